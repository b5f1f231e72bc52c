"""How many instances should mainly decode: the slider that `dynamic` moves while it serves. Enters: what arrived lately
(`pdjax.traffic`) and what an instance's steps cost. Leaves: at most one `Flip`, with hysteresis.

With x output tokens per second for each of n instances and steps of a + b * rows, Little's law gives the rows of each:
rows = x * (a + b * rows). The fewest instances are wanted on which those steps keep the TPOT limit and the rows have
slots: one more would only spread the rows, and time that is left over prefills in either role.
"""

import bisect
import dataclasses
import math

from pdjax.latency import Load
from pdjax.messages import Role
from pdjax.schedulers.base import ClusterView, Flip, InstanceView, able
from pdjax.schedulers.disaggregated import least_loaded
from pdjax.traffic import Traffic

KEPT = 0.9  # of a limit is planned for: the mix of a moment differs from the mean
LOOK_S = 0.25  # between two looks: averages change slowly, and a look at a large cluster costs as much as a decision
HOLD_S = 5.0  # for which another number must be wanted before a role changes
MIN_ARRIVALS = 5  # before which nothing is known; what comes late costs more than a flip, which reloads nothing


def step_s(view: InstanceView, rows: int, traffic: Traffic) -> float:
    """Seconds of a decode step of so many rows of the mean request, half way through."""
    context = round(traffic.prompt_tokens + traffic.output_tokens / 2)
    return view.latency.iteration_s(view.spec, Load((), rows, rows * context, rows * context))


def line(view: InstanceView, traffic: Traffic) -> tuple[float, float]:
    """Seconds of a step with one row, and of each further row."""
    most = max(view.spec.max_rows, 2)
    one, all_ = step_s(view, 1, traffic), step_s(view, most, traffic)
    return one, (all_ - one) / (most - 1)


def rows_of(rate: float, traffic: Traffic, one: float, each: float) -> float:
    """Rows at a time if `rate` requests per second decode on an instance with steps of this `line`; inf: ever more."""
    tokens = rate * max(traffic.output_tokens - 1, 0)  # the first comes from the prefill
    return tokens * (one - each) / (1 - tokens * each) if tokens * each < 1 else math.inf


def wanted(view: InstanceView, count: int, traffic: Traffic, now: float, tpot_s: float) -> int:
    """Of `count` instances like `view`, how many should decode; at least one, and one is left to prefill.

    Args:
        tpot_s: the limit on TPOT that requests have; inf: none.
    """
    (one, each), rate = line(view, traffic), traffic.rate(now)

    def enough(n: int) -> bool:
        rows = rows_of(rate / n, traffic, one, each)
        return rows <= KEPT * view.spec.max_rows and step_s(view, max(1, round(rows)), traffic) <= KEPT * tpot_s

    return 1 + bisect.bisect_left(range(1, max(count - 1, 1)), True, key=enough)  # more instances, fewer rows on each


@dataclasses.dataclass(slots=True)
class Roles:
    """Moves the number of D-heavy instances, one by one, after another number has been wanted for HOLD_S."""

    _side: int = 0
    _since_s: float = 0.0
    _looked_s: float = -math.inf

    def flip(self, cluster: ClusterView, tpot_s: float) -> list[Flip]:
        """The instance that should change its role now, if there is one: none while another one does."""
        traffic, now = cluster.traffic, cluster.now
        if traffic.arrivals < MIN_ARRIVALS or not traffic.output_tokens:
            return []
        if now - self._looked_s < LOOK_S:
            return []
        self._looked_s = now
        pool = able(cluster.instances, Role.PREFILL, Role.DECODE)
        if len(pool) < 3:
            return []
        if any(view.next_role is not None for view in cluster.instances):
            return []
        decode = [view for view in pool if view.role is Role.DECODE]
        prefill = [view for view in pool if view.role is Role.PREFILL]
        want = wanted(pool[0], len(pool), traffic, now, tpot_s)
        side = self._held(now, (want > len(decode)) - (want < len(decode)))
        why = (
            f"{want} of {len(pool)} instances should decode {traffic.rate(now):.2f} requests/s of "
            f"{traffic.prompt_tokens:.0f} + {traffic.output_tokens:.0f} tokens"
        )
        if side > 0 and len(prefill) > 1:
            idle = min(prefill, key=lambda view: (view.pending_tokens, view.spec.index))
            return [Flip(idle.spec.index, Role.DECODE, why)]
        if side < 0 and len(decode) > 1:
            return [Flip(least_loaded(decode).spec.index, Role.PREFILL, why)]
        return []

    def _held(self, now: float, side: int) -> int:
        """The side, once it has been the same for HOLD_S; the next step takes its time again."""
        if side != self._side:
            self._side, self._since_s = side, now
        if not side or now - self._since_s < HOLD_S:
            return 0
        self._since_s = now
        return side
