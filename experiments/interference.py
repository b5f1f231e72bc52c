"""What prompts do to answers that are being decoded, measured: the gaps between tokens of long answers, without prompts
and while prompts arrive, colocated (prefill-first, chunked) and disaggregated. Flags enter; a table, summary.json,
the requests of every point and interference.png leave. Run as `python -m pdjax.experiments.interference`.

All devices are used in every mode, and all modes with prompts get the same requests. Colocated, two MIXED instances
have half of the rows and half of the prompts each; disaggregated, one prefills all prompts and the other decodes all
rows. Prompts come one for each instance at a time, at a period at which `share` of the iterations of a prefill-first
instance carry a part of a prompt, as its latency model predicts it; what it came to is printed. Prompts ask for two
tokens: their KV does move, and their rows are gone at once.

Rank 0, which hands out the tokens, has the core of the first instance: disaggregated that is the one that prefills, so
that it does not disturb what is measured; colocated it is one of the two.
"""

import dataclasses
import importlib.util
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags as absl_flags
from rich.console import Console
from rich.table import Table

from pdjax import metrics, provenance, report, workload
from pdjax.config import EngineConfig
from pdjax.experiments import flags, launcher, measured
from pdjax.latency import LatencyModel
from pdjax.messages import InstanceSpec
from pdjax.models import source
from pdjax.record import RequestRecord
from pdjax.workload import Item, Workload

absl_flags.adopt_module_key_flags(flags)  # --help shows them
ROWS = absl_flags.DEFINE_integer("rows", 4, "Long answers, all instances together.", lower_bound=1)
PROMPT_TOKENS = absl_flags.DEFINE_integer("prompt_tokens", 512, "Of each prompt that disturbs them.", lower_bound=1)
SHARE = absl_flags.DEFINE_float(
    "share", 0.2, "Of the iterations of a prefill-first instance, those that carry a part of a prompt.",
    lower_bound=0.01, upper_bound=0.9,
)  # fmt: skip
SECONDS = absl_flags.DEFINE_float("seconds", 50.0, "How long prompts arrive.", lower_bound=0.1)

PURE, ALONE = "pure_decode", "pure_decode_disaggregated"
MODES = ("prefill_first", "chunked", "disaggregated")
POINTS = {"colocated": (PURE, "prefill_first"), "colocated_chunked": ("chunked",), "disaggregated": (ALONE, MODES[2])}
"""The points of each engine, in order."""
SAME_ROWS = {"prefill_first": PURE, "chunked": PURE, "disaggregated": ALONE}
"""The point without prompts in which an instance has the same rows. Against pure decode, which is colocated,
disaggregated also pays for all rows being on one instance."""
NAMES = {
    PURE: "pure decode",
    "prefill_first": "prefill-first",
    "chunked": "chunked",
    ALONE: "disaggregated, no prompts",
    "disaggregated": "disaggregated",
}
"""How points are called, in the order of the table; the last two decode all rows on one instance."""
HEADS = {PURE: "pure\ndecode", "prefill_first": "prefill-\nfirst", "chunked": "chunked"} | {
    ALONE: "disagg.,\nno prompts", "disaggregated": "disagg."
}  # fmt: skip
"""The same in few letters."""
BARS = {"prefill_first": (3.0, math.inf), "disaggregated": (0.0, 1.3)}
"""What the ITL P95 over that of pure decode is expected to be at least and at most."""
ROW_PROMPT, ANSWER = 16, 2  # tokens of a row's prompt, and of a prompt's answer
LEAD_STEPS = 20  # that all rows make before the first prompt comes


@dataclasses.dataclass(frozen=True, slots=True)
class Mix:
    """When prompts come, so that a prefill-first instance has the share of iterations that is asked for.

    Attributes:
        lead_s: before the first prompts, for the rows to start.
        period_s: between two arrivals at one instance.
        periods: arrivals at each instance.
        row_tokens: of a long answer, so that it lasts for all of them.
        prefill_busy: of the time, how much one prefill instance needs for the prompts of all `instances`; from 1 on
            prompts pile up there.
    """

    lead_s: float
    period_s: float
    periods: int
    row_tokens: int
    prefill_busy: float


def mix(
    model: LatencyModel, spec: InstanceSpec, *, instances: int, rows: int, prompt: int, share: float, seconds: float
) -> Mix:
    """The mix for instances that have `rows` rows each, by their latency model.

    A prompt takes k = ceil(prompt / max_chunk) passes; with n = k (1 - share) / share decode steps for each prompt, a
    share k / (k + n) of the iterations carries a part of it, and the period is the time of all of these.

    Raises:
        ValueError: `seconds` are too few for two periods, or the prompt is too long.
    """
    if prompt + ANSWER > spec.max_model_len:
        raise ValueError(f"prompt_tokens is {prompt}; allowed: at most {spec.max_model_len - ANSWER}")
    passes = -(-prompt // spec.max_chunk)
    prefill_s = model.prefill_s(spec, prompt)
    steps = passes * (1 - share) / share
    row_tokens = ROW_PROMPT
    for _ in range(2):  # the step depends on the contexts, and these on how many steps there are
        context = rows * (ROW_PROMPT + row_tokens // 2)
        step_s = model.decode_s(spec, rows, context, context)
        period_s = prefill_s + steps * step_s
        periods = int(seconds / period_s)
        row_tokens = LEAD_STEPS + round(steps * periods)
    if periods < 2:
        raise ValueError(f"seconds is {seconds:g}; allowed: at least {2 * period_s:.3g}, in which two prompts come")
    lead_s = 2 * rows * model.prefill_s(spec, ROW_PROMPT) + LEAD_STEPS * step_s
    row_tokens = min(row_tokens, spec.max_model_len - ROW_PROMPT)
    return Mix(lead_s, period_s, periods, row_tokens, instances * prefill_s / period_s)


def requests(mix: Mix, *, rows: int, prompt: int, instances: int, **words: Any) -> Workload:
    """The rows, all at once, and behind them the prompts, one for each instance at a time. `words`: vocab_size,
    max_model_len and seed, as `pdjax.workload.parse` takes them."""
    long = workload.parse(f"fixed:{ROW_PROMPT},{mix.row_tokens}", num_requests=rows, rate=math.inf, **words)
    count = mix.periods * instances
    short = workload.parse(f"fixed:{prompt},{ANSWER}", num_requests=count, rate=math.inf, **words)
    items = [dataclasses.replace(item, user_id=f"row-{item.user_id}") for item in long.items]
    for number, item in enumerate(short.items):
        arrival_s = mix.lead_s + number // instances * mix.period_s
        items.append(Item(arrival_s, item.prompt, item.sampling, item.slo, f"prompt-{item.user_id}"))
    note = (
        f"{rows} answers of {mix.row_tokens} tokens; {instances} prompts of {prompt} tokens every {mix.period_s:.3g} s"
    )
    return Workload(tuple(items), note)


def without_prompts(both: Workload) -> Workload:
    """The same rows alone."""
    items = tuple(item for item in both.items if item.user_id.startswith("row-"))
    return Workload(items, both.note.split(";")[0])


def window(records: Sequence[RequestRecord], mix: Mix) -> tuple[float, float]:
    """Seconds of a run in which gaps count: from the first prompt on, until the last prompts' period is over or the
    first row ends."""
    ends = [record.timeline.token_s[-1] for record in _rows(records)]
    return mix.lead_s, min(*ends, mix.lead_s + mix.periods * mix.period_s)


def gaps_ms(records: Sequence[RequestRecord], begin_s: float, end_s: float) -> list[tuple[float, float]]:
    """(second at which it ends, milliseconds) of each gap between two tokens of a row, within a time."""
    pairs = (pair for record in _rows(records) for pair in itertools.pairwise(record.timeline.token_s))
    return [(late, 1e3 * (late - early)) for early, late in pairs if begin_s <= early and late <= end_s]


def tpots_ms(records: Sequence[RequestRecord], begin_s: float, end_s: float) -> list[float]:
    """TPOT of each row, of its tokens within a time."""
    inside = ([t for t in record.timeline.token_s if begin_s <= t <= end_s] for record in _rows(records))
    return [1e3 * (times[-1] - times[0]) / (len(times) - 1) for times in inside if len(times) > 1]


def _rows(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    return [record for record in records if record.request_id.startswith("row-")]


def outcome(point: measured.Point, mix: Mix) -> dict[str, Any]:
    """The numbers of a point: of its file, but for the iterations and transfers, which are in the report."""
    records = measured.read_requests(point.path)
    begin_s, end_s = window(records, mix)
    gaps = gaps_ms(records, begin_s, end_s)
    start_s = point.report.start_s
    passes = [each for each in point.report.iterations if begin_s <= each.started_s - start_s <= end_s]
    decoding = {each.instance for each in passes if each.rows}
    loaded = sum(each.instance in decoding for each in passes if each.chunk_tokens)
    moves = [(each.started_s - start_s, each.finished_s - start_s) for each in point.report.transfers]
    beside = [ms for at, ms in gaps if any(first <= at and at - 1e-3 * ms <= last for first, last in moves)]
    prompts = [record for record in records if not record.request_id.startswith("row-")]
    return {
        "window_s": [begin_s, end_s],
        "itl_ms": metrics.spread(ms for _, ms in gaps),
        "tpot_ms": metrics.spread(tpots_ms(records, begin_s, end_s)),
        "prompt_ttft_ms": metrics.spread(ms for each in prompts if (ms := metrics.ttft_ms(each)) is not None),
        "gaps": len(gaps),
        "prompt_share_of_iterations": loaded / sum(each.steps for each in passes if each.instance in decoding),
        "itl_ms_while_kv_moves": metrics.spread(beside),
        "kv_moves_beside_gaps": len(beside) / len(gaps),
        "placed": sorted({(each.prefill_instance, each.decode_instance) for each in prompts}),
    }


def ratios(
    outcomes: Mapping[str, Mapping[str, Any]], key: str, without: Mapping[str, str] = dict.fromkeys(MODES, PURE)
) -> dict[str, float]:
    """P95 of each mode over that of the point `without` prompts."""
    return {mode: outcomes[mode][key]["p95"] / outcomes[without[mode]][key]["p95"] for mode in MODES}


def table(outcomes: Mapping[str, Mapping[str, Any]]) -> Table:
    """One column per point."""
    made = Table(title="milliseconds", title_justify="left")
    made.add_column("", no_wrap=True)
    for name in outcomes:
        made.add_column(HEADS[name], justify="right", no_wrap=True)
    for label, key in (("ITL", "itl_ms"), ("TPOT", "tpot_ms")):
        for p in ("p50", "p95", "p99", "max"):
            made.add_row(f"{label} {p}", *(_ms(each[key][p]) for each in outcomes.values()))
        base = outcomes[PURE][key]["p95"]
        over = (f"{each[key]['p95'] / base:.2f}" for each in outcomes.values())
        made.add_row(f"{label} p95 / pure decode", *over, style="bold")
        made.add_section()
    for p in ("p50", "p95"):
        made.add_row(f"TTFT of prompts {p}", *(_ms(each["prompt_ttft_ms"][p]) for each in outcomes.values()))
    shares = (f"{each['prompt_share_of_iterations']:.0%}" for each in outcomes.values())
    made.add_row("passes with a prompt", *shares)
    return made


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def main(argv: list[str]) -> None:
    del argv
    flags.refuse_requests()
    if not (out := flags.OUT.value):
        raise ValueError("out is empty; allowed: a folder to write to")
    configs = {name: config(name) for name in POINTS}
    measured.on_ranks(lambda: measure(configs, Path(out)), next(iter(configs.values())))


def config(scheduler: str) -> EngineConfig:
    """Of one engine: room for all rows on one instance, and for what a prompt leaves there for a moment."""
    return flags.build_config(scheduler=scheduler, decode_max_batch=ROWS.value + 2)


def measure(configs: Mapping[str, EngineConfig], out: Path) -> None:
    """Plays all points, on rank 0, and shows what they gave and writes it to `out`."""
    console = launcher.console()
    pace = measured.Pace(
        sum(map(len, POINTS.values())), lambda line: console.print(line, highlight=False, soft_wrap=True)
    )
    model = source.resolve(flags.MODEL.value, max_len=next(iter(configs.values())).max_model_len).config
    points: dict[str, measured.Point] = {}
    planned: Mix | None = None
    for name, names in POINTS.items():
        with measured.Bench(configs[name], out, pace) as bench:
            spec, instances = bench.engine.specs[0], len(bench.engine.specs)
            sizes = {"rows": ROWS.value, "prompt": PROMPT_TOKENS.value, "instances": instances}
            if planned is None:  # by the colocated instances; all modes get the same requests
                each = sizes | {"rows": -(-ROWS.value // instances)}
                planned = mix(bench.engine.latency[-1], spec, share=SHARE.value, seconds=SECONDS.value, **each)
                both = requests(
                    planned,
                    **sizes,
                    vocab_size=model.vocab_size,
                    max_model_len=spec.max_model_len,
                    seed=flags.SEED.value,
                )
                console.print(
                    f"{both.note}; to prefill them takes {planned.prefill_busy:.0%} of one instance",
                    highlight=False,
                    soft_wrap=True,
                )
            for point in names:
                played = without_prompts(both) if point in (PURE, ALONE) else both
                points[point] = bench.play(point, played)
    assert planned is not None
    outcomes = {name: outcome(point, planned) for name, point in points.items()}
    show(console, outcomes)
    given = {"rows": ROWS.value, "prompt_tokens": PROMPT_TOKENS.value, "share": SHARE.value, "seconds": SECONDS.value}
    origin = provenance.collect(flags.given() | given, ranks=launcher.ranks_for(configs["colocated"]))
    write(out, points, outcomes, {"provenance": origin, "workload": both.note, "mix": dataclasses.asdict(planned)})
    if importlib.util.find_spec("matplotlib") is not None:  # `report.write` has said so otherwise
        picture(points, outcomes, planned, out / "interference.png")
    console.print(f"{out}/ has summary.json, points/, timeline.json and pictures", highlight=False)
    measured.check(points.values())


def show(console: Console, outcomes: Mapping[str, Mapping[str, Any]]) -> None:
    """The table, and how the bars were met."""
    console.print(table({name: outcomes[name] for name in NAMES}))
    for mode, over in ratios(outcomes, "itl_ms").items():
        low, high = BARS.get(mode, (0.0, math.inf))
        wanted = f"at least {low:g}" if low else f"at most {high:g}"
        verdict = f"; expected {wanted}: {'ok' if low <= over <= high else 'missed'}" if mode in BARS else ""
        console.print(
            f"{NAMES[mode]}: ITL P95 is {over:.2f} x that of pure decode{verdict}", highlight=False, soft_wrap=True
        )
    moved = outcomes["disaggregated"]
    console.print(
        f"disaggregated: KV came in beside {moved['kv_moves_beside_gaps']:.0%} of the gaps, whose P95 is "
        f"{_ms(moved['itl_ms_while_kv_moves']['p95'])} ms; without prompts {_ms(outcomes[ALONE]['itl_ms']['p95'])} ms",
        highlight=False,
        soft_wrap=True,
    )


def write(
    out: Path, points: Mapping[str, measured.Point], outcomes: Mapping[str, Mapping[str, Any]], head: Mapping[str, Any]
) -> None:
    """summary.json, of which `head` is the first part, requests.jsonl and timeline.json of all points, and the
    timeline's picture."""
    summary = {
        **head,
        "itl_p95_over_pure_decode": ratios(outcomes, "itl_ms"),
        "tpot_p95_over_pure_decode": ratios(outcomes, "tpot_ms"),
        "itl_p95_over_same_rows_alone": ratios(outcomes, "itl_ms", SAME_ROWS),
        "points": outcomes,
    }
    report.write(out, summary, {name: point.report for name, point in points.items()})


def picture(
    points: Mapping[str, measured.Point], outcomes: Mapping[str, Mapping[str, Any]], planned: Mix, path: Path
) -> None:
    """Gaps of all points, and two periods of those with prompts; only rows count as answers that wait."""
    from pdjax import plots_gaps

    runs = {name: point.report for name, point in points.items()}
    gaps = {
        NAMES[name]: [ms for _, ms in gaps_ms(measured.read_requests(points[name].path), *outcomes[name]["window_s"])]
        for name in NAMES
    }
    first_s = planned.lead_s + (planned.periods // 2 - 1) * planned.period_s
    strip = (first_s - planned.period_s / 4, first_s + 2 * planned.period_s)
    plots_gaps.interference(
        gaps,
        {NAMES[mode]: dataclasses.replace(runs[mode], records=_rows(runs[mode].records)) for mode in MODES},
        dict.fromkeys((NAMES[mode] for mode in MODES), strip),
        f"What prompts of {PROMPT_TOKENS.value} tokens do to answers that are being decoded",
        path,
    )


if __name__ == "__main__":
    # One core computes no more per second in a longer pass, and with passes of so little the prompts of two colocated
    # instances at a share of 20 % are still no more than one instance can prefill.
    measured.set_defaults(out="out/interference", prefill_chunk=48)
    launcher.run(main)
