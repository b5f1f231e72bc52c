"""Plays a workload in virtual time: a policy, a workload and a latency model enter, the `Report` of the run leaves.
Called by the launchers that can do without an engine, and by scripts that look at a policy.

Instances are those that an engine of the same configuration would have. What an iteration takes is what the latency
model says; nothing else of the machine is there.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from pdjax import build, simulation
from pdjax.config import EngineConfig
from pdjax.fleet import Fleet
from pdjax.latency import LatencyModel, Load, attended, fit
from pdjax.messages import InstanceSpec
from pdjax.models.config import ModelConfig
from pdjax.report import Report
from pdjax.request import SLO, Request
from pdjax.schedulers import SCHEDULERS
from pdjax.schedulers.base import Scheduler, traits_of
from pdjax.workload import Workload

# SmolLM2-135M in float32 on one core (Xeon, 2.1 GHz): what a pass takes in ms, by prompt tokens and prior context, and
# by rows and the context of each.
PREFILLS = {(32, 0): 136, (64, 0): 276, (128, 0): 551, (128, 256): 659, (192, 0): 828, (256, 0): 1062, (256, 256): 1255}
DECODES = {
    (1, 1): 41, (1, 257): 43, (2, 1): 66, (2, 257): 73, (4, 1): 76, (4, 257): 82, (8, 1): 92, (8, 257): 101,
    (16, 1): 133, (16, 257): 175,
}  # fmt: skip
MIXED = {(64, 16, 257): 480, (128, 16, 257): 695}


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The SLO points of a comparison, as multiples of what an idle instance takes: TTFT of the prefill of a mean
    prompt, TPOT of a decode step of `ROWS` rows of mean context."""

    ttft: float
    tpot: float


ROWS = 6
POINTS = {"tight_tpot": Limits(10, 1.3), "tight_ttft": Limits(2, 6), "balanced": Limits(4, 2)}


def slo_points(prefill_s: float, step_s: float, scale: float = 1.0) -> dict[str, SLO]:
    """The limits of `POINTS` in milliseconds, all multiplied by `scale`."""
    return {
        name: SLO(ttft_ms=1e3 * scale * limits.ttft * prefill_s, tpot_ms=1e3 * scale * limits.tpot * step_s)
        for name, limits in POINTS.items()
    }


def usual_latency(spec: InstanceSpec) -> LatencyModel:
    """Fitted to the measurements above; KV moves at 1 GB/s after 1 ms."""
    samples = [(Load(((tokens, prior),)), ms) for (tokens, prior), ms in PREFILLS.items()]
    samples += [(_rows(spec, rows, context), ms) for (rows, context), ms in DECODES.items()]
    samples += [(_rows(spec, rows, context).beside((tokens, 0)), ms) for (tokens, rows, context), ms in MIXED.items()]
    return fit(spec, [(load, 1e-3 * ms) for load, ms in samples])


def _rows(spec: InstanceSpec, rows: int, context: int) -> Load:
    return Load((), rows, rows * context, attended([context] * rows, spec.row_block))


@dataclasses.dataclass(frozen=True, slots=True)
class Virtual:
    """An engine in virtual time.

    Attributes:
        config: instances and their limits; its scheduler does not matter.
        model: whose KV and context it has.
        latency: of an instance; `usual_latency` where nothing is known.
        platform: of the devices; how large KV is follows from it.
        actual: what passes take, where policies believe `latency`; None: that.
    """

    config: EngineConfig
    model: ModelConfig
    latency: Callable[[InstanceSpec], LatencyModel] | None = None
    platform: str = "cpu"
    actual: Callable[[InstanceSpec], LatencyModel] | None = None

    def specs(self, scheduler: Scheduler) -> tuple[InstanceSpec, ...]:
        return build.specs_of(self.config, self.model, traits_of(scheduler), self.platform)

    def model_of(self, spec: InstanceSpec) -> LatencyModel:
        return self.latency(spec) if self.latency else _usual(_whole(spec))

    def actual_of(self, spec: InstanceSpec) -> LatencyModel:
        return self.actual(spec) if self.actual else self.model_of(spec)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request."""
        return self.specs(SCHEDULERS["colocated"](None))[0].max_model_len

    def play(self, scheduler: str | Scheduler, workload: Workload) -> Report:
        """Serves the workload from an empty cluster.

        Args:
            scheduler: a name, or a fresh policy.
            workload: an open loop of token ids.
        """
        policy = SCHEDULERS[scheduler](self.config.stream_from) if isinstance(scheduler, str) else scheduler
        specs = self.specs(policy)
        actual, believed = (tuple(map(of, specs)) for of in (self.actual_of, self.model_of))
        return simulation.simulate(
            Fleet(specs, actual, (1,) * len(specs), believed=believed),
            sorted(requests_of(workload), key=lambda request: request.arrival_s),
            policy,
            max_queue=self.config.max_queue,
            transfer_timeout_s=self.config.transfer_timeout_s,
            on_failure=self.config.on_failure,
        )


def requests_of(workload: Workload) -> list[Request]:
    """What the controller would be told by an engine.

    Raises:
        ValueError: the workload is a closed loop, or a prompt is no list of token ids.
    """
    if workload.clients is not None:
        raise ValueError(f"workload has {workload.clients} clients; allowed in virtual time: arrivals of an open loop")
    requests = []
    for number, item in enumerate(workload.items):
        if not isinstance(item.prompt, list) or not isinstance(item.prompt[0], int):
            raise ValueError(
                f"workload item {number} is text; allowed in virtual time: kinds that are driven by lengths"
            )
        ids: Sequence[int] = item.prompt
        requests.append(
            Request(
                number,
                tuple(ids),
                item.sampling,
                slo=item.slo,
                arrival_s=item.arrival_s,
                user_id=item.user_id,
            )
        )
    return requests


def _whole(spec: InstanceSpec) -> InstanceSpec:
    """One key for all instances that have the same programs."""
    return dataclasses.replace(spec, index=0, num_pages=2, ranks=())


_usual = functools.lru_cache(maxsize=64)(usual_latency)
