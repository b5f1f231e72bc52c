"""A latency profile of devices that are not there (`pdjax.aot.estimate`): a configuration and a target enter;
profile.json, which the simulator, the planner and an engine on such devices take, tables and summary.json leave. Called
by `pdjax.experiments.aot --profile`.

For Llama-3.1-8B on one TPU v6e the estimate is compared with measured operators, LLMServingSim's profile of that chip
(profiler/v0/perf_models/TPU-v6e-1 of its repository): DATA/llmservingsim/profile/TPU-v6e-1.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pdjax import build, operator_tables, profile, provenance, report, roofline
from pdjax.aot import compiled, estimate
from pdjax.aot.estimate import Passes
from pdjax.aot.programs import catalog
from pdjax.aot.targets import Target
from pdjax.catalogue import Program
from pdjax.config import EngineConfig
from pdjax.experiments import aot_runs, flags, profile_tables
from pdjax.latency import Latency, Load
from pdjax.messages import InstanceSpec, Role
from pdjax.models.config import ModelConfig
from pdjax.models.kv import kv_dtype_on
from pdjax.models.presets import PRESETS
from pdjax.models.sharding import make_meshes
from pdjax.operators import Operators
from pdjax.schedulers.base import Traits

CHUNK = 2048  # tokens of the longest passes, unless the flags say: chips are not saturated by less
MEASURED = ("tpu-v6e", "llama3.1-8b")
FOLDER = "llmservingsim/profile/TPU-v6e-1/Llama-3.1-8B"
# Attention was measured up to 2048 tokens in all, and 256 rows.
MOST, ROWS = 2048, 256
PRIORS, CONTEXTS = (0, 1024), (64, 512, 1984)
PARTS = ("without_attention", "attention", "passes")


def run(config: EngineConfig, model: ModelConfig, target: Target, out: str, console: Console, data: str) -> None:
    """Estimates, compares, shows and writes.

    Args:
        config: its model, dtype, sizes and meshes count; instances are taken to have all programs, so that the profile
            serves every scheduler, and as many pages as memory has room for where no number is given.
        out: folder to write to; "": nothing is written.
        data: folder with published measurements; "": nothing is compared.

    Raises:
        ValueError: the model does not fit or does not divide, the target has too few devices, or a program does not
            compile.
    """
    if out:
        report.out_folder(out)
    dtype = build.dtype_of(config, target.platform)
    kv_dtype = kv_dtype_on(target.platform, dtype)
    specs = instances(config, model, target)
    aot_runs.refuse(config, model, target, specs)
    devices = build.devices_for(max(spec.devices for spec in specs), target.devices())
    found: list[tuple[profile.Kind, Passes]] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("compiling", total=None)
        for spec in specs:
            if any(profile.covers(kind.spec, spec) for kind, _ in found):
                continue
            meshes = make_meshes(model, devices[: spec.devices], spec.pp)
            passes = estimate.passes(
                spec,
                model,
                target.hardware,
                catalog(spec, specs, model, meshes, dtype, config.stream_layers),
                seconds_of,
                dtype=dtype,
                kv_dtype=kv_dtype,
                progress=lambda done, total, what: bar.update(task, completed=done, total=total, description=what),
            )
            found.append((estimate.kind_of(passes), passes))
    first = found[0][1]
    known = profile.Profile(
        version=profile.VERSION,
        name=config.model,
        model=model,
        dtype=dtype,
        hardware=str(devices[0].device_kind),
        kinds=tuple(kind for kind, _ in found),
        transfers=estimate.transfers(first.bounds, target.hardware, config.transfer),
        estimate=profile.Estimate(target.text, target.platform, f"{first.how}; transfers by the datasheet"),
    )
    console.print(profile_tables.errors(known))
    for line in profile_tables.numbers(known):
        console.print(line, highlight=False, soft_wrap=True)
    compared = against_measured(*found[0], target, model, data, console)
    if out:
        profile.save(known, Path(out) / "profile.json")
        origin = provenance.collect(flags.given() | {"profile": ""})
        report.write_summary(out, {"provenance": origin, **profile_tables.summary(known), "compared": compared})
        console.print(f"{out}/ has profile.json and summary.json", highlight=False)


def instances(config: EngineConfig, model: ModelConfig, target: Target) -> tuple[InstanceSpec, ...]:
    """Those of the configuration, each with all programs, and with the pages that memory has room for where no number
    is given.

    Raises:
        ValueError: the model does not fit, or does not divide.
    """
    chunk = config.prefill_chunk or CHUNK
    given = config.prefill_num_pages, config.decode_num_pages
    meshes = (config.prefill_tp, config.prefill_pp), (config.decode_tp, config.decode_pp)
    prefill, decode = (pages or _pages(config, model, target, *mesh) for pages, mesh in zip(given, meshes, strict=True))
    config = dataclasses.replace(
        config, prefill_chunk=chunk, decode_chunk=chunk, prefill_num_pages=prefill, decode_num_pages=decode
    )
    return build.specs_of(config, model, Traits(), target.platform)


def seconds_of(program: Program) -> float | None:
    """The compiler's estimate; None: it makes none. ValueError where the program does not compile."""
    done = compiled.compile(program)
    if done.error:
        raise ValueError(f"{program.name} does not compile: {done.error}")
    return done.seconds


def _pages(config: EngineConfig, model: ModelConfig, target: Target, tp: int, pp: int) -> int:
    dtype = build.dtype_of(config, target.platform)
    pool = roofline.pool(
        Role.MIXED,
        1,
        model,
        target.hardware,
        tp,
        pp,
        dtype_bytes=jnp.dtype(dtype).itemsize,
        kv_dtype_bytes=jnp.dtype(kv_dtype_on(target.platform, dtype)).itemsize,
    )
    return 1 + pool.kv_tokens // config.page_size


# --- against what was measured --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """A pass as estimated and as measured, seconds.

    Attributes:
        phase: "prefill" or "decode".
        size: tokens of the prompt part, or rows.
        context: tokens before the prompt part, or of each row.
        without_attention, attention: (estimated, sum of measured operators).
        passes: (by the fitted model, sum of measured operators).
    """

    phase: str
    size: int
    context: int
    without_attention: tuple[float, float]
    attention: tuple[float, float]
    passes: tuple[float, float]

    def error(self, part: str) -> float:
        """Of one of PARTS: estimated / measured - 1."""
        estimated, measured = getattr(self, part)
        return float(estimated / measured - 1)


def against_measured(
    kind: profile.Kind, passes: Passes, target: Target, model: ModelConfig, data: str, console: Console
) -> dict[str, Any] | None:
    """Compares with measured operators, if there are any of this model on this device: prints a table, and gives what
    summary.json keeps."""
    hardware, name = MEASURED
    if target.hardware.name != hardware or model != PRESETS[name] or passes.spec.devices > 1:
        return None
    if not data:
        console.print(f"not compared with measurements: --data names no folder with {FOLDER}", highlight=False)
        return None
    measured = operator_tables.tpu(Path(data) / FOLDER, model.num_layers)
    lines = list(compare(passes, kind.latency, measured))
    console.print(table(lines))
    for phase, parts in errors(lines).items():
        said = "; ".join(f"{part.replace('_', ' ')} {one['mean']:.0%}, {one['max']:.0%}" for part, one in parts.items())
        console.print(f"{phase}, mean and largest error: {said}", highlight=False, soft_wrap=True)
    return {"with": FOLDER, "errors": errors(lines), "passes": [dataclasses.asdict(line) for line in lines]}


def compare(passes: Passes, latency: Latency, measured: Operators) -> Iterator[Compared]:
    """Every size of an instance that was measured, a pass of prompts or of rows alone."""
    spec = passes.spec
    loads = [
        ("prefill", T, prior, Load(((T, prior),)), measured.prefill.at(T, prior))
        for T in spec.chunk_buckets
        for prior in PRIORS
        if T + prior <= min(MOST, spec.max_model_len)
    ] + [
        ("decode", B, context, Load((), B, B * context, B * context), measured.decode.at(B, context))
        for B in spec.row_buckets
        for context in CONTEXTS
        if B <= ROWS and context <= spec.max_model_len
    ]
    for phase, size, context, load, attention_s in loads:
        pass_s = measured.iteration_s(spec, load)
        yield Compared(
            phase,
            size,
            context,
            (passes.dense_s(load), pass_s - attention_s),
            (passes.attention_s(load), attention_s),
            (latency.iteration_s(spec, load), pass_s),
        )


def errors(lines: Sequence[Compared]) -> dict[str, dict[str, dict[str, float]]]:
    """Mean and largest absolute error, by phase and part."""

    def of(phase: str, part: str, pick: Callable[[list[float]], float]) -> float:
        return pick([abs(line.error(part)) for line in lines if line.phase == phase])

    phases = dict.fromkeys(line.phase for line in lines)
    return {
        phase: {part: {"mean": of(phase, part, statistics.fmean), "max": of(phase, part, max)} for part in PARTS}
        for phase in phases
    }


def table(lines: Sequence[Compared]) -> Table:
    """Estimated and measured milliseconds, and the error."""
    made = Table(title="the estimate against the sum of measured operators, ms", title_justify="left")
    for column in ("pass", "tokens or rows", "context"):
        made.add_column(column, justify="left" if column == "pass" else "right")
    for part in PARTS:
        for column in (part.replace("_", " "), "measured", "error"):
            made.add_column(column, justify="right")
    for number, line in enumerate(lines):
        if number and line.phase != lines[number - 1].phase:
            made.add_section()
        cells = [
            text
            for part in PARTS
            for text in (*(f"{1e3 * seconds:.3g}" for seconds in getattr(line, part)), f"{line.error(part):+.0%}")
        ]
        made.add_row(line.phase, str(line.size), str(line.context), *cells)
    return made
