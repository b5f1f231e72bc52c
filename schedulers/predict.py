"""What a placement would cost: TTFT and TPOT of a request, and the time that running rows can spare. Enter: views of
requests and instances. Leave: seconds. Pure arithmetic on latency models; used by `dynamic` and `admission`.

A row's *spare time* is what is left of its limits if from now on its instance made nothing but decode steps like the
next one. Whatever else the instance does meanwhile, such as prefilling, is paid from there: the latency shifting of
TaiChi (section 2.4), which is exact for limits on means such as TPOT.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pdjax.latency import LatencyModel
from pdjax.schedulers.base import Ask, ClusterView, InstanceView, Row
from pdjax.traffic import Traffic

prefill_s = functools.lru_cache(maxsize=65536)(LatencyModel.prefill_s)  # (model, spec, tokens) -> seconds, alone


class Spare(NamedTuple):  # quickly made: a decision may look at hundreds
    """A row's spare time.

    Attributes:
        seconds: negative where its limits will be missed whatever happens.
        pass_s: the longest pass that its limit on single gaps allows.
        left_s: until its answer is complete, by decode steps alone.
    """

    seconds: float
    pass_s: float
    left_s: float


def answer_tokens(most: int, there: int, open_ended: bool, traffic: Traffic) -> int:
    """Tokens that an answer is expected to have in the end, `there` of which it has. Known where no stop can end it
    before `most`; else the mean of finished answers, or twice what there is once that is more."""
    if not open_ended or not traffic.output_tokens:
        return most
    return min(most, max(round(traffic.output_tokens), 2 * there, 2))


def spare(row: Row, ready_s: float, step_s: float, traffic: Traffic) -> Spare:
    """The spare time of a row whose instance has done all that was issued at `ready_s`, and then makes steps of
    `step_s`."""
    slo, tokens = row.ask.slo, answer_tokens(row.most, row.issued, row.ask.open_ended, traffic)
    left_s = (tokens - row.issued) * step_s
    end_s = math.inf
    if slo.tpot_ms is not None:
        end_s = min(row.first_s, ready_s) + slo.tpot_ms / 1e3 * (tokens - 1)
    if slo.e2e_ms is not None:
        end_s = min(end_s, row.ask.arrival_s + slo.e2e_ms / 1e3)
    pass_s = math.inf if slo.itl_p99_ms is None else slo.itl_p99_ms / 1e3
    return Spare(end_s - ready_s - left_s, pass_s, left_s)


def spares(view: InstanceView, cluster: ClusterView) -> list[Spare]:
    """Of all rows of an instance and of those on their way to it, with steps as long as when all of them are there."""
    ready_s, load, expected = cluster.now + view.busy_s, view.load, view.expected
    for row in expected:
        load = load.plus_row(row.ask.context_tokens + 1)
    step_s = view.latency.iteration_s(view.spec, load)
    return [spare(row, ready_s, step_s, cluster.traffic) for row in (*view.running, *expected)]


def least(rows: Iterable[Spare]) -> float:
    """The spare time of the row that has the least; rows that miss their limits anyhow do not count."""
    return min((row.seconds for row in rows if row.seconds >= 0), default=math.inf)


def queue_s(view: InstanceView, traffic: Traffic) -> float:
    """Seconds of prefilling the prompts that are queued on an instance, in passes of their own."""
    mean = max(round(traffic.prompt_tokens), 1)
    return view.pending_tokens / mean * prefill_s(view.latency, view.spec, mean) if view.pending_tokens else 0.0


def work_s(ask: Ask, view: InstanceView, traffic: Traffic) -> float:
    """Seconds of prefilling what is queued on `view`, and then the request."""
    return queue_s(view, traffic) + prefill_s(view.latency, view.spec, ask.context_tokens)


def ttft_s(ask: Ask, view: InstanceView, cluster: ClusterView, rows: Sequence[Spare]) -> float:
    """Seconds from now until the first token, if the prompt is put behind those of `view`: behind what is issued and
    queued, and behind the decode steps of rows that cannot spare so much time. `rows`: of `spares(view)`."""
    work = work_s(ask, view, cluster.traffic)
    return view.busy_s + max((row.left_s for row in rows if 0 <= row.seconds < work), default=0.0) + work


def tpot_s(ask: Ask, view: InstanceView, traffic: Traffic) -> float:
    """Seconds per output token if the request decodes on `view`: a step of all rows there and on their way, and its
    share of the prompts that are queued there, as far as its limit lets them run (TPOT is linear in the prefill tokens
    beside which a request decodes: TaiChi, section 2.3)."""
    load, context = view.load, ask.context_tokens + ask.max_new_tokens
    for _ in range(view.incoming + 1):
        load = load.plus_row(context)
    step = view.latency.iteration_s(view.spec, load)
    tokens = answer_tokens(ask.max_new_tokens, 1, ask.open_ended, traffic)
    shared = step + queue_s(view, traffic) / max(tokens - 1, 1)
    return shared if ask.slo.tpot_ms is None else min(shared, max(step, ask.slo.tpot_ms / 1e3))
