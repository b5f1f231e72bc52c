"""What an instance could still take on and keep an SLO: a view, its latency model and limits enter, numbers leave.

Called by `Engine.capacity`, and while a workload is replayed by its recorder, whose `Gauge` goes into the summary. Pure
arithmetic on predictions; nothing here measures, and nothing decides by it.
"""

import bisect
import dataclasses
from collections.abc import Iterable
from typing import Any

from pdjax.books import Books
from pdjax.request import SLO
from pdjax.schedulers.base import InstanceView


@dataclasses.dataclass(frozen=True, slots=True)
class Remaining:
    """Remaining capacity of one instance: three limits, each for itself; none is negative.

    Attributes:
        prefill_tokens: prompt tokens that could be queued here now, with the last of them still computed within the
            TTFT limit; None: there is no limit on TTFT.
        rows: decode rows of the present rows' mean context that could join with every step within the TPOT limit and a
            slot for each.
        pages: free ones.
    """

    prefill_tokens: int | None
    rows: int
    pages: int


def remaining(view: InstanceView, slo: SLO) -> Remaining:
    """The remaining capacity of an instance, as its latency model predicts it. A dead instance has none."""
    if not view.alive:
        return Remaining(0, 0, 0)
    return Remaining(_prefill_tokens(view, slo.ttft_ms), _rows(view, slo.tpot_ms), view.free_pages)


def _prefill_tokens(view: InstanceView, ttft_ms: float | None) -> int | None:
    """Passes of `max_chunk` tokens, beside the rows there, as many as end in time, and a shorter one after them."""
    if not view.spec.max_chunk:
        return 0
    if ttft_ms is None:
        return None

    def pass_s(tokens: int) -> float:
        chunks = ((tokens, 0),) if tokens else ()
        return view.latency.iteration_s(view.spec, view.load.beside(*chunks))

    most, limit_s = view.spec.max_chunk, ttft_ms / 1e3
    full = int(limit_s / max(pass_s(most), 1e-9))
    rest = bisect.bisect_right(range(1, most), limit_s - full * pass_s(most), key=pass_s)
    return max(full * most + rest - view.pending_tokens, 0)


def _rows(view: InstanceView, tpot_ms: float | None) -> int:
    """Without rows there is no mean context: half of the longest request stands in for it."""
    there = view.rows + view.incoming
    slots = max(view.spec.max_rows - there, 0)
    if tpot_ms is None:
        return slots
    mean = view.context_tokens / view.rows if view.rows else view.spec.max_model_len / 2

    def step_s(more: int) -> float:
        context = round((view.incoming + more) * mean)
        # Rows that are not here yet are taken to be no longer than those that are.
        return view.latency.decode_s(
            view.spec, there + more, view.context_tokens + context, view.load.attended_tokens + context
        )

    return bisect.bisect_right(range(1, slots + 1), tpot_ms / 1e3, key=step_s)


def queued_prompt_tokens(books: Books) -> int:
    """Prompt tokens that arrived and were not issued to any instance yet, whether placed or not."""
    return sum(live.context_tokens for live in books.queue) + sum(lane.pending_tokens for lane in books.instances)


def strictest(slos: Iterable[SLO]) -> SLO:
    """The smallest of each limit; None where nobody has one."""
    given = list(slos)
    limits = {
        field.name: min((limit for slo in given if (limit := getattr(slo, field.name)) is not None), default=None)
        for field in dataclasses.fields(SLO)
    }
    return SLO(**limits)


class Gauge:
    """Remaining capacity over a run: the least that there was, and what there was at last, of every instance.

    Sampled whenever an instance has finished a pass: that is when anything of it changes.

    Args:
        slo: the limits to keep.
    """

    def __init__(self, slo: SLO) -> None:
        self._slo = slo
        self._least: dict[int, Remaining] = {}
        self._last: dict[int, Remaining] = {}
        self._most_queued = 0

    def sample(self, books: Books, instance: int) -> None:
        now = remaining(books.instances[instance], self._slo)
        self._last[instance] = now
        self._least[instance] = _least(self._least.get(instance, now), now)
        self._most_queued = max(self._most_queued, queued_prompt_tokens(books))

    def summary(self) -> dict[str, Any]:
        """For summary.json: `queued_prompt_tokens_max`, and `instances`: number, least and last of each that ran."""
        return {
            "queued_prompt_tokens_max": self._most_queued,
            "instances": [
                {
                    "instance": index,
                    "least": dataclasses.asdict(self._least[index]),
                    "last": dataclasses.asdict(self._last[index]),
                }
                for index in sorted(self._last)
            ],
        }


def _least(before: Remaining, now: Remaining) -> Remaining:
    tokens = [value for value in (before.prefill_tokens, now.prefill_tokens) if value is not None]
    return Remaining(min(tokens, default=None), min(before.rows, now.rows), min(before.pages, now.pages))
