"""KV from the ranks of one instance to those of another: every head arrives where it is needed, and what goes wrong
costs one transfer."""

import dataclasses
import threading

import jax
import numpy as np
import pytest

from pdjax.transfer.parcel import Credit, Parcel
from pdjax.transfer.staging import SLOTS
from tests.transfer.crossing import WAIT_S, Crossing, Split, T

# (kv heads, source, destination)
CUTS = {
    "one to one": (4, Split(1), Split(1)),
    "one device to two ranks": (4, Split(1), Split(2, ranks=2)),
    "two ranks to one device": (4, Split(2, ranks=2), Split(1)),
    "two devices to two ranks of two": (4, Split(2), Split(4, ranks=2)),
    "three ranks of three heads to one": (3, Split(3, ranks=3), Split(1)),
    "five heads to five ranks": (5, Split(1), Split(5, ranks=5)),
    "replicas over two ranks": (2, Split(2, 2, 2), Split(2, 2, 2)),
    "one head everywhere": (1, Split(1, 2, 2), Split(1, 4, 2)),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_every_rank_gets_its_heads_unit_by_unit_without_padding(cut):
    with Crossing(*cut) as ranks:
        ranks.open_src()
        ranks.open_dst()
        sent = [(0, 0, T), (2, 0, T), (0, T, 3), (2, T, 3)]
        for layer, start, tokens in sent:
            ranks.send(ranks.unit(layer=layer, start=start, tokens=tokens))
        for rank in ranks.dst:
            got = [ranks.take(rank) for _ in sent]
            assert [(u.header.layer, u.header.start, u.header.tokens) for u in got] == sent
            assert all(not np.asarray(u.kv)[:, :, u.header.tokens :].any() for u in got)
            assert all(u.kv.sharding == ranks.shardings[1] and u.moved_s[0] <= u.moved_s[1] for u in got)
            told = sum(word.nbytes for _, to, word in ranks.said(Parcel) if to == rank)
            assert told == sum(ranks.boxes[rank].share(u.header.nbytes) for u in got)  # replicas from one copy


def test_bfloat16_arrives_bit_for_bit():
    with Crossing(4, Split(2), Split(1), dtype="bfloat16") as ranks:
        ranks.open_src()
        ranks.open_dst()
        ranks.send(ranks.unit())
        assert ranks.take(2).kv.dtype == "bfloat16"


def test_a_parcel_may_come_before_its_transfer_is_known_here():
    with Crossing(4, Split(1), Split(1)) as ranks:
        ranks.open_src(1)
        ranks.open_src(2)
        ranks.open_dst(1)  # which gives credit
        first, second = ranks.unit(key=2), ranks.unit(key=2, start=T)
        ranks.send(first)
        ranks.send(ranks.unit(key=1))
        assert ranks.take(2).header.key == 1
        ranks.open_dst(2)
        ranks.send(second)
        assert [ranks.take(2).header for _ in range(2)] == [first.header, second.header]


def test_no_more_parcels_are_under_way_than_there_is_credit_for():
    with Crossing(4, Split(1), Split(1), hold=True) as ranks:
        ranks.open_src()
        for index in range(3 * SLOTS):
            ranks.send(ranks.unit(start=index * T))
        ranks.network.settle()
        assert ranks.network.under_way() == []  # nothing before there is credit
        ranks.open_dst()
        got = []
        while len(got) < 3 * SLOTS:
            ranks.network.release()
            ranks.network.settle()
            credit = sum(word.parcels for _, _, word in ranks.said(Credit))
            assert len(ranks.said(Parcel)) <= credit <= SLOTS + len(got) + ranks.units[2].qsize()
            while not ranks.units[2].empty():
                got.append(ranks.take(2))


def test_what_a_transfer_has_not_sent_when_it_ends_is_never_sent():
    with Crossing(4, Split(1), Split(1)) as ranks:
        ranks.open_src(1)
        ranks.open_src(2)
        for index in range(3):
            ranks.send(ranks.unit(key=1, start=index * T))
        ranks.boxes[1].close(1)
        ranks.send(ranks.unit(key=1, start=3 * T))
        ranks.send(ranks.unit(key=2))
        ranks.open_dst(2)
        assert ranks.take(2).header.key == 2
        assert [word.unit.key for _, _, word in ranks.said(Parcel)] == [2]


def test_what_arrives_for_a_transfer_that_has_ended_is_dropped_and_its_room_given_back():
    with Crossing(4, Split(1), Split(1)) as ranks:
        ranks.open_src(1)
        ranks.open_src(2)
        ranks.open_dst(1)
        ranks.boxes[2].close(1)
        ranks.open_dst(2)
        for index in range(2 * SLOTS):  # more than there is room for
            ranks.send(ranks.unit(key=1, start=index * T))
        ranks.send(ranks.unit(key=2))
        assert ranks.take(2).header.key == 2
        assert ranks.units[2].empty() and ranks.errors[2].empty()


def test_a_stopped_destination_keeps_its_slots_and_holds_up_nobody_when_it_is_given_up():
    with Crossing(4, Split(1), Split(1)) as ranks:
        ranks.open_src()
        ranks.open_dst()
        ranks.send(ranks.unit())
        ranks.take(2)
        ranks.network.freeze(2)
        for index in range(1, 3 * SLOTS):
            ranks.send(ranks.unit(start=index * T))
        ranks.boxes[1].gone(1)
        ranks.boxes[1].open(9, 1, ranks.given_up[1].put)
        ranks.boxes[1].send(ranks.unit(key=9))  # dropped
        for thread in threading.enumerate():
            if thread.name == "outbox-1":
                thread.join(WAIT_S)
                assert not thread.is_alive()
        assert ranks.given_up[1].empty()
        ranks.network.thaw(2)


def test_a_destination_without_room_fails_the_transfer_after_its_time():
    with Crossing(4, Split(1), Split(1), timeout_s=0.05) as ranks:
        ranks.open_src()
        ranks.send(ranks.unit())
        assert ranks.given_up[1].get(timeout=WAIT_S) == "TimeoutError: rank 2 had no room for a parcel within 0.05 s"


def test_parcels_of_a_dead_source_are_given_up_without_a_word():
    with Crossing(4, Split(1), Split(1), hold=True) as ranks:
        ranks.open_src()
        ranks.open_dst()
        ranks.send(ranks.unit())
        while not ranks.said(Parcel):
            ranks.network.release(1)
            ranks.network.settle()
        ranks.network.kill(1)
        ranks.boxes[2].gone(0)
        ranks.network.settle()
        assert ranks.units[2].empty() and ranks.errors[2].empty()


def lie(unit, **fields):
    return dataclasses.replace(unit, header=dataclasses.replace(unit.header, **fields))


LIES = {
    "a gap": (lambda ranks: ranks.unit(start=T), "ValueError: start is 8 in layer 0; allowed: 0"),
    "other heads": (lambda ranks: lie(ranks.unit(), shape=(2, 2, T, 3, 4)), "ValueError: the unit is"),
    "another type": (lambda ranks: lie(ranks.unit(), dtype="int32"), "ValueError: the unit is"),
    "more layers": (lambda ranks: lie(ranks.unit(), layer=3), "ValueError: the unit is"),
    "more tokens": (lambda ranks: ranks.unit(start=1000), "ValueError: the unit is"),
}


@pytest.mark.parametrize("wrong, why", LIES.values(), ids=LIES.keys())
def test_a_unit_that_is_not_what_was_agreed_fails_its_transfer_and_no_other(wrong, why):
    with Crossing(4, Split(1), Split(1)) as ranks:
        for key in (1, 2):
            ranks.open_src(key)
            ranks.open_dst(key)
        ranks.send(wrong(ranks))
        assert ranks.errors[2].get(timeout=WAIT_S).startswith(why)
        ranks.send(ranks.unit(key=2))
        assert ranks.take(2).header.key == 2
        assert ranks.errors[2].empty()


def test_a_parcel_without_credit_fails_its_transfer_and_no_other():
    with Crossing(4, Split(1), Split(1)) as ranks:
        parcel = Parcel(ranks.unit().header, 0, 4, 0, 0.0)
        ranks.lines[1].tell(2, parcel)
        ranks.lines[1].ship(2, 0, np.zeros(parcel.nbytes, np.uint8), lambda error: None)
        ranks.network.settle()  # it has come before there was any credit
        for key in (1, 2):
            ranks.open_src(key)
            ranks.open_dst(key)
        assert "without credit" in ranks.errors[2].get(timeout=WAIT_S)
        ranks.send(ranks.unit(key=2))
        ranks.take(2)


def test_a_shard_that_goes_as_it_is_crosses_by_its_address_and_is_not_copied_on_the_host():
    with Crossing(4, Split(2), Split(2, ranks=1), pointers=True) as ranks:
        ranks.open_src()
        ranks.open_dst()
        for start, tokens in ((0, T), (T, 3)):
            ranks.send(ranks.unit(start=start, tokens=tokens))
            ranks.take(2)
        assert all(word.padded is False for _, _, word in ranks.said(Parcel))  # both shards in one parcel
    with Crossing(4, Split(1), Split(1), pointers=True) as ranks:
        ranks.open_src()
        ranks.open_dst()
        for start, tokens in ((0, T), (T, 3)):
            ranks.send(ranks.unit(start=start, tokens=tokens))
            ranks.take(2)
        assert all(word.padded for _, _, word in ranks.said(Parcel))
    with Crossing(4, Split(1), Split(2, ranks=2), pointers=True) as ranks:  # cut: through the host
        ranks.open_src()
        ranks.open_dst()
        ranks.send(ranks.unit())
        for rank in ranks.dst:
            ranks.take(rank)


@pytest.mark.parametrize("cut", [CUTS["one to one"], CUTS["one device to two ranks"], CUTS["two ranks to one device"]])
def test_transfer_servers_bring_the_same(cut):
    with Crossing(*cut, host="127.0.0.1") as ranks:
        ranks.open_src()
        ranks.open_dst()
        for start, tokens in ((0, T), (T, 3)):
            ranks.send(ranks.unit(start=start, tokens=tokens))
            for rank in ranks.dst:
                ranks.take(rank)
        assert all(word.offer is not None for _, _, word in ranks.said(Parcel))
        assert all(ranks.errors[rank].empty() for rank in ranks.dst)


def test_a_pull_that_hangs_fails_its_transfer_and_the_next_works():
    with Crossing(4, Split(1), Split(1), host="127.0.0.1", timeout_s=1) as ranks:
        for key in (1, 2):
            ranks.open_src(key)
            ranks.open_dst(key)
        ranks.send(ranks.unit(key=2))
        ranks.take(2)
        real = ranks.said(Parcel)[0][2]
        unknown = dataclasses.replace(real.offer, number=999)
        header = dataclasses.replace(real.unit, key=1)
        ranks.lines[1].tell(2, dataclasses.replace(real, unit=header, offer=unknown))
        assert ranks.errors[2].get(timeout=WAIT_S).startswith("TimeoutError: a parcel was not pulled within 1 s")
        ranks.send(ranks.unit(key=2, start=T))
        assert ranks.take(2).header.start == T


def test_a_unit_that_is_still_computed_is_not_waited_for_by_who_sends_it():
    with Crossing(4, Split(1), Split(1)) as ranks:
        ranks.open_src()
        ranks.open_dst()
        unit = ranks.unit()
        slow = jax.jit(lambda kv: jax.lax.fori_loop(0, 2000, lambda _, x: x * 1.0, kv))(unit.kv)
        ranks.send(dataclasses.replace(unit, kv=slow))
        ranks.take(2)
