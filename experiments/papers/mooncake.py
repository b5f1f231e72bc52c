"""Mooncake (arXiv 2407.00079 and FAST'25), computed again from its released conversation trace: how much a cache of
prompt blocks finds by its size, what reuse needs of a link, TTFT under four ways to schedule, and requests turned away
by three rules. Called by `pdjax.experiments.reproduce`; needs mooncake/conversation_trace.jsonl in the data folder.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from pdjax import prefix, traces
from pdjax.experiments.papers import mooncake_node as node
from pdjax.experiments.papers.mooncake_rejection import OURS, RULES, Turned, turned
from pdjax.experiments.papers.mooncake_scheduling import POLICIES, Scheduled, expected_s, scheduled
from pdjax.experiments.papers.outcome import Outcome, Row, Setup

# Parts of the released trace's blocks that an LRU cache of so many blocks finds; table 1 of the arXiv version is of
# another trace.
HIT_RATES = {1000: 0.044, 5000: 0.110, 10000: 0.211, 30000: 0.326, 50000: 0.355, 100000: 0.364, None: 0.366}
OTHER_TRACE = {1000: 0.30, 10000: 0.40, 30000: 0.48, 50000: 0.50, 100000: 0.51, None: 0.51}
TTFT_S = {"random": 19.65, "load balancing": 5.27, "local cache-aware": 3.58, "global cache-aware": 3.07}  # figure 5
REJECTED = {"each stage": 4183, "early": 3771, "predicted": 3589}  # table 3, of about 23,000
OTHER_MFU = 0.4
FEWER = (6, 10)  # prefill and decode nodes with which prefill is the tighter stage
QUICK = 1500  # rows
TIGHT = 4000  # rows


def run(setup: Setup) -> Outcome:
    """All of it; `quick`: the first QUICK rows of the trace for what is simulated."""
    rows = node.trace(setup.folder())
    played = rows[:QUICK] if setup.quick else rows
    rates = {size: prefix.hits((row.blocks for row in rows), size).rate for size in HIT_RATES}
    ttft = _scheduled(setup, played)
    other_s = {policy: expected_s(played, policy, mfu=OTHER_MFU, seed=setup.seed) for policy in POLICIES}
    rejections = _turned(setup, played, node.PREFILLERS, node.DECODERS)
    tight = _turned(setup, played[:TIGHT], *FEWER)
    setup.say(f"mooncake: our admission, first {QUICK} rows")
    ours = turned(rows[:QUICK], OURS)
    found = (
        *_hit_rows(rates),
        *_reuse_rows(),
        *_ttft_rows(ttft, other_s, judged=not setup.quick),
        *_rejection_rows(rejections, tight, ours, len(played)),
    )
    summary = {
        "hit_rates": {str(size): rate for size, rate in rates.items()},
        "ttft": list(map(dataclasses.asdict, ttft)),
        "ttft_expected_s": {f"mfu {OTHER_MFU}": other_s},
        "rejected": {
            "8P+8D": [_counts(each) for each in rejections],
            f"{FEWER[0]}P+{FEWER[1]}D, first {TIGHT} rows": [_counts(each) for each in tight],
            f"first {QUICK} rows": [_counts(ours)],
        },
        "rows": len(played),
    }
    return Outcome(
        f"Mooncake, conversation trace, {len(played)} of {len(rows)} rows",
        found,
        {"mooncake": summary},
        functools.partial(_plot, rates, ttft, rejections),
    )


def _scheduled(setup: Setup, rows: Sequence[traces.Row]) -> list[Scheduled]:
    found = []
    for policy in POLICIES:
        setup.say(f"mooncake: {policy}")
        found.append(scheduled(rows, policy, seed=setup.seed))
    return found


def _turned(setup: Setup, rows: Sequence[traces.Row], prefillers: int, decoders: int) -> list[Turned]:
    found = []
    for rule in RULES:
        setup.say(f"mooncake: turned away by {rule}, {prefillers}P+{decoders}D at twice the trace's rate")
        found.append(turned(rows, rule, prefillers=prefillers, decoders=decoders))
    return found


def _counts(one: Turned) -> dict[str, object]:
    names = ("rule", "early", "late", "rejected", "kept", *(("load", "swing") if one.loads else ()))
    return {name: getattr(one, name) for name in names}


def _hit_rows(rates: dict[int | None, float]) -> list[Row]:
    rows = []
    for size, rate in rates.items():
        known = OTHER_TRACE.get(size)
        note = "" if known is None else f"arXiv table 1, of a trace that is not released: {known:.2f}"
        what = "any number of blocks" if size is None else f"{size} blocks"
        rows.append(Row(f"hit rate, LRU, {what}", HIT_RATES[size], rate, tolerance=5.1e-4, kind="absolute", note=note))
    return rows


def _reuse_rows() -> list[Row]:
    rows = []
    for name, flops, known in (("8 A800", node.A800_FLOPS, 6.0), ("8 H800", node.H800_FLOPS, 19.0)):
        ours = prefix.reuse_pays_bytes_per_s(8192, flops, hidden=node.HIDDEN, queries_per_kv=node.QUERIES_PER_KV)
        rows.append(
            Row(f"reuse of 8192 tokens pays from, {name}", known, ours / 1e9, "GB/s", 0.05, note="at peak FLOP/s")
        )
    return rows


def _ttft_rows(found: Sequence[Scheduled], other_s: dict[str, float], *, judged: bool) -> list[Row]:
    """`judged`: the whole trace was played."""
    rows = [
        _order("figure 5, order of mean TTFT", TTFT_S, {one.policy: one.ttft_s for one in found}),
        _order(f"the same, prefill at {OTHER_MFU:.0%} of the peak", TTFT_S, other_s),
    ]
    for one in found:
        note = (
            f"prefill at {node.MFU:.0%} of the peak, an assumption that counts for much: at {OTHER_MFU:.0%} "
            f"{other_s[one.policy]:.3g} s; {one.reused:.0%} of the blocks reused, {one.fetched:.0%} from other nodes"
        )
        tolerance = 0.3 if judged else None
        rows.append(Row(f"figure 5, {one.policy}", TTFT_S[one.policy], one.ttft_s, "s", tolerance, note=note))
    local, everywhere = found[POLICIES.index("local cache-aware")], found[POLICIES.index("global cache-aware")]
    gain = 1 - everywhere.ttft_s / local.ttft_s
    rows.append(Row("figure 5, gain of global over local", 14.0, 100 * gain, "%", 5.0 if judged else None, "absolute"))
    return rows


def _rejection_rows(found: Sequence[Turned], tight: Sequence[Turned], ours: Turned, count: int) -> list[Row]:
    by_rule = {one.rule: one for one in found}
    base, early, predicted = (by_rule[rule] for rule in RULES)
    decode_bound = (
        f"decode is the tighter stage here: its load is {base.load:.2f} in the mean, and prefill computes "
        f"{1 - base.early / count:.0%} of all prompts: not to compute some in vain gains little, and who looks early "
        "knows less; the table is of another trace, with shorter prompts and twice the requests"
    )
    rows = [_order("table 3, order of rejections", REJECTED, {one.rule: one.rejected for one in found}, decode_bound)]
    for one in found:
        what = f"table 3, rejected: {one.rule}"
        note = f"{one.early} when they came, {one.late} with prompts computed; {one.kept} of {count} kept both limits"
        rows.append(Row(what, 100 * REJECTED[one.rule] / 23000, 100 * one.rejected / count, "%", note=note))
    counts = ", ".join(f"{one.rule} {one.rejected}" for one in tight)
    fewer = {one.rule: one.rejected for one in tight}
    what = f"the same, {FEWER[0]}P+{FEWER[1]}D, first {TIGHT} rows at most"
    rows += [
        Row(what, _ranked(REJECTED), _ranked(fewer), note=f"prefill is the tighter stage: {counts} rejected"),
        Row("prompts computed in vain, early / each stage", None, early.late / max(base.late, 1)),
        Row(
            "decode load, swing predicted / early",
            "below 1",
            "below 1" if predicted.swing < early.swing else "not below 1",
            tolerance=0.0,
            note=f"standard deviation {predicted.swing:.3f} and {early.swing:.3f}",
        ),
        Row(
            f"rejected by our admission, first {QUICK} rows",
            None,
            float(ours.rejected),
            note=f"{ours.kept} kept both limits",
        ),
    ]
    return rows


def _order(what: str, published: Mapping[str, float], ours: Mapping[str, float], why: str = "") -> Row:
    row = Row(what, _ranked(published), _ranked(ours), tolerance=0.0)
    return row if row.reached else dataclasses.replace(row, note=why)


def _ranked(values: Mapping[str, float]) -> str:
    """Names by value, the largest first."""
    names = sorted(values, key=lambda name: -values[name])
    signs = (" = " if values[one] == values[other] else " > " for one, other in itertools.pairwise(names))
    return names[0] + "".join(sign + name for sign, name in zip(signs, names[1:], strict=True))


def _plot(rates: dict[int | None, float], ttft: Sequence[Scheduled], rejections: Sequence[Turned], path: Path) -> None:
    from pdjax.experiments.papers import mooncake_plots

    mooncake_plots.draw(rates, HIT_RATES, ttft, TTFT_S, rejections, path)
