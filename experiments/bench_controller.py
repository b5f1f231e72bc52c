"""How many decode rows the controller advances per second in simulation: batches that do not change, on one core. Flags
enter; a table and `summary.json` leave. Run as `python -m pdjax.experiments.bench_controller`.

The rows of one decode instance run to their ends, with one iteration for every step (`max_steps` 1) and with runs.
"""

import time
from typing import Any

from absl import flags as absl_flags
from rich.console import Console
from rich.table import Table

from pdjax import provenance, report
from pdjax.experiments import flags, launcher
from pdjax.messages import Role
from pdjax.request import Request, SamplingParams
from pdjax.schedulers import Disaggregated
from pdjax.simulated import Timing
from pdjax.testing import World, spec

BAR = 200_000  # rows per second that are enough for clusters of a thousand instances
RUN = 4096  # steps

absl_flags.declare_key_flag("out")
ROWS = absl_flags.DEFINE_integer("rows", 64, "Of the decode batch.", lower_bound=1)
TOKENS = absl_flags.DEFINE_integer("tokens", 4000, "Of an answer.", lower_bound=2)


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


def main(argv: list[str]) -> None:
    del argv
    rates = {steps: rows_per_s(ROWS.value, TOKENS.value, steps) for steps in (1, RUN)}
    table = Table(
        "steps an iteration stands for", "rows/s", f"bar {BAR}", title="decode rows advanced by the controller"
    )
    for steps, rate in rates.items():
        table.add_row(str(steps), f"{rate:,.0f}", "ok" if rate >= BAR else "below")
    Console().print(table)
    if folder := flags.OUT.value:
        entries: dict[str, Any] = {str(steps): {"value": rate, "bar": BAR} for steps, rate in rates.items()}
        origin = provenance.collect({"rows": ROWS.value, "tokens": TOKENS.value})
        report.write_summary(folder, {"provenance": origin, "rows_per_s": entries})


if __name__ == "__main__":
    launcher.run(main)
