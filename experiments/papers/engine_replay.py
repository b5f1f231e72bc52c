"""A real vLLM server's requests, served again in virtual time by `ChunkedColocated` from the operator table of its GPU;
and the constants of H200 beside the table they were fitted to. Called by `pdjax.experiments.reproduce`; reads
llmservingsim/ and dynamo/ of the data folder.

The server (vLLM 0.19.0, Llama-3.1-8B in bf16 on one RTX PRO 6000, LLMServingSim's validation run) got 300 requests at
10 a second, more than it can serve, so that most of TTFT is the wait for one of its 128 rows: an error of a step's time
shows there many times over. Nothing here is fitted to these requests.
"""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pdjax import metrics, operator_tables, published, simulation
from pdjax.experiments.papers.outcome import Outcome, Row, Setup
from pdjax.experiments.papers.served import Served, read_columns, read_requests
from pdjax.fleet import Pool, build
from pdjax.latency import Latency, Load
from pdjax.messages import Role
from pdjax.operators import Operators
from pdjax.report import Report
from pdjax.schedulers.colocated import ChunkedColocated

MODEL = "llmservingsim/{}/RTXPRO6000/Llama-3.1-8B"
LAYERS = 32
WEIGHT_BYTES = 2 * 8.03e9
KV_BYTES_PER_TOKEN = 2 * LAYERS * 8 * 128 * 2  # K and V, layers, kv heads, head size, bf16
MAX_MODEL_LEN = 131072
SKEW = 0.0543  # skew_fit.per_tp.1.alpha_default of the profile's meta.yaml: rows of unequal contexts, measured apart
# The profile is of eager passes; the server replays captured graphs. What these save on this GPU and model was measured
# by a later version of the profiler, on a vLLM that it does not name (LLMServingSim, profiler/README.md, "Step sweep");
# vLLM captures up to twice `max_num_seqs` tokens.
GRAPHS = {"graph_decode_s": 587e-6, "graph_mixed_s": 482e-6}
NOTES = {
    "TTFT mean": "LLMServingSim itself: -4.0 %",
    "TTFT P50": "LLMServingSim itself: -8.6 %",
    "TPOT mean": "LLMServingSim itself: -1.0 %",
    "E2E mean": "LLMServingSim itself: -1.8 %",
    "TTFT P99": "a wait of 600 steps, each 2 to 4 % too long: the profile is of eager passes (variants: with graphs)",
}


def run(setup: Setup) -> Outcome:
    folder = setup.folder()
    bench, profile = folder / MODEL.format("bench"), folder / MODEL.format("profile")
    rows, budget = (
        int(_number(bench / "meta.json", "engine_kwargs", name)) for name in ("max_num_seqs", "max_num_batched_tokens")
    )
    memory_gb, used = (
        _number(bench / "config.json", "nodes", 0, "instances", 0, "npu_mem", name) for name in ("mem_size", "mem_util")
    )
    kv_tokens = int((1e9 * memory_gb * used - WEIGHT_BYTES) / KV_BYTES_PER_TOKEN)
    real = read_requests(bench / "requests.jsonl")

    def replayed(latency: Latency) -> list[Served]:
        pool = Pool(
            Role.MIXED,
            1,
            latency,
            kv_tokens,
            KV_BYTES_PER_TOKEN,
            max_rows=rows,
            max_chunk=budget,
            max_model_len=MAX_MODEL_LEN,
        )
        requests = simulation.asks([one.lengths for one in real], [one.arrival_s for one in real])
        return _served(simulation.simulate(build([pool]), requests, ChunkedColocated(budget)))

    table = functools.partial(operator_tables.gpu, profile, LAYERS)
    setup.say(f"{len(real)} requests, {rows} rows, passes of {budget} tokens, KV of {kv_tokens} tokens")
    ours = replayed(table(skew=SKEW))
    lines = _compared(real, ours)
    if not setup.quick:
        lines += _variants(real, table, replayed, 2 * rows)
    if (folder / "dynamo").is_dir():
        lines += _h200(folder / "dynamo")
    series = read_columns(bench / "timeseries.csv", ("t", "running", "waiting"))
    return Outcome(
        "vLLM 0.19.0 on an RTX PRO 6000, Llama-3.1-8B: its requests served again",
        tuple(lines),
        {
            "engine_replay_tpot_mean_error": lines[0].difference,
            "engine_replay_ttft_p50_error": lines[1].difference,
        },
        functools.partial(_draw, real, ours, series),
    )


def _served(report: Report) -> list[Served]:
    served = []
    for record in report.records:
        line = record.timeline
        if line.prefill_start_s is None or line.first_token_s is None or line.last_token_s is None:
            raise RuntimeError(f"request {record.request_id} was not served: {record.reason}")
        served.append(
            Served(
                (record.prompt_tokens, len(record.token_ids)),
                line.arrival_s,
                line.prefill_start_s,
                line.first_token_s,
                line.last_token_s,
            )
        )
    return served


# --- rows -----------------------------------------------------------------------------------------------------------


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _p(percent: int) -> Callable[[Sequence[float]], float]:
    return lambda values: metrics.percentile(values, percent)


ASKED = ("TPOT mean", Served.tpots_ms, _mean, 0.05), ("TTFT P50", Served.ttfts_ms, _p(50), 0.15)
SLOWEST = "TTFT P99", Served.ttfts_ms, _p(99), None
SHOWN = (
    ("TPOT P50", Served.tpots_ms, _p(50), None),
    ("TPOT P99", Served.tpots_ms, _p(99), None),
    ("TTFT mean", Served.ttfts_ms, _mean, None),
    SLOWEST,
    ("E2E mean", Served.e2es_ms, _mean, None),
    ("E2E P99", Served.e2es_ms, _p(99), None),
)


def _compared(real: Sequence[Served], ours: Sequence[Served]) -> list[Row]:
    lines = [
        Row(what, value(of(real)), value(of(ours)), "ms", tolerance, note=NOTES.get(what, ""))
        for what, of, value, tolerance in (*ASKED, *SHOWN)
    ]
    lines.append(Row("output tokens per second", _throughput(real), _throughput(ours), "tokens/s"))
    lines.append(Row("most requests waiting", _most_waiting(real), _most_waiting(ours)))
    return lines


def _throughput(served: Sequence[Served]) -> float:
    first, last = min(one.arrival_s for one in served), max(one.last_s for one in served)
    return sum(one.lengths[1] for one in served) / (last - first)


def _most_waiting(served: Sequence[Served]) -> int:
    return int(max(Served.waiting(served, np.array([one.arrival_s for one in served]))))


def _variants(
    real: Sequence[Served],
    table: Callable[..., Operators],
    replayed: Callable[[Latency], list[Served]],
    graph_tokens: int,
) -> list[Row]:
    """What parts of the model are worth, none of them fitted."""
    lines = []
    for what, latency, note in (
        (
            "with captured graphs",
            table(skew=SKEW, graph_tokens=graph_tokens, **GRAPHS),
            "what graphs save as the profiler's authors publish it, not fitted here",
        ),
        ("rows of unequal contexts at no cost", table(), "the profile's skew factor left out"),
    ):
        ours = replayed(latency)
        for name, of, value, _ in (*ASKED, SLOWEST):
            lines.append(Row(f"variant, {what}: {name}", value(of(real)), value(of(ours)), "ms", note=note))
    return lines


def _h200(folder: Path) -> list[Row]:
    """The formula of `pdjax.published` against the table that it was fitted to."""
    entry = published.get("llama3.1-8b-fp8-h200-vllm-tp1-pp1")
    spec = build([entry.pool(Role.MIXED)]).specs[0]
    table = "h200_llama31-8b-fp8_vllm_tp1_{}.csv"
    prefill = [
        (Load(((int(tokens), 0),)), ms)
        for tokens, ms in read_columns(folder / table.format("prefill"), ("isl", "ttft_ms"))
    ]
    decode = [
        (Load((), int(rows), int(tokens)), ms)
        for rows, tokens, ms in read_columns(folder / table.format("decode"), ("batch", "active_kv_tokens", "itl_ms"))
        if rows <= spec.max_rows  # with more, the engine lets the rest wait
    ]
    lines = []
    for what, points in (("prefill", prefill), ("decode", decode)):
        errors = [abs(1e3 * entry.latency.iteration_s(spec, load) / ms - 1) for load, ms in points]
        note = f"largest {max(errors):.1%} of {len(errors)} points"
        lines.append(Row(f"H200 table, {what}: mean error", None, 100 * float(np.mean(errors)), "%", note=note))
    return lines


# --- files and pictures ---------------------------------------------------------------------------------------------


def _number(path: Path, *keys: str | int) -> float:
    """A number of a JSON file, by the keys that lead to it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        for key in keys:
            value = value[key]
    except OSError as error:
        raise ValueError(f"cannot read {str(path)!r} ({error.strerror}); allowed: a readable file") from None
    except (ValueError, LookupError, TypeError):
        value = None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        name = ".".join(map(str, keys))
        raise ValueError(f"{path}: {name} is {value!r}; allowed: JSON with a number > 0 there")
    return value


def _draw(real: Sequence[Served], ours: Sequence[Served], series: Sequence[tuple[float, ...]], path: Path) -> None:
    """TTFT and TPOT as shares of requests; requests that run and that wait over time."""
    from pdjax import plots  # needs matplotlib

    figure = plots.canvas(12.0, 3.8)
    for place, (title, of) in enumerate((("TTFT, s", Served.ttfts_ms), ("TPOT, ms", Served.tpots_ms)), 1):
        axes = figure.add_subplot(1, 3, place)
        for served, colour, name in ((real, plots.GREY, "server"), (ours, plots.DECODE, "simulated")):
            values = np.sort(of(served)) * (1e-3 if title.endswith(", s") else 1.0)
            axes.plot(values, np.arange(1, len(values) + 1) / len(values), color=colour, linewidth=1.8, label=name)
        axes.set_title(f"{title}: share of requests below", loc="left", fontsize=11, fontweight="bold")
        axes.set_ylim(0, 1)
        axes.grid(axis="y", color=plots.GRID, linewidth=0.8)
        axes.legend(frameon=False, fontsize=9)
        plots.bare(axes)
    axes = figure.add_subplot(1, 3, 3)
    times, running, waiting = (np.array(column) for column in zip(*series, strict=True))
    for logged, simulated, colour, name in (
        (running, Served.running(ours, times), plots.DECODE, "running"),
        (waiting, Served.waiting(ours, times), plots.PREFILL, "waiting"),
    ):
        axes.plot(times, logged, color=plots.GREY, linewidth=1.0)
        axes.plot(times, simulated, color=colour, linewidth=1.8, label=name)
    axes.set_title("Requests over time, s (grey: server)", loc="left", fontsize=11, fontweight="bold")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=plots.GRID, linewidth=0.8)
    axes.legend(frameon=False, fontsize=9)
    plots.bare(axes)
    figure.savefig(path)
