"""What all transports of one process do alike, on a link that does what it is told: moves that hang, threads that
survive, links that are replaced."""

import queue
import threading

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from pdjax.models.config import ModelConfig
from pdjax.models.sharding import make_mesh
from pdjax.transfer.base import Unit, UnitHeader
from pdjax.transfer.pairs import Pairs
from pdjax.transfer.shards import SPEC

WAIT_S = 20


def place():
    return NamedSharding(make_mesh(ModelConfig(8, 8, 8, 1, 1, 1, 4), jax.devices()[:1]), SPEC)


def unit(key, start=0, layer=0):
    kv = jax.device_put(np.full((1, 2, 4, 1, 4), key, np.float32), place())
    return Unit(UnitHeader(key, layer, 1, start, 4, kv.shape, "float32"), kv)


class Road:
    """A link. `moves` gets each unit; what `before` does happens first."""

    def __init__(self, before):
        self.before, self.closed = before, threading.Event()

    def move(self, unit, src, dst):
        self.before(self, unit)
        return unit.kv

    def close(self):
        self.closed.set()


@pytest.fixture
def pairs():
    """`pairs(before, timeout_s)`: a transport of three instances; `links` are those it made."""
    made = []

    def make(before, timeout_s=WAIT_S):
        links = []

        def connect(src, dst):
            links.append(Road(before))
            return links[-1]

        made.append(Pairs([[place()] * 4] * 3, connect, timeout_s))
        made[-1].links = links
        return made[-1]

    yield make
    for transport in made:
        transport.close()


def start(transport, key, src=0, dst=1):
    units, errors = queue.Queue(), queue.Queue()
    transport.start(key, src, dst, units.put, errors.put)
    return units, errors


def hang_until_closed(which):
    def before(road, one):
        if one.header.key == which:
            assert road.closed.wait(WAIT_S)
            raise ConnectionError("closed")

    return before


def test_a_move_that_hangs_fails_its_transfer_with_a_timeout(pairs):
    transport = pairs(hang_until_closed(1), timeout_s=0.05)
    _, errors = start(transport, 1)
    transport.send(unit(1))
    assert errors.get(timeout=WAIT_S) == "TimeoutError: a unit did not move within 0.05 s"
    assert transport.links[0].closed.wait(WAIT_S), "its link was not closed"


def test_what_waits_behind_a_move_that_hangs_goes_on_with_a_new_thread_and_link(pairs):
    transport = pairs(hang_until_closed(1), timeout_s=0.05)
    start(transport, 1)
    behind, errors = start(transport, 2)
    transport.send(unit(1))
    for at in range(3):
        transport.send(unit(2, start=4 * at))
    assert [behind.get(timeout=WAIT_S).header.start for _ in range(3)] == [0, 4, 8]
    assert errors.empty() and len(transport.links) == 2


def test_a_move_that_never_ends_is_left_behind_and_others_go_on(pairs, caplog):
    forever, before = threading.Event(), set(threading.enumerate())
    transport = pairs(lambda _, one: one.header.key == 1 and forever.wait(WAIT_S), timeout_s=0.05)
    late, errors = start(transport, 1)
    other, _ = start(transport, 2)
    transport.send(unit(1))
    transport.send(unit(2))
    assert "TimeoutError" in errors.get(timeout=WAIT_S)
    assert other.get(timeout=WAIT_S).header.key == 2
    assert "left behind" in caplog.text
    stuck = [thread for thread in threading.enumerate() if thread.name == "transfer-0-1" and thread not in before]
    forever.set()
    stuck[0].join(WAIT_S)
    assert not stuck[0].is_alive() and late.empty(), "what comes after all is dropped, and its thread ends"


def test_an_aborted_transfer_holds_up_nobody_by_a_move_that_hangs(pairs, monkeypatch):
    monkeypatch.setattr("pdjax.transfer.pairs.GRACE_S", 0.05)
    moving = threading.Event()

    def before(road, one):
        if one.header.key == 1:
            moving.set()
            assert road.closed.wait(WAIT_S)

    transport = pairs(before)
    units, errors = start(transport, 1)
    other, _ = start(transport, 2)
    transport.send(unit(1))
    transport.send(unit(2))
    assert moving.wait(WAIT_S) and transport.abort(1)
    assert other.get(timeout=WAIT_S).header.key == 2
    assert units.empty() and errors.empty()


def test_an_idle_transport_serves_after_longer_than_its_limit(pairs):
    transport = pairs(lambda *_: None, timeout_s=0.05)
    units, errors = start(transport, 1)
    transport.send(unit(1))
    units.get(timeout=WAIT_S)
    threading.Event().wait(0.15)  # nothing happens for three times the limit
    transport.send(unit(1, start=4))
    assert units.get(timeout=WAIT_S).header.start == 4 and errors.empty()


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_whatever_a_move_raises_fails_its_transfer_and_the_thread_lives_on(pairs, kind):
    def before(_, one):
        if one.header.key == 1 and one.header.layer == 2:
            raise kind("layer 2")

    transport = pairs(before)
    units, errors = start(transport, 1)
    other, _ = start(transport, 2)
    for layer in range(4):
        transport.send(unit(1, layer=layer))
    transport.send(unit(2))
    assert errors.get(timeout=WAIT_S) == f"{kind.__name__}: layer 2"
    assert other.get(timeout=WAIT_S).header.key == 2
    assert units.qsize() == 2 and errors.empty(), "the units behind the one that failed were not dropped"
    assert len(transport.links) == 2, "the link that raised was used again"


def test_a_link_that_cannot_be_made_fails_the_transfer(pairs, monkeypatch):
    transport = pairs(lambda *_: None)
    connect, refusals = transport._connect, iter([OSError("no ports left")])

    def refuse_once(src, dst):
        for error in refusals:
            raise error
        return connect(src, dst)

    monkeypatch.setattr(transport, "_connect", refuse_once)
    _, errors = start(transport, 1)
    units, _ = start(transport, 2)
    transport.send(unit(1))
    assert errors.get(timeout=WAIT_S) == "OSError: no ports left"
    transport.send(unit(2))
    assert units.get(timeout=WAIT_S).header.key == 2


def test_close_ends_a_move_that_hangs_in_its_link(pairs):
    moving = threading.Event()

    def before(road, one):
        moving.set()
        assert road.closed.wait(WAIT_S)

    transport = pairs(before)
    start(transport, 1)
    transport.send(unit(1))
    assert moving.wait(WAIT_S)
    worker = transport._workers[0, 1].thread
    transport.close()
    assert not worker.is_alive()
