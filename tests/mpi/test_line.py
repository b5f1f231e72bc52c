"""Words between ranks: they arrive as they were said, and what comes from the past or from the lost is dropped."""

import contextlib

from pdjax.mpi.layout import Layout
from pdjax.mpi.line import Line
from pdjax.mpi.words import EndEngine, Failed, Gone, Goodbye, Leave, Stop
from tests.mpi.posts import FakeNetwork

LAYOUT = Layout(((1,), (2,)))


@contextlib.contextmanager
def lines(offsets=(0.0, 0.0, 0.0)):
    """Three lines, and what each heard and lost."""
    heard, lost = [[], [], []], [[], [], []]
    with FakeNetwork(3) as network:
        made = [
            Line(
                post,
                LAYOUT,
                offset,
                lambda rank, word, i=i: heard[i].append((rank, word)),
                lambda rank, why, i=i: lost[i].append(rank),
                clock=lambda: 100.0,
            )
            for i, (post, offset) in enumerate(zip(network.posts, offsets, strict=True))
        ]
        yield network, made, heard, lost


def test_a_word_arrives_as_it_was_said():
    with lines() as (network, made, heard, _):
        made[0].tell(1, Failed(3, "why? \u00e4 \U0001f600"))
        made[0].tell_all((1, 2), Stop(4))
        network.settle()
        assert heard == [[], [(0, Failed(3, "why? \u00e4 \U0001f600")), (0, Stop(4))], [(0, Stop(4))]]


def test_words_of_an_engine_that_is_closed_are_dropped():
    with lines() as (network, made, heard, _):
        made[1].epoch = 1
        made[0].epoch = 2
        made[1].tell(0, Failed(1, "late"))
        network.settle()
        assert heard[0] == []


def test_the_end_is_heard_in_any_epoch():
    with lines() as (network, made, heard, _):
        made[0].epoch = 5
        made[0].tell(1, EndEngine())
        made[0].last_word(1, Goodbye(3))
        network.settle()
        assert heard[1] == [(0, Goodbye(3))]


def test_a_lost_instance_is_neither_heard_nor_told_but_for_the_last_word():
    with lines() as (network, made, heard, _):
        made[0].give_up(0)
        made[1].tell(0, Failed(1, "late"))
        made[0].tell_all((1, 2), Gone(0))
        made[0].last_word(1, Leave("silent"))
        network.settle()
        assert heard == [[], [(0, Leave("silent"))], [(0, Gone(0))]]


def test_a_stopped_rank_that_wakes_up_is_not_heard_but_learns_that_it_was_given_up():
    with lines() as (network, made, heard, _):
        network.freeze(1)
        made[1].tell(0, Failed(1, "late"))
        network.time_out(1)
        made[0].give_up(0)
        made[0].last_word(1, Leave("silent"))
        network.thaw(1)
        network.settle()
        assert heard[:2] == [[], [(0, Leave("silent"))]]


def test_a_rank_with_another_clock_tells_the_time_of_rank_0():
    with lines(offsets=(0.0, 3.0, -3.0)) as (_, made, _, _):
        assert [line.now() for line in made] == [100.0, 103.0, 97.0]
