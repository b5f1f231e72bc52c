"""Fakes that one can compute by hand, for tests of policies and of the controller without a model.

`FakeMachine` keeps, in every page, the tokens whose KV would lie there. The next token is a sum over the whole context
as read back through the block table: a wrong page, a stale one, a lost transfer or a skipped token changes it.
"""

import dataclasses
from collections.abc import Callable, Sequence

from pdjax.controller import Controller, Sink
from pdjax.latency import LatencyModel
from pdjax.messages import Arrival, InstanceSpec, Iteration, Role, StartTransfer, Tick
from pdjax.record import FlipRecord, IterationRecord, MoveRecord, RequestRecord, TransferRecord
from pdjax.request import Request
from pdjax.schedulers.base import Scheduler
from pdjax.simulated import Machine, SimulatedCluster

VOCAB = 997


def fake_next(context: Sequence[int]) -> int:
    """The token after `context`: every token counts, weighted by its position."""
    return sum((index + 1) * (token + 1) for index, token in enumerate(context)) % VOCAB


def fake_tokens(request: Request) -> tuple[int, ...]:
    """What a request must produce, wherever and however it runs."""
    tokens: list[int] = []
    while len(tokens) < request.sampling.max_tokens and not (tokens and tokens[-1] in request.stop_ids):
        tokens.append(fake_next([*request.prompt_ids, *tokens]))
    return tuple(tokens)


class FakeMachine:
    """A `Machine` whose KV is the tokens themselves."""

    def __init__(self, spec: InstanceSpec) -> None:
        self._spec = spec
        self._pages: dict[tuple[int, int], int] = {}  # (page, offset) -> token
        self._tables: dict[int, list[int]] = {}
        self._positions: dict[int, int] = {}
        self._last: dict[int, int] = {}  # slot -> token

    def run(self, iteration: Iteration, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        for join in iteration.joins:
            self._tables[join.slot], self._positions[join.slot] = list(join.pages), join.position
            if join.token is not None:
                self._last[join.slot] = join.token
        for slot, page in iteration.grows:
            self._tables[slot].append(page)
        firsts = []
        for chunk in iteration.chunks:
            for offset, token in enumerate(chunk.tokens):
                self._write(chunk.pages, chunk.start + offset, token)
            if chunk.last:
                token = fake_next(self.read(chunk.pages, chunk.start + len(chunk.tokens)))
                firsts.append(token)
                self._last[chunk.slot] = token
        out = []
        for slot in rows:
            self._write(self._tables[slot], self._positions[slot], self._last[slot])
            self._positions[slot] += 1
            self._last[slot] = fake_next(self.read(self._tables[slot], self._positions[slot]))
            out.append(self._last[slot])
        return out, firsts

    def copy(self, transfer: StartTransfer, source: Machine) -> None:
        assert isinstance(source, FakeMachine)
        for position, token in enumerate(source.read(transfer.src_pages, transfer.tokens)):
            self._write(transfer.dst_pages, position, token)

    def read(self, pages: Sequence[int], tokens: int) -> list[int]:
        """The first `tokens` tokens of a block table; KeyError where nothing was ever written."""
        size = self._spec.page_size
        return [self._pages[pages[position // size], position % size] for position in range(tokens)]

    def _write(self, pages: Sequence[int], position: int, token: int) -> None:
        size = self._spec.page_size
        page = pages[position // size]
        assert page != 0, "the zero page is written"
        self._pages[page, position % size] = token


class Collector:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.records: dict[int, RequestRecord] = {}
        self.iterations: list[IterationRecord] = []
        self.transfers: list[TransferRecord] = []
        self.flips: list[FlipRecord] = []
        self.moves: list[MoveRecord] = []

    def token(self, request: Request, token: int, time_s: float, logprob: float | None) -> bool:
        self.tokens.setdefault(request.id, []).append(token)
        return False

    def done(self, request: Request, record: RequestRecord) -> None:
        if request.id in self.records:
            raise AssertionError(f"request {request.id} ended twice")
        self.records[request.id] = record

    def iteration(self, record: IterationRecord) -> None:
        self.iterations.append(record)

    def transfer(self, record: TransferRecord) -> None:
        self.transfers.append(record)

    def revised(self, record: FlipRecord | MoveRecord) -> None:
        if isinstance(record, FlipRecord):
            self.flips.append(record)
        else:
            self.moves.append(record)


def spec(index: int, role: Role, **changes: int) -> InstanceSpec:
    """A small instance: pages of 4 tokens, 8 rows, chunks of up to 16 tokens."""
    small = InstanceSpec(
        index=index,
        role=role,
        devices=1,
        max_rows=8,
        max_chunk=16,
        max_chunks=4,
        page_size=4,
        num_pages=65,
        max_model_len=256,
        kv_bytes_per_token=1000,
    )
    return dataclasses.replace(small, **changes)  # type: ignore[arg-type]


class World:
    """A controller on a simulated cluster, and a step to drive it by.

    Args:
        specs, scheduler: as for the controller.
        latency: the same for every instance. `actual`: what passes really take; None: that.
    """

    def __init__(
        self,
        specs: Sequence[InstanceSpec],
        scheduler: Scheduler,
        latency: LatencyModel | None = None,
        machine: Callable[[InstanceSpec], Machine] = FakeMachine,
        sink: Sink | None = None,
        transfer_timeout_s: float = 60.0,
        max_queue: int = 0,
        max_steps: int = 1,
        on_failure: str = "recompute",
        correct: bool = False,
        actual: LatencyModel | None = None,
    ) -> None:
        if max_steps > 1 and machine is FakeMachine:
            raise ValueError(f"max_steps is {max_steps}; allowed with a FakeMachine, which computes every token: 1")
        models = [latency or LatencyModel()] * len(specs)
        self.collected = Collector()
        self.cluster = SimulatedCluster(specs, [actual or model for model in models], machine)
        self.controller = Controller(
            specs,
            scheduler,
            models,
            sink or self.collected,
            transfer_timeout_s,
            max_queue,
            max_steps,
            on_failure,
            correct,
        )

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.cluster.post(Arrival(request), request.arrival_s)

    def step(self) -> bool:
        """One event; False when nothing is left that could happen."""
        deadline = self.controller.next_deadline()
        event = self.cluster.next_event(None if deadline is None else max(0.0, deadline - self.cluster.now()))
        if event is None and deadline is None:
            return False
        for command in self.controller.handle(event or Tick(), self.cluster.now()):
            self.cluster.submit(command)
        return True

    def run(self) -> Collector:
        """To the end; every request must have ended, and every page be free, on lost instances too."""
        while self.step():
            for lane in self.controller.books.instances:
                lane.pool.check()
        if self.controller.books.live:
            raise AssertionError(
                f"never ended: {[(live.id, live.state) for live in self.controller.books.live.values()]}"
            )
        for lane in self.controller.books.instances:
            if lane.free_pages != lane.spec.usable_pages or not lane.idle:
                raise AssertionError(f"instance {lane.spec.index} is not empty at the end")
        return self.collected
