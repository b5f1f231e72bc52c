"""The one place that decides. Events in, commands out; all pages and row slots are accounted for here.

The life of a request, by the events that move it (the states are those of `pdjax.request`):

    1 Arrival            WAITING in `queue`; the scheduler's `place` names the instances
    2 (pump)             its first chunk is issued: pages are reserved, on both sides when it streams    PREFILLING
    3 IterationDone      the last chunk's token goes to the user at once; ends here if it stops          FINISHED
         decodes here:   it is in the batch already                                                      DECODING
         elsewhere:      KV is on its way, or the request is `held` until a decode instance has room     MIGRATING
    4 TransferDone       it joins the decode batch; its prefill pages are free                           DECODING
    5 IterationDone      a token per step; a stop is seen one step late, that token is dropped           FINISHED

What goes wrong takes one road, `_retire`: out of every batch and queue; pages come back when nothing in flight and no
transfer can touch them; then the request ends, or is WAITING again with its tokens as part of the prompt.

`handle` is a pure state machine on the events and their times: it sees no array, no thread and no clock, so the same
object drives real meshes and a simulation, and the same events give the same commands.
"""

import bisect
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from pdjax.lane import Lane
from pdjax.latency import LatencyModel
from pdjax.live import Live
from pdjax.messages import (
    Abort,
    AbortTransfer,
    Arrival,
    Chunk,
    Command,
    Event,
    InstanceLost,
    InstanceSpec,
    IterationDone,
    Role,
    StartTransfer,
    Tick,
    TransferAborted,
    TransferDone,
    TransferFailed,
)
from pdjax.record import FinishReason, IterationRecord, RequestRecord, TransferRecord
from pdjax.request import Request, State
from pdjax.schedulers.base import Ask, Place, Reject, Scheduler, Wait

MAX_RESTARTS = 3  # lost transfers or instances before a request is given up


class Sink(Protocol):
    """Where results go. Called from the controller's thread; must not block."""

    def token(self, request: Request, token: int, time_s: float) -> None: ...
    def done(self, request: Request, record: RequestRecord) -> None: ...
    def iteration(self, record: IterationRecord) -> None: ...
    def transfer(self, record: TransferRecord) -> None: ...


class Controller:
    """See the module's text. Implements the schedulers' `ClusterView`.

    Args:
        specs: the cluster's instances.
        scheduler: the policy.
        latency: one model per instance.
        sink: takes tokens and records.
        transfer_timeout_s: a transfer older than this is aborted and its request starts over.
    """

    def __init__(
        self,
        specs: Sequence[InstanceSpec],
        scheduler: Scheduler,
        latency: Sequence[LatencyModel],
        sink: Sink,
        transfer_timeout_s: float = 60.0,
    ) -> None:
        self.now = 0.0
        self.instances = [Lane(spec, model, self._fits) for spec, model in zip(specs, latency, strict=True)]
        self.live: dict[int, Live] = {}
        self.queue: list[Live] = []  # WAITING and not placed, first come first
        self.held: list[Live] = []  # MIGRATING without a transfer: KV waits on the prefill side
        self._backlog = False  # some held request found no room
        self._transfers: dict[int, Live] = {}
        self._deadlines: deque[tuple[float, int]] = deque()
        self._key = 0
        self._commands: list[Command] = []
        self._scheduler = scheduler
        self._sink = sink
        self._timeout = transfer_timeout_s

    # --- events -----------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Command]:
        """Takes one event at time `now` (seconds); returns the commands to submit, in order."""
        self.now = now
        self._commands = []
        match event:
            case Arrival(request):
                self._arrive(request)
            case Abort(request_id):
                self._abort(request_id)
            case IterationDone():
                self._iteration_done(event)
            case TransferDone():
                self._transfer_done(event)
            case TransferFailed(key, error):
                self._transfer_ended(key, error)
            case TransferAborted(key):
                self._transfer_ended(key, "aborted")
            case InstanceLost(instance, error):
                self._instance_lost(instance, error)
            case Tick():
                pass
        self._expire()
        self._pump()
        return self._commands

    def next_deadline(self) -> float | None:
        """When `handle` wants a Tick at the latest."""
        while self._deadlines and self._deadlines[0][1] not in self._transfers:
            self._deadlines.popleft()
        return self._deadlines[0][0] if self._deadlines else None

    @property
    def stalled(self) -> bool:
        """Requests are live, but nothing that is under way can move them: only a new arrival or an abort could."""
        return bool(self.live) and not self._transfers and not any(lane.in_flight for lane in self.instances)

    def fail_all(self, error: str) -> None:
        """Ends every live request: the cluster is gone and will report nothing more."""
        for live in list(self.live.values()):
            if not live.state.terminal:
                live.note = error
                live.to(State.FAILED)
                self._report(live, "error")
        self.live.clear()

    def _arrive(self, request: Request) -> None:
        live = self.live[request.id] = Live.of(request)
        self._enqueue(live)

    def _abort(self, request_id: int) -> None:
        live = self.live.get(request_id)
        if live is not None and not live.state.terminal:
            self._end(live, State.ABORTED, "abort")

    def _iteration_done(self, event: IterationDone) -> None:
        lane = self.instances[event.instance]
        if not lane.alive:
            return
        iteration, rows = lane.in_flight.popleft()
        if iteration.number != event.number:
            raise RuntimeError(f"instance {event.instance} reports iteration {event.number} before {iteration.number}")
        names = tuple(self.live[chunk.request].name for chunk in iteration.chunks)
        for chunk in iteration.chunks:
            timeline = self.live[chunk.request].timeline
            if chunk.start == 0:
                timeline.prefill_start_s = event.started_s
            if chunk.last:
                timeline.prefill_end_s = event.finished_s
        for request_id, token in event.firsts:
            self._first_token(self.live[request_id], token)
        for slot, token in event.rows:
            live = rows[slot]
            if live.state is State.DECODING:  # otherwise it ended a step ago, and this token is the extra one
                if live.timeline.decode_start_s is None:
                    live.timeline.decode_start_s = event.started_s
                self._emit(live, token)
        self._sink.iteration(
            IterationRecord(
                instance=event.instance,
                number=event.number,
                chunk_tokens=sum(len(chunk.tokens) for chunk in iteration.chunks),
                rows=len(event.rows),
                started_s=event.started_s,
                finished_s=event.finished_s,
                requests=names,
                host_gap_s=event.host_gap_s,
            )
        )
        self._freed(lane.passed(event.number))

    def _first_token(self, live: Live, token: int) -> None:
        if live.state is not State.PREFILLING:
            return
        live.first = token
        if self._emit(live, token):
            return
        if live.local:
            live.to(State.DECODING)
            return
        live.to(State.MIGRATING)
        if live.arrived:
            self._join(live)
        elif live.transfer is None:
            bisect.insort(self.held, live, key=lambda other: other.order)

    def _transfer_done(self, event: TransferDone) -> None:
        live = self._transfers.pop(event.key)
        live.transfer = None
        self._sink.transfer(
            TransferRecord(
                request_id=live.name,
                src=live.place.prefill if live.place else -1,
                dst=live.decode_on if live.decode_on is not None else -1,
                nbytes=event.nbytes,
                started_s=event.started_s,
                finished_s=event.finished_s,
            )
        )
        if live.holds:
            live.holds -= 1
            self._freed([live])
            return
        live.arrived = True
        timeline = live.timeline
        timeline.transfer_start_s, timeline.transfer_end_s = event.started_s, event.finished_s
        timeline.transfer_bytes += event.nbytes
        timeline.transfer_busy_s += event.busy_s
        timeline.transfer_hidden_s += event.hidden_s
        if live.state is State.MIGRATING:
            self._join(live)

    def _transfer_ended(self, key: int, error: str) -> None:
        live = self._transfers.pop(key)
        live.transfer = None
        if live.holds:
            live.holds -= 1
            self._freed([live])
        else:
            self._restart(live, f"transfer {key}: {error}")

    def _instance_lost(self, index: int, error: str) -> None:
        lane = self.instances[index]
        freed = lane.lose()
        for live in list(self.live.values()):
            place = live.place
            if live.holds or live.state.terminal or place is None or index not in (place.prefill, live.decode_on):
                continue
            if live.state is State.WAITING:
                lane.dequeue(live)
                live.place = None
                self._enqueue(live)
            else:
                self._restart(live, f"instance {index}: {error}")
        self._freed(freed)
        if not any(lane.alive for lane in self.instances):
            self.fail_all(f"instance {index}, the last one, is lost: {error}")

    def _expire(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self.now:
            _, key = self._deadlines.popleft()
            live = self._transfers.get(key)
            if live is not None and not live.holds:
                self._restart(live, f"transfer {key}: TimeoutError: not done after {self._timeout} s")

    # --- decisions --------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Everything that can be decided now. Requests that hold KV come first, so that none waits behind others."""
        self._hand_off()
        self._place()
        progress = True
        while progress:
            progress = False
            for lane in self.instances:
                while lane.alive and len(lane.in_flight) < lane.spec.max_in_flight and self._iterate(lane):
                    progress = True
            if progress:
                self._place()

    def _hand_off(self) -> None:
        waiting = []
        for live in self.held:
            assert live.place is not None
            target = live.place.decode
            if target is None:
                target = self._scheduler.hand_off(live, self)
            if target is None or not self.instances[target].room_for(live):
                waiting.append(live)
            else:
                self.instances[target].expect(live)
                self._transfer(live, target, "whole")
        self.held = waiting
        self._backlog = bool(waiting)

    def _place(self) -> None:
        while self.queue:
            live = self.queue[0]
            decision = self._scheduler.place(live, self)
            if isinstance(decision, Wait):
                return
            del self.queue[0]
            if isinstance(decision, Reject):
                live.note = decision.reason
                live.to(State.REJECTED)
                self._report(live, "rejected")
                del self.live[live.id]
                continue
            self._check(decision)
            live.place = decision
            self.instances[decision.prefill].enqueue(live)

    def _check(self, place: Place) -> None:
        named = [place.prefill] if place.decode is None else [place.prefill, place.decode]
        for index in named:
            if not 0 <= index < len(self.instances) or not self.instances[index].alive:
                raise ValueError(f"{type(self._scheduler).__name__}.place named instance {index}, which is not there")
        if place.mode == "stream" and place.decode is None:
            raise ValueError(f"{type(self._scheduler).__name__}.place: mode 'stream' needs a decode instance")

    def _fits(self, lane: Lane, live: Live) -> bool:
        """Whether the first chunk can have its pages and slot: nobody who holds KV must be waiting for them."""
        place = live.place
        if place is None or lane.starved or (self._backlog and lane.role is not Role.PREFILL):
            return False
        decodes_here = live.local and not live.single
        if decodes_here and not lane.has_slot:
            return False
        if lane.pool.free < lane.spec.pages_for(live.context_tokens + decodes_here):
            return False
        if place.mode != "stream" or live.local or place.decode is None:
            return True
        return not self._backlog and self.instances[place.decode].room_for(live)

    def _iterate(self, lane: Lane) -> bool:
        plan = self._scheduler.iterate(lane, self)
        decode = plan.decode and bool(lane.batch) and self._grow(lane) and bool(lane.batch)
        chunks = self._chunks(lane, plan.chunks)
        if not chunks and not decode:
            return False
        self._commands.append(lane.issue(chunks, decode))
        for chunk in chunks:
            live = self.live[chunk.request]
            if chunk.last and live.local and not live.single:
                lane.join(live, None)
        return True

    def _grow(self, lane: Lane) -> bool:
        """Gives every row the page it needs for the next step; preempts the latest arrivals when there are none.

        False: no step now, the pages of preempted rows come back when what is in flight is done.
        """
        for live in lane.growing():
            while lane.batch.get(live.slot if live.slot is not None else -1) is live and not lane.grow(live):
                lane.starved = True
                if lane.draining:
                    return False
                started = [other for other in lane.prefills if other.prefilled and other.local]
                victim = max([*lane.batch.values(), *started], key=lambda other: other.order)
                victim.preemptions += 1
                self._retire(victim, State.PREEMPTED)
        lane.starved = False
        return True

    def _chunks(self, lane: Lane, wanted: Sequence[tuple[Ask, int]]) -> tuple[Chunk, ...]:
        chunks = []
        for ask, tokens in wanted:
            live = self.live[ask.id]
            if live.place is None or live.state not in (State.WAITING, State.PREFILLING):
                continue  # preempted a moment ago, to let a row grow
            start, end = live.prefilled, live.prefilled + tokens
            last = end == live.context_tokens
            if not start < end <= live.context_tokens:
                raise ValueError(f"{type(self._scheduler).__name__}.iterate: {tokens} tokens of request {live.id}")
            if start == 0 and not self._start(lane, live):
                break
            chunks.append(
                Chunk(
                    request=live.id,
                    tokens=live.context[start:end],
                    start=start,
                    pages=lane.pool.pages(live.id),
                    slot=live.slot if live.local and live.slot is not None else lane.spec.max_rows,
                    last=last,
                    sampling=live.request.sampling,
                    stream=live.transfer,
                )
            )
            lane.advance_prefill(live, tokens)
        return tuple(chunks)

    def _start(self, lane: Lane, live: Live) -> bool:
        if not self._fits(lane, live):
            return False
        assert live.place is not None
        decodes_here = live.local and not live.single
        lane.reserve(live, live.context_tokens + decodes_here, slot=decodes_here)
        live.to(State.PREFILLING)
        if live.place.mode == "stream" and not live.local and live.place.decode is not None:
            self.instances[live.place.decode].expect(live)
            self._transfer(live, live.place.decode, "stream")
        return True

    def _transfer(self, live: Live, target: int, mode: str) -> None:
        assert live.place is not None
        self._key += 1
        live.transfer, live.decode_on = self._key, target
        self._transfers[self._key] = live
        self._deadlines.append((self.now + self._timeout, self._key))
        self._commands.append(
            StartTransfer(
                key=self._key,
                request=live.id,
                attempt=live.attempt,
                src=live.place.prefill,
                dst=target,
                src_pages=self.instances[live.place.prefill].pool.pages(live.id),
                dst_pages=self.instances[target].pool.pages(live.id),
                tokens=live.context_tokens,
                mode="stream" if mode == "stream" else "whole",
            )
        )

    def _join(self, live: Live) -> None:
        assert live.place is not None and live.decode_on is not None
        self.instances[live.place.prefill].give_back(live, slot=None)
        self.instances[live.decode_on].join(live, live.first)
        live.to(State.DECODING)

    # --- ends -------------------------------------------------------------------------------------------------------

    def _emit(self, live: Live, token: int) -> bool:
        """Hands a token to the user; True if it was the last."""
        live.tokens.append(token)
        live.timeline.token_s.append(self.now)
        self._sink.token(live.request, token, self.now)
        if token in live.request.stop_ids:
            self._end(live, State.FINISHED, "stop")
        elif len(live.tokens) == live.request.sampling.max_tokens:
            self._end(live, State.FINISHED, "length")
        else:
            return False
        return True

    def _restart(self, live: Live, why: str) -> None:
        live.restarts += 1
        if live.restarts > MAX_RESTARTS:
            live.note = f"given up after {MAX_RESTARTS} restarts; the last: {why}"
            self._end(live, State.FAILED, "error")
        else:
            self._retire(live, State.RESTARTING)

    def _end(self, live: Live, state: State, reason: FinishReason) -> None:
        """The user learns of the end now; pages follow when nothing can touch them any more."""
        if live.state in (State.PREEMPTED, State.RESTARTING):
            live.to(state)  # its pages are on their way back already
        else:
            self._retire(live, state)
        self._report(live, reason)

    def _report(self, live: Live, reason: FinishReason) -> None:
        live.timeline.finished_s = self.now
        self._sink.done(live.request, live.record(reason))

    def _retire(self, live: Live, state: State) -> None:
        live.to(state)
        if live in self.queue:
            self.queue.remove(live)
        if live in self.held:
            self.held.remove(live)
        for lane in self._lanes(live):
            lane.leave(live)
            if live in lane.prefills:
                lane.dequeue(live)
            lane.barrier(live)
        if live.transfer is not None:
            live.holds += 1
            self._commands.append(AbortTransfer(live.transfer))
        self._freed([live])

    def _freed(self, lives: Sequence[Live]) -> None:
        """Gives back what the requests held, if nothing can touch it any more; preempted ones wait again."""
        for live in lives:
            if live.holds or live.id not in self.live:
                continue
            for lane in self._lanes(live):
                decodes = lane.spec.index == live.decode_on or live.local
                lane.give_back(live, slot=live.slot if decodes else None)
            live.slot = None
            if live.state.terminal:
                del self.live[live.id]
            else:
                live.start_over()
                self._enqueue(live)

    def _enqueue(self, live: Live) -> None:
        bisect.insort(self.queue, live, key=lambda other: other.order)

    def _lanes(self, live: Live) -> list[Lane]:
        if live.place is None:
            return []
        indices = {live.place.prefill, live.decode_on if live.decode_on is not None else live.place.prefill}
        return [self.instances[index] for index in sorted(indices)]
