"""One instance over two ranks: tokens, KV in and out, what each rank holds. One job (`instance_job`)."""

import pickle

import numpy as np
import pytest

from tests.mpi.instance_job import LONG, MODEL, SAMPLING, STEPS
from tests.mpi.jobs import NEEDS_MPI, run
from tests.replicas import Driver, small, table

pytestmark = [NEEDS_MPI, pytest.mark.slow]
RANKS, STAGES, TP = 2, 2, 4


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    job = run(RANKS, "-m", "tests.mpi.instance_job", str(folder), str(STAGES), str(TP))
    assert job.status == 0, job.out + job.err
    ranks = [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(RANKS)]
    print("ms per step:", *(f"{rank['step_ms']:.1f}" for rank in ranks))
    return ranks


@pytest.fixture(scope="module")
def one():
    """The KV of LONG on one device, and its tokens."""
    driver = Driver(small(model=MODEL, chunk_buckets=(16,), row_buckets=(2,)), sampling=SAMPLING)
    tokens = driver.generate(LONG, STEPS)
    driver.prefill(0, LONG)
    return driver.instance.read_kv(table(driver.instance, 0), len(LONG)), tokens


@pytest.mark.parametrize("how", ["tokens", "in flight", "streamed", "pulled"])
def test_every_rank_has_the_tokens_of_one_process(found, one, how):
    assert [rank[how] for rank in found] == [one[1]] * RANKS


def test_an_instance_over_ranks_is_not_alone(found):
    assert not any(rank["alone"] for rank in found)


def test_ranks_hold_the_heads_of_their_devices(found, one):
    for head, rank in enumerate(found):
        source = rank["kv"]["source"]
        assert source.keys() == {(layer, head) for layer in range(MODEL.num_layers)}
        for (layer, _), values in source.items():
            np.testing.assert_allclose(values, one[0][layer, :, :, head], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["streamed", "pulled"])
def test_a_rank_holds_what_moved_bit_for_bit(found, way):
    for rank in found:
        moved, source = rank["kv"][way], rank["kv"]["source"]
        assert moved.keys() == source.keys()
        for where, values in source.items():
            np.testing.assert_array_equal(moved[where], values)
