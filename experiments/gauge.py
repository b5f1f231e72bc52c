"""How fast a machine was during a run: its passes enter, how much longer than predicted they took, and how much that
changed from begin to end, leave. Called by `fidelity_runs`.

A shared machine is not as fast as a minute ago, and passes take longer beside all that serving does than alone, as a
profile has them. Requests in front of those that count show how much, before anything that counts is served; others
behind show whether it is still so: only their passes are looked at. Where these disagree the machine changed meanwhile,
and the run says little, whatever came of it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from pdjax.latency import KINDS, LatencyModel
from pdjax.messages import InstanceSpec
from pdjax.record import IterationRecord
from pdjax.report import Report

DRIFT = 0.03  # of the passes of a kind, from those in front to those behind: more is not steady
LEAST_S = 1.0  # of passes that tell how fast they are

Scale = tuple[float, float, float]  # by KINDS: how many times as long as predicted
Passes = Sequence[IterationRecord]


def around(run: Report, margin: int) -> tuple[Passes, Passes]:
    """Passes in front of all but the first and last `margin` requests, and behind them."""
    judged = run.records[margin : len(run.records) - margin]
    start_s = judged[0].timeline.arrival_s
    end_s = max(record.timeline.finished_s or start_s for record in judged)
    return (
        [one for one in run.iterations if one.finished_s <= start_s],
        [one for one in run.iterations if one.started_s >= end_s],
    )


def times(passes: Passes) -> float | None:
    """How many times as long as predicted they took, all in all; None: too few tell."""
    predicted_s = sum(one.steps * one.predicted_s for one in passes)
    if predicted_s < LEAST_S:
        return None
    return sum(one.finished_s - one.started_s for one in passes) / predicted_s


def scales(passes: Passes, instances: int) -> tuple[Scale, ...]:
    """By instance. Where one has too few passes of a kind, those of all instances count, or those of all kinds."""

    def scale(index: int, kind: str) -> float:
        alike = [one for one in passes if one.kind == kind]
        mine = [one for one in alike if one.instance == index]
        return times(mine) or times(alike) or times(passes) or 1.0

    prefill, decode, mixed = KINDS
    return tuple((scale(index, prefill), scale(index, decode), scale(index, mixed)) for index in range(instances))


def drift(before: Passes, after: Passes) -> dict[str, float]:
    """By kind of pass, how much longer they took behind than in front: 0.02 is 2 %. A kind with few is left out."""
    found = {}
    for kind in KINDS:
        first, second = (times([one for one in each if one.kind == kind]) for each in (before, after))
        if first and second:
            found[kind] = second / first - 1
    return found


def unrest(drifts: Mapping[str, float]) -> float:
    """The largest of them, whatever its sign."""
    return max(map(abs, drifts.values()), default=0.0)


def scaled(
    model_of: Callable[[InstanceSpec], LatencyModel], scales: Sequence[Scale]
) -> Callable[[InstanceSpec], LatencyModel]:
    """Models whose passes take so many times as long, by instance, with all that streaming adds to them."""
    return lambda spec: dataclasses.replace(model_of(spec), scale=scales[spec.index], streaming=(0.0, 0.0))
