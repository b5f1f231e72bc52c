"""The device_put transport: order, failures, aborts and closing. No test waits for time, only for events."""

import queue
import threading
import weakref

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pdjax.models.config import ModelConfig
from pdjax.models.sharding import make_mesh
from pdjax.transfer.base import TRANSITIONS, TransferState, Unit, UnitHeader, advance
from pdjax.transfer.device_put import DevicePut
from pdjax.transfer.shards import SPEC

K, H = 2, 4
WAIT_S = 20  # how long a test waits for what must come


def shardings():
    """Instances 0 (2 devices), 1 (4 devices) and 2 (1 device)."""
    config = ModelConfig(8, 8, 8, 1, 8, K, H)
    devices = jax.devices()
    parts = devices[:2], devices[2:6], devices[6:7]
    return [NamedSharding(make_mesh(config, part), SPEC) for part in parts]


class Pending:
    """An array that is computed only when `ready` is set."""

    def __init__(self, kv):
        self.kv, self.ready, self.waited_for = kv, threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(self.kv, name)

    def block_until_ready(self):
        self.waited_for.set()
        assert self.ready.wait(WAIT_S)
        return self


class Receiver:
    """Collects what a transfer's callbacks are given."""

    def __init__(self):
        self.units, self.errors = queue.Queue(), queue.Queue()

    def get(self):
        return self.units.get(timeout=WAIT_S)

    def error(self):
        return self.errors.get(timeout=WAIT_S)

    def start(self, transport, key, src=0, dst=1):
        transport.start(key, src, dst, self.units.put, self.errors.put)
        return self


def unit(transport_shardings, key, start=0, tokens=5, layer=0, layers=2, src=0, value=None, padded=8):
    """A unit on the devices of `src`, each value telling its key and first token."""
    kv = np.full((layers, 2, padded, K, H), 100 * key + start if value is None else value, np.float32)
    header = UnitHeader(key, layer, layers, start, tokens, kv.shape, "float32")
    return Unit(header, jax.device_put(kv, transport_shardings[src]))


def layered(places):
    """The same for every layer."""
    return [[place] * 8 for place in places]


@pytest.fixture
def places():
    return shardings()


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("transfer-")}


@pytest.fixture
def transport(places):
    before = threads()  # engines of other tests may be alive
    made = DevicePut(layered(places))
    yield made
    made.close()
    assert threads() <= before


def test_units_of_a_transfer_arrive_in_order_on_the_destination(transport, places):
    receiver = Receiver().start(transport, key=1)
    sent = [unit(places, 1, start, layer=layer) for start in (0, 5, 10) for layer in (0, 2)]
    for one in sent:
        transport.send(one)
    for one in sent:
        got = receiver.get()
        assert got.header == one.header and got.kv.sharding == places[1]
        np.testing.assert_array_equal(np.asarray(got.kv), np.asarray(one.kv))
    transport.finish(1)
    assert receiver.errors.empty()


def test_layers_may_be_sent_whole_one_group_after_the_other(transport, places):
    receiver = Receiver().start(transport, key=1)
    for layer in (0, 2):
        for start in (0, 5):
            transport.send(unit(places, 1, start, layer=layer))
    assert [receiver.get().header.layer for _ in range(4)] == [0, 0, 2, 2]


def test_send_returns_while_the_unit_is_still_being_computed(transport, places):
    receiver = Receiver().start(transport, key=1)
    made = unit(places, 1)
    pending = Pending(made.kv)
    transport.send(Unit(made.header, pending))  # would never return if it waited
    assert pending.waited_for.wait(WAIT_S) and receiver.units.empty()
    pending.ready.set()
    assert receiver.get().header == made.header


def test_a_source_that_still_computes_delays_no_other_source(transport, places):
    slow, fast = Receiver().start(transport, key=1, src=0), Receiver().start(transport, key=2, src=2)
    made = unit(places, 1)
    pending = Pending(made.kv)
    transport.send(Unit(made.header, pending))
    assert pending.waited_for.wait(WAIT_S)
    transport.send(unit(places, 2, src=2))
    assert fast.get().header.key == 2
    pending.ready.set()
    assert slow.get().header.key == 1


def test_two_transfers_between_the_same_instances_keep_their_own_units(transport, places):
    receivers = {key: Receiver().start(transport, key) for key in (1, 2)}
    for start in (0, 5, 10):
        for key in (1, 2):
            transport.send(unit(places, key, start))
    for key, receiver in receivers.items():
        got = [receiver.get() for _ in range(3)]
        assert [int(one.kv[0, 0, 0, 0, 0]) for one in got] == [100 * key + start for start in (0, 5, 10)]


def test_moved_s_is_the_time_of_the_copy_and_not_of_the_wait(places):
    ticks = iter(range(100))
    transport = DevicePut(layered(places), clock=lambda: float(next(ticks)))
    receiver = Receiver().start(transport, key=1)
    made = unit(places, 1)
    pending = Pending(made.kv)
    transport.send(Unit(made.header, pending))
    assert pending.waited_for.wait(WAIT_S)
    assert next(ticks) == 0  # not asked before the unit was computed
    pending.ready.set()
    assert receiver.get().moved_s == (1.0, 2.0)
    transport.close()


def test_no_unit_stays_in_memory_after_it_was_delivered(transport, places):
    seen = queue.Queue()
    transport.start(1, 0, 1, lambda one: seen.put(weakref.ref(one.kv)), seen.put)
    transport.start(2, 0, 1, lambda one: seen.put(None), seen.put)
    first = unit(places, 1)
    source = weakref.ref(first.kv)
    transport.send(first)
    del first
    moved = seen.get(timeout=WAIT_S)
    transport.send(unit(places, 2))  # when this one is there, the thread has let go of the first
    assert seen.get(timeout=WAIT_S) is None
    assert source() is None and moved() is None


# --- headers --------------------------------------------------------------------------------------------------------


def lies(places):
    good = unit(places, 1)
    header, kv = good.header, good.kv

    def told(**change):
        fields = {name: getattr(header, name) for name in UnitHeader.__slots__}
        return Unit(UnitHeader(**(fields | change)), kv)

    mesh = Mesh(np.array(jax.devices()[:2]), ("kv",))
    elsewhere = jax.device_put(np.asarray(kv), NamedSharding(mesh, PartitionSpec(None, None, "kv")))
    return {
        "shape": (told(shape=(2, 2, 8, 4, 2)), "the header says"),
        "dtype": (told(dtype="int32"), "the header says int32"),
        "layers": (told(layers=3), "3 layers"),
        "no tokens": (told(tokens=0), "shape is"),
        "too many tokens": (told(tokens=9), "at least 9 tokens"),
        "gap": (told(start=1), "start is 1 in layer 0; allowed: 0"),
        "other sharding": (Unit(header, elsewhere), "the array is sharded as"),
    }


@pytest.mark.parametrize("name", lies(shardings()))
def test_a_header_that_lies_fails_the_transfer_and_says_why(transport, places, name):
    wrong, why = lies(places)[name]
    receiver = Receiver().start(transport, key=1)
    transport.send(wrong)
    assert why in receiver.error()
    assert receiver.units.empty()


@pytest.mark.parametrize("start, layer", [(0, 0), (3, 0), (6, 0), (5, 1)])
def test_a_repeat_an_overlap_and_a_gap_fail_the_transfer(transport, places, start, layer):
    receiver = Receiver().start(transport, key=1)
    transport.send(unit(places, 1, start=0, layer=0))
    receiver.get()
    transport.send(unit(places, 1, start=start, layer=layer))  # only start 5, layer 0 continues; layer 1 overlaps half
    assert "start is" in receiver.error()


# --- failures -------------------------------------------------------------------------------------------------------


def test_a_failed_transfer_is_told_once_and_drops_what_follows(transport, places):
    receiver, other = Receiver().start(transport, key=1), Receiver().start(transport, key=2)
    for start in (5, 0, 5):  # the first is out of order
        transport.send(unit(places, 1, start))
    transport.send(unit(places, 2))
    assert other.get().header.key == 2  # the thread lives and serves others
    assert receiver.errors.qsize() == 1 and receiver.units.empty()


def test_a_unit_that_could_not_be_computed_fails_its_transfer(transport, places):
    receiver = Receiver().start(transport, key=1)
    lost = unit(places, 1)
    lost.kv.delete()
    transport.send(lost)
    assert "deleted" in receiver.error()


def test_callbacks_that_raise_do_not_kill_the_thread(transport, places):
    def broken(_):
        raise OSError("no room")

    errors, other = queue.Queue(), Receiver()
    transport.start(1, 0, 1, broken, errors.put)
    transport.start(2, 0, 1, broken, broken)
    other.start(transport, key=3)
    for key in (1, 2, 3):
        transport.send(unit(places, key))
    assert errors.get(timeout=WAIT_S) == "OSError: no room"
    assert other.get().header.key == 3


# --- endings --------------------------------------------------------------------------------------------------------


def test_abort_drops_units_that_are_waiting_and_says_it_was_in_time(transport, places):
    receiver, other = Receiver().start(transport, key=1), Receiver().start(transport, key=2)
    made = unit(places, 1)
    pending = Pending(made.kv)
    transport.send(Unit(made.header, pending))
    transport.send(unit(places, 1, start=5))
    assert pending.waited_for.wait(WAIT_S)
    assert transport.abort(1) is True  # although its thread waits for the device
    pending.ready.set()
    transport.send(unit(places, 1, start=10))
    transport.send(unit(places, 2))
    assert other.get().header.key == 2
    assert receiver.units.empty() and receiver.errors.empty()


def test_abort_waits_for_a_delivery_that_is_running(transport, places):
    entered, leave, log = threading.Event(), threading.Event(), []

    def deliver(_):
        entered.set()
        assert leave.wait(WAIT_S)
        log.append("delivered")

    transport.start(1, 0, 1, deliver, log.append)
    transport.send(unit(places, 1))
    transport.send(unit(places, 1, start=5))
    assert entered.wait(WAIT_S)
    aborter = threading.Thread(target=lambda: log.append(transport.abort(1)))
    aborter.start()
    aborter.join(0.05)
    assert aborter.is_alive() and log == []
    leave.set()
    aborter.join(WAIT_S)
    transport.close()
    assert log == ["delivered", True]


def test_abort_of_an_ended_or_unknown_transfer_is_false(transport, places):
    Receiver().start(transport, key=1)
    transport.finish(1)
    failing = Receiver().start(transport, key=2)
    transport.send(unit(places, 2, start=1))
    failing.error()
    Receiver().start(transport, key=3)
    transport.abort(3)
    assert [transport.abort(key) for key in (1, 2, 3, 4)] == [False] * 4


def test_a_callback_may_end_its_own_transfer(transport, places):
    done = queue.Queue()

    def deliver(one):
        transport.finish(one.header.key)
        done.put(one)

    transport.start(1, 0, 1, deliver, done.put)
    transport.send(unit(places, 1))
    assert done.get(timeout=WAIT_S).header.key == 1


def test_finish_after_an_end_raises(transport, places):
    Receiver().start(transport, key=1)
    transport.abort(1)
    for key in (1, 2):
        with pytest.raises(RuntimeError, match=f"transfer {key} is not open"):
            transport.finish(key)


def test_only_started_transfers_can_end():
    ends = [state for state in TransferState if state is not TransferState.STARTED]
    for old in TransferState:
        for new in TransferState:
            if old is TransferState.STARTED and new in ends:
                assert advance(old, new) is new
            else:
                with pytest.raises(RuntimeError, match=f"{old.value} -> {new.value}"):
                    advance(old, new)
    assert set(TRANSITIONS) == set(TransferState)


def test_ended_transfers_leave_nothing_behind(transport, places):
    for key in range(200):
        receiver = Receiver().start(transport, key)
        if key % 3 == 0:
            transport.abort(key)
        elif key % 3 == 1:
            transport.finish(key)
        else:
            transport.send(unit(places, key, start=1))
            receiver.error()
    assert transport._transfers == {} and len(transport._workers) == 1


def test_start_refuses_a_live_key_and_an_unknown_instance(transport):
    receiver = Receiver().start(transport, key=1)
    with pytest.raises(ValueError, match="key is 1"):
        receiver.start(transport, key=1)
    with pytest.raises(ValueError, match=r"dst is 3; allowed: an instance, 0\.\.2"):
        receiver.start(transport, key=2, dst=3)


def test_a_sharding_of_another_kind_is_refused_at_construction(places):
    flat = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("tp",)), PartitionSpec("tp"))
    with pytest.raises(ValueError, match=r"shardings\[1\] has .*allowed"):
        DevicePut(layered([places[0], flat]))


def test_close_drops_what_is_on_its_way_and_is_idempotent(places):
    transport = DevicePut(layered(places))
    before = threads()
    receiver = Receiver().start(transport, key=1)
    made = unit(places, 1)
    pending = Pending(made.kv)
    transport.send(Unit(made.header, pending))
    for start in range(5, 50, 5):
        transport.send(unit(places, 1, start))
    assert pending.waited_for.wait(WAIT_S)
    closer = threading.Thread(target=transport.close)
    closer.start()
    pending.ready.set()
    closer.join(WAIT_S)
    transport.close()
    assert receiver.units.qsize() <= 1 and receiver.errors.empty()
    assert threads() <= before
    transport.send(unit(places, 1))
    with pytest.raises(RuntimeError, match="closed"):
        receiver.start(transport, key=2)
