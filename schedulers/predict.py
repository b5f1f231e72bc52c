"""What a placement would cost: TTFT and TPOT of a request, and the time that running rows can spare. Enter: views of
requests and instances. Leave: seconds. Pure arithmetic on latency models; used by `dynamic` and `admission`.

A row's *spare time* is what is left of its limits if from now on its instance made nothing but decode steps like the
next one. Whatever else the instance does meanwhile, such as prefilling, is paid from there: the latency shifting of
TaiChi (section 2.4), which is exact for limits on means such as TPOT.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pdjax.latency import Latency
from pdjax.messages import InstanceSpec
from pdjax.schedulers.base import Ask, ClusterView, InstanceView, RowTable
from pdjax.traffic import Traffic


@functools.lru_cache(maxsize=65536)
def prefill_s(model: Latency, spec: InstanceSpec, tokens: int) -> float:
    """`Latency.prefill_s` of a prompt alone."""
    return model.prefill_s(spec, tokens)


class Spares(NamedTuple):
    """The spare time of rows, [n] each.

    Attributes:
        seconds: negative where limits will be missed whatever happens.
        pass_s: the longest pass that a limit on single gaps allows.
        left_s: until the answer is complete, by decode steps alone.
    """

    seconds: np.ndarray
    pass_s: np.ndarray
    left_s: np.ndarray

    @property
    def size(self) -> int:
        return len(self.seconds)

    def after(self, delay_s: float) -> "Spares":
        """Of the rows whose answers take longer than that."""
        late = self.left_s > delay_s
        return Spares(self.seconds[late], self.pass_s[late], self.left_s[late])

    def least(self) -> float:
        """Of the row that has the least; rows that miss their limits anyhow do not count."""
        return float(self.seconds.min(where=self.seconds >= 0, initial=math.inf))

    def held_up_s(self, work_s: float) -> float:
        """How long rows that could not spare `work_s` still run, by decode steps alone."""
        short = (self.seconds >= 0) & (self.seconds < work_s)
        return float(self.left_s.max(where=short, initial=0.0))


def answer_tokens(most: int, there: int, open_ended: bool, traffic: Traffic) -> int:
    """Tokens that an answer is expected to have in the end, `there` of which it has. Known where no stop can end it
    before `most`; else the mean of known ones, or twice what there is once that is more."""
    if not open_ended or not traffic.output_tokens:
        return most
    return min(most, max(round(traffic.output_tokens), 2 * there, 2))


def answers_tokens(rows: RowTable, traffic: Traffic) -> np.ndarray:
    """`answer_tokens` of each row, [n]."""
    if not traffic.output_tokens or not rows.open_ended.any():
        return rows.most
    guess = np.minimum(rows.most, np.maximum(2 * rows.issued, max(round(traffic.output_tokens), 2)))
    return np.where(rows.open_ended, guess, rows.most)


def spares(view: InstanceView, cluster: ClusterView) -> Spares:
    """Of all rows of an instance and of those on their way to it, once it has done all that was issued, and with steps
    as long as when all of them are there."""
    rows = view.table
    if not len(rows.asks):
        return NO_ROWS
    ready_s = cluster.now + view.busy_s
    tokens = answers_tokens(rows, cluster.traffic)
    left_s = (tokens - rows.issued) * view.latency.iteration_s(view.spec, view.full_load)
    gaps = tokens - 1
    allowed_s = np.where(gaps > 0, rows.tpot_s * np.maximum(gaps, 1), math.inf)
    end_s = np.minimum(np.minimum(rows.first_s, ready_s) + allowed_s, rows.end_s)
    return Spares(end_s - ready_s - left_s, rows.pass_s, left_s)


def _mean_prompt(traffic: Traffic) -> int:
    """Tokens that every queued prompt is taken to have."""
    return max(round(traffic.prompt_tokens), 1)


def queue_s(view: InstanceView, traffic: Traffic) -> float:
    """Seconds of prefilling the prompts that are queued on an instance, in passes of their own."""
    mean = _mean_prompt(traffic)
    return view.pending_tokens / mean * prefill_s(view.latency, view.spec, mean) if view.pending_tokens else 0.0


def works_s(ask: Ask, views: Sequence[InstanceView], traffic: Traffic) -> list[float]:
    """Seconds of prefilling what is queued on each of `views`, and then the request. What prompts take is looked up
    once for all instances of one make: policies ask about whole clusters."""
    mean = _mean_prompt(traffic)
    known: dict[tuple[int, int], tuple[float, float]] = {}
    works = []
    for view in views:
        model, make = view.latency, (id(view.latency), view.twin)
        if make not in known:
            known[make] = prefill_s(model, view.spec, mean), prefill_s(model, view.spec, ask.context_tokens)
        mean_s, own_s = known[make]
        works.append(view.pending_tokens / mean * mean_s + own_s)
    return works


def ttft_s(view: InstanceView, work_s: float, rows: Spares) -> float:
    """Seconds from now until the first token, if the prompt is put behind those of `view`: behind what is issued,
    behind the decode steps of rows that cannot spare so much time, and when all of `work_s` (`works_s`) is done.
    `rows`: of `spares(view)`."""
    return view.busy_s + rows.held_up_s(work_s) + work_s


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


NO_ROWS = Spares(*(np.zeros(0) for _ in range(3)))
