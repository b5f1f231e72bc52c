"""The cheapest cluster for a rate. Enter: what it has to serve, and hardware for prompts and for tokens. Leaves: how
many machines of each keep the nine limits. Called by `pdjax.experiments.papers.splitwise`.

The paper sweeps both numbers (section IV-D). Prompt machines set TTFT and token machines the time between tokens, so
one is searched after the other: prompt machines beside token machines in plenty, then token machines.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from pdjax.experiments.papers.outcome import Row
from pdjax.experiments.papers.splitwise_clusters import Case, failing
from pdjax.experiments.papers.splitwise_machines import A100, H100, L40, Design, dollars, machine, spec
from pdjax.latency import Load

FEW, MANY = 6, 64  # rows of a token machine: numbers of machines in between are searched
IDLE = 8  # times the machines that prompts alone would keep busy: more are not tried


def cheapest(case: Case, design: Design, rate: float, relaxed: float = 1.0) -> Design | list[str]:
    """How many machines of the hardware of `design` serve a rate; or the limits that none of the numbers tried keeps.
    A design without token machines stays one. `relaxed`: as for `failing`."""

    def broken(candidate: Design) -> list[str]:
        return failing(case.play(candidate, rate), relaxed)

    busy = rate * case.prompt_s(design.prompt)
    if not design.tokens:
        return _smallest(broken, lambda count: dataclasses.replace(design, prompts=count), busy, IDLE * busy)
    there = machine(design.token, case.model, case.engine)
    rows = rate * float(np.mean(case.workload.answers)) * there.latency.iteration_s(spec(there), Load((), 1, 1, 1))
    plenty = math.ceil(rows / FEW)
    found = _smallest(
        broken, lambda count: dataclasses.replace(design, prompts=count, tokens=plenty), busy / 2, 2 * busy
    )
    if not isinstance(found, Design):
        return found
    return _smallest(broken, lambda count: dataclasses.replace(found, tokens=count), rows / MANY, plenty)


def _smallest(
    broken: Callable[[Design], list[str]], made: Callable[[int], Design], least: float, most: float
) -> Design | list[str]:
    """The design with the smallest number that breaks no limit, by bisection."""
    low, high = max(1, math.ceil(least)), math.ceil(most)
    if limits := broken(made(high)):
        return limits
    while low < high:
        middle = (low + high) // 2
        if broken(made(middle)):
            low = middle + 1
        else:
            high = middle
    return made(high)


# --- what mixed hardware saves --------------------------------------------------------------------------------------

RATE = 35.0  # requests per second of conversations; savings hardly depend on it, but for whole machines
RELAXED = 2.0
CLAIMS = "20 to 25 (paper), 30 to 50 (others)"
BASE, HH = Design("Baseline-H100", H100, 1), Design("HH", H100, 1, H100, 1)
HA, HL = Design("HA", H100, 1, A100, 1), Design("H100 + L40", H100, 1, L40, 1)


def savings(bloom: Case, llama: Case, code: Case, say: Callable[[str], None]) -> list[Row]:
    """Dollars of clusters for the same conversations, with the steps as measured; and the paper's sweep of HH for 70
    requests of `code` per second (section V)."""

    def found(case: Case, design: Design, rate: float = RATE, relaxed: float = 1.0) -> Design | list[str]:
        best = cheapest(case, design, rate, relaxed)
        words = f"breaks {', '.join(best)} whatever their number" if isinstance(best, list) else _priced(best)
        loose = f", limits on TBT and E2E x {relaxed:g}" * (relaxed != 1)
        say(f"splitwise: {case.model}, {rate:g} req/s of {case.workload.name}{loose}: {design.name} {words}")
        return best

    prices = ", ".join(f"{kind} {dollars(kind):g}" for kind in (A100, H100, L40))
    rows = [Row("dollars per hour of a machine of eight", None, prices, note="L40: assumed")]
    for case in (bloom, llama):
        base, same, mixed = (found(case, design) for design in (BASE, HH, HA))
        rows += [_saving(case, mixed, same, HA, CLAIMS), _saving(case, mixed, base, HA, None, "Baseline-H100")]
    rows.append(_saving(llama, found(llama, HL), same, HL, CLAIMS))
    same, mixed, cheap = (found(llama, design, relaxed=RELAXED) for design in (HH, HA, HL))
    loose = f", limits on TBT and E2E x {RELAXED:g}"
    rows += [
        _saving(llama, mixed, same, HA, None, what=loose),
        _saving(llama, cheap, same, HL, CLAIMS, what=loose),
    ]
    swept = found(code, HH, 70.0)
    for name, published in (("prompts", 27), ("tokens", 3)):
        rows.append(
            Row(
                f"HH for 70 req/s of code: machines for {name} (section V)",
                published,
                getattr(swept, name) if isinstance(swept, Design) else None,
                tolerance=2,
                kind="absolute",
            )
        )
    return rows


def _saving(
    case: Case,
    mixed: Design | list[str],
    against: Design | list[str],
    design: Design,
    published: str | None,
    other: str = "HH",
    what: str = "",
) -> Row:
    """What a cluster costs less than another for the same requests."""
    words = f"{case.model}, {RATE:g} req/s of conversations{what}: {design.name} costs less than {other}"
    if isinstance(mixed, Design) and isinstance(against, Design):
        ours = 100 * (1 - mixed.dollars / against.dollars)
        return Row(words, published, ours, "%", note=f"{_priced(mixed)}, {_priced(against)}")
    limits = [limit for found in (mixed, against) if isinstance(found, list) for limit in found]
    return Row(words, published, "not served", note=f"{', '.join(limits)} breaks whatever the number")


def _priced(design: Design) -> str:
    return f"{design.title}: {design.dollars:.0f} $/h"
