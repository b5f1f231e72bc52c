"""The goodput of a system: runs at several rates, judged request by request, enter; a rate and its interval leave.
Called by the launchers that compare schedulers, and by scripts.

The goodput is the highest rate at which the share of requests that keep their limits reaches a target (DistServe,
section 2). `search` finds it by a bracket and bisection (DistServe, section 4.1). Between two rates that were played
the attainment is taken to be linear in the logarithm of the rate. Runs have noise: since more load helps nobody, the
attainments are first made to fall with the rate by pooling neighbours that do not (`falling`).

Estimates are geometric means over seeds, so that the ratio of two estimates is the estimate of their ratio.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np

from pdjax.metrics import ATTAINMENT

Bound = Literal["", "at least", "at most", "unknown"]
CONFIDENCE = 0.95
RESAMPLES = 1000  # of a bootstrap
SEEDS_FOR_T = 3  # with two, Student's t gives 13 standard errors either way, which says nothing
DIGITS = 3  # of the rates that a search tries: searches that share runs meet at the same rates


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """One run: `met[i]` says whether request i, in order of arrival, kept its limits. `rate`: requests per second."""

    rate: float
    met: tuple[bool, ...]

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rate is {self.rate!r}; allowed: requests per second > 0")
        if not self.met:
            raise ValueError("met is empty; allowed: at least one request")

    @property
    def attainment(self) -> float:
        return sum(self.met) / len(self.met)


@dataclasses.dataclass(frozen=True, slots=True)
class Crossing:
    """Where the attainment falls below the target. `bound`: "at least" or "at most" where the rates that were played
    all lie on one side of it; `rate` is then the last of them."""

    rate: float
    bound: Bound = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """A rate, or a ratio of two, over seeds: `value` lies from `low` to `high` with `CONFIDENCE`.

    Attributes:
        bound: "" for a value; "at least" or "at most" where some seed says no more than that; "unknown" where they
            say both, or a ratio is one of two bounds.
        how: how the interval was made, in words.
        by_seed: the values that went in.
    """

    value: float
    low: float
    high: float
    bound: Bound
    how: str
    by_seed: tuple[float, ...]


def falling(trials: Iterable[Trial]) -> list[tuple[float, float]]:
    """(rate, attainment) by rate; the nearest attainments, by least squares over requests, that nowhere rise.

    Pool adjacent violators: a neighbour that rises is averaged with the one before it, by requests, until none does.
    """
    return _falling(_counts(trials))


def crossing(trials: Iterable[Trial], target: float = ATTAINMENT) -> Crossing:
    """The goodput that runs of one seed show.

    Raises:
        ValueError: there is no run.
    """
    return _crossing(_counts(trials), target)


_Count = tuple[float, int, int]  # rate, requests that met, requests


def _counts(trials: Iterable[Trial]) -> list[_Count]:
    return [(trial.rate, sum(trial.met), len(trial.met)) for trial in trials]


def _falling(counts: Iterable[_Count]) -> list[tuple[float, float]]:
    blocks: list[tuple[int, int, list[float]]] = []
    for rate, met, count in sorted(counts):
        rates = [rate]
        while blocks and met * blocks[-1][1] >= blocks[-1][0] * count:
            before = blocks.pop()
            met, count, rates = before[0] + met, before[1] + count, before[2] + rates
        blocks.append((met, count, rates))
    return [(rate, met / count) for met, count, rates in blocks for rate in rates]


def _crossing(counts: Iterable[_Count], target: float) -> Crossing:
    points = _falling(counts)
    if not points:
        raise ValueError("trials is empty; allowed: at least one run")
    above = [point for point in points if point[1] >= target]
    below = [point for point in points if point[1] < target]
    if not below:
        return Crossing(above[-1][0], "at least")
    if not above:
        return Crossing(below[0][0], "at most")
    (low, high_share), (high, low_share) = above[-1], below[0]
    part = (high_share - target) / (high_share - low_share)
    return Crossing(low * (high / low) ** part)


def search(
    run: Callable[[float], Trial],
    guess: float,
    *,
    known: Iterable[Trial] = (),
    target: float = ATTAINMENT,
    factor: float = 2.0,
    tolerance: float = 0.1,
    max_runs: int = 10,
) -> list[Trial]:
    """Plays runs until two neighbouring rates hold the goodput between them.

    Args:
        run: plays the system at a rate.
        guess: the first rate, where nothing is known.
        known: runs that there are already.
        target: of the attainment.
        factor: from one rate to the next as long as all lie on one side; squared where less than half of the target is
            reached.
        tolerance: done when the bracket is no wider than this, relative to its lower end.
        max_runs: it gives up then.

    Returns:
        Those that were known, and the new ones in the order they were played.

    Raises:
        ValueError: `guess`, `factor` or `tolerance` leads nowhere.
    """
    for name, value, least in (("guess", guess, 0.0), ("factor", factor, 1.0), ("tolerance", tolerance, 0.0)):
        if not least < value < math.inf:
            raise ValueError(f"{name} is {value!r}; allowed: a number > {least:g}")
    trials = list(known)
    for _ in range(max_runs):
        points = falling(trials)
        above = [rate for rate, share in points if share >= target]
        below = [rate for rate, share in points if share < target]
        if not points:
            rate = guess
        elif not below:
            rate = above[-1] * factor
        elif not above:
            share = points[0][1]  # far below the target, a step alone would not do
            rate = below[0] / (factor if share > target / 2 else factor**2)
        elif below[0] <= above[-1] * (1 + tolerance):
            break
        else:
            rate = math.sqrt(above[-1] * below[0])
        rate = rounded(rate)
        if any(trial.rate == rate for trial in trials):
            break
        trials.append(run(rate))
    return trials


def rounded(rate: float) -> float:
    """With `DIGITS` digits."""
    return float(f"{rate:.{DIGITS}g}")


def mean(seeds: Sequence[Sequence[Trial]], target: float = ATTAINMENT) -> float:
    """The value of `estimate`, without its interval."""
    return _middle([crossing(trials, target).rate for trials in seeds])


def estimate(seeds: Sequence[Sequence[Trial]], target: float = ATTAINMENT) -> Estimate:
    """The goodput and its interval.

    With three seeds or more: Student's t over the logarithms of their goodputs. With fewer: a percentile bootstrap over
    the requests of each run. Requests of one run wait for each other, so this interval is rather too narrow.

    Args:
        seeds: the runs of each seed.

    Raises:
        ValueError: there is no seed, or one without runs.
    """
    found = [crossing(trials, target) for trials in seeds]
    values, bound = [one.rate for one in found], _agreed(one.bound for one in found)
    if len(values) >= SEEDS_FOR_T:
        return _over_seeds(values, bound)
    return _bootstrapped(values, bound, [_resampled(trials, target, seed) for seed, trials in enumerate(seeds)])


def ratio(over: Sequence[Sequence[Trial]], under: Sequence[Sequence[Trial]], target: float = ATTAINMENT) -> Estimate:
    """The goodput of one system over that of another, seed by seed: both have had the same requests. The interval is
    that of `estimate`, of the ratios; a bootstrap draws the same requests for both.

    Raises:
        ValueError: they do not have the same seeds, or there is none.
    """
    if len(over) != len(under):
        raise ValueError(f"over has {len(over)} seeds; allowed: as many as under, {len(under)}")
    pairs = [(crossing(a, target), crossing(b, target)) for a, b in zip(over, under, strict=True)]
    values = [a.rate / b.rate for a, b in pairs]
    bound = _agreed(_bound_of_ratio(a.bound, b.bound) for a, b in pairs)
    if len(values) >= SEEDS_FOR_T:
        return _over_seeds(values, bound)
    draws = [
        [a / b for a, b in zip(_resampled(one, target, seed), _resampled(other, target, seed), strict=True)]
        for seed, (one, other) in enumerate(zip(over, under, strict=True))
    ]
    return _bootstrapped(values, bound, draws)


def _over_seeds(values: Sequence[float], bound: Bound) -> Estimate:
    from scipy.special import stdtrit  # slow to import

    logs = np.log(values)
    count = len(values)
    reach = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * float(np.std(logs, ddof=1)) / math.sqrt(count)
    middle, spread = _middle(values), math.exp(reach)
    how = f"t over {count} seeds"
    return Estimate(middle, middle / spread, middle * spread, bound, how, tuple(map(float, values)))


def _bootstrapped(values: Sequence[float], bound: Bound, resampled: Sequence[Sequence[float]]) -> Estimate:
    """`resampled`: of each seed, its goodput again and again."""
    if not values:
        raise ValueError("seeds is empty; allowed: at least one")
    means = np.exp(np.log(resampled).mean(axis=0))
    low, high = np.percentile(means, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    how = "bootstrap over the requests of " + ("one seed" if len(values) == 1 else f"{len(values)} seeds")
    return Estimate(_middle(values), float(low), float(high), bound, how, tuple(map(float, values)))


def _middle(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def _resampled(trials: Sequence[Trial], target: float, seed: int) -> list[float]:
    """The goodput again and again, each time of requests drawn from the runs. Runs of equal length draw the same."""
    draws = np.random.default_rng(seed).random((RESAMPLES, max((len(trial.met) for trial in trials), default=0)))
    met = []
    for trial in trials:
        count = len(trial.met)
        met.append(np.asarray(trial.met)[(draws[:, :count] * count).astype(int)].sum(axis=1).tolist())
    rates, counts = [trial.rate for trial in trials], [len(trial.met) for trial in trials]
    return [_crossing(zip(rates, one, counts, strict=True), target).rate for one in zip(*met, strict=True)]


_OPPOSITE: dict[Bound, Bound] = {"": "", "at least": "at most", "at most": "at least", "unknown": "unknown"}


def _bound_of_ratio(over: Bound, under: Bound) -> Bound:
    return _agreed((over, _OPPOSITE[under]))


def _agreed(bounds: Iterable[Bound]) -> Bound:
    said = {bound for bound in bounds if bound}
    return said.pop() if len(said) == 1 else "unknown" if said else ""
