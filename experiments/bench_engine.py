"""How much of the machine the engine leaves to its programs. Enters: nothing but installed weights. Leaves:
`engine_efficiency`, and output tokens per second for both dtypes. Called by `pdjax.experiments.bench_programs`.

The workload is offline: 64 prompts of 64 to 256 tokens, 64 tokens out each, all there at the start. One instance serves
it; the passes that the controller ordered are then run again on another instance, by a loop without engine, queue or
thread, and the ratio of the two times is the efficiency.
"""

import collections
import dataclasses
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pdjax
from pdjax import eventlog
from pdjax.experiments import bench_cases
from pdjax.instance import Pending
from pdjax.messages import InstanceSpec, Iteration
from pdjax.schedulers.base import Ask, ClusterView, Place, Traits
from pdjax.schedulers.colocated import Colocated
from pdjax.workload import Workload, parse

BAR = 0.85
KIND, REQUESTS = "uniform:64-256,64-64", 64
_CHUNK, _ROWS, _MAX_LEN, _PAGE = 512, 64, 512, 64


class Alone(Colocated):
    """Prefill-first on the decode instance; the engine's other one, which it always has, does nothing."""

    traits = Traits(prefill_decodes=False)

    def place(self, ask: Ask, cluster: ClusterView) -> Place:
        return Place(1, 1, "whole", "one core, one instance")


def workload() -> Workload:
    """The requests, greedy."""
    return parse(
        KIND,
        num_requests=REQUESTS,
        vocab_size=bench_cases.MODEL.vocab_size,
        max_model_len=_MAX_LEN,
        rate=math.inf,
    )


def measure(report: Callable[[str], None]) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """({"engine_efficiency": entry}, output tokens per second by dtype)."""
    ratios, speeds = {}, {}
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "events.jsonl"
            served_s, tokens, spec = _serve(dtype, str(log))
            speeds[dtype] = tokens / served_s
            report(f"engine, {dtype}: {tokens} tokens in {served_s:.1f} s")
            if dtype == "float32":
                ran_s = _run_again(eventlog.read(log), spec)
                value = ran_s / served_s
                ratios["engine_efficiency"] = {
                    "value": value, "bar": BAR, "ok": value >= BAR, "at_most": False, "ms": 1e3 * served_s
                }  # fmt: skip
                report(f"engine_efficiency: {value:.3f}")
    return ratios, speeds


def _serve(dtype: str, log: str) -> tuple[float, int, InstanceSpec]:
    """(seconds, output tokens, the instance that served)."""
    config = pdjax.EngineConfig(
        model="smollm2-135m",
        dtype=dtype,
        scheduler=Alone(),
        prefill_chunk=32,
        decode_chunk=_CHUNK,
        decode_max_batch=_ROWS,
        max_model_len=_MAX_LEN,
        page_size=_PAGE,
        stream_layers=0,
        event_log=log,
    )
    with pdjax.Engine(config) as engine:
        report = engine.replay(workload())
        return report.duration_s, sum(len(record.token_ids) for record in report.records), engine.specs[1]


def _run_again(log: eventlog.Log, spec: InstanceSpec) -> float:
    """Seconds of the same passes, as many in flight as the engine has."""
    one = bench_cases.instance(dataclasses.replace(spec, index=0), "float32")
    passes = [command for entry in log.entries for command in entry.commands if isinstance(command, Iteration)]
    one.warmup()
    began = time.perf_counter()
    flying: collections.deque[Pending] = collections.deque()
    for order in passes:
        flying.append(one.run(order, lambda unit: None))
        if len(flying) == spec.max_in_flight:
            flying.popleft().wait()
    while flying:
        flying.popleft().wait()
    return time.perf_counter() - began
