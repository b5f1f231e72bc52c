"""How many prefill instances a decode instance needs, over the decode batch. Flags or a profile enter; a table, an
answer, and with --out summary.json and ratio.png leave. Run as
`python -m pdjax.experiments.ratio [--profile=out/profile.json]` or with the times of a pass and a step
(`--prefill_ms=100 --decode_ms=25`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import flags as absl_flags
from rich.table import Table

from pdjax import pd_ratio, profile, provenance, report
from pdjax.experiments import analytic_plots, flags, launcher
from pdjax.pd_ratio import Point, Side

PREFILL_MS = absl_flags.DEFINE_float(
    "prefill_ms", 100.0, "Of a pass over the prompts.", lower_bound=1e-3, upper_bound=1e9
)
DECODE_MS = absl_flags.DEFINE_float(
    "decode_ms", 25.0, "Of a decode step of one row.", lower_bound=1e-3, upper_bound=1e9
)
ROW_MS = absl_flags.DEFINE_float(
    "row_ms", 0.0, "That each further row adds to a step.", lower_bound=0.0, upper_bound=1e9
)
PROMPTS = absl_flags.DEFINE_integer("prompts", 1, "Of one prefill pass, B_p.", lower_bound=1)
PROMPT_TOKENS = absl_flags.DEFINE_integer("prompt_tokens", 512, "Of a prompt; for a profile.", lower_bound=1)
OUTPUT_TOKENS = absl_flags.DEFINE_integer("output_tokens", 501, "Of an answer, L.", lower_bound=2)
MAX_ROWS = absl_flags.DEFINE_integer("max_rows", 0, "Largest decode batch; 0: the profile's, or 64.", lower_bound=0)
for _name in ("profile", "out"):
    absl_flags.declare_key_flag(_name)  # --help shows these

LEAST, MOST = 3.0, 8.0  # decode instances per prefill instance: what is said to be usual


def inputs() -> tuple[Side, Callable[[int], float], int, str]:
    """The prefill side, the seconds of a step of so many rows, the largest batch, and where the times come from.

    Of a profile, a pass over B_p prompts takes B_p times one prompt: it is their tokens that take the time.
    """
    if not flags.PROFILE.value:
        side = Side(PREFILL_MS.value / 1e3, PROMPTS.value, OUTPUT_TOKENS.value)
        first_s, more_s = DECODE_MS.value / 1e3, ROW_MS.value / 1e3
        return side, lambda rows: first_s + more_s * (rows - 1), MAX_ROWS.value or 64, "given times"
    known = profile.load(flags.PROFILE.value)
    context = PROMPT_TOKENS.value + OUTPUT_TOKENS.value // 2
    side = Side(PROMPTS.value * known.prefill_s(PROMPT_TOKENS.value), PROMPTS.value, OUTPUT_TOKENS.value)
    most = MAX_ROWS.value or known.kinds[0].spec.max_rows
    return side, lambda rows: known.decode_s(rows, context), most, known.origin


def table(side: Side, points: Sequence[Point]) -> Table:
    """A row for each power of two among the batches, and the last."""
    out = Table(title=f"T_p {1e3 * side.prefill_s:.4g} ms for B_p {side.prompts}, L {side.output_tokens}")
    for column in ("B_d", "T_d, ms", "N_p : N_d", "decode tokens/s"):
        out.add_column(column, justify="right")
    for one in points:
        if one.rows & (one.rows - 1) == 0 or one is points[-1]:
            out.add_row(str(one.rows), f"{1e3 * one.decode_s:.4g}", one.text, f"{one.rows / one.decode_s:.4g}")
    return out


def answer(points: Sequence[Point]) -> str:
    """For which batches the ratio is the usual one."""
    found = pd_ratio.between(points, LEAST, MOST)
    if found is None:
        ends = f"{points[0].text} at B_d {points[0].rows}, {points[-1].text} at B_d {points[-1].rows}"
        return f"Between 1:{MOST:g} and 1:{LEAST:g} at no batch up to {points[-1].rows}: {ends}"
    return f"Between 1:{MOST:g} and 1:{LEAST:g} for B_d from {found[0]} to {found[1]}; {points[0].text} at B_d 1"


def main(argv: list[str]) -> None:
    del argv
    side, step_s, most, origin = inputs()
    points = pd_ratio.curve(side, step_s, range(1, most + 1))
    console = launcher.console()
    console.print(
        f"N_p / N_d = (T_p / B_p) / (T_d(B_d) x (L - 1) / B_d), from {origin}", highlight=False, soft_wrap=True
    )
    console.print(table(side, points))
    console.print(answer(points), highlight=False, soft_wrap=True)
    if folder := flags.OUT.value:
        holders = (PREFILL_MS, DECODE_MS, ROW_MS, PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS, MAX_ROWS)
        summary = {
            "provenance": provenance.collect(flags.given() | {holder.name: holder.value for holder in holders}),
            "times": origin,
            "prefill": dataclasses.asdict(side),
            "points": [dataclasses.asdict(one) for one in points],
            "usual": pd_ratio.between(points, LEAST, MOST),
        }
        report.write_summary(folder, summary)
        analytic_plots.ratio(points, (LEAST, MOST), Path(folder) / "ratio.png")
        console.print(f"{folder}/ has summary.json and a picture", highlight=False)


if __name__ == "__main__":
    launcher.run(main)
