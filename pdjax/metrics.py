"""Latencies, SLOs and goodput of finished runs. Request records enter, numbers and one summary dict leave.

Called by `pdjax.report` and by users who judge records of their own. Pure arithmetic on the marks of a record: nothing
here measures. The definitions:

    TTFT  arrival to the first token handed to the user, queueing included
    TPOT  (last token - first token) / (tokens - 1); a one-token answer has none
    ITL   each gap between two tokens; the largest is the stall a user feels
    E2E   arrival to the last token

Only a finished request has a say in latencies. Every request counts in the SLO attainment: one that failed, was aborted
or was rejected has missed. One that was degraded is judged by the limits of the class that it was put into, and counted
as degraded besides. *Admitted* is every request that was not rejected. Goodput is requests that met their SLO per
second. The goodput of a system is the highest rate at which a run attains its target (DistServe, section 2: 90 %); one
run says whether its rate is below that.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pdjax.record import IterationRecord, RequestRecord, TransferRecord
from pdjax.request import SLO, State

PARTS = ("queue", "prefill", "first_token", "transfer", "decode_wait", "decode")
PERCENTILES = (50, 90, 95, 99)
ATTAINMENT = 0.9  # the usual target


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A limit on one percentile of a whole run: `metric` is "ttft_ms", "tpot_ms", "itl_ms" or "e2e_ms"."""

    metric: str
    percentile: int
    limit_ms: float


TARGETS: dict[str, tuple[Target, ...]] = {
    "interactive": (Target("ttft_ms", 95, 500.0), Target("tpot_ms", 95, 50.0), Target("e2e_ms", 99, 5000.0)),
}


def preset_targets(preset: str) -> tuple[Target, ...]:
    """The percentile targets of an SLO preset. Raises ValueError for an unknown one."""
    if preset not in TARGETS:
        raise ValueError(f"slo is {preset!r}; allowed: {', '.join(TARGETS)}")
    return TARGETS[preset]


def preset_slo(preset: str) -> SLO:
    """The limits of a preset's targets, as limits of each request. Raises ValueError for an unknown preset."""
    return SLO(**{target.metric: target.limit_ms for target in preset_targets(preset)})


def ttft_ms(record: RequestRecord) -> float | None:
    """Time to first token in ms; None if there is no token."""
    first = record.timeline.first_token_s
    return None if first is None else 1e3 * (first - record.timeline.arrival_s)


def tpot_ms(record: RequestRecord) -> float | None:
    """Time per output token after the first in ms; None for less than two tokens."""
    times = record.timeline.token_s
    return None if len(times) < 2 else 1e3 * (times[-1] - times[0]) / (len(times) - 1)


def itl_ms(record: RequestRecord) -> list[float]:
    """The gaps between tokens in ms: one fewer than there are tokens."""
    times = record.timeline.token_s
    return [1e3 * (late - early) for early, late in itertools.pairwise(times)]


def e2e_ms(record: RequestRecord) -> float | None:
    """Arrival to last token in ms; None if there is no token."""
    last = record.timeline.last_token_s
    return None if last is None else 1e3 * (last - record.timeline.arrival_s)


def itl_p99_ms(record: RequestRecord) -> float | None:
    """The 99th percentile of the gaps in ms; None for less than two tokens."""
    gaps = itl_ms(record)
    return percentile(gaps, 99) if gaps else None


# By the limit of an SLO: what is compared with it.
_VALUES: dict[str, Callable[[RequestRecord], float | None]] = {
    "ttft_ms": ttft_ms,
    "tpot_ms": tpot_ms,
    "itl_p99_ms": itl_p99_ms,
    "e2e_ms": e2e_ms,
}


def kept(record: RequestRecord, slo: SLO | None = None) -> dict[str, bool]:
    """Which limits of the SLO (the record's own where None) a request kept, by field name; where none is set, no entry.

    A value equal to its limit keeps it. A request that did not finish keeps nothing. A finished answer of one token has
    no TPOT and no ITL and keeps those limits.
    """
    slo = record.slo if slo is None else slo
    one_token = len(record.timeline.token_s) == 1
    result = {}
    for name, value_of in _VALUES.items():
        limit = getattr(slo, name)
        if limit is None:
            continue
        value = value_of(record) if record.state is State.FINISHED else None
        undefined = one_token and name in ("tpot_ms", "itl_p99_ms") and record.state is State.FINISHED
        result[name] = undefined or (value is not None and value <= limit)
    return result


def met(record: RequestRecord, slo: SLO | None = None) -> bool:
    """Whether the request finished and kept every limit of the SLO (the record's own where None)."""
    return record.state is State.FINISHED and all(kept(record, slo).values())


def parts(record: RequestRecord) -> dict[str, float]:
    """Where the E2E time of a request with tokens went, in ms; the parts add up to it.

    queue: arrival to the start of prefill; after a restart or preemption, of the last prefill.
    prefill: to its end. first_token: to the first token handed out. transfer: what the move of KV added after that,
    not what prefill hid. decode_wait: KV there, first step not begun. decode: to the last token.
    A mark that is missing or earlier than the one before it takes no time of its own.

    Raises:
        ValueError: the record has no token.
    """
    marks = record.timeline
    if marks.first_token_s is None or marks.last_token_s is None:
        raise ValueError(f"record {record.request_id!r} has no token; allowed: records with at least one token")
    ends = (
        marks.prefill_start_s,
        marks.prefill_end_s,
        marks.first_token_s,
        marks.transfer_end_s,
        marks.decode_start_s,
        marks.last_token_s,
    )
    result: dict[str, float] = {}
    before = marks.arrival_s
    for name, end in zip(PARTS, ends, strict=True):
        after = before if end is None else min(max(before, end), marks.last_token_s)
        result[name] = 1e3 * (after - before)
        before = after
    return result


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of at least one value, linear between the two nearest ranks: rank = percent / 100 * (n - 1)."""
    return float(np.percentile(np.asarray(values, np.float64), percent))


def spread(values: Iterable[float]) -> dict[str, float | None]:
    """Returns {mean, p50, p90, p95, p99, max}; percentiles as `percentile` defines them, all None without values."""
    data = list(values)
    if not data:
        return {"mean": None, **{f"p{p}": None for p in PERCENTILES}, "max": None}
    quantiles = {f"p{p}": percentile(data, p) for p in PERCENTILES}
    return {"mean": float(np.mean(data)), **quantiles, "max": max(data)}


def summarize(
    records: Sequence[RequestRecord],
    *,
    devices: int,
    duration_s: float,
    slo: SLO | None = None,
    targets: Sequence[Target] = (),
    attainment: float = ATTAINMENT,
    iterations: Sequence[IterationRecord] = (),
    transfers: Sequence[TransferRecord] = (),
) -> dict[str, Any]:
    """The numbers of one run, ready for JSON. Keys do not depend on values; what is undefined is None.

    Args:
        records: every request of the run, finished or not.
        devices: how many the run had.
        duration_s: from the first arrival to the last answer, > 0.
        slo: judge by this instead of each record's own.
        targets: limits on percentiles of the whole run.
        attainment: the share of requests that must meet their SLO, in (0, 1].
        iterations: for host_gap_ms, computed tokens, the count of iterations and their prediction.
        transfers: for their prediction.

    Returns:
        devices, num_requests and how they ended: completed, rejected, failed, aborted; preempted (how often a row lost
        its pages), duration_s, prompt_tokens and output_tokens of completed requests; prompt_tokens_by_source, what of
        them was computed where the request decoded and what was transferred there; computed_prompt_tokens, of all
        passes: more than prompt_tokens where requests were preempted, started over or did not complete;
        throughput_rps, output_tokens_per_s, goodput_rps; slo_attainment (met / all), admitted (how many were not
        rejected), admitted_attainment (met / admitted), degraded, by_class (the same by the class that was asked for),
        attainment_target, attained (whether it is reached) and slo_kept (the attainment of each limit alone);
        ttft_ms, tpot_ms, itl_ms, e2e_ms, stages_ms and host_gap_ms as `spread`s (max_itl_ms: of each request's largest
        gap); kv_transfer: count, bytes, ms (a spread of the time in which a request's bytes moved), share_of_e2e
        (that time / E2E, of the requests that moved) and overlap (the share of it that prefill hid); iterations, how
        many by what they computed; prediction: what was predicted against what came of it, see `prediction`; targets.

    Raises:
        ValueError: duration_s or attainment is out of its range.
    """
    if not 0 < attainment <= 1:
        raise ValueError(f"attainment is {attainment!r}; allowed: a number in (0, 1]")
    if not duration_s > 0:
        raise ValueError(f"duration_s is {duration_s!r}; allowed: seconds > 0")
    done = [record for record in records if record.state is State.FINISHED]
    ended = {state: sum(record.state is state for record in records) for state in State if state.terminal}
    output_tokens = sum(len(record.token_ids) for record in done)
    good = sum(met(record, slo) for record in records)
    spreads = {
        "ttft_ms": spread(_defined(ttft_ms, done)),
        "tpot_ms": spread(_defined(tpot_ms, done)),
        "itl_ms": spread(gap for record in done for gap in itl_ms(record)),
        "e2e_ms": spread(_defined(e2e_ms, done)),
    }
    stages = [parts(record) for record in done if record.timeline.token_s]
    return {
        "devices": devices,
        "num_requests": len(records),
        "completed": ended[State.FINISHED],
        "rejected": ended[State.REJECTED],
        "failed": ended[State.FAILED],
        "aborted": ended[State.ABORTED],
        "preempted": sum(record.preemptions for record in records),
        "duration_s": duration_s,
        "prompt_tokens": sum(record.prompt_tokens for record in done),
        "prompt_tokens_by_source": _sources(done),
        "computed_prompt_tokens": sum(iteration.chunk_tokens for iteration in iterations),
        "output_tokens": output_tokens,
        "throughput_rps": len(done) / duration_s,
        "output_tokens_per_s": output_tokens / duration_s,
        "goodput_rps": good / duration_s,
        "slo_attainment": good / len(records) if records else None,
        "admitted": len(records) - ended[State.REJECTED],
        "admitted_attainment": _share(good, len(records) - ended[State.REJECTED]),
        "degraded": sum(bool(record.degraded_from) for record in records),
        "by_class": _by_class(records, slo),
        "attainment_target": attainment,
        "attained": bool(records) and good / len(records) >= attainment,
        "slo_kept": _slo_kept(records, slo),
        **spreads,
        "max_itl_ms": spread(max(gaps) for record in done if (gaps := itl_ms(record))),
        "kv_transfer": _kv_transfer(done),
        "stages_ms": {name: spread(stage[name] for stage in stages) for name in PARTS},
        "host_gap_ms": spread(1e3 * iteration.host_gap_s for iteration in iterations),
        "iterations": {
            "prefill": sum(not iteration.rows for iteration in iterations),
            "decode": sum(iteration.steps for iteration in iterations if not iteration.chunk_tokens),
            "mixed": sum(bool(iteration.rows and iteration.chunk_tokens) for iteration in iterations),
        },
        "prediction": prediction(done, iterations, transfers),
        "targets": [_check(target, spreads) for target in targets],
    }


def prediction(
    done: Sequence[RequestRecord], iterations: Sequence[IterationRecord], transfers: Sequence[TransferRecord]
) -> dict[str, dict[str, float | None]]:
    """How well times were predicted: of passes (prefill, decode, mixed) when they were issued, of whole transfers
    (streamed ones last as long as their prompts are computed), and, where a policy said what it expected, of the TTFT
    and TPOT of finished requests that kept their first placement.

    Returns:
        For each of them count, mean_error and max_error of |predicted / actual - 1|, and bias, the mean of
        predicted / actual - 1; None where nothing was predicted. Each decode step of a run counts, with their mean.
    """
    told: dict[str, list[tuple[float | None, float | None, int]]] = {"prefill": [], "decode": [], "mixed": []}
    for iteration in iterations:
        actual_s = (iteration.finished_s - iteration.started_s) / iteration.steps
        told[iteration.kind].append((iteration.predicted_s, actual_s, iteration.steps))
    told["transfer"] = [(one.predicted_s, one.finished_s - one.started_s, 1) for one in transfers if not one.streamed]
    first = [(record, record.predicted) for record in done if not record.preemptions and not record.restarts]
    told["ttft_ms"] = [(said.ttft_ms, ttft_ms(record), 1) for record, said in first if said]
    told["tpot_ms"] = [(said.tpot_ms, tpot_ms(record), 1) for record, said in first if said]
    return {name: _errors(each) for name, each in told.items()}


def _errors(told: Iterable[tuple[float | None, float | None, int]]) -> dict[str, float | None]:
    """Of (predicted, actual, how many); where one is missing or 0, nothing was predicted, or there is no ratio."""
    rows = [(predicted / actual - 1, count) for predicted, actual, count in told if predicted and actual]
    if not rows:
        return {"count": 0, "mean_error": None, "max_error": None, "bias": None}
    ratios, counts = np.array(rows).T
    return {
        "count": int(counts.sum()),
        "mean_error": float(np.average(np.abs(ratios), weights=counts)),
        "max_error": float(np.abs(ratios).max()),
        "bias": float(np.average(ratios, weights=counts)),
    }


def _defined(metric: Callable[[RequestRecord], float | None], records: Iterable[RequestRecord]) -> list[float]:
    return [value for record in records if (value := metric(record)) is not None]


def _slo_kept(records: Sequence[RequestRecord], slo: SLO | None) -> dict[str, float | None]:
    """Of the requests that have a limit, the share that kept it."""
    by_limit: dict[str, list[bool]] = {field.name: [] for field in dataclasses.fields(SLO)}
    for record in records:
        for name, ok in kept(record, slo).items():
            by_limit[name].append(ok)
    return {name: sum(oks) / len(oks) if oks else None for name, oks in by_limit.items()}


def _by_class(records: Sequence[RequestRecord], slo: SLO | None) -> dict[str, dict[str, Any]]:
    """Of each class, under the name that its requests asked for; without requests of classes, empty."""
    classes: dict[str, list[RequestRecord]] = {}
    for record in records:
        if name := record.degraded_from or record.slo_class:
            classes.setdefault(name, []).append(record)
    result = {}
    for name, theirs in sorted(classes.items()):
        good = sum(met(record, slo) for record in theirs)
        rejected = sum(record.state is State.REJECTED for record in theirs)
        result[name] = {
            "num_requests": len(theirs),
            "completed": sum(record.state is State.FINISHED for record in theirs),
            "rejected": rejected,
            "degraded": sum(bool(record.degraded_from) for record in theirs),
            "slo_attainment": good / len(theirs),
            "admitted_attainment": _share(good, len(theirs) - rejected),
            "slo_kept": _slo_kept(theirs, slo),
        }
    return result


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _sources(done: Sequence[RequestRecord]) -> dict[str, int]:
    """Where the prompt's KV came from, seen from where the request decoded."""
    moved = sum(record.prompt_tokens for record in done if record.timeline.transfer_end_s is not None)
    return {"computed": sum(record.prompt_tokens for record in done) - moved, "transferred": moved}


def _kv_transfer(done: Sequence[RequestRecord]) -> dict[str, Any]:
    moved = [record for record in done if record.timeline.transfer_end_s is not None or record.moves]
    busy_s = sum(record.timeline.transfer_busy_s for record in moved)
    hidden_s = sum(record.timeline.transfer_hidden_s for record in moved)
    total_ms = sum(_defined(e2e_ms, moved))
    return {
        "count": len(moved),
        "bytes": sum(record.timeline.transfer_bytes for record in moved),
        "ms": spread(1e3 * record.timeline.transfer_busy_s for record in moved),
        "share_of_e2e": 1e3 * busy_s / total_ms if total_ms else None,
        "overlap": hidden_s / busy_s if busy_s else None,
    }


def _check(target: Target, spreads: Mapping[str, Mapping[str, float | None]]) -> dict[str, Any]:
    value = spreads[target.metric][f"p{target.percentile}"]
    return {
        "target": f"{target.metric} p{target.percentile} <= {target.limit_ms:g}",
        "value": value,
        "ok": value is not None and value <= target.limit_ms,
    }
