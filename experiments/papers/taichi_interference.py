"""How much of a row's TPOT is interference by prompts (TaiChi, section 2.3.1). Enters: a `Report` of instances that
prefill beside their rows. Leaves: for each request what it met, and how well a line explains its TPOT. Called by
`taichi`.

The *intensity* is the prompt tokens that were computed in the passes in which a request decoded, per token that it got
in them.
"""

import numpy as np

from pdjax import metrics
from pdjax.report import Report


def met(report: Report) -> np.ndarray:
    """(intensity, mean rows of its passes, TPOT in ms) of each request with two tokens or more whose row has not moved,
    [n, 3]."""
    found = []
    for index in range(len(report.specs)):
        passes = [one for one in report.iterations if one.instance == index and one.rows]
        ends = np.array([one.finished_s for one in passes])
        sums = np.zeros((len(passes) + 1, 3), int)
        sums[1:] = np.cumsum(
            [(one.chunk_tokens, one.rows * one.steps, one.steps) for one in passes] or sums[1:], axis=0
        )
        for record in report.records:
            tpot_ms, times = metrics.tpot_ms(record), record.timeline.token_s
            if record.decode_instance == index and tpot_ms is not None and not record.moves:
                first, last = np.searchsorted(ends, [times[0], times[-1]], side="right")
                tokens, rows, steps = (sums[last] - sums[first]).tolist()
                found.append((tokens / (len(times) - 1), rows / max(steps, 1), tpot_ms))
    return np.array(found, float).reshape(-1, 3)


def line(values: np.ndarray, *columns: int) -> tuple[list[float], float]:
    """TPOT as a constant and multiples of the columns of `met`, by least squares.

    Returns:
        the constant and the factors, and R^2: the share of the variance of TPOT that they explain.
    """
    tpot_ms = values[:, 2]
    matrix = np.column_stack([np.ones(len(values)), values[:, list(columns)]])
    factors, *_ = np.linalg.lstsq(matrix, tpot_ms, rcond=None)
    return factors.tolist(), 1 - float(np.var(tpot_ms - matrix @ factors)) / float(np.var(tpot_ms))
