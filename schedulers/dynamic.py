"""Places every request, and fills every pass, by what limits allow: between colocated and disaggregated (TaiChi).

Instances are P-heavy or D-heavy by their role, and all of them can do both. D-heavy ones decode, and prefill in the
time that their rows can spare. P-heavy ones prefill; rows stay there only while the others are full.

- *Prefill* (section 3.4): a prompt goes where its first token is predicted to come first. Among queued prompts, those
  that can still keep their TTFT limit come first.
- *Decode* (section 3.3): a row goes to the D-heavy instance with the fewest rows; `flows` moves it later.
- *Chunks*: the largest one that rows can spare the time for (`predict.spares`), beside them where that saves time.
- *Roles*: how many instances decode follows what arrives (`sliders`).

Its end points: with `mixed=True` all instances are MIXED and requests stay where they are prefilled (colocated); with
`decode_chunk=0` D-heavy ones prefill nothing (disaggregated).
"""

import dataclasses
import math
from collections.abc import Sequence

from pdjax.latency import Load, pass_sizes
from pdjax.messages import Role
from pdjax.record import Predicted
from pdjax.schedulers import predict
from pdjax.schedulers.base import (
    Ask,
    ClusterView,
    InstanceView,
    Place,
    Plan,
    Revision,
    Traits,
    Wait,
    able,
    decoders,
    prefillers,
    take_chunks,
)
from pdjax.schedulers.disaggregated import least_loaded
from pdjax.schedulers.flows import flow
from pdjax.schedulers.sliders import Roles

STEPS = 2.0  # decode steps of spare time are left to rows: predictions err
ISSUED = 3.0  # decode steps: behind more work than that nothing is issued while prompts wait
PATIENCE = 10.0  # times its TTFT limit: a prompt that is so late comes first again, or it might wait for ever
LOOKED = 64  # prompts at the front of a queue: of more, hardly one can be in time
SHOWN = 3  # alternatives in a reason
NEAREST = 4  # instances of a role whose rows are looked at: of more, hardly one is better, and each costs time


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A prompt on `source`, its row on `target`. Seconds from now; `at_least`: the TTFT may be longer."""

    source: InstanceView
    target: InstanceView
    ttft_s: float
    tpot_s: float
    at_least: bool = False

    @property
    def text(self) -> str:
        source, target = self.source.spec.index, self.target.spec.index
        where = f"all on {source}" if source == target else f"{source}->{target}"
        sign = ">= " if self.at_least else ""
        return f"{where} TTFT {sign}{1e3 * self.ttft_s:.0f} ms TPOT {1e3 * self.tpot_s:.1f} ms"


class Dynamic:
    """See the module's text.

    Args:
        stream_from: prompts of at least so many tokens are streamed where they move; None: all are pulled.
        decode_chunk: most prompt tokens in a pass of a D-heavy instance; None: what it takes, 0: none while another
            instance is left to prefill.
        mixed: instances are neither P-heavy nor D-heavy.
    """

    def __init__(self, stream_from: int | None = None, decode_chunk: int | None = None, mixed: bool = False) -> None:
        if stream_from is not None and stream_from < 1:
            raise ValueError(f"stream_from is {stream_from}; allowed: tokens >= 1, or None")
        if decode_chunk is not None and decode_chunk < 0:
            raise ValueError(f"decode_chunk is {decode_chunk}; allowed: tokens >= 0, or None")
        self.traits = Traits(colocated=mixed, moves=not mixed)
        self.decode_prefills = decode_chunk != 0  # of roles; those that flip need the programs for all
        self._stream_from = stream_from
        self._decode_chunk = decode_chunk
        self._roles = Roles()
        self._tpot_s = math.inf  # the shortest limit of late; each request lets it grow by a tenth
        self._turn = 0

    # --- placing ----------------------------------------------------------------------------------------------------

    def place(self, ask: Ask, cluster: ClusterView) -> Place | Wait:
        choices = self._choices(ask, cluster)
        if not choices:
            return Wait("no living instance can prefill, or none decode")
        best, *others = sorted(choices, key=lambda choice: (choice.at_least, choice.ttft_s))
        slo = ask.slo
        self._tpot_s = min(math.inf if slo.tpot_ms is None else slo.tpot_ms / 1e3, 1.1 * self._tpot_s)
        ttft_ms = 1e3 * (best.ttft_s + cluster.now - ask.arrival_s)
        verdict = "too late, the earliest is " if slo.ttft_ms is not None and ttft_ms > slo.ttft_ms else ""
        rest = "; ".join(choice.text for choice in others[:SHOWN])
        reason = f"dynamic: {verdict}{best.text}" + (f" (not: {rest})" if rest else "")
        source, target = best.source.spec.index, best.target.spec.index
        predicted = Predicted(ttft_ms, 1e3 * best.tpot_s if ask.max_new_tokens > 1 else None)
        if source == target:
            return Place(source, target, "whole", reason, predicted)
        if self._stream_from is None or ask.context_tokens < self._stream_from:
            return Place(source, None, "whole", reason, predicted)
        return Place(source, target, "stream", reason, predicted)

    def _choices(self, ask: Ask, cluster: ClusterView) -> list[Choice]:
        """One for each instance that may be the best, and some others. The rows of an instance are looked at only where
        its queue is short enough, and one of the shortest of its role: a decision costs little in a large cluster."""
        targets = decoders(cluster.instances)
        # A slot is left to each for a prompt of its own.
        free = [view for view in targets if view.rows + view.incoming + 1 < view.spec.max_rows]
        roomy = least_loaded(free) if free else None
        sources = [view for view in able(cluster.instances, *Role) if self._most(view)] or prefillers(cluster.instances)
        works = self._works_s(ask, sources, cluster)
        bounds = [view.busy_s + work_s for view, work_s in zip(sources, works, strict=True)]
        best_s = math.inf
        left = dict.fromkeys(Role, NEAREST)
        choices: list[Choice] = []
        for bound_s, work_s, view in sorted(zip(bounds, works, sources, strict=True), key=lambda triple: triple[0]):
            if bound_s >= best_s and len(choices) > SHOWN:
                break
            maybe = bound_s < best_s and left[view.role] > 0
            if not maybe and len(choices) > SHOWN:
                continue
            left[view.role] -= 1
            target = view if view in targets or (roomy is None and view.spec.max_rows) else roomy
            if target is None:
                continue
            ttft_s = self._ttft_s(ask, view, work_s, target, cluster) if maybe else bound_s
            best_s = min(best_s, ttft_s)
            choices.append(Choice(view, target, ttft_s, predict.tpot_s(ask, target, cluster.traffic), not maybe))
        return choices

    def _ttft_s(self, ask: Ask, view: InstanceView, work_s: float, target: InstanceView, cluster: ClusterView) -> float:
        """Seconds until the first token; where the row would stay and has no slot yet, one has to end before."""
        rows = predict.spares(view, cluster)
        full = target is view and view.rows + view.incoming >= view.spec.max_rows
        slot_s = float(rows.left_s.min()) if full and rows.size else 0.0
        if not self._slices(view):
            return slot_s + predict.ttft_s(view, work_s, rows)
        steps_s = self._passes(ask, view) * view.latency.iteration_s(view.spec, view.load)  # which rows make anyhow
        return slot_s + view.busy_s + rows.held_up_s(work_s - steps_s) + work_s

    def _works_s(self, ask: Ask, views: Sequence[InstanceView], cluster: ClusterView) -> list[float]:
        """Seconds of prefilling what is queued on each, and then the request: in few long passes that rows wait for, or
        where `decode_chunk` makes them short, in many that rows ride in."""
        works = predict.works_s(ask, views, cluster.traffic)
        if self._decode_chunk:
            for at, view in enumerate(views):
                if self._slices(view):
                    load = view.load.beside((self._most(view), 0))
                    works[at] = self._passes(ask, view) * view.latency.iteration_s(view.spec, load)
        return works

    def _slices(self, view: InstanceView) -> bool:
        """Whether passes with prompts are shorter there than the instance could take."""
        return self._most(view) not in (0, view.spec.max_chunk)

    def _passes(self, ask: Ask, view: InstanceView) -> int:
        return -(-(view.pending_tokens + ask.context_tokens) // self._most(view))

    def hand_off(self, ask: Ask, cluster: ClusterView) -> int | None:
        free = [view for view in decoders(cluster.instances) if view.room_for(ask)]
        return least_loaded(free).spec.index if free else None

    # --- passes -----------------------------------------------------------------------------------------------------

    def iterate(self, instance: InstanceView, cluster: ClusterView) -> Plan:
        if not instance.prefills:
            return Plan(decode=instance.rows > 0)
        first = instance.prefills[0]
        if not first.prefilled and not instance.startable(first):
            return Plan(decode=instance.rows > 0)
        step_s = instance.latency.iteration_s(instance.spec, instance.load.plus_row(1))
        if instance.busy_s > ISSUED * step_s:
            return Plan()  # what is decided when that is done is decided better
        rows = predict.spares(instance, cluster)
        if not rows.size:
            return Plan(self._take(instance, cluster, instance.spec.max_chunk))
        tokens, decode = self._pass(instance, rows)
        return Plan(self._take(instance, cluster, tokens), decode)

    def _most(self, view: InstanceView) -> int:
        """Prompt tokens in a pass."""
        if view.role is not Role.DECODE or self._decode_chunk is None:
            return view.spec.max_chunk
        return min(self._decode_chunk, view.spec.max_chunk)

    def _pass(self, instance: InstanceView, rows: predict.Spares) -> tuple[int, bool]:
        """(prompt tokens, whether rows take part) of the largest pass that these rows can spare the time for. Padded
        rows may cost more beside a chunk than alone: then they wait for it, and make their step after it."""
        spec, latency, load = instance.spec, instance.latency, instance.load
        step_s = latency.iteration_s(spec, load)
        spare_s, gap_s = rows.least() - STEPS * step_s, float(rows.pass_s.min())
        prior, best = instance.prefills[0].prefilled, (0, instance.rows > 0)
        for tokens in pass_sizes(spec, beside_rows=True):
            alone_s = latency.iteration_s(spec, Load(((tokens, prior),)))
            beside_s = latency.iteration_s(spec, load.beside((tokens, prior)))
            beside = instance.rows > 0 and beside_s <= alone_s + step_s
            wait_s = beside_s - step_s if beside else alone_s
            if wait_s <= spare_s and wait_s + step_s <= gap_s:
                best = tokens, beside
        return best

    def _take(self, instance: InstanceView, cluster: ClusterView, budget: int) -> tuple[tuple[Ask, int], ...]:
        """Prompt tokens until the budget is filled exactly; prompts that can still be in time come first."""
        ready_s = cluster.now + instance.busy_s

        def late(ask: Ask) -> bool:
            limit_s, waited_s = (ask.slo.ttft_ms or math.inf) / 1e3, ready_s - ask.arrival_s
            left = ask.context_tokens - ask.prefilled
            needed_s = predict.prefill_s(instance.latency, instance.spec, left)
            return limit_s - needed_s < waited_s < PATIENCE * limit_s

        budget = min(budget, self._most(instance) or budget)  # prompts are here: if it takes none, nobody else was left
        queue = instance.prefills[:LOOKED]
        order = sorted(queue, key=lambda ask: (late(ask), ask.prefilled == 0, ask.arrival_s, ask.id))
        return take_chunks(instance, budget, order)

    # --- what was decided before ------------------------------------------------------------------------------------

    def revise(self, cluster: ClusterView) -> list[Revision]:
        """One instance in turn is looked at, so that an event costs no more in a large cluster."""
        self._turn = (self._turn + 1) % len(cluster.instances)
        return [*self._roles.flip(cluster, self._tpot_s), *flow(cluster.instances[self._turn], cluster)]
