"""What `scale` found, for people and for summary.json: a `Found` enters; a table, a sentence, a page of Markdown and a
dict leave.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from pdjax.experiments import scale_forms, scale_measured
from pdjax.experiments.scale_forms import Assumptions, Resource, Split
from pdjax.experiments.scale_measured import Check, Costs

CONTROLLER = "one controller"


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """Attributes:
    assumed, requests: what was asked.
    split: of the instances.
    resources: the first to be used up first.
    measured: what decisions cost, by size; `there`: extrapolated to the size that was asked for.
    checks: simulated.
    live_bytes: that the controller keeps for a live request.
    """

    assumed: Assumptions
    requests: int
    split: Split
    resources: tuple[Resource, ...]
    measured: tuple[Costs, ...]
    there: Costs
    checks: tuple[Check, ...]
    live_bytes: float

    @property
    def machine(self) -> Resource:
        """The first to be used up but for the controller."""
        return next(each for each in self.resources if each.name != CONTROLLER)

    @property
    def live(self) -> float:
        """Requests that are there at the rate of `machine`: those that decode, and those that prefill or move."""
        rps, assumed = self.machine.rps, self.assumed
        moving_s = assumed.kv_bytes / assumed.nic_bytes_per_s
        rows = min(assumed.rows_at(rps / self.split.decode), scale_forms.rows_of(assumed))
        return rows * self.split.decode + rps * (assumed.prefill_s() + moving_s)

    @property
    def controllers(self) -> int:
        """That the rate of `machine` needs, each with a share of the instances."""
        return scale_measured.controllers(self.assumed, self.split, self.measured, self.machine.rps)


def answer(found: Found) -> str:
    """What is used up first, and what next."""
    first, machine = found.resources[0], found.machine
    size = f"{found.assumed.instances:,} instances"
    text = f"Of {size}, {first.name} is used up first, at {first.rps:,.0f} requests/s. "
    if first.name == CONTROLLER:
        events = [scale_forms.events_per_s(found.assumed, found.split, each.rps) for each in (first, machine)]
        text = (
            f"Of {size}, {first.name} is used up first: it decides on {events[0]:,.0f} events/s, which are there from "
            f"{first.rps:,.0f} requests/s on, and beyond that decode steps wait for it. With {found.controllers}, each "
            f"with a share of the instances, the next is '{machine.name}', at {machine.rps:,.0f} requests/s and "
            f"{events[1]:,.0f} events/s. "
        )
    seconds = found.requests / machine.rps
    return text + f"{found.requests:,} requests take {seconds / 60:,.1f} min at {machine.rps:,.0f} requests/s."


def table(found: Found) -> Table:
    """All resources."""
    shown = Table("resource", "requests/s", "of the first", "how", title_justify="left")
    shown.title = f"{found.split.prefill} prefill and {found.split.decode} decode instances"
    for each in found.resources:
        shown.add_row(each.name, f"{each.rps:,.0f}", f"{each.rps / found.resources[0].rps:.2f} x", each.how)
    return shown


def summary(found: Found) -> dict[str, Any]:
    """For summary.json."""
    return {
        "first": found.resources[0].name,
        "split": dataclasses.asdict(found.split),
        "resources": [dataclasses.asdict(each) for each in found.resources],
        "decision_s": [dataclasses.asdict(each) for each in (*found.measured, found.there)],
        "controllers": found.controllers,
        "checks": [dataclasses.asdict(each) | {"difference": each.difference} for each in found.checks],
        "bytes_per_live_request": found.live_bytes,
        "live_requests": found.live,
    }


def page(found: Found, origin: Mapping[str, Any]) -> str:
    """The whole page, Markdown. `origin`: of `pdjax.provenance`."""
    assumed, there = found.assumed, found.there
    rows = scale_forms.rows_of(assumed)
    nic = 8e-9 * assumed.nic_bytes_per_s
    speed = found.checks[0].requests_per_minute
    parts = [
        f"# {assumed.instances:,} instances, {found.requests:,} requests: what is used up first",
        "Written by `python -m pdjax.experiments.scale`; see its `--help` for the assumptions that can be changed.",
        answer(found),
        "## Assumptions",
        f"- Instances are {assumed.instance.name} ({assumed.instance.devices} device each): KV of "
        f"{assumed.instance.kv_tokens:,} tokens, {assumed.instance.kv_bytes_per_token:,} bytes a token.\n"
        f"- Every request has {assumed.prompt:,} prompt tokens and {assumed.answer:,} of answer; a decode step may "
        f"take {assumed.tpot_ms:g} ms. Means only: a real mix needs room for its bursts and long prompts.\n"
        f"- Each instance has a link of {nic:,.0f} Gbit/s in each direction; the switches pass on 1 / "
        f"{assumed.oversubscription:g} of what half of the instances can send.\n"
        f"- A prompt alone takes {1e3 * assumed.prefill_s():.1f} ms, a step of {rows} rows "
        f"{1e3 * assumed.step_s(rows):.1f} ms; a request moves {1e-9 * assumed.kv_bytes:.2f} GB of KV.\n"
        f"- {found.split.prefill} instances prefill and {found.split.decode} decode: as many prompts are computed as "
        "answers are finished.",
        "## What each resource can serve",
        _markdown(
            ("resource", "requests/s", "of the first", "how"),
            [
                (each.name, f"{each.rps:,.0f}", f"{each.rps / found.resources[0].rps:.2f} x", each.how)
                for each in found.resources
            ],
        ),
        "## The controller",
        "CPU time of one decision of `disaggregated`, mean, measured on one core with half of the instances decoding "
        f"{rows} rows each. The last line is not measured: it lies on a straight line through the others.",
        _markdown(
            ("instances", "live requests", "arrival, ms", "pass, ms", "transfer, ms", "passes/s"),
            [
                (
                    f"{each.instances:,}" + (" (extrapolated)" if each is there else ""),
                    f"{each.live:,}" if each.live else "",
                    *(f"{1e3 * each.seconds[kind]:.3f}" for kind in scale_measured.KINDS),
                    f"{1 / each.mean_s:,.0f}",
                )
                for each in (*found.measured, there)
            ],
        ),
        f"Engines report every decode step, so one controller handles "
        f"{scale_forms.steps_per_s(assumed, found.split, found.machine.rps):,.0f} steps/s and "
        f"{scale_forms.FIXED_EVENTS * found.machine.rps:,.0f} other events/s at {found.machine.rps:,.0f} requests/s: "
        f"{scale_measured.busy_s(assumed, found.split, there, found.machine.rps):.1f} s of CPU in a second. "
        f"{found.controllers} controllers would do, each with {assumed.instances / found.controllers:.0f} instances, "
        "where a decision takes less. The policy spreads rows over all decode instances: at low rates nearly every row "
        "has a step of its own, which is why a single controller is used up so early. With "
        f"{found.live:,.0f} live requests and {found.live_bytes / 1e3:.1f} kB for each of them (prompt ids and times "
        f"of tokens included) its memory is {found.live * found.live_bytes / 1e9:.1f} GB, however many requests there "
        "are in all.",
        "## Simulated",
        f"Clusters of {found.checks[0].split.prefill + found.checks[0].split.decode} instances, overrun by "
        f"{scale_measured.OVERLOAD:g} times what the closed forms promise, each with another resource that is scarce. "
        "The middle third of the requests counts. The simulated controller takes no time. A row that "
        "grows beyond what memory is left is preempted and computed again (how often, in the mean of all requests, is "
        "in the last column), which the closed forms leave out.",
        _markdown(
            ("cluster", "P + D", "used up first", "closed form, requests/s", "simulated", "difference", "preempted"),
            [
                (
                    each.what,
                    f"{each.split.prefill} + {each.split.decode}",
                    each.first,
                    f"{each.predicted_rps:.2f}",
                    f"{each.simulated_rps:.2f}",
                    f"{each.difference:+.1%}",
                    f"{each.preempted:.2f}",
                )
                for each in found.checks
            ],
        ),
        f"One core simulates {speed:,.0f} requests per minute of the first of them; {found.requests:,} requests would "
        f"take it {found.requests / speed / 60:.1f} h at that speed.",
        "## Where the numbers come from",
        "\n".join(f"- {name}: {_plain(value)}" for name, value in origin.items() if value is not None),
    ]
    return "\n\n".join(parts) + "\n"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(each)}" for name, each in value.items() if each not in (None, {}))
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
