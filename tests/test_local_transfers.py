"""Transfers of the local cluster by the real transports, on fake executors (`tests.sites`): aborts at every stage,
faults, slices, inserts between steps, digests."""

import itertools
import math
import re
import threading

import jax
import numpy as np
import pytest

from pdjax.controller import MAX_FAILURES, Controller
from pdjax.latency import LatencyModel
from pdjax.messages import Abort, Arrival, Iteration, IterationDone, Join, Role, StartTransfer, TransferDone
from pdjax.request import SamplingParams, State
from pdjax.testing import Collector, fake_tokens, spec
from pdjax.transfer.device_put import DevicePut
from pdjax.transfer.jax_transfer import JaxTransfer
from tests.sites import LAYERS, SLICE, WAIT_S, Site, move
from tests.worlds import ask, policy, specs

TRANSPORTS = pytest.mark.parametrize("transport", [DevicePut, JaxTransfer])
MODES = pytest.mark.parametrize("mode", ["pull", "stream"])


class Serving:
    """A controller on a cluster with a real transport. Before an event is handled, `seen(event)` is called; before a
    unit moves, `moving(unit)`; what arrives is `change(unit, kv)`. `keys`: the transfers of request 0."""

    def __init__(self, mode, transport=DevicePut, verify_kv=False):
        self.site = Site(specs(mode, num_pages=200), transport=transport, verify_kv=verify_kv)
        self.mode = mode
        self.seen = self.moving = lambda what: None
        self.change = lambda unit, kv: kv
        self.keys = set()
        self.handled = threading.Event()  # the abort of request 0
        connect = self.site.wire._connect
        self.site.wire._connect = lambda src, dst: _Link(self, connect(src, dst))

    def run(self, requests):
        """The records, when all have ended and all pages are free."""
        cluster, executors, collected = self.site.cluster, self.site.executors, Collector()
        models = [LatencyModel()] * len(executors)
        controller = Controller([one.spec for one in executors], policy(self.mode), models, collected)
        for request in requests:
            cluster.post(Arrival(request))
        while len(collected.records) < len(requests) or controller.books.live:
            event = self.site.event()
            self.seen(event)
            for command in controller.handle(event, cluster.now()):
                if isinstance(command, StartTransfer) and command.request == 0:
                    self.keys.add(command.key)
                cluster.submit(command)
            if event == Abort(0):
                self.handled.set()
        free = [lane.free_pages for lane in controller.books.instances]
        assert free == [one.spec.usable_pages for one in executors]
        assert cluster._moves == {} and self.site.wire._transfers == {}
        return collected.records

    def abort(self):
        """Request 0, from whatever thread; returns when the controller's commands are submitted."""
        if not self.handled.is_set():
            self.site.cluster.post(Abort(0))
            assert self.handled.wait(WAIT_S)


class _Link:
    def __init__(self, serving, link):
        self.serving, self.link, self.close = serving, link, link.close

    def move(self, unit, src, dst):
        self.serving.moving(unit)
        return self.serving.change(unit, self.link.move(unit, src, dst))


@pytest.fixture
def serving():
    made = []

    def make(*arguments, **options):
        made.append(Serving(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.site.cluster.close()


def crowd(count=6):
    """Request 0 has more tokens than a slice or a chunk."""
    return [ask(0, prompt=40, tokens=30)] + [ask(number, prompt=9 + number, tokens=5) for number in range(1, count)]


def equal(records, requests):
    return all(records[request.id].token_ids == fake_tokens(request) for request in requests)


# --- aborts ---------------------------------------------------------------------------------------------------------


def before_the_first_unit(s):
    if s.mode == "stream":
        s.site.executors[0].before = lambda what: what == "run" and s.abort()
        return
    extract = s.site.cluster._extract

    def aborted(lane, one):
        if one.command.key in s.keys:
            s.abort()
        extract(lane, one)

    s.site.cluster._extract = aborted


def while_a_unit_moves(s):
    s.moving = lambda unit: unit.header.key in s.keys and s.abort()


def between_units(s):
    moved = itertools.count()
    s.moving = lambda unit: unit.header.key in s.keys and next(moved) == 3 and s.abort()


def after_the_last_unit(s):
    commit = s.site.cluster._commit

    def late(one):
        if one.command.key in s.keys:
            s.abort()
        commit(one)

    s.site.cluster._commit = late


def after_the_commit(s):
    s.seen = lambda event: isinstance(event, TransferDone) and event.key in s.keys and s.site.cluster.post(Abort(0))


STAGES = [before_the_first_unit, while_a_unit_moves, between_units, after_the_last_unit, after_the_commit]


@pytest.mark.parametrize("stage", STAGES)
@MODES
@TRANSPORTS
def test_an_abort_at_any_stage_frees_all_pages_once_and_disturbs_no_other(serving, transport, mode, stage):
    s, requests = serving(mode, transport), crowd()
    stage(s)
    records = s.run(requests)
    assert records[0].state is State.ABORTED
    assert equal(records, requests[1:])


# --- faults ---------------------------------------------------------------------------------------------------------


@MODES
@TRANSPORTS
def test_a_transport_that_raises_on_a_layer_fails_that_transfer_only(serving, transport, mode):
    s, requests = serving(mode, transport), crowd()
    first = []

    def moving(unit):
        if unit.header.key in s.keys and unit.header.layer == 1 and not first:
            first.append(unit.header.key)
            raise OSError("layer 1 is gone")

    s.moving = moving
    records = s.run(requests)
    assert [records[request.id].restarts for request in requests] == [1, 0, 0, 0, 0, 0]
    assert equal(records, requests)


@MODES
def test_a_move_that_hangs_costs_a_restart_and_no_token(serving, mode):
    s, requests = serving(mode), crowd()
    s.site.wire._timeout_s, hangs = 0.1, threading.Event()
    first = []

    def moving(unit):
        if unit.header.key in s.keys and not first:
            first.append(unit)
            assert hangs.wait(WAIT_S)

    s.moving = moving
    records = s.run(requests)
    hangs.set()
    assert records[0].restarts == 1 and equal(records, requests)


@pytest.mark.parametrize("kind", [OSError, SystemExit])
def test_a_transfer_that_always_breaks_ends_its_request_with_the_reason(serving, kind):
    s, requests = serving("pull"), crowd()

    def moving(unit):
        if unit.header.key in s.keys:
            raise kind("no road")

    s.moving = moving
    records = s.run(requests)
    assert records[0].state is State.FAILED and records[0].restarts == MAX_FAILURES
    assert f"{kind.__name__}: no road" in records[0].reason
    assert equal(records, requests[1:])


# --- slices ---------------------------------------------------------------------------------------------------------


def test_kv_larger_than_a_slice_moves_in_slices_and_arrives_equal(serving):
    s, (request, *_) = serving("pull"), crowd()
    moved = []
    s.moving = lambda unit: moved.append((unit.header.start, unit.header.tokens))
    records = s.run([request])
    starts = range(0, len(request.prompt_ids), SLICE)
    assert moved == [(at, min(SLICE, len(request.prompt_ids) - at)) for at in starts for _ in range(LAYERS)]
    assert equal(records, [request])


def test_a_failure_in_the_second_slice_stops_the_third():
    with_wire = Site([spec(0, Role.PREFILL), spec(1, Role.DECODE)])
    wire, deliver = with_wire.wire, with_wire.wire.deliver
    asked = []

    def send(unit):
        asked.append(unit.header.start)
        wire.fail(unit.header.key, "slice 2") if unit.header.start == SLICE else deliver(unit)

    wire.deliver = send
    with_wire.prefilled(range(1, 16))
    with_wire.cluster.submit(move(tokens=15))
    failed = with_wire.event()  # it comes through the source's lane, which has ended the reading by then
    with_wire.cluster.close()
    assert failed.error == "slice 2" and asked == [0] * LAYERS + [SLICE]


# --- inserts between steps ------------------------------------------------------------------------------------------


def test_inserts_wait_their_turn_between_the_steps_of_rows():
    s = Site([spec(0, Role.PREFILL), spec(1, Role.DECODE)], hold=True)
    decoder, steps = s.executors[1], 12
    decoder.insert_cost_s = math.inf  # one goes between two steps
    pages = (10, 11, 12, 13, 14, 15)
    dispatched = {number: threading.Event() for number in range(1, steps + 2)}
    run = decoder.run

    def gated(iteration, emit):
        tokens = run(iteration, emit)
        if iteration.number in dispatched:
            dispatched[iteration.number].set()
        tokens.gate = dispatched.get(iteration.number + 1)  # a step ends when the next is on its way, as on a device
        return tokens

    decoder.run = gated
    s.prefilled(range(1, 16))
    s.cluster.submit(move(tokens=15))
    s.fence()
    assert len(s.wire.kept) == 6
    s.cluster.submit(s.prefill([1, 2, 3], pages=pages, number=-1, instance=1))
    assert isinstance(s.event(), IterationDone)
    join = Join(0, 9, 3, pages, 5, SamplingParams())
    s.cluster.submit(Iteration(1, 1, joins=(join,), decode=True))
    for one in s.wire.kept:
        s.wire.deliver(one)
    for number in range(2, steps + 2):
        s.cluster.submit(Iteration(1, number, decode=True))
    ended = {type(event) for event in s.events(steps + 2)}
    s.cluster.close()
    assert ended == {IterationDone, TransferDone}
    order = [what for what, _ in decoder.log if what in ("run", "insert")]
    gaps = [len(list(group)) for what, group in itertools.groupby(order) if what == "insert"]
    assert gaps == [1] * 6


# --- digests --------------------------------------------------------------------------------------------------------


@MODES
@TRANSPORTS
def test_kv_that_arrives_right_passes_the_check(serving, transport, mode):
    s, requests = serving(mode, transport, verify_kv=True), crowd()
    records = s.run(requests)
    assert equal(records, requests) and not any(record.restarts for record in records.values())


def corrupt(s):
    s.change = lambda unit, kv: _changed(s, unit, kv, lambda array: array ^ (array == array.flat[-1]))


def swap_heads(s):
    s.change = lambda unit, kv: _changed(s, unit, kv, lambda array: array[:, :, :, ::-1])


def lose_v(s):
    s.change = lambda unit, kv: _changed(s, unit, kv, lambda array: array * np.array([1, 0])[:, None, None, None])


def wrong_page(s):
    decoder = s.site.executors[1]
    insert = decoder.insert

    def elsewhere(unit, pages):
        wrong = unit.header.key in s.keys and unit.header.layer == 1
        insert(unit, (pages[1], pages[0], *pages[2:]) if wrong else pages)

    decoder.insert = elsewhere


def _changed(s, unit, kv, change):
    if unit.header.key not in s.keys or unit.header.layer != 1:
        return kv
    return jax.device_put(np.ascontiguousarray(change(np.asarray(kv))).astype(np.int32), kv.sharding)


@pytest.mark.parametrize("damage", [corrupt, swap_heads, lose_v, wrong_page])
@MODES
def test_the_check_names_request_and_layer_and_both_digests(serving, mode, damage, caplog):
    s, requests = serving(mode, verify_kv=True), crowd()
    damage(s)
    records = s.run(requests)
    said = r"verify_kv: request 0, instance 0 to 1: layer 1, head \d has digest \w{16} at the source and \w{16} at the"
    assert records[0].state is State.FAILED
    assert re.search(said, records[0].reason), records[0].reason
    assert "verify_kv: request 0" in caplog.text
    assert equal(records, requests[1:])


def test_without_the_check_no_page_is_read_back(serving, monkeypatch):
    s = serving("pull")
    for executor in s.site.executors:
        monkeypatch.setattr(executor, "held_kv", None)
    assert equal(s.run(crowd()), crowd())
