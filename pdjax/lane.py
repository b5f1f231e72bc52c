"""One instance in the controller's books: pages, row slots, queue, decode batch, iterations in flight.

The controller changes it, schedulers read it (it implements their `InstanceView`). What a decode step costs here is
what changes: pages that fall due and rows that end are found by the number of the step, not by looking at every row.
"""

import bisect
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from types import MappingProxyType

from pdjax.latency import LatencyModel
from pdjax.live import Live
from pdjax.messages import Chunk, InstanceSpec, Iteration, Join, Role
from pdjax.pages import PagePool
from pdjax.schedulers.base import Ask

_Row = tuple[Live, int]  # with its attempt: a row may leave, start over and join again


class Lane:
    """The books of one instance. `fits` asks the controller whether a request can start (it may need two lanes)."""

    def __init__(self, spec: InstanceSpec, latency: LatencyModel, fits: Callable[["Lane", Live], bool]) -> None:
        self.spec = spec
        self.role: Role = spec.role
        self.alive = True
        self.latency = latency
        self.pool = PagePool(spec)
        self.prefills: list[Live] = []
        self.batch: dict[int, Live] = {}  # slot -> row, in the instance's order
        self.prefill_streak = 0
        self.in_flight: deque[tuple[Iteration, Mapping[int, Live]]] = deque()
        self.starved = False  # a row waits for a page: nobody else may take one
        self._fits = fits
        self._slots = list(range(spec.max_rows - 1, -1, -1))
        self._incoming: set[int] = set()
        self._snapshot: Mapping[int, Live] | None = None
        self._leaves: list[int] = []
        self._joins: list[tuple[Live, int | None]] = []
        self._grows: list[tuple[int, int]] = []
        self._due: defaultdict[int, list[_Row]] = defaultdict(list)  # step -> rows that need a page for it
        self._ends: defaultdict[int, list[_Row]] = defaultdict(list)  # step -> rows for which it is the last
        self._barriers: deque[tuple[int, Live]] = deque()
        self._steps = 0
        self._number = 0
        self._pending_tokens = 0
        self._context_sum = 0
        self._offsets: dict[int, int] = {}  # slot -> context at join minus the step of joining

    # --- what schedulers see ----------------------------------------------------------------------------------------

    @property
    def pending_tokens(self) -> int:
        return self._pending_tokens

    @property
    def rows(self) -> int:
        return len(self.batch)

    @property
    def incoming(self) -> int:
        return len(self._incoming)

    @property
    def context_tokens(self) -> int:
        return self._context_sum

    @property
    def max_context(self) -> int:
        return max(self._offsets.values()) + self._steps if self._offsets else 0

    @property
    def free_pages(self) -> int:
        return self.pool.free

    def startable(self, ask: Ask) -> bool:
        assert isinstance(ask, Live)
        return self._fits(self, ask)

    def room_for(self, ask: Ask) -> bool:
        needed = self.spec.pages_for(ask.context_tokens + 1)
        return self.alive and not self.starved and self.has_slot and self.pool.free >= needed

    # --- the queue --------------------------------------------------------------------------------------------------

    def enqueue(self, live: Live) -> None:
        bisect.insort(self.prefills, live, key=lambda other: (other.prefilled == 0, other.order))
        self._pending_tokens += live.context_tokens

    def dequeue(self, live: Live) -> None:
        """Takes a request out whose prompt is not fully issued."""
        self.prefills.remove(live)
        self._pending_tokens -= live.context_tokens - live.prefilled

    # --- pages and slots --------------------------------------------------------------------------------------------

    def reserve(self, live: Live, tokens: int, *, slot: bool) -> None:
        """Gives the pages for `tokens` tokens, and a row slot; the caller has made sure that both are there."""
        if self.pool.take(live.id, self.spec.pages_for(tokens)) is None:
            raise RuntimeError(f"instance {self.spec.index} has no pages for request {live.id}")
        if slot:
            live.slot = self._slots.pop()

    @property
    def has_slot(self) -> bool:
        return bool(self._slots)

    def expect(self, live: Live) -> None:
        """A row that will join once its KV is here: pages and slot are reserved now."""
        self.reserve(live, live.context_tokens + 1, slot=True)
        self._incoming.add(live.id)

    def give_back(self, live: Live, *, slot: int | None) -> None:
        self.pool.release(live.id)
        self._incoming.discard(live.id)
        if slot is not None:
            self._slots.append(slot)

    # --- the decode batch -------------------------------------------------------------------------------------------

    def join(self, live: Live, token: int | None) -> None:
        """The row takes part in every step issued from now on; `token` None: its slot holds the input token."""
        assert live.slot is not None
        self._incoming.discard(live.id)
        position = live.context_tokens
        self.batch[live.slot] = live
        self._joins.append((live, token))
        self._offsets[live.slot] = position + 1 - self._steps
        self._context_sum += position + 1
        row = (live, live.attempt)
        self._due[self._steps + len(self.pool.pages(live.id)) * self.spec.page_size - position].append(row)
        last = self._steps + live.request.sampling.max_tokens - (position - len(live.request.prompt_ids)) - 2
        self._ends[last].append(row)
        self._snapshot = None

    def leave(self, live: Live) -> None:
        """The row takes part in no further step. Does nothing if it is not in the batch."""
        slot = live.slot
        if slot is None or not self.holds(live):
            return
        del self.batch[slot]
        self.starved = self.starved and bool(self.batch)
        self._context_sum -= self._offsets.pop(slot) + self._steps
        self._snapshot = None
        for waiting in self._joins:
            if waiting[0] is live:  # the instance never heard of it
                self._joins.remove(waiting)
                return
        self._grows = [grow for grow in self._grows if grow[0] != slot]
        self._leaves.append(slot)

    def holds(self, live: Live) -> bool:
        """Whether it is a row of the batch."""
        return live.slot is not None and self.batch.get(live.slot) is live

    def growing(self) -> list[Live]:
        """Rows that need a page before the next step can be issued."""
        due = [row[0] for row in self._due.get(self._steps, ()) if self._here(row)]
        return sorted(due, key=lambda live: live.order)

    def grow(self, live: Live) -> bool:
        """Gives a due row its page; False if there is none."""
        taken = self.pool.take(live.id, 1)
        if taken is None:
            return False
        assert live.slot is not None
        row = (live, live.attempt)
        self._due[self._steps].remove(row)
        self._due[self._steps + self.spec.page_size].append(row)
        self._grows.append((live.slot, taken[0]))
        return True

    def _here(self, row: _Row) -> bool:
        live, attempt = row
        return live.attempt == attempt and self.holds(live)

    # --- iterations -------------------------------------------------------------------------------------------------

    def issue(self, chunks: tuple[Chunk, ...], decode: bool) -> Iteration:
        """Makes the next iteration from what changed since the last, and counts its step."""
        self._number += 1
        joins = tuple(
            Join(live.slot, live.id, live.context_tokens, self.pool.pages(live.id), token, live.request.sampling)
            for live, token in self._joins
            if live.slot is not None
        )
        iteration = Iteration(
            self.spec.index, self._number, chunks, tuple(self._leaves), joins, tuple(self._grows), decode
        )
        self._leaves, self._joins, self._grows = [], [], []
        if self._snapshot is None:
            self._snapshot = MappingProxyType(dict(self.batch))
        self.in_flight.append((iteration, self._snapshot if decode else {}))
        self.prefill_streak = self.prefill_streak + 1 if chunks and not decode and self.batch else 0
        if decode:
            self._due.pop(self._steps, None)
            ending = [row[0] for row in self._ends.pop(self._steps, ()) if self._here(row)]
            self._steps += 1
            self._context_sum += len(self.batch)
            for live in ending:
                self.leave(live)
        return iteration

    def advance_prefill(self, live: Live, tokens: int) -> None:
        """Counts prompt tokens as issued: a started request moves to the front part, an issued one leaves the queue."""
        if live.prefilled == 0:
            self.prefills.remove(live)
            self.prefills.insert(sum(other.prefilled > 0 for other in self.prefills), live)
        live.prefilled += tokens
        self._pending_tokens -= tokens
        if live.prefilled == live.context_tokens:
            self.prefills.remove(live)

    @property
    def draining(self) -> bool:
        """Whether pages will come back when what is in flight is done."""
        return bool(self._barriers)

    def barrier(self, live: Live) -> bool:
        """Makes `live` hold on until all that is now in flight here is done; False if nothing is."""
        if not self.in_flight:
            return False
        self._barriers.append((self._number, live))
        live.holds += 1
        return True

    def passed(self, number: int) -> list[Live]:
        """The requests whose barrier ends with this iteration."""
        out = []
        while self._barriers and self._barriers[0][0] <= number:
            live = self._barriers.popleft()[1]
            live.holds -= 1
            out.append(live)
        return out

    def lose(self) -> list[Live]:
        """The instance is gone: forget its queue, batch and iterations; returns the requests freed of a barrier."""
        self.alive = False
        self.in_flight.clear()
        return self.passed(self._number)

    @property
    def idle(self) -> bool:
        return not self.in_flight and not self.prefills and not self.batch
