"""The one place that decides. Events in, commands out; all pages and row slots are accounted for here.

The life of a request, by the events that move it (the states are those of `pdjax.request`):

    1 Arrival            WAITING in the queue; the policy's `place` names the instances
    2 (decide)           its first chunk is issued: pages are reserved, on both sides when it streams    PREFILLING
    3 IterationDone      the last chunk's token goes to the user at once; ends here if it stops          FINISHED
         decodes here:   it is in the batch already                                                      DECODING
         elsewhere:      KV is on its way, or waits here until a decode instance has room                MIGRATING
    4 TransferDone       it joins the decode batch; its prefill pages are free                           DECODING
    5 IterationDone      a token per step; a stop is seen one step late, that token is dropped           FINISHED
      (decide)           the policy moves the row: out of the batch; when its steps are done, as in 3    MIGRATING

What goes wrong takes one road, `Books.retire`: out of every batch and queue; pages come back when nothing in flight
and no transfer can touch them; then the request ends, or is WAITING again with its tokens as part of the prompt.

`handle` is a pure state machine on the events and their times: it sees no array, no thread and no clock, so the same
object drives real meshes and a simulation, and the same events give the same commands.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Protocol

from pdjax.books import Books
from pdjax.decisions import decide
from pdjax.flights import Flight
from pdjax.lane import Lane
from pdjax.latency import Latency
from pdjax.live import Live
from pdjax.messages import (
    Abort,
    Arrival,
    Command,
    Event,
    InstanceLost,
    InstanceSpec,
    IterationDone,
    RunStarted,
    Tick,
    TransferAborted,
    TransferDone,
    TransferFailed,
)
from pdjax.record import FinishReason, FlipRecord, IterationRecord, MoveRecord, RequestRecord, TransferRecord
from pdjax.request import Request, State
from pdjax.revisions import reviser_of
from pdjax.schedulers.base import Scheduler, traits_of

STALL_S = 10.0  # after which requests that nothing can move are given up
MAX_FAILURES = 3  # of its transfers, before a request is given up; lost instances do not count: there is an end to them


class Sink(Protocol):
    """Where results go. Called from the controller's thread; must not block."""

    def token(self, request: Request, token: int, time_s: float, logprob: float | None) -> bool:
        """Takes a token that a cluster computed; True if the answer's text ends with it (`SamplingParams.stop`)."""
        ...

    def done(self, request: Request, record: RequestRecord) -> None: ...
    def iteration(self, record: IterationRecord) -> None: ...
    def transfer(self, record: TransferRecord) -> None: ...
    def revised(self, record: FlipRecord | MoveRecord) -> None: ...


class Controller:
    """See the module's text.

    Args:
        specs: the cluster's instances.
        scheduler: the policy.
        latency: one model per instance.
        sink: takes tokens and records.
        transfer_timeout_s: a transfer older than this is aborted and its request starts over.
        on_failure: of requests on an instance that is lost: "recompute" them elsewhere, or "fail" them.
        max_queue: requests that may wait for their first pass; one more is rejected. 0: any number.
        max_steps: decode steps that one iteration may stand for, if the cluster computes no tokens (a *run*) and the
            policy is steady (`Traits`).
        correct: correct the latency models by what passes and transfers take; not with runs.
    """

    def __init__(
        self,
        specs: Sequence[InstanceSpec],
        scheduler: Scheduler,
        latency: Sequence[Latency],
        sink: Sink,
        transfer_timeout_s: float = 60.0,
        max_queue: int = 0,
        max_steps: int = 1,
        on_failure: str = "recompute",
        correct: bool = False,
    ) -> None:
        if correct and max_steps > 1:
            raise ValueError(f"max_steps is {max_steps}; allowed with correct, which looks at every pass: 1")
        self.books = Books(specs, latency, transfer_timeout_s, max_steps, steady=traits_of(scheduler).steady)
        self._scheduler, self._reviser = scheduler, reviser_of(scheduler)
        self._sink = sink
        self._max_queue = max_queue
        self._on_failure = on_failure
        self._correct = correct
        self._stalled_s: float | None = None  # since when requests are live and nothing is under way
        self._gone = ""  # why there is no instance any more

    # --- events -----------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Command]:
        """Takes one event at time `now` (seconds); returns the commands to submit, in order."""
        books = self.books
        books.now, books.commands = now, []
        match event:
            case Arrival(request):
                self._arrive(request)
            case Abort(request_id):
                self._abort(request_id)
            case RunStarted():
                self.books.instances[event.instance].run_started(event)
                return []
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
        for live in books.expired():
            live.note = "its deadline passed"
            self._end(live, State.ABORTED, "deadline")
        for key, live in books.overdue():
            self._restart(live, f"transfer {key}: TimeoutError: no answer in time")
        for live, reason in decide(books, self._scheduler, self._reviser):
            live.note = reason
            self._end(live, State.REJECTED, "rejected")
        for record in books.revised:
            self._sink.revised(record)
        books.revised.clear()
        self._watch_stall()
        return books.commands

    def next_deadline(self) -> float | None:
        """When `handle` wants a Tick at the latest."""
        deadline = self.books.next_deadline()
        if self._stalled_s is None:
            return deadline
        return min(self._stalled_s + STALL_S, math.inf if deadline is None else deadline)

    def fail_all(self, error: str) -> None:
        """Ends every live request: the cluster is gone and will report nothing more."""
        for live in list(self.books.live.values()):
            if not live.state.terminal:
                live.note = error
                live.to(State.FAILED)
                self._report(live, "error")
        self.books.live.clear()

    def _arrive(self, request: Request) -> None:
        waiting = self.books.waiting if self._max_queue else 0
        live = self.books.admit(request)
        tokens = None if live.open_ended else live.max_new_tokens
        self.books.traffic.arrived(self.books.now, live.context_tokens, tokens)
        if self._gone:
            live.note = self._gone
            self._end(live, State.FAILED, "error")
        elif waiting >= self._max_queue > 0:
            live.note = f"max_queue: {waiting} requests are waiting already"
            self._end(live, State.REJECTED, "rejected")

    def _abort(self, request_id: int) -> None:
        live = self.books.live.get(request_id)
        if live is not None and not live.state.terminal:
            self._end(live, State.ABORTED, "abort")

    def _iteration_done(self, event: IterationDone) -> None:
        lane = self.books.instances[event.instance]
        if not lane.alive:
            return
        flight = lane.reported(event)
        if self._correct:
            lane.correction.passed(lane.spec, flight.load, event.finished_s - event.started_s)
        iteration = flight.iteration
        names = tuple(self.books.live[chunk.request].name for chunk in iteration.chunks)
        for chunk in iteration.chunks:
            timeline = self.books.live[chunk.request].timeline
            if chunk.start == 0:
                timeline.prefill_start_s = event.started_s
            if chunk.last:
                timeline.prefill_end_s = event.finished_s
        scores = iter(event.logprobs or itertools.repeat(0.0))
        for (request_id, token), score in zip(event.firsts, scores, strict=False):
            self._first_token(self.books.live[request_id], token, score)
        for (slot, token), score in zip(event.rows or (), scores, strict=False):
            live = flight.rows[slot]
            if live.state is State.DECODING:  # otherwise it ended a step ago, and this token is the extra one
                if live.timeline.decode_start_s is None:
                    live.timeline.decode_start_s = event.started_s
                self._emit(live, token, score)
        if event.rows is None:
            self._counted(lane, flight)
        self._sink.iteration(
            IterationRecord(
                instance=event.instance,
                number=event.number,
                chunk_tokens=sum(len(chunk.tokens) for chunk in iteration.chunks),
                rows=len(flight.rows),
                started_s=event.started_s,
                finished_s=event.finished_s,
                requests=names,
                host_gap_s=event.host_gap_s,
                steps=event.steps,
                predicted_s=flight.predicted_s,
            )
        )
        self.books.freed(lane.passed(event.number))

    def _counted(self, lane: Lane, flight: Flight) -> None:
        """A step without tokens: only the rows for which it is the last are looked at."""
        for live, attempt in flight.ending:
            if live.state is State.DECODING and live.attempt == attempt:
                lane.settle(live)
                self._end(live, State.FINISHED, "length")

    def _first_token(self, live: Live, token: int, score: float) -> None:
        if live.state is not State.PREFILLING:
            return
        live.first = token
        if self._emit(live, token, score):
            return
        if live.local:
            live.to(State.DECODING)
            return
        live.to(State.MIGRATING)
        if live.arrived:
            self.books.join(live)
        elif live.transfer is None:
            self.books.hold(live)

    def _transfer_done(self, event: TransferDone) -> None:
        live = self.books.transfers[event.key]
        assert live.place is not None and live.decode_on is not None
        source = self.books.instances[live.place.prefill]
        streamed = live.place.mode == "stream" and live.place.decode == live.decode_on
        self._sink.transfer(
            TransferRecord(
                request_id=live.name,
                src=live.place.prefill,
                dst=live.decode_on,
                nbytes=event.nbytes,
                started_s=event.started_s,
                finished_s=event.finished_s,
                streamed=streamed,
                predicted_s=source.latency.transfer_s(event.nbytes),
            )
        )
        if self._correct and not streamed:  # a streamed one lasts as long as its prompt is computed
            source.correction.moved(event.nbytes, event.finished_s - event.started_s)
        _, wanted = self.books.ended(event.key)
        if not wanted:
            return
        live.arrived = True
        timeline = live.timeline
        if timeline.decode_start_s is None:  # its hand-off; a row that moves has begun already
            timeline.transfer_start_s, timeline.transfer_end_s = event.started_s, event.finished_s
        timeline.transfer_bytes += event.nbytes
        timeline.transfer_busy_s += event.busy_s
        timeline.transfer_hidden_s += event.hidden_s
        if live.state is State.MIGRATING:
            self.books.join(live)

    def _transfer_ended(self, key: int, error: str) -> None:
        live, wanted = self.books.ended(key)
        if wanted:
            self._restart(live, f"transfer {key}: {error}")

    def _instance_lost(self, index: int, error: str) -> None:
        lane = self.books.instances[index]
        if not lane.alive:
            return
        self.books.flips.pop(index, None)
        lane.next_role = None
        # Rows that were about to move are seen to below, like all that is there.
        freed = [live for live in lane.lose() if live.state is not State.DECODING]
        self.books.relieve_all()  # others may have to take its rows
        for live in list(self.books.live.values()):
            live.failures = 0  # those until now may have been this instance's doing
            place = live.place
            if place is None or live.state.terminal or live.state in (State.PREEMPTED, State.RESTARTING):
                continue  # nothing of it is there, or `freed` sees to it
            there = lane.pool.count(live.id) > 0
            if live.state is State.WAITING:
                if index in (place.prefill, place.decode):
                    self.books.unplace(live)
            elif live.moving == index and not there:
                self.books.stay(live)
            elif there and self._on_failure == "fail":
                live.note = f"instance {index} is lost: {error}"
                self._end(live, State.FAILED, "error")
            elif there or (index == place.decode and live.state is not State.DECODING):
                # In the second case its KV is elsewhere, but the policy has to name another place for it.
                live.restarts += 1
                self.books.retire(live, State.RESTARTING)
        self.books.freed(freed)
        if not any(lane.alive for lane in self.books.instances):
            self._gone = f"instance {index}, the last one, is lost: {error}"
            for live in list(self.books.live.values()):
                if not live.state.terminal:
                    live.note = self._gone
                    self._end(live, State.FAILED, "error")

    def _watch_stall(self) -> None:
        """A policy that lets requests wait while nothing is under way must not keep them for ever."""
        if not self.books.stalled:
            self._stalled_s = None
        elif self._stalled_s is None:
            self._stalled_s = self.books.now
        elif self.books.now >= self._stalled_s + STALL_S:  # as in `next_deadline`, to the last bit
            why = f"{type(self._scheduler).__name__} let it wait for {STALL_S} s while nothing was under way"
            for live in list(self.books.live.values()):
                live.note = f"{why}: {self.books.wait}" if self.books.wait else why
                self._end(live, State.FAILED, "error")

    # --- ends -------------------------------------------------------------------------------------------------------

    def _emit(self, live: Live, token: int, score: float) -> bool:
        """Hands a token to the user; True if it was the last."""
        logprob = score if live.request.sampling.logprobs else None
        live.tokens.append(token)
        if logprob is not None:
            live.logprobs.append(logprob)
        live.timeline.token_s.append(self.books.now)
        text_ends = self._sink.token(live.request, token, self.books.now, logprob)
        if text_ends or token in live.request.stop_ids:
            self._end(live, State.FINISHED, "stop")
        elif len(live.tokens) == live.request.sampling.max_tokens:
            self._end(live, State.FINISHED, "length")
        else:
            return False
        return True

    def _restart(self, live: Live, why: str) -> None:
        """Its transfer was lost: once more from the start, unless that happens again and again."""
        live.failures += 1
        if live.failures > MAX_FAILURES:
            live.note = f"given up after {MAX_FAILURES} restarts; the last: {why}"
            self._end(live, State.FAILED, "error")
        else:
            live.restarts += 1
            self.books.retire(live, State.RESTARTING)

    def _end(self, live: Live, state: State, reason: FinishReason) -> None:
        """The user learns of the end now; pages follow when nothing can touch them any more."""
        if state is State.FINISHED and live.open_ended:
            self.books.traffic.finished(len(live.tokens))
        if live.state in (State.PREEMPTED, State.RESTARTING):
            live.to(state)  # its pages are on their way back already
        else:
            self.books.retire(live, state)
        self._report(live, reason)

    def _report(self, live: Live, reason: FinishReason) -> None:
        live.timeline.finished_s = self.books.now
        self._sink.done(live.request, live.record(reason))
