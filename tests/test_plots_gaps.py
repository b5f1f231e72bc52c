"""Gaps and strips of any runs can be drawn."""

import pytest

from tests.test_plots import EMPTY, RUN, size

plots_gaps = pytest.importorskip("pdjax.plots_gaps", reason="needs matplotlib")


@pytest.mark.parametrize("runs", [{}, {"two": RUN}, {"two": RUN, "none": EMPTY}])
def test_gaps_of_all_and_strips_of_some_are_a_png(tmp_path, runs):
    gaps = {"one": [10.0, 11.0, 12.0], "two": [10.0, 900.0], "none": [11.0]}
    plots_gaps.interference(gaps, runs, dict.fromkeys(runs, (0.5, 2.0)), "title", tmp_path / "p.png")
    width, height = size(tmp_path / "p.png")
    assert width > 1000 and height > 300
