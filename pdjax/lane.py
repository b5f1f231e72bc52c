"""One instance in the controller's books: pages, row slots, queue, decode batch, iterations in flight.

The controller changes it, schedulers read it (it implements their `InstanceView`).

While a run is on its way, the steps of it that count as issued follow from the time: as many as are done, and as many
more as may be in flight. Whatever depends on them brings itself up to date first, and a change of the batch or of the
queue cuts the run there. So every view and every decision is what it would be with an iteration for every step.
"""

import bisect
from collections.abc import Collection, Sequence
from typing import Protocol

from pdjax.barriers import Barriers
from pdjax.batch import Batch
from pdjax.changes import Changes
from pdjax.correction import Correction
from pdjax.flights import Flight, Flights
from pdjax.latency import Latency, Load
from pdjax.live import Live
from pdjax.messages import Chunk, Command, Cut, InstanceSpec, Iteration, IterationDone, Role, RunStarted
from pdjax.pages import PagePool
from pdjax.request import State
from pdjax.schedulers.base import Ask, RowTable
from pdjax.schedulers.base import Row as RowView
from pdjax.slots import Slots


class Desk(Protocol):
    """What a lane needs of the books that it is part of."""

    @property
    def now(self) -> float: ...
    @property
    def steady(self) -> bool:
        """Whether the policy is."""
        ...

    @property
    def commands(self) -> list[Command]: ...
    @property
    def stirred(self) -> set[int]:
        """The lanes that something has happened to since they had nothing to do or no room."""
        ...

    @property
    def relieved(self) -> set[int]:
        """The lanes that may have room for what had none there before."""
        ...

    def fits(self, lane: "Lane", live: Live) -> bool:
        """Whether a request can start; it may need two lanes."""
        ...


class Lane:
    """The books of one instance."""

    def __init__(self, spec: InstanceSpec, latency: Latency, desk: Desk, twin: int) -> None:
        self.spec = spec
        self.twin = twin
        self.role: Role = spec.role
        self.next_role: Role | None = None
        self.alive = True
        self.correction = Correction(latency)
        self.prefills: list[Live] = []
        self.prefill_streak = 0
        self.in_flight = Flights(spec.max_in_flight)
        self.starved = False  # a row waits for a page: nobody else may take one
        self._desk = desk
        self._pool = PagePool(spec)
        self.batch = Batch(spec, self._pool)
        self._slots = list(range(spec.max_rows - 1, -1, -1))
        self._table = Slots(spec.max_rows)
        self._incoming: dict[int, Live] = {}
        self._assigned: dict[int, Live] = {}
        self._changes = Changes()
        self._barriers = Barriers()
        self._reported = False  # something, since the last decision
        self._pending_tokens = 0

    # --- what schedulers see ----------------------------------------------------------------------------------------

    @property
    def pending_tokens(self) -> int:
        return self._pending_tokens

    @property
    def rows(self) -> int:
        return len(self.batch.rows)

    @property
    def incoming(self) -> int:
        return len(self._incoming)

    @property
    def rows_due(self) -> int:
        return len(self.batch.rows) + len(self._incoming) + len(self._assigned)

    @property
    def assigned(self) -> Collection[Ask]:
        return self._assigned.values()  # no copy: there may be thousands

    @property
    def running(self) -> Sequence[RowView]:
        self._catch_up()
        done, steps, offsets = self.in_flight.clock.done, self.batch.steps, self.batch.offsets
        rows, decoding = [], State.DECODING
        for slot, live in self.batch.rows.items():
            if live.state is decoding:  # its first token may still be on its way to the host
                generated, request = len(live.tokens), live.request
                if done > live.step:
                    generated += done - live.step
                issued = offsets[slot] + steps - len(request.prompt_ids)
                rows.append(RowView(live, generated, issued, request.sampling.max_tokens, live.timeline.token_s[0]))
        return rows

    @property
    def table(self) -> RowTable:
        self._catch_up()
        return self._table.table(self.batch.steps)

    @property
    def latency(self) -> Latency:
        return self.correction.model

    @property
    def busy_s(self) -> float:
        if not self.in_flight:
            return 0.0
        self._catch_up()
        return self.in_flight.busy_s(self._desk.now, lambda load: self.latency.iteration_s(self.spec, load))

    @property
    def context_tokens(self) -> int:
        self._catch_up()
        return self.batch.context_tokens

    @property
    def attended_tokens(self) -> int:
        self._catch_up()
        return self.batch.attended_tokens

    @property
    def load(self) -> Load:
        return Load((), len(self.batch.rows), self.context_tokens, self.attended_tokens)

    @property
    def full_load(self) -> Load:
        load = self.load
        for live in self._incoming.values():
            load = load.plus_row(live.context_tokens + 1)
        return load

    @property
    def pool(self) -> PagePool:
        self._catch_up()
        return self._pool

    @property
    def free_pages(self) -> int:
        return self.pool.free

    def startable(self, ask: Ask) -> bool:
        assert isinstance(ask, Live)
        return self._desk.fits(self, ask)

    def room_for(self, ask: Ask) -> bool:
        assert isinstance(ask, Live)
        if not self.alive or self.starved or not self._slots:
            return False  # first what costs least: thousands may be asked about
        held = self._pool.count(ask.id) if ask.state is State.MIGRATING else 0
        runs = ask.state is State.DECODING
        tokens = len(ask.request.prompt_ids) + len(ask.tokens) if runs else ask.context_tokens + 1
        needed = self.spec.pages_for(tokens) - held
        return self.pool.free >= needed

    # --- the queue --------------------------------------------------------------------------------------------------

    def enqueue(self, live: Live) -> None:
        self._cut()
        if self._desk.steady or self._desk.fits(self, live):  # otherwise it changes nothing (`blocked`)
            self._desk.stirred.add(self.spec.index)
        bisect.insort(self.prefills, live, key=lambda other: (other.prefilled == 0, other.order))
        self._pending_tokens += live.context_tokens

    def assign(self, live: Live) -> None:
        """A request that was placed on another instance is to decode here."""
        self._assigned[live.id] = live

    def unassign(self, live: Live) -> None:
        self._assigned.pop(live.id, None)

    def dequeue(self, live: Live) -> None:
        """Takes a request out whose prompt is not fully issued."""
        self.prefills.remove(live)
        self._pending_tokens -= live.context_tokens - live.prefilled

    # --- pages and slots --------------------------------------------------------------------------------------------

    def reserve(self, live: Live, tokens: int, *, slot: bool) -> None:
        """Gives the pages for `tokens` tokens, and a row slot; the caller has made sure that both are there."""
        pages = self.spec.pages_for(tokens)
        self._catch_up()
        if not self.batch.has_pages(self.in_flight.unissued, besides=pages):
            self._cut()  # an open run counts on the pages that were free when it was issued
        if self._pool.take(live.id, pages) is None:
            raise RuntimeError(f"instance {self.spec.index} has no pages for request {live.id}")
        if slot:
            live.slot = self._slots.pop()

    @property
    def has_slot(self) -> bool:
        return bool(self._slots)

    def expect(self, live: Live) -> None:
        """A row that will join once its KV is here: pages and slot are reserved now."""
        self.reserve(live, live.context_tokens + 1, slot=True)
        self._incoming[live.id] = live
        self._table.take(live, max(len(live.tokens), 1), here=False)
        self._assigned.pop(live.id, None)

    def keep(self, live: Live) -> None:
        """A request whose KV waits here decodes here after all; `room_for` it has been asked."""
        self._cut()
        more = self.spec.pages_for(live.context_tokens + 1) - self._pool.count(live.id)
        if self._pool.take(live.id, more) is None:
            raise RuntimeError(f"instance {self.spec.index} has no page for request {live.id}")
        live.slot = self._slots.pop()

    def give_back(self, live: Live, *, slot: int | None) -> None:
        self.pool.release(live.id)
        self._relieve()
        self._incoming.pop(live.id, None)
        if slot is not None:
            self._slots.append(slot)
            self._table.leave(slot)

    def _relieve(self) -> None:
        self._desk.relieved.add(self.spec.index)
        self._desk.stirred.add(self.spec.index)

    def uproot(self, live: Live) -> None:
        """A row that left the batch, and whose steps are all done, goes on elsewhere: its pages stay until then."""
        assert live.slot is not None
        self.settle(live)
        self._slots.append(live.slot)
        self._relieve()

    # --- the decode batch -------------------------------------------------------------------------------------------

    def join(self, live: Live, token: int | None) -> None:
        """The row takes part in every step issued from now on; `token` None: its slot holds the input token."""
        assert live.slot is not None
        self._cut()
        self._desk.stirred.add(self.spec.index)
        self._incoming.pop(live.id, None)
        live.last_pass = None
        self.batch.join(live)
        self._changes.join(live, token)
        self._table.take(live, self.batch.offsets[live.slot] - len(live.request.prompt_ids), here=True)

    def leave(self, live: Live) -> None:
        """The row takes part in no further step. Does nothing if it is not in the batch."""
        slot = live.slot
        if slot is None or not self.holds(live):
            return
        self._cut()
        live.last_pass = self.in_flight.number
        self.batch.leave(slot)
        self._relieve()
        self._table.leave(slot)
        self.starved = self.starved and bool(self.batch)
        self._changes.leave(live, slot)

    def holds(self, live: Live) -> bool:
        """Whether it is a row of the batch."""
        return self.batch.holds(live)

    def grow(self, live: Live) -> bool:
        """Gives a row its page for the next step (`Batch.growing`); False if there is none."""
        page = self.batch.grow(live)
        if page is None:
            return False
        assert live.slot is not None
        self._changes.grow(live.slot, page)
        return True

    # --- iterations -------------------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """For one more iteration."""
        if self._reported:  # between reports an open run leaves no room
            self._reported = False
            self.in_flight.decided()
            self._catch_up()
        return self.alive and self.in_flight.room

    @property
    def blocked(self) -> bool:
        """Whether nothing can be issued, whatever a policy wants, until pages or slots come back or a prompt is queued
        that fits: there are no rows, and no prompt that was begun or can start."""
        return not self.batch and not any(live.prefilled or self._desk.fits(self, live) for live in self.prefills)

    def steady_steps(self, most: int) -> int:
        """How many steps the next iteration may stand for: `Batch.steady_steps`, one while prompts wait."""
        return 1 if self.prefills else self.batch.steady_steps(most)

    def issue(self, chunks: tuple[Chunk, ...], decode: bool, steps: int = 1) -> Iteration:
        """Makes the next iteration from what changed since the last, and counts its steps."""
        leaves, joins, grows = self._changes.take(self._pool)
        iteration = Iteration(self.spec.index, self.in_flight.number + 1, chunks, leaves, joins, grows, decode, steps)
        rows, ending = self.batch.snapshot if decode else {}, self.batch.take_ending() if decode else []
        load = self.load if decode else Load()
        load = load.beside(*((len(chunk.tokens), chunk.start) for chunk in chunks))
        predicted_s = self.latency.iteration_s(self.spec, load)
        self.in_flight.add(Flight(iteration, rows, ending, steps, load, predicted_s), self._desk.now)
        self.prefill_streak = self.prefill_streak + 1 if chunks and not decode and self.batch else 0
        if steps > 1:
            self._catch_up()
        elif decode:
            self.batch.step(1)
            for live, _ in ending:
                self.leave(live)
        return iteration

    def run_started(self, event: RunStarted) -> None:
        self.in_flight.started(event, self._desk.now)

    def reported(self, event: IterationDone) -> Flight:
        """Takes the iteration, or the steps of a run, that an event reports out of flight."""
        flight = self.in_flight.reported(event, self._desk.now)
        self._reported = True
        self._desk.stirred.add(self.spec.index)
        self._catch_up()
        if self.in_flight.clock.long:
            rows = [*self.batch.rows.values(), *(live for other in self.in_flight for live, _ in other.ending)]
            rows += [live for live, _ in flight.ending]
            self.in_flight.clock.forget(min((live.step for live in rows), default=self.in_flight.clock.done))
        return flight

    def settle(self, live: Live) -> None:
        """Writes down the tokens of a row up to now, where the cluster only counts them: zeros."""
        self.in_flight.tick(self._desk.now)
        clock, marks = self.in_flight.clock, live.timeline
        count = clock.done - live.step
        if count > 0:
            if marks.decode_start_s is None:
                marks.decode_start_s = clock.start(live.step)
            live.tokens.extend([0] * count)
            marks.token_s.extend(clock.ends(live.step))
            live.step += count

    def _catch_up(self) -> None:
        """Counts the steps of an open run that are issued by now, and gives the pages that they need."""
        if self._desk.now < self.in_flight.quiet_s:
            return
        if new := self.in_flight.newly_issued(self._desk.now):
            self.batch.step(new)

    def _cut(self) -> None:
        """Something is about to change: no step of an open run is issued any more."""
        self._catch_up()
        if self.in_flight.cut():
            self._desk.stirred.add(self.spec.index)
            self._desk.commands.append(Cut(self.spec.index, self.in_flight.number))

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
        """Makes `live` hold on until nothing that is in flight here can touch its pages; False if nothing can."""
        if live.last_pass is None:
            self._cut()  # or the end of its last issued step would be reported with later ones
        number = self.in_flight.number if live.last_pass is None else live.last_pass
        if number < self.in_flight.oldest:
            return False
        self._barriers.add(number, live)
        return True

    def passed(self, number: int) -> list[Live]:
        """The requests whose barrier ends with this iteration."""
        return self._barriers.passed(number)

    def lose(self) -> list[Live]:
        """The instance is gone: forget its queue, batch and iterations; returns the requests freed of a barrier."""
        self.in_flight.tick(self._desk.now)
        self.alive = False
        self.in_flight.forget()
        return self.passed(self.in_flight.number)

    @property
    def idle(self) -> bool:
        return not self.in_flight and not self.prefills and not self.batch
