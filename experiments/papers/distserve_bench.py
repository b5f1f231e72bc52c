"""The systems of DistServe's evaluation (sections 6.1 and appendix B) as simulated clusters. A model, a system and a
rate enter, TTFT and TPOT of every request leave. Called by the parts of `pdjax.experiments.papers.distserve`.

What is taken from where:

- Pass times and KV memory: `pdjax.published`, constants that DistServe's authors profiled on A100-80G for their own
  engine and for vLLM of 2023. Nothing is fitted here.
- Placements: OPT-13B P(TP2) + D(TP1), OPT-66B P(TP4) + D(TP2, PP2) (appendix B); vLLM TP 1 and 4 (section 6.1).
- Limits of a pass: those that the authors' evaluation starts the servers with: DistServe's prefill passes 8192 tokens
  and 128 prompts, 1024 decode rows; vLLM's passes 16384 tokens, 1024 sequences.
- Swap: both may put KV of preempted rows into 16 GiB of host memory per GPU. DistServe does it; pdjax has no swap and
  computes such a row again on the prefill instance. So what its decode instance may hold is counted together, GPU and
  host (`swap`). vLLM of 2023 computes single answers again, as pdjax does.
- Requests per run: as the authors' client scripts, 100 per GPU for OPT-13B and 25 for OPT-66B. Such a run is over
  before queues have settled: longer ones come out worse, so their length is part of what was measured.
- Neither engine issues a step before the last one's tokens are read: `max_in_flight` is the number of stages.
- KV moves over NVLink within a node; the time is that of `network` in `distserve_transfer` and far below a step's, so
  that these clusters have no network.
"""

import dataclasses
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from pdjax import metrics, published, traces
from pdjax.curves import Curves, Decode
from pdjax.fleet import Fleet, Pool, build
from pdjax.goodput import Trial
from pdjax.messages import Role
from pdjax.record import FlipRecord, IterationRecord, MoveRecord, RequestRecord, TransferRecord
from pdjax.request import SLO, Request, State
from pdjax.schedulers.base import Scheduler
from pdjax.schedulers.colocated import Colocated
from pdjax.schedulers.disaggregated import Disaggregated
from pdjax.simulation import asks, poisson, serve

SYSTEMS = ("distserve", "vllm")
HOST_BYTES = 16 * 2**30  # of swap space per GPU (the evaluation's server scripts, --swap-space 16)
PREFILL = {"max_chunk": 8192, "max_chunks": 128}
DECODE = {"max_rows": 1024}
NOTHING_S = 1e-6  # of a pass that is not to be seen
VLLM = {"max_chunk": 16384, "max_chunks": 1024, "max_rows": 1024}

Lengths = Sequence[tuple[int, int]]


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """What the evaluation uses for a model with ShareGPT.

    Attributes:
        slo: table 1.
        prefill, decode, vllm: (TP, PP).
        per_gpu: requests of a run per GPU.
    """

    name: str
    slo: SLO
    prefill: tuple[int, int]
    decode: tuple[int, int]
    vllm: tuple[int, int]
    per_gpu: int


MODELS = (
    Model("opt-13b", SLO(ttft_ms=250.0, tpot_ms=100.0), (2, 1), (1, 1), (1, 1), 100),
    Model("opt-66b", SLO(ttft_ms=2500.0, tpot_ms=150.0), (4, 1), (2, 2), (4, 1), 25),
)


def named(model: str, engine: str, split: tuple[int, int]) -> published.Published:
    """Constants of a model on A100-80G split as (TP, PP). ValueError where there are none."""
    return published.get(f"{model}-a100-80g-{engine}-tp{split[0]}-pp{split[1]}")


def disaggregated(
    model: str,
    prefill: tuple[int, int],
    decode: tuple[int, int],
    *,
    counts: tuple[int, int] = (1, 1),
    swap: bool = True,
) -> Fleet:
    """DistServe: so many prefill and decode instances, each split as (TP, PP)."""
    sources = named(model, "distserve", prefill).pool(Role.PREFILL, counts[0], **PREFILL)
    return in_step([sources, _decoders(model, decode, counts[1], swap=swap)])


def decode_alone(model: str, decode: tuple[int, int]) -> Fleet:
    """A decode instance of DistServe whose prompts come prefilled: their prefill takes no time to speak of."""
    target = _decoders(model, decode, 1, swap=True)
    instant = Curves((NOTHING_S, 0.0, 0.0), (Decode(0, NOTHING_S, 0.0, 0.0),))
    source = Pool(Role.PREFILL, 1, instant, kv_tokens=1 << 22, kv_bytes_per_token=target.kv_bytes_per_token)
    return in_step([source, target])


def _decoders(model: str, split: tuple[int, int], count: int, *, swap: bool) -> Pool:
    pool = named(model, "distserve", split).pool(Role.DECODE, count, **DECODE)
    host_tokens = pool.devices * HOST_BYTES // pool.kv_bytes_per_token if swap else 0
    return dataclasses.replace(pool, kv_tokens=pool.kv_tokens + host_tokens)


def colocated(model: str, split: tuple[int, int], engine: str = "vllm") -> Fleet:
    """vLLM: one instance, split as (TP, PP)."""
    return in_step([named(model, engine, split).pool(Role.MIXED, 1, **VLLM)])


def in_step(pools: Sequence[Pool]) -> Fleet:
    """A cluster whose stages have one pass each, and no more, under way."""
    fleet = build(pools)
    return dataclasses.replace(
        fleet, specs=tuple(dataclasses.replace(spec, max_in_flight=spec.pp) for spec in fleet.specs)
    )


def evaluated(model: Model, system: str, *, swap: bool = True) -> Fleet:
    """As in the evaluation."""
    if system == "vllm":
        return colocated(model.name, model.vllm)
    return disaggregated(model.name, model.prefill, model.decode, swap=swap)


def policy(system: str) -> Scheduler:
    """A fresh one."""
    return Colocated() if system == "vllm" else Disaggregated(batch_tokens=PREFILL["max_chunk"])


# --- runs -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Played:
    """One run.

    Attributes:
        rate: requests per second of all.
        ttft_ms, tpot_ms: [requests] by arrival; `inf` for one that did not finish; TPOT 0 for an answer of one token.
        preempted: how often a row had to give up its pages.
    """

    rate: float
    ttft_ms: np.ndarray
    tpot_ms: np.ndarray
    preempted: int

    def met(self, slo: SLO, scale: float = 1.0) -> np.ndarray:
        """Who kept both limits, `scale` times those of `slo`; what has no limit is kept."""
        ttft_ms, tpot_ms = slo.ttft_ms or np.inf, slo.tpot_ms or np.inf
        kept: np.ndarray = (self.ttft_ms <= scale * ttft_ms) & (self.tpot_ms <= scale * tpot_ms)
        return kept

    def attainment(self, slo: SLO, scale: float = 1.0) -> float:
        """Of the requests, in percent."""
        return 100 * float(self.met(slo, scale).mean())

    def trial(self, slo: SLO, devices: int) -> Trial:
        """At its rate per device."""
        return Trial(self.rate / devices, tuple(map(bool, self.met(slo))))


class Times:
    """A sink that keeps TTFT and TPOT of every request, and no more."""

    def __init__(self, count: int) -> None:
        self.ttft_ms, self.tpot_ms = np.full(count, np.inf), np.full(count, np.inf)
        self.preempted = 0

    def token(self, request: Request, token: int, time_s: float, logprob: float | None) -> bool:
        return False

    def done(self, request: Request, record: RequestRecord) -> None:
        self.preempted += record.preemptions
        if record.state is State.FINISHED:
            self.ttft_ms[request.id] = metrics.ttft_ms(record)
            self.tpot_ms[request.id] = metrics.tpot_ms(record) or 0.0

    def iteration(self, record: IterationRecord) -> None:
        pass

    def transfer(self, record: TransferRecord) -> None:
        pass

    def revised(self, record: FlipRecord | MoveRecord) -> None:
        pass


def play(fleet: Fleet, scheduler: Scheduler, lengths: Lengths, rate: float, count: int, seed: int) -> Played:
    """`count` requests, lengths drawn from `lengths`, at `rate` per second in all, Poisson. One seed has the same
    requests at every rate, as in the evaluation."""
    drawn = np.random.default_rng(seed).integers(0, len(lengths), count)
    sink = Times(count)
    serve(fleet, asks([lengths[at] for at in drawn], poisson(rate, count, seed)), scheduler, sink)
    return Played(rate, sink.ttft_ms, sink.tpot_ms, sink.preempted)


@cache
def sharegpt(folder: Path) -> Lengths:
    """(prompt, answer) of ShareGPT with DistServe's mean lengths."""
    rows = traces.read_csv(folder / "datasets-derived" / "sharegpt_matched_lengths.csv", timed=False)
    return tuple((row.input_tokens, row.output_tokens) for row in rows)
