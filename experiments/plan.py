"""Plans a cluster: which instances, split or not, serve a workload within limits with the least hardware. Flags enter;
a table, the reasons, a command that realises the best, and with --out summary.json and plan.png leave. Run as
`python -m pdjax.experiments.plan --model=llama2-7b --hardware=a100-80g:16 --workload=fixed:2000,500`.
"""

import dataclasses
import importlib.util
import math
import shlex
from pathlib import Path

from absl import flags as absl_flags
from rich.progress import Progress
from rich.table import Table

from pdjax.experiments import flags
from pdjax.planning import planner, stock

# The processes of a search import this module again: what starts JAX is imported where it is needed.

HARDWARE = absl_flags.DEFINE_string(
    "hardware", "a100-80g:8", "Devices there are, NAME:NUMBER with commas (pdjax.hardware)."
)
BY = absl_flags.DEFINE_enum("by", "device", ["device", "dollar"], "What goodput is divided by.")
COMPARE = absl_flags.DEFINE_list("compare", [], "P:D instances to play whatever is expected of them, as 4:12.")
NODE_DEVICES = absl_flags.DEFINE_integer("node_devices", stock.NODE, "Devices of a node.", lower_bound=1)
NODE_GBPS = absl_flags.DEFINE_float(
    "node_gbps", None, "What a node sends to others, Gbit/s; unset: what the datasheet says.", lower_bound=1e-3
)
WORKERS = absl_flags.DEFINE_integer("workers", 0, "Processes; 0: one for each core.", lower_bound=0)
_SHARED = "model workload rate slo ttft_slo_ms tpot_slo_ms e2e_slo_ms attainment profile seed out"
for _name in _SHARED.split():
    absl_flags.declare_key_flag(_name)  # --help shows these

SHOWN = 12  # candidates of the table


def splits(texts: list[str]) -> list[tuple[int, int]]:
    """P:D pairs of --compare."""
    pairs = []
    for text in texts:
        p, _, d = text.partition(":")
        if not (p.isdecimal() and d.isdecimal() and int(p) and int(d)):
            raise ValueError(f"compare is {text!r}; allowed: P:D, two whole numbers >= 1")
        pairs.append((int(p), int(d)))
    return pairs


def table(found: planner.Plan, title: str) -> Table:
    """The candidates, best first."""
    out = Table(title=title, title_justify="left")
    out.add_column("scheduler")
    out.add_column("cluster", overflow="fold")
    for name in ("requests/s", "per device", "per $", "$/h"):
        out.add_column(name, justify="right")
    out.add_column("what ends it", overflow="fold")
    for one in found.candidates[:SHOWN]:
        out.add_row(
            one.policy,
            one.cluster,
            f"{'>= ' if one.bound == 'at least' else ''}{one.goodput:.3g}",
            f"{one.per_device:.3g}",
            f"{one.per_dollar:.3g}",
            f"{one.price_per_hour:.3g}",
            one.bottleneck,
        )
    return out


def split_table(found: planner.Plan) -> Table:
    """Every P:D split of the best sizes."""
    out = Table(title="P:D splits of the same instances, requests/s", title_justify="left")
    for name in ("P:D", "of its instances", "played"):
        out.add_column(name, justify="right")
    for one in found.splits:
        played = "" if one.goodput is None else f"{one.goodput:.3g}"
        out.add_row(f"{one.prefill}:{one.decode}", f"{one.estimate:.3g}", played)
    return out


def main(argv: list[str]) -> None:
    from pdjax.experiments import launcher

    del argv
    # The preset's limit on E2E is made for short answers: only one that is given counts.
    slo = dataclasses.replace(flags.build_slo(), e2e_ms=flags.E2E_SLO_MS.value)
    rate = flags.RATE.value
    if rate is not None and not 0 < rate < math.inf:
        raise ValueError(f"rate is {rate!r}; allowed: requests per second > 0, or unset for as many as possible")
    console = launcher.console()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("searching", total=None)
        found = planner.plan(
            flags.MODEL.value,
            HARDWARE.value,
            flags.WORKLOAD.value,
            slo,
            rate,
            by=BY.value,
            compare=splits(COMPARE.value),
            attainment=flags.ATTAINMENT.value,
            seed=flags.SEED.value,
            node_devices=NODE_DEVICES.value,
            node_bytes_per_s=None if NODE_GBPS.value is None else NODE_GBPS.value * 1e9 / 8,
            profile=flags.PROFILE.value,
            workers=WORKERS.value,
            progress=lambda done, total, what: bar.update(task, completed=done, total=total, description=what),
        )
    limits = ", ".join(
        f"{name} <= {limit:g} ms"
        for name, limit in (("TTFT", slo.ttft_ms), ("TPOT", slo.tpot_ms), ("E2E", slo.e2e_ms))
        if limit is not None
    )
    title = f"{flags.MODEL.value}, {flags.WORKLOAD.value}, {limits} for {flags.ATTAINMENT.value:.0%}"
    if found.candidates:
        console.print(table(found, title))
    if found.splits:
        console.print(split_table(found))
    console.print(found.why, highlight=False, soft_wrap=True)
    if found.command:
        console.print(shlex.join(found.command), highlight=False, soft_wrap=True)
    for line in found.caveats:
        console.print(f"note: {line}", highlight=False, soft_wrap=True)
    if flags.OUT.value:
        _write(found, title, flags.OUT.value)
        console.print(f"{flags.OUT.value}/ has summary.json and a picture", highlight=False)


def _write(found: planner.Plan, title: str, folder: str) -> None:
    from pdjax import provenance, report  # see above

    holders = (HARDWARE, BY, COMPARE, NODE_DEVICES, NODE_GBPS, WORKERS)
    own = {holder.name: holder.value for holder in holders}
    path = report.write_summary(folder, {"provenance": provenance.collect(flags.given() | own), **found.summary()})
    if found.candidates and importlib.util.find_spec("matplotlib") is not None:
        from pdjax import plots_plan

        plots_plan.plan(found, title, Path(path) / "plan.png")


if __name__ == "__main__":
    from pdjax.experiments import launcher

    absl_flags.set_default(flags.MODEL, "llama2-7b")
    absl_flags.set_default(flags.WORKLOAD, "fixed:512,64")
    launcher.run(main)
