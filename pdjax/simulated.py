"""A cluster without hardware: a virtual clock, and latency models instead of programs.

Enters: the controller's commands. Leaves: the events that real instances would give, at the times the models predict.
What an instance computes is up to its `Machine`: `Timing` computes nothing, `pdjax.testing.FakeMachine` computes
tokens by hand from the KV pages it was told to use, so that a wrong page number gives a wrong token.
"""

import dataclasses
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from pdjax.latency import Latency
from pdjax.messages import (
    AbortTransfer,
    Command,
    Cut,
    Event,
    InstanceLost,
    InstanceSpec,
    Iteration,
    IterationDone,
    RunStarted,
    StartTransfer,
    TransferAborted,
    TransferDone,
)
from pdjax.network import Network
from pdjax.passes import Batch, Run, Stages
from pdjax.wires import Alone, Shared, Transfer, Wires


class Machine(Protocol):
    """What happens on one simulated instance."""

    def run(self, iteration: Iteration, rows: Sequence[int]) -> tuple[list[int] | None, list[int]]:
        """Executes an iteration; returns the rows' tokens (None: it computes none) and those of the chunks that were
        `last`, in order."""
        ...

    def copy(self, transfer: StartTransfer, source: "Machine") -> None:
        """Takes the KV of a transfer from the pages of another machine."""
        ...


class Timing:
    """Computes nothing: every token is 0, so requests end by `max_tokens`. Takes runs."""

    def run(self, iteration: Iteration, rows: Sequence[int]) -> tuple[list[int] | None, list[int]]:
        return None, [0] * sum(chunk.last for chunk in iteration.chunks)

    def copy(self, transfer: StartTransfer, source: Machine) -> None:
        return None


class SimulatedCluster:
    """Implements `Cluster` in virtual time; deterministic.

    A pass through a pipeline of stages starts as soon as the first stage is free, a decode step when the tokens of the
    one before are there, too. Of a pass behind which another follows at once the controller hears later, as
    `Latency.report_s` says: what computes keeps the core from those that report. So it hears of the steps of a run,
    none of which is shorter than that.

    Args:
        specs: the instances.
        latency: one model per instance.
        machine: makes the machine of an instance.
        network: the links that transfers share; None: each has a wire to itself.
        layer_groups: by instance, in how many parts the KV of a pass is streamed; empty: as a whole behind the pass.
    """

    def __init__(
        self,
        specs: Sequence[InstanceSpec],
        latency: Sequence[Latency],
        machine: Callable[[InstanceSpec], Machine] = lambda spec: Timing(),
        network: Network | None = None,
        layer_groups: Sequence[int] = (),
    ) -> None:
        self.specs = tuple(specs)
        self.machines = [machine(spec) for spec in specs]
        self._latency = list(latency)
        self._now = 0.0
        self._heap: list[tuple[float, int, int, Callable[[], Event | None]]] = []
        self._order = itertools.count()
        self._queues: list[deque[Iteration]] = [deque() for _ in specs]
        self._batches = [Batch() for _ in specs]
        self._runs: dict[int, Run] = {}
        self._stages = [Stages([0.0] * spec.pp) for spec in specs]
        self._transfers: dict[int, Transfer] = {}
        groups = layer_groups or [1] * len(self.specs)
        self._wires: Wires = (
            Alone(latency, groups, self.now, self._later, self._arrive)
            if network is None
            else Shared(network, groups, self.now, self._later, self._arrive)
        )
        self._lost: set[int] = set()
        self._report_s = [
            model.report_s() if spec.max_in_flight > 1 else 0.0  # which waits to hear, nothing follows at once
            for spec, model in zip(specs, latency, strict=True)
        ]
        self._heard_s = [-1.0] * len(self.specs)  # of each instance, when the last one that comes late does

    def now(self) -> float:
        return self._now

    def post(self, event: Event, at_s: float | None = None) -> None:
        """Adds an outside event, now or at a later time."""
        self._at(self._now if at_s is None else at_s, lambda: event)

    def lose(self, instance: int, error: str, at_s: float) -> None:
        """An instance dies at a time, with everything on it."""

        def die() -> Event:
            self._lost.add(instance)
            self._queues[instance].clear()
            self._stages[instance].started = 0
            self._runs.pop(instance, None)
            return InstanceLost(instance, error)

        self._at(at_s, die)

    def submit(self, command: Command) -> None:
        if self._lost:
            self._check(command)
        match command:
            case Iteration():
                self._queues[command.instance].append(command)
                self._start(command.instance)
            case Cut():
                self._cut(command)
            case StartTransfer():
                nbytes = command.tokens * self.specs[command.src].kv_bytes_per_token
                transfer = self._transfers[command.key] = Transfer(command, self._now, nbytes)
                self._wires.open(transfer)
                if command.mode == "whole":
                    self._push(command.key, command.tokens, self._now)
            case AbortTransfer(key):
                if self._transfers.pop(key, None) is not None:
                    self._wires.close(key)
                    self.post(TransferAborted(key))

    def _check(self, command: Command) -> None:
        """Nothing is to be asked of a lost instance; that a transfer with one is aborted is all that it needs."""
        match command:
            case Iteration() | Cut():
                named = {command.instance}
            case StartTransfer():
                named = {command.src, command.dst}
            case AbortTransfer():
                named = set()
        if gone := named & self._lost:
            raise RuntimeError(f"a command to lost instances {sorted(gone)}: {command}")

    def next_event(self, timeout_s: float | None) -> Event | None:
        """Advances the clock to the next event; None when there is none (within timeout_s)."""
        limit = float("inf") if timeout_s is None else self._now + timeout_s
        while self._heap and self._heap[0][0] <= limit:
            self._now, _, _, happen = heapq.heappop(self._heap)
            event = happen()
            if event is not None:
                return event
        if timeout_s is not None:
            self._now = limit
        return None

    def close(self) -> None:
        self._heap.clear()

    def _at(self, time_s: float, happen: Callable[[], Event | None], rank: int = 1) -> None:
        """At equal times lower ranks come first: steps end before anybody can ask how far they are."""
        heapq.heappush(self._heap, (time_s, rank, next(self._order), happen))

    def _later(self, time_s: float, happen: Callable[[], None]) -> None:
        self._at(time_s, happen)

    def _start(self, index: int) -> None:
        """Starts what can start now, in order."""
        queue, stages = self._queues[index], self._stages[index]
        while stages.started < len(queue):
            iteration = queue[stages.started]
            if stages.started:
                if len(stages.free_s) == 1:
                    return
                run = self._runs.get(index)
                if run is not None and queue[stages.started - 1] is run.iteration:  # it starts behind the last step
                    stages.free_s, stages.step_s = run.after()
            start_s = stages.start_s(self._now, decode=iteration.decode)
            if start_s > self._now:
                self._later(start_s, lambda: self._start(index))
                return
            stages.started += 1
            self._begin(index, iteration, stages)

    def _begin(self, index: int, iteration: Iteration, stages: Stages) -> None:
        batch, started = self._batches[index], self._now
        batch.change(iteration)
        spec, latency = self.specs[index], self._latency[index]
        load = batch.load(iteration, spec.row_block)
        if iteration.steps == 1:
            leaving = [chunk for chunk in iteration.chunks if chunk.stream in self._transfers]
            took_s = latency.iteration_s(spec, load)
            if leaving:
                took_s += latency.streaming_s(len(leaving), sum(len(chunk.tokens) for chunk in leaving))
            end_s = stages.run(started, took_s)
            rows = []
            if iteration.decode:
                stages.step_s, rows = end_s, list(batch.offsets)
                batch.step(1)
            for chunk in leaving:
                assert chunk.stream is not None
                nbytes = len(chunk.tokens) * spec.kv_bytes_per_token
                self._wires.computing(self._transfers[chunk.stream], nbytes, started, end_s)
            self._at(end_s, lambda: self._finish(index, iteration, rows, started), rank=0)
            return
        seconds, late_s = latency.steps_s(spec, load, iteration.steps), self._report_s[index]
        if late_s:
            seconds = np.maximum(seconds, late_s)  # until it has heard of what ran before, only one more is issued
        run = Run(iteration, started, seconds, list(stages.free_s), iteration.steps)
        self._runs[index] = run
        batch.step(run.steps)
        self._at(started, lambda: RunStarted(index, iteration.number, tuple(at + late_s for at in run.ends)), rank=0)
        self._await_report(index, run)

    def _finish(self, index: int, iteration: Iteration, rows: list[int], started_s: float) -> Event | None:
        if index in self._lost:
            return None
        self._queues[index].popleft()
        self._stages[index].started -= 1
        row_tokens, first_tokens = self.machines[index].run(iteration, rows)
        self._start(index)
        for chunk in iteration.chunks:
            if chunk.stream in self._transfers:
                self._push(chunk.stream, len(chunk.tokens), started_s)
        last = [chunk.request for chunk in iteration.chunks if chunk.last]
        done = IterationDone(
            instance=index,
            number=iteration.number,
            rows=None if row_tokens is None else tuple(zip(rows, row_tokens, strict=True)),
            firsts=tuple(zip(last, first_tokens, strict=True)),
            started_s=started_s,
            finished_s=self._now,
        )
        return self._tell(done, self._report_s[index] if self._stages[index].started else 0.0)

    def _tell(self, done: IterationDone, late_s: float) -> Event | None:
        """The event, or None if it comes later; those of an instance come in order."""
        last_s = self._heard_s[done.instance]
        if not late_s and last_s < self._now:
            return done
        heard_s = self._heard_s[done.instance] = max(self._now + late_s, last_s)
        self._at(heard_s, lambda: done, rank=0)
        return None

    def _await_report(self, index: int, run: Run) -> None:
        """The next report of a run comes when fewer steps than may be in flight are left, then with every step."""
        steps = max(run.reported + 1, run.steps - self.specs[index].max_in_flight + 1)
        version = run.version
        self._at(run.ends[steps - 1], lambda: self._report(index, run, version, steps), rank=0)

    def _report(self, index: int, run: Run, version: int, steps: int) -> Event | None:
        if self._runs.get(index) is not run or run.version != version:
            return None
        started = run.ends[run.reported - 1] if run.reported else run.started_s
        count, run.reported = steps - run.reported, steps
        if steps < run.steps:
            self._await_report(index, run)
        else:
            self._end(index, run)
        done = IterationDone(index, run.iteration.number + steps - 1, None, (), started, self._now, steps=count)
        return self._tell(done, self._report_s[index])

    def _cut(self, cut: Cut) -> None:
        queue, run = self._queues[cut.instance], self._runs.get(cut.instance)
        steps = cut.last - queue[-1].number + 1  # nothing is queued behind a run that can still be cut
        if run is None or run.iteration is not queue[-1]:
            queue[-1] = dataclasses.replace(queue[-1], steps=steps)
        else:
            self._batches[cut.instance].step(steps - run.steps)
            run.steps, run.version = steps, run.version + 1
            if run.reported == steps:  # the last one has just ended, and is to be heard of later
                self._end(cut.instance, run)
            else:
                self._await_report(cut.instance, run)

    def _end(self, index: int, run: Run) -> None:
        """The last step of a run is done: what is behind it can start."""
        stages = self._stages[index]
        if stages.started == 1:  # otherwise what started behind it has seen to them
            stages.free_s, stages.step_s = run.after()
        del self._runs[index]
        self._queues[index].popleft()
        stages.started -= 1
        self._start(index)

    def _push(self, key: int, tokens: int, started_s: float) -> None:
        """KV of more tokens is computed."""
        transfer = self._transfers[key]
        nbytes = tokens * self.specs[transfer.command.src].kv_bytes_per_token
        transfer.left -= nbytes
        transfer.computed_s = self._now
        self._wires.push(transfer, nbytes, started_s)

    def _arrive(self, key: int) -> None:
        """All of a transfer is there."""
        transfer = self._transfers.pop(key)
        command = transfer.command
        self.machines[command.dst].copy(command, self.machines[command.src])
        visible_s = self._now - transfer.computed_s
        self.post(
            TransferDone(
                key=key,
                nbytes=command.tokens * self.specs[command.src].kv_bytes_per_token,
                started_s=transfer.started_s,
                finished_s=self._now,
                busy_s=transfer.busy_s,
                hidden_s=max(0.0, transfer.busy_s - visible_s) if command.mode == "stream" else 0.0,
            )
        )
