"""Measures the programs that serve against the limits of the machine, on one core. Flags enter; a table and, with
--out, `summary.json` with `ratios: {name: {value, bar, ok}}` leave. Run as
`python -m pdjax.experiments.bench_programs`.

The model is SmolLM2-135M's shape with random weights. Ratios are medians of --runs; those of whole workloads are
measured once. A ratio below its bar does not fail the launcher: the bars were set on another machine.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from absl import flags as absl_flags
from rich.console import Console
from rich.table import Table

from pdjax import provenance
from pdjax import report as outputs
from pdjax.experiments import bench_cases, bench_engine, bench_peers, launcher

OUT = absl_flags.DEFINE_string("out", None, "Folder to write to; empty: nothing is written.")
RUNS = absl_flags.DEFINE_integer("runs", 3, "Measurements of each ratio of programs; the median counts.", lower_bound=1)
ONLY = absl_flags.DEFINE_list("only", [], "Ratios whose names start with one of these; empty: all.")
PEERS = absl_flags.DEFINE_bool("peers", False, "Compare with Hugging Face transformers too (the extra `peers`).")

# Output tokens/s of vLLM 0.32's CPU build on the same workload, measured on one core of an AVX-512 machine with
# bfloat16 arithmetic (40 GB/s, 255 GFLOP/s): a reference point, not a measurement of this machine.
VLLM_TOKENS_PER_S = {"float32": 197.0, "bfloat16": 341.0}

Entry = dict[str, Any]


def use_one_core() -> None:
    """Pins the process to one core and makes XLA use one thread. Must come before JAX starts its backend.

    An engine has two instances at least, and the CPU client wants devices to spare (see `pdjax.build.devices_for`).
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    flags = "--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count=4"
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), flags]).strip()


def program_ratios(wanted: Callable[[str], bool], runs: int, report: Callable[[str], None]) -> dict[str, Entry]:
    """Measures every wanted ratio of programs: name -> {value, bar, ok, ms}."""
    ratios = {}
    for name, case in bench_cases.cases().items():
        if not wanted(name):
            continue
        measure = case.prepare()
        values, times = zip(*(measure() for _ in range(runs)), strict=True)
        value = float(np.median(values))
        ratios[name] = {
            "value": value,
            "bar": case.bar,
            "ok": case.ok(value),
            "at_most": case.ceiling,
            "ms": 1e3 * float(np.median(times)),
        }
        report(f"{name}: {value:.3f}")
    return ratios


def table_of(ratios: Mapping[str, Entry]) -> Table:
    """One row per ratio."""
    table = Table("ratio", "value", "bar", "reached", "ms")
    for name, entry in ratios.items():
        verdict = "[green]yes[/green]" if entry["ok"] else "[red]no[/red]"
        sign = "<=" if entry["at_most"] else ">="
        ms = f"{entry['ms']:.1f}" if "ms" in entry else ""
        table.add_row(name, f"{entry['value']:.3f}", f"{sign} {entry['bar']:g}", verdict, ms)
    return table


def main(argv: list[str]) -> None:
    del argv
    console = Console(stderr=True)
    prefixes = tuple(ONLY.value)
    names = (*bench_cases.cases(), "engine_efficiency", "vs_transformers")
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in names):
            raise ValueError(f"only has {prefix!r}; allowed: the start of one of {', '.join(names)}")
    if PEERS.value:
        bench_peers.check()
    if OUT.value:
        outputs.out_folder(OUT.value)
    use_one_core()
    limits = {"read_gb_per_s": bench_cases.read_bandwidth() / 1e9, "gemm_gflops": bench_cases.peak_flops() / 1e9}

    def wanted(name: str) -> bool:
        return not prefixes or name.startswith(prefixes)

    def note(line: str) -> None:
        console.print(line, highlight=False)

    ratios = program_ratios(wanted, RUNS.value, note)
    tokens_per_s: dict[str, float] = {}
    if wanted("engine_efficiency") or wanted("vs_transformers"):
        found, tokens_per_s = bench_engine.measure(note)
        ratios |= found
    if PEERS.value and wanted("vs_transformers"):
        ratios["vs_transformers"] = bench_peers.measure(tokens_per_s["float32"], note)
    out = launcher.console()
    out.print(
        f"this core reads {limits['read_gb_per_s']:.1f} GB/s and multiplies {limits['gemm_gflops']:.0f} GFLOP/s (f32)"
    )
    out.print(table_of(ratios))
    for dtype, ours in tokens_per_s.items():
        out.print(
            f"{dtype}: {ours:.0f} output tokens/s; vLLM's CPU build made {VLLM_TOKENS_PER_S[dtype]:.0f} of them on a "
            "core of an AVX-512 machine, which multiplies 4 times as fast",
            highlight=False,
        )
    if OUT.value:
        given = {flag.name: flag.value for flag in (OUT, RUNS, ONLY, PEERS)}
        summary = {
            "provenance": provenance.collect(given, devices=jax.devices()[:1]),
            "limits": limits,
            "ratios": ratios,
            "output_tokens_per_s": tokens_per_s,
            "vllm_output_tokens_per_s": VLLM_TOKENS_PER_S,
        }
        outputs.write_summary(OUT.value, summary)


if __name__ == "__main__":
    launcher.run(main)
