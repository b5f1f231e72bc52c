"""Splitwise (Patel et al., ISCA 2024) computed again: its clusters at equal power and at equal cost, what mixed
hardware saves, and what moving KV costs. A `Setup` whose folder has the Azure traces enters, an `Outcome` leaves.
Called by `pdjax.experiments.reproduce`.

The rates of single clusters are those of the authors' simulator (Mutinifni/splitwise-sim, commit 8f99e7d), with its
policy, on two-minute traces and a grid of ten requests per second: the paper prints ratios only. In that simulator a
decode step takes what it does for one row, however many there are. The tables say what comes out so, and with the
steps that the authors measured by batch size.
"""

import dataclasses
from typing import Any

from pdjax.experiments.papers import splitwise_plots
from pdjax.experiments.papers.outcome import Outcome, Row, Setup
from pdjax.experiments.papers.splitwise_clusters import LIMITS, Case, Found, Workload, azure, max_rate
from pdjax.experiments.papers.splitwise_cost import cheapest, savings
from pdjax.experiments.papers.splitwise_machines import A100, CAPPED, H100, MEASURED, SIMULATED, Design
from pdjax.experiments.papers.splitwise_transfer import transfers

BLOOM, LLAMA = "bloom-176b", "llama2-70b"
DURATION_S, QUICK_S = 60.0, 30.0  # of a trace; shorter ones end before long answers have piled up
TOLERANCE, QUICK_TOLERANCE = 0.06, 0.12  # of a highest rate: steps of 1.25 halved twice, and once
RATIO = 0.15  # what ratios may be off

BASE_A100, BASE_H100 = Design("Baseline-A100", A100, 70), Design("Baseline-H100", H100, 40)
# Section V and the configurations of the authors' simulator: machines for prompts and for tokens. Baseline-H100 and HH
# are the same at equal power and at equal cost.
HH, HH_CODE = Design("HH", H100, 25, H100, 15), Design("HH", H100, 35, H100, 5)
CLUSTERS: dict[tuple[str, str], tuple[Design, ...]] = {
    ("equal power", "conv"): (
        BASE_A100,
        BASE_H100,
        Design("AA", A100, 45, A100, 25),
        HH,
        Design("HA", H100, 25, A100, 26),
        Design("HHcap", H100, 25, CAPPED, 21),
    ),
    ("equal power", "code"): (
        BASE_A100,
        BASE_H100,
        Design("AA", A100, 55, A100, 15),
        HH_CODE,
        Design("HA", H100, 35, A100, 8),
        Design("HHcap", H100, 35, CAPPED, 7),
    ),
    ("equal cost", "conv"): (
        Design("Baseline-A100", A100, 86),
        BASE_H100,
        Design("AA", A100, 51, A100, 35),
        HH,
        Design("HA", H100, 30, A100, 21),
        Design("HHcap", H100, 30, CAPPED, 10),
    ),
    ("equal cost", "code"): (
        Design("Baseline-A100", A100, 86),
        BASE_H100,
        Design("AA", A100, 66, A100, 20),
        HH_CODE,
        Design("HA", H100, 35, A100, 10),
        Design("HHcap", H100, 35, CAPPED, 7),
    ),
}
# Of the authors' simulator: the highest rate of its grid that keeps all nine limits; the lowest that was tried and does
# not, None where none was.
PUBLISHED: dict[str, dict[str, tuple[float, float | None]]] = {
    "conv": {
        "Baseline-A100": (50, 60),
        "Baseline-H100": (110, 120),
        "AA": (110, 120),
        "HH": (120, 130),
        "HA": (140, None),
        "HHcap": (140, None),
    },
    "code": {
        "Baseline-A100": (40, 70),
        "Baseline-H100": (40, 70),
        "AA": (70, 100),
        "HH": (100, None),
        "HA": (70, 100),
        "HHcap": (100, None),
    },
}
SIGNATURE = {"Baseline-A100": "TBT", "Baseline-H100": "TBT", "AA": "TTFT", "HH": "TTFT"}
"""Which limits break first, conversations at equal power."""

STEPS = (
    "their decode step takes what it does for one row, however many there are; as measured, BLOOM-176B's on A100 goes "
    "from 49 ms to 65 ms for 32 rows and 97 ms for 64"
)


@dataclasses.dataclass(slots=True)
class Searches:
    """The highest rates of clusters; none is searched twice."""

    setup: Setup
    workloads: dict[str, Workload]
    found: dict[tuple[str, str, str, Design], Found] = dataclasses.field(default_factory=dict)

    def case(self, model: str, engine: str, workload: str) -> Case:
        duration_s = QUICK_S if self.setup.quick else DURATION_S
        return Case(self.workloads[workload], model, engine, duration_s, self.setup.seed)

    def rate(self, design: Design, workload: str, model: str = BLOOM, engine: str = SIMULATED) -> Found:
        key = model, engine, workload, design
        if key not in self.found:
            tolerance = QUICK_TOLERANCE if self.setup.quick else TOLERANCE
            found = self.found[key] = max_rate(self.case(model, engine, workload), design, tolerance)
            why = ", ".join(found.why) or "nothing"
            self.setup.say(
                f"splitwise: {model}, {workload}, {engine}: {design.title} keeps the limits up to "
                f"{found.rate:g} req/s; then {why} breaks ({len(found.runs)} runs)"
            )
        return self.found[key]


def run(setup: Setup) -> Outcome:
    """Raises ValueError where the folder or its traces are missing."""
    folder = setup.folder()
    searches = Searches(setup, {name: azure(folder, name) for name in ("conv", "code")})
    rows = [*_power(searches), *_measured(searches)]
    if not setup.quick:
        rows += [*_code(searches), *_cost(searches), *_llama(searches)]
        rows += savings(
            searches.case(BLOOM, MEASURED, "conv"),
            searches.case(LLAMA, MEASURED, "conv"),
            searches.case(BLOOM, SIMULATED, "code"),
            setup.say,
        )
    rows += transfers()
    return Outcome(
        f"Splitwise, traces of {QUICK_S if setup.quick else DURATION_S:g} s",
        tuple(rows),
        {"splitwise": [_entry(key, found) for key, found in searches.found.items()]},
        lambda path: splitwise_plots.draw(_by_engine(searches), PUBLISHED["conv"], path),
    )


def _power(searches: Searches) -> list[Row]:
    """Conversations at equal power."""
    found = {design.name: searches.rate(design, "conv") for design in CLUSTERS["equal power", "conv"]}
    rows = [_single(one, "conv") for one in found.values()]
    rows.append(
        Row(
            "which limits break first: Baseline-A100, Baseline-H100, AA, HH (authors' simulator)",
            ", ".join(SIGNATURE.values()),
            ", ".join(_first(found[name]) for name in SIGNATURE),
            tolerance=0,
            note="interference in the baselines, queues of prompts in Splitwise",
        )
    )
    unclear = "the paper does not say against what; HH is also all H100 and as powerful"
    return [
        *rows,
        _ratio(found, "AA", "Baseline-A100", 2.15, "section VI; the abstract has 2.35 at the same cost and power"),
        _ratio(found, "HA", "HH", 1.18, unclear),
        _ratio(found, "HA", "Baseline-H100", None, "the other reading of 1.18"),
    ]


def _measured(searches: Searches) -> list[Row]:
    """The same with steps that take longer for more rows, and AA with as many machines split anew."""
    designs = CLUSTERS["equal power", "conv"]
    if searches.setup.quick:
        designs = tuple(design for design in designs if design.name in ("Baseline-A100", "AA"))
    found = {design.name: searches.rate(design, "conv", engine=MEASURED) for design in designs}
    rows = [
        Row(
            f"{one.design.title}, conversation, equal power, steps as measured by batch size",
            None,
            one.rate,
            "req/s",
            note=_note(one),
        )
        for one in found.values()
    ]
    rows.append(_ratio(found, "AA", "Baseline-A100", 2.15, STEPS, "; steps as measured"))
    if searches.setup.quick:
        return rows
    machines = BASE_A100.prompts
    split = cheapest(searches.case(BLOOM, MEASURED, "conv"), Design("AA", A100, 1, A100, 1), found["AA"].rate)
    if isinstance(split, Design):
        prompts = round(machines * split.prompts / (split.prompts + split.tokens))
        again = searches.rate(Design("AA", A100, prompts, A100, machines - prompts), "conv", engine=MEASURED)
        note = f"{again.design.title}: split as the fewest machines for {found['AA'].rate:g} req/s are, {split.title}"
        found["AA"] = again
        rows.append(_ratio(found, "AA", "Baseline-A100", 2.15, note, "; steps as measured, split anew"))
    return rows


def _code(searches: Searches) -> list[Row]:
    return [_single(searches.rate(design, "code"), "code") for design in CLUSTERS["equal power", "code"]]


def _cost(searches: Searches) -> list[Row]:
    rows = []
    for workload in ("conv", "code"):
        found = {design.name: searches.rate(design, workload) for design in CLUSTERS["equal cost", workload]}
        rows += [
            Row(f"{one.design.title}, {WORDS[workload]}, equal cost", None, one.rate, "req/s", note=_note(one))
            for one in found.values()
        ]
        published = 1.4 if workload == "conv" else None
        note = f"at {found['AA'].design.power / found['Baseline-H100'].design.power - 1:+.0%} power (paper: +25 %)"
        rows.append(_ratio(found, "AA", "Baseline-H100", published, note, f", {WORDS[workload]}, equal cost"))
    return rows


def _llama(searches: Searches) -> list[Row]:
    designs = [design for design in CLUSTERS["equal power", "conv"] if design.name in ("Baseline-A100", "AA")]
    found = {design.name: searches.rate(design, "conv", LLAMA) for design in designs}
    rows = [
        Row(f"{one.design.title}, Llama2-70B, conversation, equal power", None, one.rate, "req/s", note=_note(one))
        for one in found.values()
    ]
    return [*rows, _ratio(found, "AA", "Baseline-A100", None, "", ", Llama2-70B")]


# --- rows -----------------------------------------------------------------------------------------------------------

WORDS = {"conv": "conversation", "code": "code"}


def _single(found: Found, workload: str) -> Row:
    """One cluster beside the authors' simulator, whose grid gives a range."""
    kept, broken = PUBLISHED[workload][found.design.name]
    inside = kept <= found.rate and (broken is None or found.rate < broken)
    words = f"{kept:g} to {broken:g}" if broken is not None else f"at least {kept:g}"
    exact = workload == "conv" and broken is not None
    return Row(
        f"{found.design.title}, {WORDS[workload]}, equal power (authors' simulator)",
        kept if exact else words,
        found.rate,
        "req/s",
        tolerance=RATIO if exact else None,
        note=f"{_note(found)}; theirs is {words}" + ("" if inside or exact else ", ours is not"),
    )


def _ratio(found: dict[str, Found], over: str, under: str, published: float | None, note: str, what: str = "") -> Row:
    return Row(
        f"{over} / {under}{what or ', conversation, equal power'}",
        published,
        found[over].rate / found[under].rate,
        tolerance=None if published is None else RATIO,
        note=note,
    )


def _note(found: Found) -> str:
    return f"{found.bound} it; " * bool(found.bound) + f"then {', '.join(found.why) or 'no limit'} breaks"


def _first(found: Found) -> str:
    """What breaks first: the limit that the first rate over the limits is furthest from keeping."""
    over = [slowdowns for rate, slowdowns in found.runs if rate > found.rate]
    if not over:
        return "none"
    return max(LIMITS, key=lambda key: over[0][key] / LIMITS[key])[0]


def _entry(key: tuple[str, str, str, Design], found: Found) -> dict[str, Any]:
    model, engine, workload, design = key
    return {
        "cluster": dataclasses.asdict(design) | {"dollars_per_hour": design.dollars, "power": design.power},
        "model": model,
        "engine": engine,
        "workload": workload,
        "rate_rps": found.rate,
        "bound": found.bound,
        "breaks": found.why,
        "runs": [
            {"rate_rps": rate, **{f"{name}_p{percent}": value for (name, percent), value in slowdowns.items()}}
            for rate, slowdowns in found.runs
        ],
    }


def _by_engine(searches: Searches) -> dict[str, list[Found]]:
    """Of BLOOM-176B, conversations, the clusters of equal power, by engine."""
    return {
        engine: [
            searches.found[key]
            for design in CLUSTERS["equal power", "conv"]
            if (key := (BLOOM, engine, "conv", design)) in searches.found
        ]
        for engine in (SIMULATED, MEASURED)
    }
