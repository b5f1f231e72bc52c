"""Pictures can be drawn of any run, and the red lane counts what it says."""

import struct

import pytest

from pdjax.messages import Role
from pdjax.record import IterationRecord, RequestRecord, Timeline, TransferRecord
from pdjax.report import Report
from pdjax.request import SLO, State
from pdjax.testing import spec

plots = pytest.importorskip("pdjax.plots", reason="needs matplotlib")


def report(*token_s, transfers=(), iterations=()):
    records = [
        RequestRecord("r", 5, (0,) * len(times), State.FINISHED, "length", SLO(), Timeline(10.0, token_s=list(times)))
        for times in token_s
    ]
    return Report(records, list(iterations), list(transfers), 5.0, (spec(0, Role.PREFILL), spec(1, Role.DECODE)))


RUN = report(
    (10.5, 11.0, 11.1),
    (10.5, 12.5),
    transfers=[TransferRecord("0", 0, 1, 4096, 10.5, 10.9)],
    iterations=[
        IterationRecord(0, 0, 64, 0, 10.0, 10.5),
        IterationRecord(1, 0, 0, 2, 10.9, 11.0),
        IterationRecord(1, 1, 16, 2, 10.95, 12.5),
    ],
)
EMPTY = report(())


def size(path):
    """Width and height in the header of a PNG."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])


@pytest.mark.parametrize("draw", [plots.latency_by_run, plots.timeline])
@pytest.mark.parametrize("runs", [{"one": RUN}, {"one": RUN, "two": RUN, "none": EMPTY}, {"none": EMPTY}])
def test_a_picture_of_any_number_of_runs_is_a_png(tmp_path, draw, runs):
    draw(runs, tmp_path / "p.png")
    width, height = size(tmp_path / "p.png")
    assert width > 1000 and height > 200


def test_the_timeline_grows_with_the_runs(tmp_path):
    plots.timeline({"one": RUN}, tmp_path / "one.png")
    plots.timeline({"one": RUN, "two": RUN}, tmp_path / "two.png")
    assert size(tmp_path / "two.png")[1] > size(tmp_path / "one.png")[1]


def test_stalls_count_the_answers_in_a_long_gap():
    times, counts = plots.stalls(RUN, limit_ms=400)
    assert times == pytest.approx([0.5, 0.5, 1.0, 2.5])
    assert counts == [1, 2, 1, 0]


def test_a_gap_of_the_limit_is_no_stall():
    assert plots.stalls(report((10.0, 10.5)), limit_ms=500) == ([], [])
