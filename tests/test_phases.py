"""Workloads whose mix moves: what the phases hold, when they come, and what is no phase."""

import itertools

import pytest

from pdjax import phases, workload
from pdjax.phases import Phase

KIND = "phases:fixed:30,2@2;fixed:5,20@3*4"


def make(kind: str = KIND, num_requests: int | None = None, **options: object) -> workload.Workload:
    defaults = {"vocab_size": 500, "max_model_len": 100, "rate": 2.0, "arrival": "uniform"} | options
    return workload.parse(kind, num_requests=num_requests, **defaults)  # type: ignore[arg-type]


def test_phases_are_read_in_order() -> None:
    assert phases.parse("fixed:30,2@2;uniform:1-4,2@3*0.5") == (
        Phase("fixed:30,2", 2, 1.0),
        Phase("uniform:1-4,2", 3, 0.5),
    )


def test_requests_of_all_phases_follow_each_other() -> None:
    items = make().items
    assert [(len(item.prompt), item.sampling.max_tokens) for item in items] == [(30, 2)] * 2 + [(5, 20)] * 3
    assert all(item.sampling.ignore_eos for item in items)


def test_a_phase_sets_the_pace_of_its_requests() -> None:
    times = [item.arrival_s for item in make().items]
    assert times == pytest.approx([0, 0.5, 0.625, 0.75, 0.875])


def test_a_rate_stretches_all_gaps_alike() -> None:
    slow, fast = (make(rate=rate, arrival="poisson").items for rate in (1.0, 4.0))
    assert [item.arrival_s for item in slow] == pytest.approx([4 * item.arrival_s for item in fast])


def test_phases_of_one_kind_have_prompts_of_their_own() -> None:
    items = make("phases:fixed:30,2@2;fixed:30,2@2").items
    assert all(a.prompt != b.prompt for a, b in itertools.combinations(items, 2))


def test_a_part_of_the_phases_can_be_asked_for() -> None:
    assert [item.prompt for item in make(num_requests=3).items] == [item.prompt for item in make().items[:3]]
    with pytest.raises(ValueError, match="num_requests is 6; allowed: at most the 5"):
        make(num_requests=6)


@pytest.mark.parametrize(
    "text",
    ["fixed:3,2", "fixed:3,2@0", "fixed:3,2@2.5", "fixed:3,2@2*", "fixed:3,2@2*0", "fixed:3,2@2*inf", "chat@3",
     "fixed:3,2@2;", "phases:fixed:1,1@1@1"],
)  # fmt: skip
def test_what_is_no_phase_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"workload has phases .*allowed: KIND@N"):
        make(f"phases:{text}")


def test_mean_lengths_weigh_phases_by_their_requests() -> None:
    assert workload.mean_lengths("uniform:256-768,16-64") == (512, 40)
    assert workload.mean_lengths(KIND) == pytest.approx((15, 12.8))
    with pytest.raises(ValueError, match="workload is 'chat'; allowed where mean lengths"):
        workload.mean_lengths("chat")
