"""Device pointers: what the MPI library is asked, and the test that bytes cross by their address."""

import subprocess
import sys
import threading
import types

import jax
import pytest

from pdjax.mpi.layout import deal
from pdjax.mpi.line import Line
from pdjax.transfer import pointers
from tests.mpi.posts import FakeNetwork


@pytest.mark.parametrize(
    "said, environ, answer",
    [
        (1, {}, (True, "MPIX_Query_cuda_support says 1")),
        (0, {}, (False, "MPIX_Query_cuda_support says 0")),
        (None, {}, (False, "the MPI library does not know MPIX_Query_cuda_support")),
        (None, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, (True, "MPICH_GPU_SUPPORT_ENABLED is 1")),
        (None, {"MV2_USE_CUDA": "1"}, (True, "MV2_USE_CUDA is 1")),
    ],
)
def test_the_library_is_asked_in_its_own_way(said, environ, answer):
    library = types.SimpleNamespace() if said is None else types.SimpleNamespace(MPIX_Query_cuda_support=lambda: said)
    assert pointers.cuda_aware(library, environ) == answer


def test_the_library_that_mpi4py_has_loaded_is_found():
    pytest.importorskip("mpi4py")
    script = (
        "import mpi4py; mpi4py.rc.initialize = False\n"
        "from mpi4py import MPI; from pdjax.transfer import pointers; print(pointers.cuda_aware(environ={}))"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True).stdout
    assert "MPIX_Query_cuda_support says" in said


@pytest.mark.parametrize("broken", [False, True])
def test_the_self_test_compares_bytes(broken, monkeypatch):
    with FakeNetwork(3) as network:
        lines = [Line(post, deal([1, 1]), 0.0, lambda *_: None, lambda *_: None) for post in network.posts]
        if broken:  # what is fetched lands elsewhere
            fetch = lines[1].fetch
            elsewhere = pointers.pointer(pointers.fresh((pointers.TEST_BYTES,), "uint8", jax.devices()[0]))
            monkeypatch.setattr(lines[1], "fetch", lambda rank, tag, _, done: fetch(rank, tag, elsewhere, done))
        answers = {}

        def test(rank, other):
            answers[rank] = pointers.self_test(lines[rank], other, other, jax.devices()[rank], 20)

        threads = [threading.Thread(target=test, args=pair) for pair in ((1, 2), (2, 1))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == {1: "other bytes came from rank 2" if broken else None, 2: None}


def test_a_rank_that_does_not_answer_is_not_waited_for():
    with FakeNetwork(3) as network:
        lines = [Line(post, deal([1, 1]), 0.0, lambda *_: None, lambda *_: None) for post in network.posts]
        why = pointers.self_test(lines[1], 2, 2, jax.devices()[0], 0.05)
    assert why == "no answer of ranks 2 and 2 within 0.05 s"
