"""What the check of a GPU must reach. Enters: a figure and the name of its goal. Leaves: an entry of `checks` in its
summary.json. Called by the parts of `pdjax.experiments.gpu_check`.
"""

from typing import Any

# Name -> (bar, whether it is the most that is allowed; else it is the least).
GOALS = {
    "prefill_of_peak": (0.6, False),
    "decode_of_bandwidth": (0.8, False),
    "tokens_equal_float32": (1.0, False),
    # Against the CPU's float32, for the worst token of the worst layer. float32 sums in another order; with bfloat16
    # every product rounds its rows to 8 bits first, 0.2 % each, and 30 layers pass that on.
    "kv_error_float32": (1e-3, True),
    "kv_error_bfloat16": (0.1, True),
}


def judge(goal: str, value: float) -> dict[str, Any]:
    """{value, bar, at_most, ok} of a figure. NaN reaches nothing."""
    bar, at_most = GOALS[goal]
    return {"value": value, "bar": bar, "at_most": at_most, "ok": value <= bar if at_most else value >= bar}
