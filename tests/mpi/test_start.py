"""What ranks compare and choose at the start of a job: pure functions."""

import dataclasses

import pytest

from pdjax.config import EngineConfig
from pdjax.mpi.facts import Facts, collect, disagreement
from pdjax.mpi.layout import check_size, deal, layout_of
from pdjax.mpi.pin import cores_of
from pdjax.mpi.start import fastest
from pdjax.schedulers.base import Traits

SAME = (("pdjax", "0.1.0"), ("page_size", "64"))


def ranks(*changes):
    """Facts of a rank for each dict of changes."""
    return tuple(dataclasses.replace(Facts(i, f"h{i}", 100 + i, SAME), **change) for i, change in enumerate(changes))


def test_ranks_are_dealt_out_in_the_order_of_the_instances():
    layout = deal([1, 2, 1])
    assert layout.ranks == ((1,), (2, 3), (4,)) and layout.size == 5
    assert [layout.instance_of(rank) for rank in (1, 2, 3, 4)] == [0, 1, 1, 2]
    with pytest.raises(ValueError, match="rank is 0; allowed: 1 to 4"):
        layout.instance_of(0)


def test_colocated_instances_have_the_ranks_of_decode_instances():
    config = EngineConfig(prefill_instances=2, prefill_tp=2, decode_tp=2, decode_ranks=2)
    assert layout_of(config, Traits()).ranks == ((1,), (2,), (3, 4))
    assert layout_of(config, Traits(colocated=True)).ranks == ((1, 2), (3, 4), (5, 6))


def test_a_wrong_number_of_ranks_is_refused_with_the_right_one_and_why():
    config = EngineConfig(prefill_instances=2, decode_tp=2, decode_ranks=2)
    layout = layout_of(config, Traits())
    check_size(layout, config, 5)
    with pytest.raises(ValueError, match=r"mpirun -n is 4; allowed: 5: .* 1 \+ 1 \+ 2 .*2 \* 1.*1 \* 2"):
        check_size(layout, config, 4)


def test_equal_ranks_agree():
    assert disagreement(ranks({}, {}, {})) is None


def test_a_difference_names_the_field_both_values_and_both_ranks():
    why = disagreement(ranks({}, {}, {"same": (("pdjax", "0.1.0"), ("page_size", "16"))}))
    assert why == "page_size is '64' on rank 0 (h0) and '16' on rank 2 (h2); allowed: the same on every rank"


def test_a_field_that_one_rank_lacks_is_a_difference():
    assert "page_size is '64' on rank 0 (h0) and None on rank 1" in disagreement(ranks({}, {"same": SAME[:1]}))


def test_what_one_rank_finds_wrong_is_told_with_its_name_and_what_all_find_without():
    assert disagreement(ranks({}, {"error": "no model"})) == "rank 1 on h1: no model"
    assert disagreement(ranks({"error": "no model"}, {"error": "no model"})) == "no model"


def test_facts_hold_all_that_must_be_equal_and_not_what_need_not():
    config = EngineConfig(model="tiny", scheduler=object(), event_log="x")
    facts = dict(collect(1, config).same)
    named = {"pdjax", "jax", "dtype", "page_size", "layers", "kv heads", "context limit", "model digest"}
    assert named | {"decode_ranks", "transfer"} <= facts.keys()
    assert not {"scheduler", "event_log", "compilation_cache", "model"} & facts.keys()


def test_a_model_that_is_not_there_becomes_the_error_of_its_rank():
    assert "model is '/nowhere'" in collect(2, EngineConfig(model="/nowhere")).error


def test_the_offset_of_a_clock_that_is_3_s_ahead_comes_from_the_fastest_echo():
    echoes = [(10.0, 10.5, 13.4), (11.0, 11.002, 14.001), (12.0, 12.3, 15.0)]
    took, offset = fastest(echoes)
    assert took == pytest.approx(0.002) and offset == pytest.approx(-3.0)


def test_instances_of_a_host_get_equal_runs_of_its_cores_and_rank_0_those_of_the_first():
    layout = deal([1, 2])
    here, cores = (0, 1, 2, 3), (0, 1, 4, 5)
    assert [cores_of(rank, here, layout, cores) for rank in here] == [(0, 1), (0, 1), (4, 5), (4, 5)]


def test_only_instances_of_the_same_host_share_its_cores():
    assert cores_of(2, (2,), deal([1, 1]), (0, 1)) == (0, 1)
    assert cores_of(0, (0,), deal([1, 1]), (0, 1)) == (0, 1)


def test_fewer_cores_than_instances_are_refused():
    with pytest.raises(ValueError, match="2 instances on a host where a rank may use 1 cores"):
        cores_of(1, (0, 1, 2), deal([1, 1]), (3,))
