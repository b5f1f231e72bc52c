"""Which devices a rank takes, and the port where ranks meet."""

import socket

import pytest

from pdjax.config import EngineConfig
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
