"""The order in which clusters are tried: stocks and a mix enter, the clusters that were played and what came of them
leave. Called by `pdjax.planning.planner`.

First single instances, of all sizes: as prefill, as decode, and as colocated instances. Then clusters of those that
carry most for what they cost. Of each kind the most hopeful are played first, and none that by a bound in closed form
reaches far less than the best so far.
"""

import concurrent.futures
import dataclasses
import multiprocessing
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence

from pdjax.fleet import Pool
from pdjax.messages import Role
from pdjax.planning import bounds, clusters
from pdjax.planning.clusters import Cluster, Part, Shape
from pdjax.planning.mix import Mix
from pdjax.planning.stock import Stock
from pdjax.planning.trial import Found, Phase, Task, find

Progress = Callable[[int, int, str], None]  # done, total, what

COLOCATED = ("colocated", "colocated_chunked")
JUDGED: dict[Phase, int] = {"prefill": 500, "decode": 100, "both": 100}  # requests of a run of an instance
JUDGED_CLUSTER = 200
JUDGED_BEST = 1000  # of those that come out first
RUNS_INSTANCE, RUNS_CLUSTER, RUNS_BEST = 5, 5, 6
WORTH = 0.8  # of the best of its kind per cost: instances that carry less win by no rounding either
CLOSE = 0.85  # of the best cluster: a dynamic one that reaches less in its first runs is not played again
GROUP = 4  # instances of a dynamic cluster: it is asked at every step, which takes long, and played in groups
SHORT = 2  # times fewer requests are judged there
HOPE = 1.3  # times its estimate: what a cluster may reach, since queues that are shared are shorter
KEPT = 0.6  # of the best of their kind and stock per cost have instances that clusters are made of
PLAYED = {"colocated": 1, "colocated_chunked": 1, "splits": 3, "units": 2, "dynamic": 1}  # clusters of a kind
SLIDERS = ((2048, 256),)  # TaiChi's S_P and S_D for dynamic, beside what instances take


@dataclasses.dataclass(frozen=True)
class Played:
    """A cluster and its goodput. `judged`: requests of each run. `again`: it was among the best, and these are
    the runs that followed."""

    cluster: Cluster
    found: Found
    judged: int
    again: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a search found.

    Attributes:
        phases: of each phase, the goodput of single instances that were played.
        played: clusters, in no order.
        splits: every P:D split of the instances that the best of them is made of, whether it was played or not.
    """

    phases: dict[str, dict[Shape, Found]]
    played: tuple[Played, ...]
    splits: tuple[Cluster, ...]


@dataclasses.dataclass(frozen=True)
class _Job:
    """Something to play. `hope`: goodput per cost that it may reach; `worth`: of the best of its kind that it must
    promise to be played."""

    kind: Hashable
    key: Hashable
    task: Task
    hope: float
    cost: float
    worth: float


class Workers:
    """Plays jobs on several cores, most hopeful first.

    Args:
        count: processes; 1: this one.
        progress: told after every job.
    """

    def __init__(self, count: int, progress: Progress | None = None) -> None:
        self._count = count
        self._progress = progress or (lambda done, total, what: None)
        self._done = self._total = 0
        self._pool: concurrent.futures.Executor | None = None

    def __enter__(self) -> "Workers":
        if self._count > 1:
            # Not forked: whoever plans may have threads, JAX's among them.
            context = multiprocessing.get_context("spawn")
            self._pool = concurrent.futures.ProcessPoolExecutor(
                self._count, mp_context=context, initializer=_leave_with_parent
            )
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def play(self, jobs: Iterable[_Job], what: str) -> dict[Hashable, Found]:
        """What came of the jobs that were worth it, by their keys."""
        waiting = _in_order(jobs)
        self._total += len(waiting)
        best: dict[Hashable, float] = {}
        results: dict[Hashable, Found] = {}

        def took(job: _Job, found: Found) -> None:
            results[job.key] = found
            best[job.kind] = max(best.get(job.kind, 0.0), found.rate / job.cost)
            self._step(what)

        running: dict[concurrent.futures.Future[Found], _Job] = {}
        while waiting or running:
            while waiting and len(running) < self._count:
                job = waiting.pop(0)
                if job.hope < job.worth * best.get(job.kind, 0.0):
                    self._step(what)
                elif self._pool is None:
                    took(job, find(job.task))
                else:
                    running[self._pool.submit(find, job.task)] = job
            done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                took(running.pop(future), future.result())
        return results

    def _step(self, what: str) -> None:
        self._done += 1
        self._progress(self._done, self._total, what)


def _leave_with_parent() -> None:
    """A process whose parent was killed would wait for jobs for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _in_order(jobs: Iterable[_Job]) -> list[_Job]:
    """By hope, relative to the most hopeful of their kind."""
    made = list(jobs)
    most: dict[Hashable, float] = {}
    for job in made:
        most[job.kind] = max(most.get(job.kind, 0.0), job.hope)
    return sorted(made, key=lambda job: -job.hope / most[job.kind])


def search(
    stocks: Sequence[Stock],
    mix: Mix,
    rate: float | None,
    by: str,
    workers: Workers,
    compare: Sequence[tuple[int, int]] = (),
) -> Outcome:
    """Looks for the cluster with the highest goodput per cost. Arguments as for `pdjax.planning.planner.plan`."""
    with workers:
        found = clusters.shapes(stocks, mix)
        phases = _phases(found, mix, by, workers)
        rates = {name: _kept(phases[name], by) for name in phases}
        splits = list(clusters.splits(rates["prefill"], rates["decode"], rate))
        jobs: list[tuple[str, Cluster]] = []
        for policy in COLOCATED:
            jobs += _top(policy, clusters.colocated(policy, rates[policy], rate), rate, by)
        jobs += _top("splits", splits, rate, by)
        asked = [_asked(pair, found, phases, mix) for pair in compare]
        jobs += [("splits", one) for one in asked if one is not None]
        if any(stock.devices > stock.node_devices for stock in stocks):
            jobs += _top("units", clusters.units(rates["prefill"], rates["decode"], rate), rate, by)
        jobs += _dynamic(jobs)
        played = _clusters(list(dict.fromkeys(jobs)), mix, by, workers, compare)
        played = _again(played, mix, rate, by, workers)
    return Outcome(phases, tuple(played), tuple(_like(splits, jobs)))


def _phases(found: Sequence[Shape], mix: Mix, by: str, workers: Workers) -> dict[str, dict[Shape, Found]]:
    """Goodputs of single instances, by phase or colocated policy."""
    kinds: list[tuple[str, str, Phase, Role, Callable[[Pool, Mix], float], Callable[[Pool, Mix], float], float]] = [
        ("prefill", "disaggregated", "prefill", Role.PREFILL, bounds.prefill_rate, bounds.prefill_guess, 1.0),
        ("decode", "disaggregated", "decode", Role.DECODE, bounds.decode_rate, bounds.decode_rate, 0.9),
    ]
    kinds += [(policy, policy, "both", Role.MIXED, bounds.mixed_rate, bounds.mixed_rate, 0.7) for policy in COLOCATED]
    jobs = []
    for name, policy, phase, role, bound, guess, part in kinds:
        for shape in found:
            most = bound(shape.pool, mix)
            if not most:
                continue
            cost = _cost(shape, by)
            pools = (dataclasses.replace(shape.pool, role=role),)
            rate = part * guess(shape.pool, mix)
            task = Task(policy, pools, mix, phase, rate, JUDGED[phase], max_runs=RUNS_INSTANCE)
            jobs.append(_Job((name, shape.stock.name), (name, shape), task, most / cost, cost, WORTH))
    results = workers.play(jobs, "instances")
    return {name: {shape: results[name, shape] for shape in found if (name, shape) in results} for name, *_ in kinds}


def _cost(shape: Shape, by: str) -> float:
    return shape.devices * (shape.stock.price_per_hour if by == "dollar" else 1.0)


def _kept(phase: dict[Shape, Found], by: str) -> dict[Shape, float]:
    """The goodput of those that clusters are made of, in each stock. Many sizes, since only some fill the devices."""
    best: dict[str, float] = {}
    for shape, one in phase.items():
        best[shape.stock.name] = max(best.get(shape.stock.name, 0.0), one.rate / _cost(shape, by))
    return {
        shape: one.rate
        for shape, one in phase.items()
        if one.rate and one.rate / _cost(shape, by) >= KEPT * best[shape.stock.name]
    }


def value(goodput: float, cluster: Cluster, rate: float | None, by: str) -> float:
    """What counts: the rate that is served, no more than is asked for, for what the cluster costs."""
    return min(goodput, rate or goodput) / cluster.cost(by)


def _promise(cluster: Cluster, rate: float | None, by: str) -> tuple[bool, float]:
    return cluster.estimate >= (rate or 0.0), value(cluster.estimate, cluster, rate, by)


def _top(kind: str, made: Iterable[Cluster], rate: float | None, by: str) -> list[tuple[str, Cluster]]:
    """Those that promise most: first who carries the rate."""
    best = sorted(made, key=lambda cluster: _promise(cluster, rate, by), reverse=True)
    return [(kind, cluster) for cluster in best[: PLAYED[kind]]]


def _asked(
    pair: tuple[int, int], found: Sequence[Shape], phases: dict[str, dict[Shape, Found]], mix: Mix
) -> Cluster | None:
    """The most promising cluster with so many prefill and decode instances; None where none keeps the limits."""
    p, d = pair

    def rate(name: str, shape: Shape) -> float:
        bound = {"prefill": bounds.prefill_guess, "decode": bounds.decode_rate}[name]
        return phases[name][shape].rate if shape in phases[name] else bound(shape.pool, mix)

    best: Cluster | None = None
    for source in found:
        for target in found:
            estimate = min(p * rate("prefill", source), d * rate("decode", target))
            parts = Part(Role.PREFILL, source, p), Part(Role.DECODE, target, d)
            cluster = Cluster("disaggregated", parts, estimate)
            stocks = {part.shape.stock.name: part.shape.stock.devices for part in parts}
            fits = all(used <= stocks[name] for name, used in cluster.devices.items())
            if fits and estimate > (best.estimate if best is not None else 0.0):
                best = cluster
    return best


def _dynamic(jobs: Sequence[tuple[str, Cluster]]) -> list[tuple[str, Cluster]]:
    """The most promising split, with all instances able to do both and roles that move, and several sliders. Where no
    split promises anything, half of the best colocated instances begin as decode ones."""
    for kind, cluster in sorted(jobs, key=lambda job: job[0] != "splits"):
        if kind in COLOCATED:
            (whole,) = cluster.parts
            half = whole.count // 2
            sides = [(whole.shape, whole.count - half), (whole.shape, half)]
        else:
            sides = [(part.shape, cluster.groups * part.count) for part in cluster.parts]
        counts = _in_small([count for _, count in sides])
        parts = [
            Part(role, shape, count)
            for role, (shape, _), count in zip((Role.PREFILL, Role.DECODE), sides, counts, strict=True)
            if count
        ]
        if len(parts) < len(sides):
            continue
        small = Cluster("dynamic", tuple(parts), 0.0).devices
        groups = min(count // small[name] for name, count in cluster.devices.items())
        estimate = max(one.estimate for _, one in jobs if one.devices == cluster.devices)
        share = groups * sum(small.values()) / sum(cluster.devices.values())
        return [
            ("dynamic", Cluster("dynamic", tuple(parts), share * estimate, groups, chunks))
            for chunks in (None, *SLIDERS)
        ]
    return []


def _in_small(counts: Sequence[int]) -> list[int]:
    """So many instances of both sides in nearly the same ratio, at most GROUP together."""
    prefill, decode = counts
    total = prefill + decode
    if total <= GROUP or not prefill or not decode:
        return [prefill, decode]
    first = min(max(round(GROUP * prefill / total), 1), GROUP - 1)
    return [first, GROUP - first]


def _clusters(
    jobs: Sequence[tuple[str, Cluster]], mix: Mix, by: str, workers: Workers, compare: Sequence[tuple[int, int]]
) -> list[Played]:
    """Plays clusters as a whole, judged on all limits."""
    made = []
    for kind, cluster in jobs:
        guess = 0.9 * cluster.estimate / cluster.groups
        judged = _judged(cluster, JUDGED_CLUSTER)
        task = Task(cluster.policy, cluster.pools, mix, "both", guess, judged, cluster.network(), RUNS_CLUSTER)
        asked = kind == "splits" and cluster.counts in compare
        hope, cost = HOPE * cluster.estimate / cluster.cost(by), cluster.cost(by) / cluster.groups
        made.append(_Job(kind, (kind, cluster), task, hope, cost, 0.0 if asked else 1.0))
    results = workers.play(made, "clusters")
    return [
        Played(cluster, _whole(results[kind, cluster], cluster), _judged(cluster, JUDGED_CLUSTER))
        for kind, cluster in jobs
        if (kind, cluster) in results
    ]


def _again(played: Sequence[Played], mix: Mix, rate: float | None, by: str, workers: Workers) -> list[Played]:
    """The best cluster of each policy is played for longer, a dynamic one only where it comes near the best of all: the
    verdict is between these."""
    worth = {id(one): value(one.found.rate, one.cluster, rate, by) for one in played}
    best = max(worth.values(), default=0.0)
    chosen: dict[str, Played] = {}
    for one in played:
        policy = one.cluster.policy
        if worth[id(one)] and (policy != "dynamic" or worth[id(one)] >= CLOSE * best):
            chosen[policy] = max(chosen.get(policy, one), one, key=lambda one: worth[id(one)])
    made = []
    for policy, one in chosen.items():
        cluster, guess = one.cluster, one.found.rate / one.cluster.groups
        judged, network = _judged(cluster, JUDGED_BEST), cluster.network()
        task = Task(policy, cluster.pools, mix, "both", guess, judged, network, RUNS_BEST, factor=1.15)
        made.append(_Job(policy, id(one), task, 1.0, 1.0, 0.0))
    results = workers.play(made, "the best clusters")
    return [
        Played(one.cluster, _whole(results[id(one)], one.cluster), _judged(one.cluster, JUDGED_BEST), True)
        if id(one) in results
        else one
        for one in played
    ]


def _judged(cluster: Cluster, usual: int) -> int:
    return usual // SHORT if cluster.policy == "dynamic" else usual


def _whole(found: Found, cluster: Cluster) -> Found:
    """Of all groups."""
    return dataclasses.replace(found, rate=cluster.groups * found.rate)


def _like(splits: Sequence[Cluster], jobs: Sequence[tuple[str, Cluster]]) -> list[Cluster]:
    """All splits of the instances that the most promising one is made of."""
    best = next((cluster for kind, cluster in jobs if kind == "splits"), None)
    if best is None:
        return []
    sizes = [part.shape for part in best.parts]
    return [cluster for cluster in splits if [part.shape for part in cluster.parts] == sizes]
