"""Serves a workload whose mix moves (long prompts, then long answers, then both) with schedulers that keep their
instances' roles and with one that changes them. Flags enter; a table, summary.json, the requests of every run and
switch.png leave. Run as `python -m pdjax.experiments.switch`.

All get the same requests at the same times on as many devices: colocated, disaggregated in every split of the
instances, dynamic. The limits are the balanced point of `pdjax.experiments.virtual` for the mean request of all
phases; the rate, if none is given, is the highest that any of them is predicted to serve. With --simulate all is played
in virtual time.

Give --pin where there is a core for each instance. Without it instances share cores and slow each other down, which no
prediction knows: start the ranks through `experiments/cpu_share.sh` then, which gives each a fixed share of a core.
"""

import importlib.util
import math
from collections.abc import Callable, Mapping
from typing import Any

from absl import flags as absl_flags
from rich.console import Console

from pdjax import provenance, report, workload
from pdjax.experiments import flags, launcher, measured, moving, predictions
from pdjax.models import source

WORKLOAD = "phases:uniform:512-768,8-16@48;uniform:64-128,96-160@72*2;uniform:384-640,32-64@48*0.9"

SIMULATE = absl_flags.DEFINE_bool("simulate", False, "In virtual time, by the latency model; without engines.")


def finish(summary: Mapping[str, Any], console: Console, origin: Callable[[], dict[str, Any]]) -> None:
    """Tells and writes the results."""
    console.print(moving.table(summary))
    for flip in summary["flips"]:
        console.print(
            f"{flip['start_s']:.1f} s: instance {flip['instance']} from {flip['from']} to {flip['to']} in "
            f"{flip['seconds']:.2f} s: {flip['reason']}",
            highlight=False,
            soft_wrap=True,
        )
    ratio = summary["dynamic_over_best_static"]
    if ratio is not None:
        console.print(f"dynamic keeps {ratio:.2f} x as many as {summary['best_static']}", highlight=False)
    if not (folder := flags.OUT.value):
        return
    path = report.write_summary(folder, {"provenance": origin(), **summary})
    if importlib.util.find_spec("matplotlib") is not None:
        from pdjax import plots_goodput

        plots_goodput.switch(summary, path / "switch.png")
    console.print(f"{folder}/ has summary.json and switch.png", highlight=False)


def main(argv: list[str]) -> None:
    del argv
    flags.refuse_requests("workload", "rate")
    kind, seed, console = flags.WORKLOAD.value, flags.SEED.value, launcher.console()
    workload.mean_lengths(kind)  # or there are no limits
    if flags.RATE.value is not None and not 0 < flags.RATE.value < math.inf:
        raise ValueError(f"rate is {flags.RATE.value}; allowed: a finite number of requests per second > 0")
    configs = moving.systems(flags.build_config(scheduler="colocated"))
    first = configs["colocated"]
    if SIMULATE.value:
        model = source.resolve(first.model).config
        virtuals = {name: predictions.profiled(config, model) for name, config in configs.items()}
        slo = predictions.limits(virtuals["colocated"], kind)[0][moving.POINT]
        rate = flags.RATE.value or moving.sustained(virtuals, kind, slo, seed)
        finish(moving.simulate(virtuals, kind, slo, rate, seed), console, lambda: provenance.collect(flags.given()))
        return
    if not (out := flags.OUT.value):
        raise ValueError("out is empty; allowed: a folder, for the requests of every run")
    report.out_folder(out)

    def on_head() -> None:
        summary = moving.measure(configs, kind, flags.RATE.value, seed, out)
        finish(summary, console, lambda: provenance.collect(flags.given(), ranks=launcher.ranks_for(first)))

    measured.on_ranks(on_head, first)


absl_flags.adopt_module_key_flags(flags)  # --help shows them
measured.set_defaults()
absl_flags.set_default(flags.PIN, False)  # which needs a core for each of the three instances
absl_flags.set_default(flags.WORKLOAD, WORKLOAD)
absl_flags.set_default(flags.OUT, "out/switch")
absl_flags.FLAGS.set_default("decode_instances", 2)
absl_flags.FLAGS.set_default("max_model_len", 1024)
absl_flags.FLAGS.set_default("decode_max_batch", 16)

if __name__ == "__main__":
    launcher.run(main)
