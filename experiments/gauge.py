"""How fast a machine was during a run: its passes enter, how much longer than predicted they took, and how much that
changed from begin to end, leave. Called by `fidelity_runs`.

A shared machine is not as fast as a minute ago, and passes take longer beside all that serving does than alone, as a
profile has them. Requests in front of those that count, and behind them, show how much: only their passes are looked
at. Where these disagree the machine changed meanwhile, and the run says little, whatever came of it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from pdjax.latency import KINDS, LatencyModel
from pdjax.messages import InstanceSpec
from pdjax.record import IterationRecord
from pdjax.report import Report

DRIFT = 0.05  # of the passes of a kind, from those in front to those behind: more is not steady
LEAST_S = 1.0  # of passes that tell how fast they are

Scale = tuple[float, float, float]  # by KINDS: how many times as long as predicted
Key = tuple[int, int]  # instance, kind of pass
Passes = Mapping[Key, tuple[float, float]]  # seconds that they took, seconds that were predicted


def passes(iterations: Sequence[IterationRecord], counts: Callable[[IterationRecord], bool]) -> Passes:
    """Of those that count, by instance and kind."""
    found: dict[Key, tuple[float, float]] = {}
    for one in filter(counts, iterations):
        key = (one.instance, (2 if one.rows else 0) if one.chunk_tokens else 1)
        taken, predicted = found.get(key, (0.0, 0.0))
        found[key] = (taken + one.finished_s - one.started_s, predicted + one.steps * one.predicted_s)
    return found


def around(run: Report, margin: int) -> tuple[Passes, Passes]:
    """Passes in front of all but the first and last `margin` requests, and behind them."""
    judged = run.records[margin : len(run.records) - margin]
    start_s = judged[0].timeline.arrival_s
    end_s = max(record.timeline.finished_s or start_s for record in judged)
    return (
        passes(run.iterations, lambda one: one.finished_s <= start_s),
        passes(run.iterations, lambda one: one.started_s >= end_s),
    )


def both(before: Passes, after: Passes) -> Passes:
    found = dict(before)
    for key, (taken, predicted) in after.items():
        more = found.get(key, (0.0, 0.0))
        found[key] = (more[0] + taken, more[1] + predicted)
    return found


def scales(known: Passes, instances: int) -> tuple[Scale, ...]:
    """By instance. Where one has too few passes of a kind, those of all instances count, or those of all kinds."""

    def scale(index: int, kind: int) -> float:
        of_kind = {key: sums for key, sums in known.items() if key[1] == kind}
        for some in ({key: sums for key, sums in of_kind.items() if key[0] == index}, of_kind, known):
            taken, predicted = _sum(some)
            if predicted >= LEAST_S:
                return taken / predicted
        return 1.0

    return tuple((scale(index, 0), scale(index, 1), scale(index, 2)) for index in range(instances))


def drift(before: Passes, after: Passes) -> dict[str, float]:
    """By kind of pass, how much longer they took behind than in front: 0.02 is 2 %. A kind with few is left out."""
    found = {}
    for kind, name in enumerate(KINDS):
        sums = [_sum({key: sums for key, sums in each.items() if key[1] == kind}) for each in (before, after)]
        if min(predicted for _, predicted in sums) >= LEAST_S:
            first, second = (taken / predicted for taken, predicted in sums)
            found[name] = second / first - 1
    return found


def steady(drifts: Mapping[str, float]) -> bool:
    return all(abs(each) <= DRIFT for each in drifts.values())


def scaled(
    model_of: Callable[[InstanceSpec], LatencyModel], scales: Sequence[Scale]
) -> Callable[[InstanceSpec], LatencyModel]:
    """Models whose passes take so many times as long, by instance, with all that streaming adds to them."""
    return lambda spec: dataclasses.replace(model_of(spec), scale=scales[spec.index], streaming=(0.0, 0.0))


def _sum(known: Passes) -> tuple[float, float]:
    return sum(taken for taken, _ in known.values()), sum(predicted for _, predicted in known.values())
