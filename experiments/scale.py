"""Which resource of a cluster of a thousand instances is used up first: links, KV memory, or the decisions of its one
controller. Flags enter; tables, and with --md a page of text, with --out summary.json, leave. Run as
`python -m pdjax.experiments.scale --md=experiments/scale.md`.

Closed forms (`scale_forms`) say what each resource can serve; smaller simulated clusters that are overrun say whether
they are right. What a decision costs is measured here, at several sizes, and extrapolated to the size in question.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags as absl_flags

from pdjax import hardware, provenance, published, report
from pdjax.experiments import flags, launcher, scale_forms, scale_measured, scale_page
from pdjax.experiments.scale_forms import Assumptions, Split
from pdjax.experiments.scale_measured import Check, Costs
from pdjax.experiments.scale_page import Found

INSTANCE = absl_flags.DEFINE_string(
    "instance", "opt-13b-a100-80g-distserve-tp1-pp1", "Model, hardware and engine: a name of pdjax.published."
)
INSTANCES = absl_flags.DEFINE_integer("instances", 1000, "Of the cluster.", lower_bound=2, upper_bound=1_000_000)
REQUESTS = absl_flags.DEFINE_integer("requests", 1_000_000, "That are to be served.", lower_bound=1)
# The means of Azure's conversation trace of November 2023 (Splitwise, section III).
PROMPT = absl_flags.DEFINE_integer("prompt", 1155, "Tokens of every prompt.", lower_bound=1)
ANSWER = absl_flags.DEFINE_integer("answer", 211, "Tokens of every answer.", lower_bound=2)
TPOT_MS = absl_flags.DEFINE_float("tpot_ms", 100.0, "Limit of a decode step.", lower_bound=0.01)
NIC_GBIT = absl_flags.DEFINE_float(
    "nic_gbit", 0.0, "Of an instance's link, Gbit/s, each direction; 0: what its devices have.", lower_bound=0.0
)
OVERSUBSCRIPTION = absl_flags.DEFINE_float(
    "oversubscription", 4.0, "How many times more the links of one half carry than the switches.", lower_bound=1.0
)
SIZES = absl_flags.DEFINE_list("sizes", ["8", "64", "256"], "Instances with which decisions are measured.")
EVENTS = absl_flags.DEFINE_integer("events", 2000, "Passes that are timed at each size.", lower_bound=10)
CHECKED = absl_flags.DEFINE_integer("checked", 16, "Instances of the simulated clusters.", lower_bound=2)
MD = absl_flags.DEFINE_string("md", "", "File of the page; empty: none.")
for _name in ("seed", "out"):
    absl_flags.declare_key_flag(_name)  # --help shows these

SCARCE = 0.5  # of the rate in balance: what the resource that a check makes scarce can serve


def assumptions() -> Assumptions:
    """By the flags. ValueError naming one."""
    instance = published.get(INSTANCE.value)
    own = hardware.get(instance.hardware).nic_bytes_per_s * instance.devices
    nic = NIC_GBIT.value * 1e9 / 8 or own
    assumed = Assumptions(
        instance, INSTANCES.value, PROMPT.value, ANSWER.value, TPOT_MS.value, nic, OVERSUBSCRIPTION.value
    )
    scale_forms.rows_of(assumed)  # or nothing can be served
    return assumed


def sizes() -> list[int]:
    """Ascending. ValueError naming the flag."""
    texts = SIZES.value
    if not texts or not all(text.isdigit() and int(text) >= 2 for text in texts):
        raise ValueError(f"sizes is {','.join(texts)!r}; allowed: whole numbers >= 2 with commas")
    return sorted({int(text) for text in texts})


def scarce(assumed: Assumptions) -> tuple[Split, list[tuple[str, Assumptions]]]:
    """The split of a small cluster, and in words how it is changed, so that another resource is used up first."""
    small = dataclasses.replace(assumed, instances=CHECKED.value)
    split = scale_forms.split_of(small)
    links = SCARCE * scale_measured.limits(small, split)[0].rps * small.kv_bytes / min(split.prefill, split.decode)
    # With a quarter of the memory there is room for a quarter of the rows, but for a whole request at least.
    room = max(small.instance.kv_tokens // 4, small.prompt + small.answer)
    return split, [
        ("as assumed", small),
        (
            f"KV of {room:,} tokens",
            dataclasses.replace(small, instance=dataclasses.replace(small.instance, kv_tokens=room)),
        ),
        (f"links of {8e-9 * links:.3g} Gbit/s", dataclasses.replace(small, nic_bytes_per_s=links)),
    ]


def run(assumed: Assumptions, measured_at: Sequence[int], say: Callable[[str], None]) -> Found:
    """Measures, simulates and puts together."""
    rows = scale_forms.rows_of(assumed)
    measured: list[Costs] = []
    for size in measured_at:
        measured.append(scale_measured.costs(size, rows, EVENTS.value))
        say(f"{size} instances: a decision about a pass takes {1e3 * measured[-1].mean_s:.3f} ms")
    checks: list[Check] = []
    small_split, changed = scarce(assumed)
    for what, small in changed:
        checks.append(scale_measured.check(what, small, small_split, flags.SEED.value))
        say(f"{what}: {checks[-1].simulated_rps:.2f} requests/s, by the closed form {checks[-1].predicted_rps:.2f}")
    kept = scale_measured.bytes_per_live_request(assumed, flags.SEED.value)
    split = scale_forms.split_of(assumed)
    there = scale_measured.cost_at(measured, assumed.instances)
    used = scale_forms.resources(assumed, split, lambda rps: scale_measured.busy_s(assumed, split, there, rps))
    return Found(assumed, REQUESTS.value, split, tuple(used), tuple(measured), there, tuple(checks), kept)


def main(argv: list[str]) -> None:
    del argv
    assumed, measured_at = assumptions(), sizes()
    console = launcher.console()
    found = run(assumed, measured_at, lambda line: console.print(line, highlight=False, soft_wrap=True))
    console.print(scale_page.table(found))
    console.print(scale_page.answer(found), highlight=False, soft_wrap=True)
    holders: list[Any] = [INSTANCE, INSTANCES, REQUESTS, PROMPT, ANSWER, TPOT_MS, NIC_GBIT, OVERSUBSCRIPTION, SIZES]
    given = {holder.name: holder.value for holder in (*holders, EVENTS, CHECKED, flags.SEED)}
    origin = provenance.collect(given)
    if file := MD.value:
        try:
            Path(file).write_text(scale_page.page(found, origin))
        except OSError as error:
            raise ValueError(f"md is {file!r} ({error.strerror}); allowed: a file that can be written") from None
        console.print(f"{file} is written", highlight=False)
    if folder := flags.OUT.value:
        report.write_summary(folder, {"provenance": origin, **scale_page.summary(found)})
        console.print(f"{folder}/ has summary.json", highlight=False)


if __name__ == "__main__":
    launcher.run(main)
