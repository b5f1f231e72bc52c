"""Why a plan is as it is, in sentences: the candidates of a search enter, a verdict and words leave. Called by
`pdjax.planning.planner`; pure text.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from pdjax.planning.search import COLOCATED

Verdict = Literal["yes", "no", "either", ""]

NOISE = 0.05  # of a goodput: less than that, runs of this length and brackets this wide do not tell apart

BINDS = {
    "": "nothing that was seen",
    "TTFT: queueing": "prompts that queue",
    "TTFT: the prefill itself": "prompts that take too long, alone or in the pass that they share",
    "TPOT: decode steps": "decode steps that take too long, with the prompts between them",
    "KV memory": "KV memory or row slots that are full",
    "link": "links that KV takes too long over",
}


class Candidate(Protocol):
    """What is asked of a candidate here; `pdjax.planning.planner.Candidate`."""

    @property
    def policy(self) -> str: ...
    @property
    def cluster(self) -> str: ...
    @property
    def goodput(self) -> float: ...
    @property
    def bound(self) -> str: ...
    @property
    def per_device(self) -> float: ...
    @property
    def per_dollar(self) -> float: ...
    @property
    def bottleneck(self) -> str: ...
    @property
    def again(self) -> bool: ...
    @property
    def devices(self) -> Mapping[str, int]: ...


def why(
    candidates: Sequence[Candidate],
    instances: Mapping[str, Mapping[str, float]],
    rate: float | None,
    by: str,
    impossible: str,
) -> tuple[Verdict, str]:
    """Whether to disaggregate, and why.

    Args:
        candidates: best first.
        instances: goodput of single instances, by what they do and their size, small ones first.
        rate: that was asked for.
        by: "device" or "dollar".
        impossible: what rules out all instances, "" for nothing.
    """
    if not candidates:
        return "", f"No cluster keeps the limits: {impossible or 'no rate that was tried is served'}."
    best = candidates[0]
    said = [f"{best.policy} ({best.cluster}) serves {best.goodput:.3g} requests/s, {_worth(best, by)}."]
    if rate is not None and best.goodput < rate:
        said.insert(0, f"No cluster of these devices carries {rate:g} requests/s; this one comes nearest.")
    said.append(f"What ends it: {BINDS[best.bottleneck]}.")
    together = next((one for one in candidates if one.policy in COLOCATED), None)
    apart = next((one for one in candidates if one.policy == "disaggregated"), None)
    said += _balance(instances)
    if together is None:
        said.append("Disaggregate: no colocated instance keeps the limits at any rate that was tried.")
        return "yes", " ".join(said)
    if apart is None:
        said.append("Do not disaggregate: no split keeps the limits at any rate that was tried.")
        return "no", " ".join(said)
    gain = _per(apart, rate, by) / _per(together, rate, by) - 1
    if abs(gain) < NOISE:
        said.append(
            f"Colocated ({together.cluster}) and split ({apart.cluster}) differ by {gain:+.0%}, less than these runs "
            "can tell: stay colocated, which moves no KV."
        )
        return "either", " ".join(said)
    verdict: Verdict = "yes" if gain > 0 else "no"
    said.append(
        f"{'Disaggregate' if gain > 0 else 'Do not disaggregate'}: for what it costs the best split ({apart.cluster}) "
        f"serves {1 + gain:.0%} of what {together.policy} ({together.cluster}) does. Colocated, it ends with "
        f"{BINDS[together.bottleneck]}; split, with {BINDS[apart.bottleneck]}."
    )
    mixed = next((one for one in candidates if one.policy == "dynamic" and one.again), None)
    if mixed is not None and _per(mixed, rate, by) > (1 + NOISE) * max(_per(apart, rate, by), _per(together, rate, by)):
        said.append(f"Best is neither: dynamic ({mixed.cluster}) shifts work to whoever has time for it.")
    return verdict, " ".join(said)


def caveats(candidates: Sequence[Candidate]) -> list[str]:
    """What the numbers do not say."""
    said = []
    best = candidates[0] if candidates else None
    if best is not None and best.bound == "at least":
        said.append("the best serves the highest rate that was tried: its goodput may be more")
    if best is not None and "groups" in best.cluster:
        said.append("groups keep to themselves here: start a job for each, on nodes that it has alone")
    if best is not None and len(best.devices) > 1:
        said.append("ranks of instances follow each other: give mpirun the hosts in the order of the parts")
    return said


def _worth(one: Candidate, by: str) -> str:
    return f"{one.per_dollar:.3g} per dollar" if by == "dollar" else f"{one.per_device:.3g} per device"


def _per(one: Candidate, rate: float | None, by: str) -> float:
    """What counts of a candidate: more than the rate that is asked for is worth nothing."""
    share = min(1.0, rate / one.goodput) if rate else 1.0
    return share * (one.per_dollar if by == "dollar" else one.per_device)


def _balance(instances: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The ratio at which both phases carry the same."""
    prefill, decode = instances.get("prefill", {}), instances.get("decode", {})
    both = [name for name in prefill if prefill[name] and decode.get(name)]
    if not both:
        return []
    name = both[0]
    ratio = prefill[name] / decode[name]
    words = f"1:{ratio:.2g}" if ratio >= 1 else f"{1 / ratio:.2g}:1"
    return [
        f"A {name} instance alone prefills {prefill[name]:.3g} and decodes {decode[name]:.3g} requests/s within the "
        f"limits: P:D is balanced at {words}."
    ]
