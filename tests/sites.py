"""Executors that one can compute by hand, a wire that does what it is told, and a local cluster of both: the threads
are real, no model and no device is needed. Real transports can take the wire's place. Imported as `tests.sites`."""

import threading
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from pdjax.local import LocalCluster
from pdjax.messages import AbortTransfer, Chunk, Iteration, IterationDone, Sampled, StartTransfer, TransferAborted
from pdjax.request import SamplingParams
from pdjax.testing import FakeMachine
from pdjax.transfer.base import TransferState, Unit, UnitHeader, advance
from pdjax.transfer.shards import SPEC

WAIT_S = 20  # how long a test waits for what must come
LAYERS = 2
SLICE = 6  # tokens of a unit of a whole transfer


class Tokens:
    """A `Pending`: its values are there when `gate` is open."""

    def __init__(self, rows, firsts, log):
        self.rows, self.firsts, self.log = rows, firsts, log
        self.gate = None

    def wait(self):
        self.log("wait")
        if self.gate is not None:
            assert self.gate.wait(WAIT_S)
        return Sampled(self.rows, self.firsts)


class FakeExecutor:
    """An `Executor` on a `FakeMachine`: its KV is the tokens. Logs what it is told to do, in order.

    `place`: the sharding of its units, for a transport that moves arrays; None: they are numpy.
    `before`: called with ("run" | "insert" | "extract" | "wait") first; tests block or raise there.
    """

    def __init__(self, spec, place=None):
        self.spec, self.place = spec, place
        self.machine = FakeMachine(spec)
        self.log: list[tuple] = []
        self.before = lambda what: None
        self.insert_cost_s = 0.0
        self._order: list[int] = []
        self._kv: dict[tuple[int, int, int], np.ndarray] = {}  # (layer, page, offset) -> inserted [2, K, 1]

    def run(self, iteration, emit):
        self._note("run", iteration.number)
        for slot in iteration.leaves:
            self._order.remove(slot)
        self._order += [join.slot for join in iteration.joins]
        rows = list(self._order) if iteration.decode else []
        tokens, firsts = self.machine.run(iteration, rows)
        for layer in range(LAYERS):
            for chunk in iteration.chunks:
                if chunk.stream is not None:
                    emit(unit(chunk.stream, layer, chunk.start, chunk.tokens, self.place))
        last = [chunk.request for chunk in iteration.chunks if chunk.last]
        return Tokens(
            tuple(zip(rows, tokens, strict=True)),
            tuple(zip(last, firsts, strict=True)),
            lambda what: self._note(what, iteration.number),
        )

    def extract(self, transfer):
        self._note("extract", transfer.key)
        tokens = self.machine.read(transfer.src_pages, transfer.tokens)
        for start in range(0, transfer.tokens, SLICE):
            for layer in range(LAYERS):
                yield unit(transfer.key, layer, start, tokens[start : start + SLICE], self.place)

    def insert(self, unit, pages):
        self._note("insert", unit.header.key)
        kv = np.asarray(unit.kv)[0]  # [2, T, K, 1]
        for i in range(unit.header.tokens):
            where = self._where(pages, unit.header.start + i)
            self._kv[unit.header.layer, *where] = kv[:, i]
            if unit.header.layer == 0:
                self.machine._pages[where] = int(kv[0, i, 0, 0])

    def insert_s(self, unit):
        return self.insert_cost_s

    def held_kv(self, pages, tokens):
        kv = self.read_kv(pages, tokens)
        return [(layer, head, kv[layer, :, :, head]) for layer in range(LAYERS) for head in range(kv.shape[3])]

    def read_kv(self, pages, tokens):
        own = _kv_of(self.machine.read(pages, tokens))  # what it computed is the same in every layer
        layers = [
            [self._kv.get((layer, *self._where(pages, at)), own[:, at]) for at in range(tokens)]
            for layer in range(LAYERS)
        ]
        return np.array(layers).swapaxes(1, 2)

    def _where(self, pages, at):
        return pages[at // self.spec.page_size], at % self.spec.page_size

    def count(self, what):
        return sum(entry[0] == what for entry in self.log)

    def _note(self, what, number):
        self.log.append((what, number))
        self.before(what)


def _kv_of(tokens: Sequence[int]) -> np.ndarray:
    """[2, T, K, 1]: two heads that differ."""
    ids = np.array(tokens, np.int32)
    return np.tile(np.stack([ids, -1 - ids], axis=1)[None, :, :, None], (2, 1, 1, 1))


def unit(key: int, layer: int, start: int, tokens: Sequence[int], place: NamedSharding | None = None) -> Unit:
    kv = _kv_of(tokens)[None]
    header = UnitHeader(key, layer, 1, start, len(tokens), kv.shape, "int32")
    return Unit(header, kv if place is None else jax.device_put(kv, place), (1.0, 2.0))


def places(count: int) -> list[NamedSharding]:
    """Of the units of `count` instances, each on a device of its own."""
    meshes = [Mesh(np.array([[device]]), ("kv", "rep")) for device in jax.devices()[:count]]
    return [NamedSharding(mesh, SPEC) for mesh in meshes]


class Wire:
    """A `Transport` in memory. Units arrive when they are sent, or are kept for the test to deliver."""

    def __init__(self, hold=False):
        self.hold = hold
        self.kept: list[Unit] = []
        self.fail_next = 0  # transfers that are to break at their first unit
        self.states: dict[int, TransferState] = {}
        self.closed = False
        self._ends = {}
        self._lock = threading.Lock()

    def start(self, key, src, dst, deliver, failed):
        with self._lock:
            self.states[key], self._ends[key] = TransferState.STARTED, (deliver, failed)

    def send(self, unit):
        if self.hold:
            self.kept.append(unit)
        elif self.fail_next and self.states[unit.header.key] is TransferState.STARTED:
            self.fail_next -= 1
            self.fail(unit.header.key, "the wire broke")
        else:
            self.deliver(unit)

    def deliver(self, unit):
        with self._lock:
            if self.states[unit.header.key] is TransferState.STARTED:
                self._ends[unit.header.key][0](unit)

    def fail(self, key, error):
        if self._end(key, TransferState.FAILED):
            self._ends[key][1](error)

    def finish(self, key):
        assert self._end(key, TransferState.COMMITTED)

    def abort(self, key):
        return self._end(key, TransferState.ABORTED)

    def close(self):
        self.closed = True

    def _end(self, key, state):
        with self._lock:
            if self.states[key] is not TransferState.STARTED:
                return False
            self.states[key] = advance(self.states[key], state)
            return True


class Site:
    """A cluster of fakes, closed at the end; without threads left behind.

    `transport`: DevicePut or JaxTransfer in place of the wire.
    """

    def __init__(self, specs, hold=False, transport=None, verify_kv=False):
        if transport is None:
            self.executors, self.wire = [FakeExecutor(spec) for spec in specs], Wire(hold)
        else:
            where = places(len(specs))
            self.executors = [FakeExecutor(spec, place) for spec, place in zip(specs, where, strict=True)]
            self.wire = transport([[place] * LAYERS for place in where])
        self.cluster = LocalCluster(self.executors, self.wire, LAYERS, verify_kv)
        self._fences = 1000

    def event(self):
        event = self.cluster.next_event(WAIT_S)
        assert event is not None, "nothing came"
        return event

    def events(self, count):
        return [self.event() for _ in range(count)]

    def fence(self):
        """Every event that the transfers submitted so far can still cause: an abort's answer comes through both lanes.
        Tokens are read by other threads: they may come later."""
        self._fences += 1
        self.cluster.submit(move(self._fences, mode="stream"))
        self.cluster.submit(AbortTransfer(self._fences))
        before = []
        while (event := self.event()) != TransferAborted(self._fences):
            before.append(event)
        return before

    def prefilled(self, prompt):
        """Computes a prompt; nothing of it is on its way afterwards."""
        self.cluster.submit(self.prefill(prompt))
        assert isinstance(self.event(), IterationDone)

    def prefill(self, prompt, pages=(1, 2, 3, 4), number=1, stream=None, instance=0):
        slot = self.executors[instance].spec.max_rows
        return Iteration(instance, number, (Chunk(7, tuple(prompt), 0, pages, slot, True, SamplingParams(), stream),))


def move(key=1, tokens=10, mode="whole"):
    return StartTransfer(key, 7, 0, 0, 1, (1, 2, 3, 4), (5, 6, 7, 8), tokens, mode)
