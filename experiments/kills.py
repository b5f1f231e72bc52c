"""Kills ranks of a running job at chosen moments, and looks what became of the requests. Enters: an engine over ranks
and a plan of kills. Leaves: an `Outcome` for each. Called by `pdjax.experiments.kill_soak`, on rank 0.
"""

import contextlib
import dataclasses
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from pdjax import Engine, Handle, SamplingParams
from pdjax.messages import Command, Iteration, StartTransfer
from pdjax.mpi.facts import Facts

STAGES = ("idle", "prefilling", "sending", "receiving", "decoding")
WAIT_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Kill:
    """When and how a rank is hit.

    Attributes:
        stage: what its instance has just been told to do.
        rank: which rank of the instance, counted from its leader.
        stop: SIGSTOP, and SIGCONT when it has been given up; otherwise SIGKILL.
        delay_s: after that command.
    """

    stage: str
    rank: int
    stop: bool
    delay_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What followed.

    Attributes:
        instance, rank: that was hit.
        noticed_s: until the instance was given up.
        next_token_s: until the last of the requests that had to start over got its next token; None without any.
        restarted: how many requests had to start over.
        wrong: what should not be; empty if all is well.
    """

    kill: Kill
    role: str
    instance: int
    rank: int
    noticed_s: float
    next_token_s: float | None
    restarted: int
    wrong: tuple[str, ...]


def plan(seed: int, number: int, ranks_of_largest: int) -> Kill:
    """Kill `number` of a soak: stages in turn, one in five by SIGSTOP, the rest drawn."""
    draw = random.Random(f"{seed} {number}")
    return Kill(
        stage=STAGES[number % len(STAGES)],
        rank=draw.randrange(ranks_of_largest),
        stop=number % 5 == number // 5 % 5,
        delay_s=draw.choice([0.0, 0.001, 0.003, 0.01]) * draw.random(),
    )


class Soak:
    """Requests that are asked again and again, first undisturbed.

    Args:
        engine: whose instances are ranks on this host.
        facts: of all ranks.
        seed: of the prompts.
        requests: how many.
    """

    def __init__(self, engine: Engine, facts: Sequence[Facts], seed: int, requests: int, vocabulary: int) -> None:
        self._engine, self._facts = engine, facts
        draw = random.Random(seed)
        self._asked = [
            (
                [draw.randrange(vocabulary) for _ in range(draw.randint(8, 60))],
                SamplingParams(temperature=draw.choice([0.0, 1.0]), max_tokens=24, ignore_eos=True, seed=number),
            )
            for number in range(requests)
        ]
        self._dead: set[int] = set()  # instances
        self.undisturbed = [handle.result().token_ids for handle in self._submit()]

    @property
    def left(self) -> int:
        """Living instances."""
        return len(self._alive())

    def can(self, stage: str) -> bool:
        """Whether an instance will come to a stage: where those of one role are lost, the others keep what they compute
        and move nothing."""
        roles = {self._engine.specs[index].role for index in self._alive()}
        return len(roles) > 1 or stage not in ("sending", "receiving")

    def strike(self, kill: Kill) -> Outcome:
        """Asks all requests, hits a rank at the planned moment, and waits for the answers."""
        blow = Blow(kill, [spec.ranks for spec in self._engine.specs], self._facts, self._engine.now)
        with self._watched(blow):
            if kill.stage == "idle":
                blow.fall(random.Random(kill.delay_s).choice(self._alive()))
                blow.noticed.wait(WAIT_S)
            handles = self._submit()
            results = [handle.result() for handle in handles]
        if blow.instance is None:
            raise RuntimeError(f"no instance came to the stage {kill.stage!r}")
        wrong = []
        self._dead.add(blow.instance)
        if not blow.noticed.wait(WAIT_S):
            wrong.append("the loss was not noticed")
        if kill.stop:
            wrong += blow.wake()
        for number, (result, expected) in enumerate(zip(results, self.undisturbed, strict=True)):
            if result.token_ids != expected:
                wrong.append(f"request {number} got {result.token_ids}, not {expected} ({result.finish_reason})")
        if not self._engine.wait_idle(WAIT_S):
            wrong.append("the engine does not come to rest")
        for spec, free in zip(self._engine.specs, self._engine.free_pages, strict=True):
            if spec.index not in self._dead and free != spec.usable_pages:
                wrong.append(f"instance {spec.index} has {free} of {spec.usable_pages} pages")
        again = [result.record for result in results if result.record.restarts]
        waits = [min((t for t in record.timeline.token_s if t > blow.at_s), default=blow.at_s) for record in again]
        return Outcome(
            kill=kill,
            role=self._engine.specs[blow.instance].role.value,
            instance=blow.instance,
            rank=blow.rank,
            noticed_s=blow.noticed_s - blow.at_s,
            next_token_s=max(waits) - blow.at_s if waits else None,
            restarted=len(again),
            wrong=tuple(wrong),
        )

    def _alive(self) -> list[int]:
        return [spec.index for spec in self._engine.specs if spec.index not in self._dead]

    def _submit(self) -> list[Handle]:
        return [self._engine.submit(prompt, sampling) for prompt, sampling in self._asked]

    @contextlib.contextmanager
    def _watched(self, blow: "Blow") -> Iterator[None]:
        """While open, the blow sees every command, and when its instance is given up."""
        cluster: Any = self._engine.cluster
        submit, lose = cluster.submit, cluster.lose

        def submitting(command: Command) -> None:
            submit(command)
            if (instance := struck(blow.kill.stage, command)) is not None:
                blow.fall(instance)

        def losing(rank: int, why: str) -> None:
            lose(rank, why)
            blow.given_up(rank)

        cluster.submit, cluster.lose = submitting, losing
        try:
            yield
        finally:
            cluster.submit, cluster.lose = submit, lose


def struck(stage: str, command: Command) -> int | None:
    """The instance that a command brings to a stage, or None."""
    match command:
        case Iteration(instance, chunks=chunks) if chunks:
            return instance if stage == "prefilling" else None
        case Iteration(instance, decode=True):
            return instance if stage == "decoding" else None
        case StartTransfer(src=src, dst=dst):
            return {"sending": src, "receiving": dst}.get(stage)
    return None


class Blow:
    """One signal to one rank, and when it was noticed. `instance`, `rank`, `at_s` are set when it falls."""

    def __init__(self, kill: Kill, ranks: Sequence[tuple[int, ...]], facts: Sequence[Facts], now: Any) -> None:
        self.kill, self._ranks, self._facts, self._now = kill, ranks, facts, now
        self.instance: int | None = None
        self.rank, self.at_s, self.noticed_s = 0, 0.0, 0.0
        self.noticed = threading.Event()

    def fall(self, instance: int) -> None:
        """Hits an instance after the delay; only the first call does."""
        if self.instance is not None:
            return
        self.instance = instance
        ranks = self._ranks[instance]
        self.rank = ranks[self.kill.rank % len(ranks)]
        threading.Timer(self.kill.delay_s, self._signal).start()

    def given_up(self, rank: int) -> None:
        if self.instance is not None and rank in self._ranks[self.instance] and not self.noticed.is_set():
            self.noticed_s = self._now()
            self.noticed.set()

    def wake(self) -> list[str]:
        """Lets a stopped rank go on: it must leave by itself. What is wrong, if it does not."""
        pid = self._facts[self.rank].pid
        os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return []
            time.sleep(0.01)
        return [f"rank {self.rank} was given up, woke up, and did not leave"]

    def _signal(self) -> None:
        self.at_s = self._now()
        os.kill(self._facts[self.rank].pid, signal.SIGSTOP if self.kill.stop else signal.SIGKILL)
