"""How fast the controller is in simulation, on one core. Flags enter; tables and `summary.json` leave. Run as
`python -m pdjax.experiments.bench_controller [--trace=azure:FILE]`.

Decode rows per second of batches that do not change: the rows of one decode instance run to their ends, with one
iteration for every step (`max_steps` 1) and with runs. And requests per minute of disaggregated clusters of 64
instances (OPT-13B on an A100 each) at one rate: one that keeps up with it, and one with too few decode instances, where
KV waits and prompts back up. Lengths are a trace's, drawn again and again, or like those of the Azure conversation
trace; with how much memory grows over ten times the requests.
"""

import itertools
import random
import resource
import time
from collections.abc import Iterator
from typing import Any

from absl import flags as absl_flags
from rich.table import Table

from pdjax import fleet, provenance, published, report, simulation, traces
from pdjax.experiments import flags, launcher
from pdjax.messages import Role
from pdjax.request import Request, SamplingParams
from pdjax.schedulers import Disaggregated
from pdjax.simulated import Timing
from pdjax.tally import Tally
from pdjax.testing import World, spec

BAR = 200_000  # rows per second that are enough for clusters of a thousand instances
RUN = 4096  # steps
REQUESTS_BAR = 100_000  # a minute
RATE = 100.0  # requests/s
CLUSTERS = {"keeps up": (24, 40), "overloaded": (40, 24)}  # prefill and decode instances
# Ten equal parts with the means and the medians of the Azure conversation trace (Patel et al., Splitwise, ISCA 2024):
# prompts 1155 and 1020 tokens, answers 211 and 129; drawn apart.
PROMPTS = (13, 120, 300, 560, 980, 1060, 1150, 1400, 1900, 4062)
ANSWERS = (7, 26, 60, 90, 120, 138, 260, 395, 424, 590)

absl_flags.declare_key_flag("out")
ROWS = absl_flags.DEFINE_integer("rows", 64, "Of the decode batch.", lower_bound=1)
TOKENS = absl_flags.DEFINE_integer("tokens", 4000, "Of an answer.", lower_bound=2)
REQUESTS = absl_flags.DEFINE_integer(
    "requests", 2000, "Of the cluster's short run; the long one has ten times as many.", lower_bound=1
)
TRACE = absl_flags.DEFINE_string(
    "trace", "", "Whose lengths: azure:FILE or mooncake:FILE; empty: like Azure's conversations."
)


def rows_per_s(rows: int, tokens: int, max_steps: int) -> float:
    """Decode rows advanced per second of this process."""
    length = 128 + tokens
    pages = 1 + rows * -(-length // 64)
    sizes = {"page_size": 64, "num_pages": pages, "max_rows": rows, "max_model_len": length, "max_chunk": 512}
    specs = [spec(0, Role.PREFILL, **sizes), spec(1, Role.DECODE, **sizes)]
    world = World(specs, Disaggregated(), machine=lambda _: Timing(), max_steps=max_steps)
    prompt = tuple(range(128))
    world.add(*(Request(number, prompt, SamplingParams(max_tokens=tokens)) for number in range(rows)))
    began = time.perf_counter()
    while world.step():
        pass
    return rows * tokens / (time.perf_counter() - began)


def lengths(trace: str) -> Iterator[tuple[int, int]]:
    """Prompt and answer of request after request, without end. ValueError naming the trace."""
    pairs = list(traces.Stream(trace).lengths) if trace else list(itertools.product(PROMPTS, ANSWERS))
    order = random.Random(0)
    while True:
        yield order.choice(pairs)


def requests_per_min(prefill: int, decode: int, count: int, trace: str) -> tuple[float, Tally]:
    """Simulated requests per minute of this process's time, and what came of them."""
    one = published.get("opt-13b-a100-80g-distserve-tp1-pp1")
    cluster = fleet.build([one.pool(Role.PREFILL, prefill), one.pool(Role.DECODE, decode)])
    tally = Tally()
    requests = simulation.asks(lengths(trace), simulation.poisson(RATE, count, seed=0))
    began = time.process_time()
    simulation.serve(cluster, requests, Disaggregated(), tally)
    return 60 * count / (time.process_time() - began), tally


def main(argv: list[str]) -> None:
    del argv
    rates = {steps: rows_per_s(ROWS.value, TOKENS.value, steps) for steps in (1, RUN)}
    table = Table(
        "steps an iteration stands for", "rows/s", f"bar {BAR}", title="decode rows advanced by the controller"
    )
    for steps, rate in rates.items():
        table.add_row(str(steps), f"{rate:,.0f}", "ok" if rate >= BAR else "below")
    launcher.console().print(table)
    table = Table(
        "prefill + decode",
        "requests",
        "requests/min",
        f"bar {REQUESTS_BAR}",
        "TTFT, TPOT p50, ms",
        "peak memory, MiB",
        title="clusters of 64 instances",
    )
    runs: dict[str, dict[str, dict[str, float]]] = {}
    for name, (prefill, decode) in CLUSTERS.items():
        runs[name] = {}
        for count in (REQUESTS.value, 10 * REQUESTS.value):
            rate, tally = requests_per_min(prefill, decode, count, TRACE.value)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            runs[name][str(count)] = {"value": rate, "bar": REQUESTS_BAR, "peak_memory_mib": peak}
            table.add_row(
                f"{prefill} + {decode}: {name}",
                str(count),
                f"{rate:,.0f}",
                "ok" if rate >= REQUESTS_BAR else "below",
                f"{tally.ttft_ms.percentile(50):.0f}, {tally.tpot_ms.percentile(50):.0f}",
                f"{peak:.0f}",
            )
    launcher.console().print(table)
    if folder := flags.OUT.value:
        entries: dict[str, Any] = {str(steps): {"value": rate, "bar": BAR} for steps, rate in rates.items()}
        origin = provenance.collect(
            {"rows": ROWS.value, "tokens": TOKENS.value, "requests": REQUESTS.value, "trace": TRACE.value}
        )
        report.write_summary(folder, {"provenance": origin, "rows_per_s": entries, "requests_per_min": runs})


if __name__ == "__main__":
    launcher.run(main)
