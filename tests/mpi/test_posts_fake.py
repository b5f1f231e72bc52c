"""The fake network keeps the contract of a post, and does what tests tell it to."""

import threading

import numpy as np
import pytest

from tests.mpi.posts import FakeNetwork


class Ears:
    """What one post said, in its order, as ("heard", rank, message) and ("lost", rank, why); and in which threads."""

    def __init__(self, network, rank):
        self.said, self.threads = [], set()
        network.posts[rank].start(lambda *said: self.note("heard", *said), lambda *said: self.note("lost", *said))

    def note(self, *said):
        self.said.append(said)
        self.threads.add(threading.get_ident())

    def done(self, name):
        return lambda error: self.note(name, error)


def test_messages_arrive_in_order_in_one_thread():
    with FakeNetwork(3) as network:
        ears = [Ears(network, rank) for rank in range(3)]
        for number in range(100):
            network.posts[0].tell(1, b"%d" % number)
            network.posts[2].tell(1, b"%d" % number)
        network.settle()
    for source in (0, 2):
        assert [message for _, rank, message in ears[1].said if rank == source] == [b"%d" % n for n in range(100)]
    assert len(ears[1].threads) == 1 and threading.get_ident() not in ears[1].threads


@pytest.mark.parametrize("first", ["ship", "fetch"])
def test_bytes_are_matched_by_tag(first):
    with FakeNetwork(2) as network:
        ears = [Ears(network, rank) for rank in range(2)]
        sent = [np.arange(4, dtype=np.float32) + 10 * tag for tag in range(3)]
        room = [np.zeros(4, np.float32) for _ in range(3)]
        for step in ("ship", "fetch") if first == "ship" else ("fetch", "ship"):
            for tag in range(3) if step == "ship" else (2, 0, 1):
                if step == "ship":
                    network.posts[0].ship(1, tag, sent[tag], ears[0].done("shipped"))
                else:
                    network.posts[1].fetch(0, tag, room[tag], ears[1].done("fetched"))
        network.settle()
    assert np.array_equal(room, sent)
    assert ears[0].said == [("shipped", None)] * 3 and ears[1].said == [("fetched", None)] * 3


def test_another_size_is_an_error_of_the_receiver():
    with FakeNetwork(2) as network:
        ears = [Ears(network, rank) for rank in range(2)]
        network.posts[0].ship(1, 7, np.zeros(3, np.uint8), ears[0].done("shipped"))
        network.posts[1].fetch(0, 7, np.zeros(4, np.uint8), ears[1].done("fetched"))
        network.settle()
    assert ears[0].said == [("shipped", None)] and "shipped 3 bytes" in str(ears[1].said[0][1])


def test_a_killed_rank_is_lost_and_fails_what_is_open():
    with FakeNetwork(3) as network:
        ears = [Ears(network, rank) for rank in range(3)]
        network.posts[0].ship(2, 0, np.zeros(1, np.uint8), ears[0].done("shipped"))
        network.posts[1].fetch(2, 0, np.zeros(1, np.uint8), ears[1].done("fetched"))
        network.kill(2)
        network.posts[0].tell(2, b"dropped")
        network.posts[1].ship(2, 1, np.zeros(1, np.uint8), ears[1].done("late"))
        network.settle()
    assert [said[0] for said in ears[0].said] == ["shipped", "lost"]
    assert [said[0] for said in ears[1].said] == ["fetched", "lost", "late"]
    assert all(isinstance(said[1], ConnectionError) for said in ears[1].said if said[0] != "lost")
    assert ears[2].said == []


def test_a_frozen_rank_keeps_everything_until_it_is_thawed():
    with FakeNetwork(2) as network:
        ears = [Ears(network, rank) for rank in range(2)]
        network.freeze(1)
        network.posts[0].tell(1, b"a")
        network.posts[0].ship(1, 0, np.ones(2, np.uint8), ears[0].done("shipped"))
        network.time_out(1)
        network.settle()
        assert [said[0] for said in ears[0].said] == ["lost"] and ears[1].said == []
        network.posts[1].tell(0, b"late")
        room = np.zeros(2, np.uint8)
        network.posts[1].fetch(0, 0, room, ears[1].done("fetched"))
        network.thaw(1)
        network.settle()
    assert ears[0].said[1:] == [("shipped", None)]  # and nothing heard from one that was given up
    assert ears[1].said == [("heard", 0, b"a"), ("fetched", None)] and room.all()


def test_what_is_held_goes_when_the_test_says():
    with FakeNetwork(2, hold=True) as network:
        ears = [Ears(network, rank) for rank in range(2)]
        for message in (b"a", b"b", b"c"):
            network.posts[0].tell(1, message)
        network.settle()
        assert ears[1].said == [] and network.under_way() == [(0, 1)] * 3
        assert network.release(2) == 2
        network.settle()
        assert ears[1].said == [("heard", 0, b"a"), ("heard", 0, b"b")]
        assert network.release() == 1


def test_what_a_callback_raises_is_raised_again():
    def heard(rank, message):
        raise KeyError(message)

    with pytest.raises(KeyError, match="boom"), FakeNetwork(2) as network:
        network.posts[1].start(heard, print)
        network.posts[0].tell(1, b"boom")
        network.settle()


def test_a_closed_post_answers_at_once():
    with FakeNetwork(2) as network:
        ears = Ears(network, 0)
        network.posts[0].close(5)
        network.posts[0].ship(1, 0, np.zeros(1, np.uint8), ears.done("shipped"))
    assert isinstance(ears.said[0][1], ConnectionError)
