"""Which devices a rank takes, and the port where ranks meet."""

import os
import socket
import subprocess
import sys

import pytest

from pdjax.config import EngineConfig
from pdjax.mpi import devices
from pdjax.mpi.devices import free_port, needed, share

UNEQUAL = EngineConfig(prefill_pp=2, prefill_tp=2, prefill_ranks=2, decode_instances=2)


def test_a_rank_takes_what_its_part_of_the_instance_needs():
    assert needed(UNEQUAL, colocated=False) == (0, 2, 2, 1, 1)


def test_colocated_instances_take_what_decode_instances_do():
    config = EngineConfig(prefill_tp=2, decode_tp=2, decode_ranks=2)
    assert needed(config, colocated=False) == (0, 2, 1, 1)
    assert needed(config, colocated=True) == (0, 1, 1, 1, 1)


def test_devices_per_rank_replaces_the_need_and_must_cover_it():
    config = EngineConfig(prefill_pp=2, devices_per_rank=3)
    assert needed(config, colocated=False) == (0, 3, 3)
    with pytest.raises(ValueError, match=r"devices_per_rank is 1; allowed: 0, or at least 2, .* prefill"):
        needed(EngineConfig(prefill_pp=2, devices_per_rank=1), colocated=False)


def test_ranks_of_a_host_share_its_gpus_without_gap_or_overlap():
    takes = needed(UNEQUAL, colocated=False)
    assert [list(share(rank, range(5), takes, 6)) for rank in (1, 2, 3, 4)] == [[0, 1], [2, 3], [4], [5]]


def test_every_host_deals_out_its_own_gpus():
    takes = needed(UNEQUAL, colocated=False)
    assert [list(share(rank, (1, 3), takes, 3)) for rank in (1, 3)] == [[0, 1], [2]]
    assert [list(share(rank, (2, 4), takes, 3)) for rank in (2, 4)] == [[0, 1], [2]]


def test_too_few_gpus_are_refused_with_the_number_that_is_needed():
    with pytest.raises(ValueError, match="the host has 5 GPUs; allowed: at least 6"):
        share(1, range(5), needed(UNEQUAL, colocated=False), 5)


@pytest.mark.parametrize(("platforms", "gpus"), [("", "1"), ("cuda", "1"), ("cuda,cpu", "1"), ("cpu,cuda", None)])
def test_gpus_are_dealt_out_where_the_first_platform_is_theirs(platforms, gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "mine")  # what the test leaves there goes
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")  # JAX runs: it can be asked for no more
    monkeypatch.setattr(devices, "_gpus", lambda: 2)
    devices.choose(2, (0, 1, 2), (0, 1, 1))
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == gpus


@pytest.mark.parametrize(("given", "mine"), [("4,7", "7"), ("GPU-a,GPU-b,GPU-c", "GPU-b"), ("3", "3")])
def test_gpus_are_dealt_out_of_those_that_are_named_unless_they_were_dealt_out_before(given, mine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    monkeypatch.setattr(devices, "_gpus", lambda: 2)
    devices.choose(2, (0, 1, 2), (0, 1, 1))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == mine


def test_ranks_of_an_instance_see_the_gpus_they_were_dealt_and_not_one_by_their_number_under_slurm():
    """By itself JAX would take the third of them."""
    code = """
import jax
from pdjax.mpi.devices import join_ranks
class Alone:
    rank, size = 0, 1
    def bcast(self, address): return address
join_ranks(Alone(), True)
print(jax.config.values["jax_cuda_visible_devices"])
"""
    slurm = {"JOB_ID": "1", "STEP_NODELIST": "here", "NTASKS": "3", "PROCID": "2", "LOCALID": "2"}
    environ = os.environ | {f"SLURM_{name}": value for name, value in slurm.items()}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert done.stdout == "all\n", done.stderr


def test_the_port_of_the_ranks_is_kept_from_others_until_jax_listens_on_it():
    with free_port("127.0.0.1") as port, socket.socket() as stranger, socket.socket() as grpc:
        with pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        grpc.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        grpc.bind(("127.0.0.1", port))
        grpc.listen()


def test_two_jobs_get_two_ports():
    with free_port("127.0.0.1") as one, free_port("127.0.0.1") as other:
        assert one != other
