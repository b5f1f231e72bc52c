"""DistServe (OSDI'24, arXiv 2401.09670): goodput by prefill and decode on instances of their own. A `Setup` enters, an
`Outcome` leaves. Called by `pdjax.experiments.reproduce`.

The systems, and what of them is taken from where, are in `distserve_bench`; every other part of the paper that is
reproduced has a module: equations 1 to 3, figure 1, figure 8 with goodput per GPU and table 2, figure 11, figure 10.
"""

from pathlib import Path
from typing import Any

from pdjax.experiments.papers import (
    distserve_ablation,
    distserve_curves,
    distserve_figure1,
    distserve_queue,
    distserve_transfer,
)
from pdjax.experiments.papers.outcome import Outcome, Row, Setup


def run(setup: Setup) -> Outcome:
    """All of it. ValueError where the published data is not there."""
    setup.folder()  # before minutes are spent
    rows: list[Row] = [*distserve_queue.rows(setup), *distserve_figure1.rows(setup)]
    summary: dict[str, Any] = {}
    for part in (
        distserve_curves.figure_8,
        distserve_curves.table_2,
        distserve_ablation.rows,
        distserve_transfer.rows,
    ):
        made, found = part(setup)
        rows += made
        summary |= found

    def plot(path: Path) -> None:
        from pdjax.experiments.papers import distserve_plot  # needs matplotlib, which is optional

        distserve_plot.draw(summary, path)

    return Outcome("DistServe: goodput by disaggregating prefill and decode", tuple(rows), summary, plot)
