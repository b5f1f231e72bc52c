"""Finds the goodput of several schedulers at several SLOs by playing one workload at many rates: what plays it enters,
runs and estimates leave. Called by `compare`, in virtual time and on engines alike.

All schedulers get the same requests: a seed says which, and a rate only stretches the gaps between them. A scheduler
that looks at no SLO is played once and judged by all.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pdjax import goodput
from pdjax.goodput import Estimate, Trial
from pdjax.request import SLO
from pdjax.workload import Workload


@dataclasses.dataclass(frozen=True, slots=True)
class Played:
    """What came of one workload: `met(slo)` says of each request, in order, whether it kept the limits; `numbers` are
    those of the run that no SLO changes (`pdjax.metrics.summarize`)."""

    met: Callable[[SLO], tuple[bool, ...]]
    numbers: Mapping[str, Any]


Play = Callable[[str, Workload], Played]  # a name for its files, and what to play
Make = Callable[[float, int, int, SLO], Workload]  # rate, seed, number of requests and their limits


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """How long to look.

    Attributes:
        seeds: how many.
        window_s: arrivals of a run last so long, but it has
        least, most: requests.
        max_runs: of one search.
        factor, tolerance: of `pdjax.goodput.search`.
        budget_s: of real time for one scheduler, if its runs take it; a search that has a run begins none that would
            end later.
    """

    seeds: int
    window_s: float
    least: int
    most: int
    max_runs: int
    factor: float = 2.0
    tolerance: float = 0.1
    budget_s: float = math.inf

    def count(self, rate: float) -> int:
        """Requests of a run."""
        return max(self.least, min(self.most, round(rate * self.window_s)))


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One workload served once.

    Attributes:
        slo: name of the limits that the scheduler was told; "" for one that looks at none.
        scale: what they were multiplied by.
    """

    scheduler: str
    slo: str
    scale: float
    seed: int
    rate: float
    played: Played

    def line(self, points: Mapping[str, SLO]) -> dict[str, Any]:
        """For summary.json: attainment by the limits it was told, or by all."""
        told = {self.slo: points[self.slo]} if self.slo else points
        shares = {name: Trial(self.rate, self.played.met(scaled(slo, self.scale))) for name, slo in told.items()}
        return {
            "scheduler": self.scheduler,
            "slo": self.slo or None,
            "scale": self.scale,
            "seed": self.seed,
            "rate": self.rate,
            "attainment": {name: trial.attainment for name, trial in shares.items()},
            **{name: self.played.numbers[name] for name in NUMBERS},
        }


NUMBERS = (
    "num_requests",
    "completed",
    "rejected",
    "duration_s",
    "throughput_rps",
    "output_tokens_per_s",
    "ttft_ms",
    "tpot_ms",
)


def scaled(slo: SLO, scale: float) -> SLO:
    """All limits multiplied."""
    limits = {field.name: getattr(slo, field.name) for field in dataclasses.fields(SLO)}
    return SLO(**{name: limit if limit is None else scale * limit for name, limit in limits.items()})


class Sweep:
    """Runs of several schedulers on one workload.

    Args:
        points: limits by name.
        make: a workload at a rate.
        effort: how long to look.
        aware: the schedulers that look at the limits.
    """

    def __init__(self, points: Mapping[str, SLO], make: Make, effort: Effort, aware: Sequence[str]) -> None:
        self.points, self.effort = dict(points), effort
        self.runs: list[Run] = []
        self.rates: dict[str, float] = {}  # by point: where other scales of the limits are played
        self._make, self._aware = make, aware

    def find(self, scheduler: str, play: Play, guesses: Mapping[str, float]) -> None:
        """Searches the goodput at every point and seed; `guesses`: the first rates, by point, all of which are played
        before any search goes on."""
        began_s = time.monotonic()
        for first in (True, False):
            for seed in range(self.effort.seeds):
                for name in self.points:
                    known, guess = self.trials(scheduler, name, seed), guesses[name]
                    ends_s = time.monotonic() - began_s + self.effort.count(guess) / guess
                    if known and ends_s > self.effort.budget_s:
                        continue
                    if not first:
                        self._search(scheduler, name, seed, guess, known, play)
                    elif all(trial.rate != guess for trial in known):
                        self._trial(scheduler, name, seed, guess, play)

    def scale(self, scheduler: str, play: Play, name: str, rate: float, scales: Sequence[float]) -> None:
        """Plays seed 0 at one rate, the same for all schedulers, with the limits of a point at several scales; once, if
        the scheduler looks at none."""
        self.rates[name] = rate
        for scale in scales if scheduler in self._aware else (1.0,):
            told = name if scheduler in self._aware else ""
            if self._find(scheduler, told, scale, 0, rate) is None:
                self._play(scheduler, told, scale, 0, rate, play)

    def trials(self, scheduler: str, name: str, seed: int) -> list[Trial]:
        """What is known of a scheduler at a point, by rate."""
        runs = [run for run in self.of(scheduler) if run.seed == seed and run.slo in ("", name) and run.scale == 1]
        return [Trial(run.rate, run.played.met(self.points[name])) for run in sorted(runs, key=lambda run: run.rate)]

    def of(self, scheduler: str) -> list[Run]:
        return [run for run in self.runs if run.scheduler == scheduler]

    def attainment(self, scheduler: str, name: str, scale: float) -> float | None:
        """Of seed 0 at a scale of the limits; None if it was not played so."""
        if (rate := self.rates.get(name)) is None:
            return None
        told = name if scheduler in self._aware else ""
        run = self._find(scheduler, told, scale if told else 1.0, 0, rate)
        return None if run is None else Trial(rate, run.played.met(scaled(self.points[name], scale))).attainment

    @property
    def schedulers(self) -> list[str]:
        """Those that were played."""
        return list(dict.fromkeys(run.scheduler for run in self.runs))

    def goodput(self, scheduler: str, name: str) -> Estimate:
        return goodput.estimate(self._seeds(scheduler, name))

    def mean(self, scheduler: str, name: str) -> float:
        """The value of `goodput`, which takes longer for its interval."""
        return goodput.mean(self._seeds(scheduler, name))

    def ratio(self, over: str, under: str, name: str) -> Estimate:
        return goodput.ratio(self._seeds(over, name), self._seeds(under, name))

    def best(self, schedulers: Sequence[str], name: str) -> str:
        """The one with the highest goodput."""
        return max(schedulers, key=lambda scheduler: self.mean(scheduler, name))

    def _seeds(self, scheduler: str, name: str) -> list[list[Trial]]:
        return [self.trials(scheduler, name, seed) for seed in range(self.effort.seeds)]

    def _search(self, scheduler: str, name: str, seed: int, guess: float, known: list[Trial], play: Play) -> None:
        goodput.search(
            lambda rate: self._trial(scheduler, name, seed, rate, play),
            guess,
            known=known,
            factor=self.effort.factor,
            tolerance=self.effort.tolerance,
            max_runs=self.effort.max_runs - 1,
        )

    def _trial(self, scheduler: str, name: str, seed: int, rate: float, play: Play) -> Trial:
        told = name if scheduler in self._aware else ""
        return Trial(rate, self._play(scheduler, told, 1.0, seed, rate, play).played.met(self.points[name]))

    def _play(self, scheduler: str, told: str, scale: float, seed: int, rate: float, play: Play) -> Run:
        slo = scaled(self.points[told], scale) if told else SLO()
        label = "-".join([scheduler, *([told] if told else []), *([f"scale{scale:g}"] if scale != 1 else [])])
        played = play(f"{label}-seed{seed}-rate{rate:g}", self._make(rate, seed, self.effort.count(rate), slo))
        self.runs.append(Run(scheduler, told, scale, seed, rate, played))
        return self.runs[-1]

    def _find(self, scheduler: str, told: str, scale: float, seed: int, rate: float) -> Run | None:
        wanted = (told, scale, seed, rate)
        found = [run for run in self.of(scheduler) if (run.slo, run.scale, run.seed, run.rate) == wanted]
        return found[0] if found else None
