"""Who is asked for a sign, who is given up, and how often a post looks. Times by hand; a timeout of 8 s."""

import pytest

from pdjax.mpi.mpi_post import nap_s
from pdjax.mpi.watch import Watch


def look_on(watch, start, stop, alive=()):
    """Looks every half second; the ranks `alive` give a sign each time. (time, given up) of those that are."""
    lost = []
    for step in range(int(start * 2), int(stop * 2)):
        for rank in alive:
            watch.seen(rank, step / 2)
        lost += [(step / 2, rank) for rank in watch.look(step / 2)[1]]
    return lost


def test_all_are_asked_four_times_in_a_timeout():
    watch = Watch((1, 2), 8.0, 0.0)
    asked = [step / 2 for step in range(17) if watch.look(step / 2)[0] == (1, 2)]
    assert asked == [2.0, 4.0, 6.0, 8.0]


def test_a_silent_rank_is_given_up_once():
    watch = Watch((1, 2), 8.0, 0.0)
    assert look_on(watch, 0, 30, alive=(1,)) == [(8.5, 2)]


def test_one_that_is_given_up_or_lost_is_not_watched_any_more():
    watch = Watch((1, 2), 8.0, 0.0)
    watch.forget(1)
    assert look_on(watch, 0, 10) == [(8.5, 2)]
    watch.seen(2, 10.0)
    assert look_on(watch, 10, 30) == []


@pytest.mark.parametrize("still_s, lost_at", [(1.0, 8.5), (1.5, 17.5), (100.0, 116.0)])
def test_a_standstill_of_the_watcher_does_not_count_against_the_watched(still_s, lost_at):
    watch = Watch((1,), 8.0, 0.0)
    assert look_on(watch, 0, 8) == []  # the last look is at 7.5
    assert look_on(watch, 7.5 + still_s, 200) == [(lost_at, 1)]


def test_naps_grow_with_the_silence_up_to_what_is_awaited():
    assert nap_s(100e-6, False, False) == nap_s(900e-6, True, False) == 0
    assert nap_s(800e-6, False, False) == pytest.approx(100e-6)
    assert [nap_s(0.5, *wait) for wait in ((True, False), (True, True), (False, True), (False, False))] == [
        100e-6,
        100e-6,
        1e-3,
        2e-3,
    ]


def test_bytes_that_do_not_come_keep_no_core_busy():
    assert nap_s(5.0, True, False) == 2e-3
