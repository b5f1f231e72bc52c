"""Tables for people: the entries of `summary.json` enter, a rich table leaves. Called by the launchers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

Run = Mapping[str, Any]


def comparison(runs: Sequence[Run]) -> Table:
    """One column per run, one row per number. `runs` are entries of summary.json's `runs`."""
    table = Table()
    table.add_column("")
    for run in runs:
        table.add_column(run["scheduler"], justify="right")
    for name, cell in _ROWS:
        table.add_row(name, *(cell(run) for run in runs))
    table.add_section()
    for index, target in enumerate(runs[0]["targets"]):
        table.add_row(_words(target["target"]), *(_verdict(run["targets"][index]) for run in runs))
    return table


def _percentiles(key: str, *names: str) -> Callable[[Run], str]:
    return lambda run: " / ".join(_number(run[key][name]) for name in names)


def _ended(run: Run) -> str:
    rest = [f"{run[how]} {how}" for how in ("rejected", "failed", "aborted") if run[how]]
    return ", ".join([f"{run['completed']} of {run['num_requests']}", *rest])


def _attained(run: Run) -> str:
    if run["slo_attainment"] is None:
        return "-"
    colour, word = ("green", "reaches") if run["attained"] else ("red", "below")
    return f"{run['slo_attainment']:.0%} [{colour}]{word} {run['attainment_target']:.0%}[/{colour}]"


def _admitted(run: Run) -> str:
    if run["admitted_attainment"] is None:
        return "-"
    degraded = f", {run['degraded']} degraded" if run["degraded"] else ""
    return f"{run['admitted_attainment']:.0%} of {run['admitted']}{degraded}"


def classes(runs: Sequence[Run]) -> Table:
    """One row per run and class of requests, as `metrics.summarize` counts them."""
    table = Table()
    for name in ("", "class", "requests", "rejected", "degraded", "met the SLO", "of the admitted"):
        table.add_column(name, justify="left" if name in ("", "class") else "right")
    for run in runs:
        for name, numbers in run["by_class"].items():
            counts = (str(numbers[key]) for key in ("num_requests", "rejected", "degraded"))
            shares = ("-" if (share := numbers[key]) is None else f"{share:.0%}" for key in _SHARES)
            table.add_row(run["scheduler"], name, *counts, *shares)
    return table


_SHARES = ("slo_attainment", "admitted_attainment")


def _hidden(run: Run) -> str:
    overlap = run["kv_transfer"]["overlap"]
    return "-" if overlap is None else f"{overlap:.0%}"


def _predicted(*names: str) -> Callable[[Run], str]:
    def cell(run: Run) -> str:
        errors = [run["prediction"][name]["mean_error"] for name in names]
        return " / ".join("-" if error is None else f"{error:.0%}" for error in errors)

    return cell


_ROWS: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("devices", lambda run: str(run["devices"])),
    ("completed", _ended),
    ("TTFT p50 / p95, ms", _percentiles("ttft_ms", "p50", "p95")),
    ("TPOT p50 / p95, ms", _percentiles("tpot_ms", "p50", "p95")),
    ("longest gap p50 / max, ms", _percentiles("max_itl_ms", "p50", "max")),
    ("E2E p50 / p99, ms", _percentiles("e2e_ms", "p50", "p99")),
    ("role flips, rows moved", lambda run: f"{len(run['flips'])}, {run['moves']}"),
    ("KV moved, requests", lambda run: str(run["kv_transfer"]["count"])),
    ("KV moved, MB", lambda run: _number(run["kv_transfer"]["bytes"] / 1e6)),
    ("KV moving p50 / max, ms", lambda run: _percentiles("ms", "p50", "max")(run["kv_transfer"])),
    ("KV time hidden by prefill", _hidden),
    ("output tokens/s", lambda run: _number(run["output_tokens_per_s"])),
    ("throughput, requests/s", lambda run: f"{run['throughput_rps']:.2f}"),
    ("goodput at SLO, requests/s", lambda run: f"{run['goodput_rps']:.2f}"),
    ("met the SLO", _attained),
    ("met it, of the admitted", _admitted),
    ("prefill / decode / mixed passes predicted within, mean", _predicted("prefill", "decode", "mixed")),
    ("TTFT / TPOT predicted within, mean", _predicted("ttft_ms", "tpot_ms")),
    ("warm-up, s", lambda run: _number(run.get("warmup_s"))),
)


def _number(value: float | None) -> str:
    """Three digits, "-" for what is undefined."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _words(target: str) -> str:
    """ "ttft_ms p95 <= 500" as a row's name."""
    metric, rest = target.split(" ", 1)
    return f"{metric.removesuffix('_ms').upper()} {rest} ms"


def _verdict(check: Mapping[str, Any]) -> str:
    colour, word = ("green", "ok") if check["ok"] else ("red", "missed")
    return f"[{colour}]{_number(check['value'])} {word}[/{colour}]"
