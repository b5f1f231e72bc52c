"""Goodput from runs at several rates: hand-computed crossings, searches and intervals."""

import math

import pytest

from pdjax import goodput
from pdjax.goodput import Crossing, Trial, crossing, estimate, falling, ratio, search


def trial(rate: float, met: int, count: int = 10) -> Trial:
    return Trial(rate, (True,) * met + (False,) * (count - met))


def line(at: float, factor: float = 1.0) -> list[Trial]:
    """Two runs with the goodput 2 ** 0.5 * at: all of 10 kept at `at`, 8 of 10 at twice that rate."""
    return [trial(at * factor, 10), trial(2 * at * factor, 8)]


def test_the_goodput_lies_between_two_rates_linear_in_the_logarithm() -> None:
    assert crossing([trial(1, 10), trial(4, 8)]).rate == pytest.approx(2)
    assert crossing([trial(1, 10), trial(4, 5)]).rate == pytest.approx(4**0.2)


def test_a_rate_that_reaches_the_target_exactly_is_served() -> None:
    assert crossing([trial(1, 10), trial(2, 9), trial(4, 0)]).rate == pytest.approx(2)


def test_runs_on_one_side_of_the_target_give_a_bound() -> None:
    assert crossing([trial(1, 10), trial(2, 9)]) == Crossing(2, "at least")
    assert crossing([trial(2, 5), trial(1, 6)]) == Crossing(1, "at most")


def test_neighbours_that_rise_are_pooled_by_requests() -> None:
    assert falling([trial(1, 10), trial(2, 6), trial(3, 18, 20), trial(4, 5)]) == [(1, 1), (2, 0.8), (3, 0.8), (4, 0.5)]


def test_pooling_goes_back_as_far_as_it_must() -> None:
    assert [share for _, share in falling([trial(1, 8), trial(2, 7), trial(3, 9)])] == [0.8] * 3


def test_a_search_brackets_then_bisects() -> None:
    played = []

    def run(rate: float) -> Trial:
        played.append(rate)
        return trial(rate, 10 if rate < 5.2 else 0)

    trials = search(run, 1, tolerance=0.1)
    assert played == [1, 2, 4, 8, 5.66, 4.76, 5.19]
    assert [one.rate for one in trials] == played
    assert 5.19 <= crossing(trials).rate <= 5.66


def test_a_search_goes_down_until_a_rate_is_served() -> None:
    assert [one.rate for one in search(lambda rate: trial(rate, 10 if rate <= 1 else 8), 4, tolerance=1)] == [4, 2, 1]


def test_a_search_takes_a_double_step_down_where_little_is_served() -> None:
    assert [one.rate for one in search(lambda rate: trial(rate, 10 if rate <= 1 else 4), 4, tolerance=1)] == [4, 1, 2]


def test_a_search_uses_what_is_known() -> None:
    known = [trial(1, 10), trial(1.05, 0)]
    assert search(lambda rate: pytest.fail("played"), 9, known=known) == known


def test_a_search_ends_where_nothing_is_ever_served() -> None:
    trials = search(lambda rate: trial(rate, 0), 1, max_runs=3)
    assert [one.rate for one in trials] == [1, 0.25, 0.0625]
    assert crossing(trials) == Crossing(0.0625, "at most")


@pytest.mark.parametrize("changes", [{"guess": 0.0}, {"factor": 1.0}, {"tolerance": 0.0}])
def test_a_search_that_leads_nowhere_is_refused(changes: dict[str, float]) -> None:
    arguments = {"guess": 1.0} | changes
    with pytest.raises(ValueError, match=f"{next(iter(changes))} is .*allowed"):
        search(lambda rate: trial(rate, 1), **arguments)  # type: ignore[arg-type]


def test_an_interval_over_seeds_is_students_t_of_the_logarithms() -> None:
    # Goodputs 1, 2, 4 times sqrt(2): logarithms ln 2 apart, deviation ln 2, t(2 degrees, 97.5 %) = 4.3027.
    found = estimate([line(1), line(2), line(4)])
    assert found.value == pytest.approx(2 * math.sqrt(2))
    assert found.high / found.value == pytest.approx(math.exp(4.3027 * math.log(2) / math.sqrt(3)), rel=1e-4)
    assert found.value / found.low == pytest.approx(found.high / found.value)
    assert (found.bound, found.how) == ("", "t over 3 seeds")


def test_one_seed_gets_an_interval_over_its_requests() -> None:
    found = estimate([[trial(1, 100, 100), trial(4, 50, 100)]])
    assert found.low < found.value < found.high
    # The share at rate 4 has a standard deviation of 5 %: the crossing is 4 ** (0.1 / (0.5 +- 0.1)).
    assert (found.low, found.high) == pytest.approx((4 ** (0.1 / 0.6), 4 ** (0.1 / 0.4)), rel=0.02)
    assert "bootstrap" in found.how


def test_two_seeds_get_an_interval_over_the_requests_of_both() -> None:
    runs = [trial(1, 100, 100), trial(4, 50, 100)]
    both, one = estimate([runs, runs]), estimate([runs])
    assert both.value == pytest.approx(one.value)
    narrower = math.log(both.high / both.low) / math.log(one.high / one.low)
    assert narrower == pytest.approx(1 / math.sqrt(2), rel=0.1)
    assert both.how == "bootstrap over the requests of 2 seeds"


def test_a_ratio_pairs_seeds() -> None:
    # The seeds differ by a lot, the ratio of both systems does not.
    found = ratio([line(1, 2.0), line(8, 2.0), line(3, 2.0)], [line(1), line(8), line(3)])
    assert (found.low, found.value, found.high) == pytest.approx((2, 2, 2))
    assert found.by_seed == pytest.approx((2, 2, 2))


def test_a_ratio_of_one_seed_draws_the_same_requests_for_both() -> None:
    found = ratio([line(1, 3.0)], [line(1)])
    assert (found.low, found.value, found.high) == pytest.approx((3, 3, 3))


def test_the_estimate_of_a_ratio_is_the_ratio_of_the_estimates() -> None:
    over, under = [line(3), line(5)], [line(1), line(4)]
    assert ratio(over, under).value == pytest.approx(estimate(over).value / estimate(under).value)


@pytest.mark.parametrize(
    ("over", "under", "bound"),
    [
        ([trial(4, 10)], line(1), "at least"),
        (line(1), [trial(4, 0)], "at least"),
        ([trial(4, 0)], line(1), "at most"),
        (line(1), [trial(4, 10)], "at most"),
        ([trial(4, 10)], [trial(4, 10)], "unknown"),
    ],
)
def test_bounds_go_through_a_ratio(over: list[Trial], under: list[Trial], bound: str) -> None:
    assert ratio([over], [under]).bound == bound
    assert ratio([over, over], [under, under]).bound == bound


def test_what_cannot_be_estimated_is_refused() -> None:
    with pytest.raises(ValueError, match="trials is empty"):
        estimate([[]])
    with pytest.raises(ValueError, match="seeds is empty"):
        estimate([])
    with pytest.raises(ValueError, match="over has 1 seeds"):
        ratio([line(1)], [line(1), line(2)])
    with pytest.raises(ValueError, match="rate is"):
        trial(0, 1)
    with pytest.raises(ValueError, match="met is empty"):
        trial(1, 0, 0)
    assert goodput.rounded(0.12345) == 0.123
