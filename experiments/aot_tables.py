"""What `pdjax.experiments.aot` shows: compiled instances enter, tables and lines leave. All numbers are those of one
chip.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from rich.table import Table

from pdjax.aot import memory
from pdjax.aot.compiled import Compiled
from pdjax.aot.programs import Program
from pdjax.experiments.aot_runs import Done

_GIB = 2**30
NOTE = (
    "Temporaries: activations and results too. Of the chip: all weights and pages of the program's stage, and the "
    "temporaries of this program. Loops over pages count as if they went round once, and kernels of our own as "
    "nothing, in FLOP, bytes and time. FLOP of CUDA programs: of the matrix products that were given to the compiler, "
    "which tells none."
)


def programs(done: Done) -> Table:
    """One row per program of an instance."""
    job = done.job
    spec, chip = job.spec, job.target.hardware
    table = Table(
        title=f"{job.target.text}, {job.name}: {spec.pp} x {spec.devices // spec.pp} {chip.name}, {job.dtype}",
        title_justify="left",
    )
    for name in ("program", "compiles", "weights", "pages", "temporaries", "of the chip", "in place", "collectives"):
        table.add_column(name, justify="left" if name in ("program", "collectives") else "right")
    for name in ("GFLOP", "GB", "estimate, ms"):
        table.add_column(name, justify="right")
    for program, answer in done.answers:
        table.add_row(program.name, *_cells(done, program, answer))
    return table


def instances(compiled: Sequence[Done]) -> Table:
    """One row per instance: its memory on a chip, and what would fit."""
    table = Table(title="memory of a chip, of the fullest stage", title_justify="left")
    for name in ("target", "instance"):
        table.add_column(name)
    for name in ("weights", "pages", "temporaries", "of the chip", "most pages", "requests", "context"):
        table.add_column(name, justify="right")
    for done in compiled:
        fit, spec = done.fit, done.job.spec
        colour = "green" if fit.fits else "red"
        table.add_row(
            done.job.target.text,
            done.job.name,
            *(_gib(size) for size in (fit.need.weights, fit.pool, fit.need.extra)),
            f"[{colour}]{fit.total / fit.memory:.0%} of {fit.memory / _GIB:g}[/{colour}]",
            f"{fit.pages} of {spec.page_size}",
            f"{fit.batch} of {spec.max_model_len}",
            str(fit.context),
        )
    return table


def lines(compiled: Sequence[Done]) -> Iterator[str]:
    """What a table has no room for."""
    seen = dict.fromkeys((done.job.target.text, *done.job.attention.items()) for done in compiled)
    for target, *forms in seen:
        yield f"{target}: attention {', '.join(f'of {phase} by {form}' for phase, form in forms)}"
    for done in compiled:
        spec = done.job.spec
        yield (
            f"{done.job.target.text}, {done.job.name}: at most {done.fit.pages} pages of {spec.page_size} tokens fit, "
            f"for {done.fit.batch} requests of {spec.max_model_len} tokens, or {spec.max_rows or spec.max_chunks} of "
            f"{done.fit.context}, as long as temporaries stay what they are; it has {spec.num_pages}"
        )
    yield NOTE


def _cells(done: Done, program: Program, answer: Compiled) -> Iterator[str]:
    if (held := memory.held_by(program, answer)) is None:
        yield "[red]no[/red]"
        return
    need = dataclasses.replace(done.needs[program.stage], extra=held.extra)
    yield f"{answer.seconds_to_compile:.1f} s"
    yield from (_gib(size) for size in (held.weights, held.pool, held.extra))
    yield f"{need.total(done.job.spec.num_pages) / done.fit.memory:.1%}"
    yield {None: "-", True: "[green]yes[/green]", False: "[red]copied[/red]"}[answer.pool_aliased]
    yield ", ".join(f"{count} {kind}" for kind, count in answer.collectives.items()) or "-"
    yield _scaled(answer.flops, 1e-9)
    yield _scaled(answer.bytes, 1e-9)
    yield _scaled(answer.seconds, 1e3)


def _gib(size: float) -> str:
    return f"{size / _GIB:.3f} GiB" if size >= 0.001 * _GIB else f"{size / 2**20:.2f} MiB"


def _scaled(value: float | None, factor: float) -> str:
    return "-" if value is None else f"{value * factor:.3g}"
