"""Computes published results again with our controller and policies on the simulated cluster. Flags enter; for each
paper a table of what was published, what comes out here and the difference, summary.json and a picture leave. Run as
`python -m pdjax.experiments.reproduce --paper=distserve [--data=FOLDER]`.

Where a result is not reached the table says why. Exit status 0 says that the reproduction ran, not that it agrees.
"""

import dataclasses
import importlib
import importlib.util

from absl import flags as absl_flags
from rich.table import Table

from pdjax import provenance, report
from pdjax.experiments import flags, launcher, published_data
from pdjax.experiments.papers import PAPERS
from pdjax.experiments.papers.outcome import Outcome, Row, Setup

PAPER = absl_flags.DEFINE_list("paper", ["distserve"], f"Some of {', '.join(PAPERS)}; all.")
QUICK = absl_flags.DEFINE_bool("quick", False, "Fewer and shorter runs.")
for _name in ("seed", "out", "data"):
    absl_flags.declare_key_flag(_name)  # --help shows these


def table(outcome: Outcome) -> Table:
    """Published, ours, difference."""
    made = Table(title=outcome.title, title_justify="left")
    made.add_column("", overflow="fold")
    for name in ("published", "ours", "difference"):
        made.add_column(name, justify="right")
    made.add_column("")
    made.add_column("note", overflow="fold")
    for row in outcome.rows:
        mark = {None: "", True: "ok", False: "off"}[row.reached]
        made.add_row(row.what, _value(row.published, row), _value(row.ours, row), _difference(row), mark, row.note)
    return made


def _value(value: float | str | None, row: Row) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.4g} {row.unit}".strip()


def _difference(row: Row) -> str:
    if row.difference is None:
        return ""
    return f"{row.difference:+.1%}" if row.kind == "relative" else f"{row.difference:+.3g} {row.unit}".strip()


def entry(row: Row) -> dict[str, object]:
    """For summary.json."""
    return dataclasses.asdict(row) | {"difference": row.difference, "reached": row.reached}


def main(argv: list[str]) -> None:
    del argv
    names = list(PAPERS) if PAPER.value == ["all"] else PAPER.value
    unknown = [name for name in names if name not in PAPERS]
    if unknown or not names:
        raise ValueError(f"paper is {','.join(PAPER.value)!r}; allowed: some of {', '.join(PAPERS)}, or all")
    data = published_data.folder()
    console = launcher.console()
    setup = Setup(data, QUICK.value, flags.SEED.value, lambda line: console.print(line, highlight=False))
    outcomes = {}
    for name in names:
        outcomes[name] = importlib.import_module(f"pdjax.experiments.papers.{name}").run(setup)
        console.print(table(outcomes[name]))
    if not (folder := flags.OUT.value):
        return
    own = {"paper": names, "data": published_data.DATA.value, "quick": QUICK.value}
    summary = {
        "provenance": provenance.collect(flags.given() | own),
        "papers": {
            name: {"rows": [entry(row) for row in outcome.rows], **outcome.summary}
            for name, outcome in outcomes.items()
        },
        **{key: value for outcome in outcomes.values() for key, value in outcome.summary.items()},
    }
    path = report.write_summary(folder, summary)
    drawn = []
    if importlib.util.find_spec("matplotlib") is not None:
        for name, outcome in outcomes.items():
            if outcome.plot is not None:
                outcome.plot(path / f"{name}.png")
                drawn.append(f"{name}.png")
    console.print(f"{folder}/ has {', '.join(['summary.json', *drawn])}", highlight=False)


if __name__ == "__main__":
    launcher.run(main)
