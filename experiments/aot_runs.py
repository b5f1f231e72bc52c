"""Compiles the programs of one instance for a target. Enter: a configuration and a chip (`pdjax.aot.targets`). Leave:
what does not fit, refused before anything is compiled, and for each instance its programs with the compiler's answers,
as objects and as entries of summary.json. Called by `pdjax.experiments.aot` and by its check.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pdjax import build
from pdjax.aot import compiled, memory
from pdjax.aot.compiled import Compiled
from pdjax.aot.memory import Fit, Need
from pdjax.aot.programs import Program, catalog
from pdjax.aot.targets import Target
from pdjax.config import EngineConfig
from pdjax.messages import InstanceSpec, Role
from pdjax.models.attention import backend_for
from pdjax.models.config import ModelConfig
from pdjax.models.kv import kv_dtype_on
from pdjax.models.sharding import make_meshes

Progress = Callable[[int, int, str], None]  # done, total, what
Answers = tuple[tuple[Program, Compiled], ...]

_COMPILERS = 2  # threads: tracing holds the interpreter, and compilers have threads of their own
# Kinds of programs that change pages; one that made new ones would need memory for two pools.
_IN_PLACE = ("group", "insert")


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One instance that is to be compiled.

    Attributes:
        programs: all that it has, or some.
        attention: "prefill" and "decode" -> the form of attention that its devices take.
    """

    target: Target
    model: ModelConfig
    spec: InstanceSpec
    dtype: str
    programs: tuple[Program, ...]
    attention: dict[str, str]

    @property
    def name(self) -> str:
        return f"{self.spec.role.value} instance {self.spec.index}"


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """The same, compiled.

    Attributes:
        needs: bytes on a chip of each stage.
    """

    job: Job
    answers: Answers
    needs: tuple[Need, ...]
    fit: Fit

    @property
    def faults(self) -> list[str]:
        """What an engine could not run with, in words."""
        where = f"{self.job.target.text}, {self.job.name}"
        refused = [f"{where}: {done.name} does not compile: {done.error}" for _, done in self.answers if done.error]
        copied = [
            f"{where}: {done.name} copies an array that it should update in place"
            for program, done in self.answers
            if done.pool_aliased is False or (program.kind in _IN_PLACE and not (done.pool_aliased or done.error))
        ]
        return refused + copied


def refuse(config: EngineConfig, model: ModelConfig, target: Target, specs: Iterable[InstanceSpec]) -> None:
    """ValueError, with the numbers, if the weights and pages of an instance are more than its chips hold."""
    dtype = build.dtype_of(config, target.platform)
    for spec in specs:
        need = memory.needs(spec, model, dtype)
        memory.check(spec, memory.fit(spec, model, need, target.hardware), target.hardware)


def distinct(specs: Sequence[InstanceSpec]) -> list[tuple[InstanceSpec, int]]:
    """Instances that differ in more than their number, each with the number of its first device: instances lie side by
    side, and equal ones have equal programs."""
    found: list[tuple[InstanceSpec, int]] = []
    seen: list[InstanceSpec] = []
    first = 0
    for spec in specs:
        kind = dataclasses.replace(spec, index=0, role=Role.MIXED)
        if kind not in seen:
            seen.append(kind)
            found.append((spec, first))
        first += spec.devices
    return found


def job(
    config: EngineConfig,
    model: ModelConfig,
    target: Target,
    spec: InstanceSpec,
    specs: Sequence[InstanceSpec],
    devices: Sequence[Any],
) -> Job:
    """All programs of one of the instances `specs`, on these devices, which are its own."""
    dtype = build.dtype_of(config, target.platform)
    meshes = make_meshes(model, devices, spec.pp)
    programs = tuple(catalog(spec, specs, model, meshes, dtype, config.stream_layers))
    kv = kv_dtype_on(target.platform, dtype)
    attention = backend_for(meshes[0]).kernels(model, spec.page_size, kv)
    return Job(target, model, spec, dtype, programs, attention)


def run(job: Job, tell: Progress) -> Done:
    """Compiles the programs of an instance; `tell` is told of each that is done, with its seconds."""
    pool = ThreadPoolExecutor(_COMPILERS)
    try:
        pending = [(program, pool.submit(compiled.compile, program)) for program in job.programs]
        answers = []
        for number, (program, future) in enumerate(pending, start=1):
            answer = future.result()
            answers.append((program, answer))
            tell(number, len(pending), f"{job.target.text}: {program.name} took {answer.seconds_to_compile:.1f} s")
    finally:
        pool.shutdown(cancel_futures=True)  # who interrupts it does not wait for all the others
    needs = memory.measured(memory.needs(job.spec, job.model, job.dtype), answers)
    return Done(job, tuple(answers), needs, memory.fit(job.spec, job.model, needs, job.target.hardware))


def program_entries(done: Done) -> list[dict[str, Any]]:
    """For summary.json's `programs`. Bytes and operations are those of one chip."""
    return [
        {
            "target": done.job.target.text,
            "instance": done.job.name,
            "program": program.name,
            "kind": program.kind,
            "stage": program.stage,
            "compiled": answer.error is None,
            "error": answer.error,
            "compile_s": answer.seconds_to_compile,
            "memory": _memory_entry(program, answer),
            "donated": answer.donated,
            "pool_aliased": answer.pool_aliased,
            "collectives": answer.collectives,
            "flops": answer.flops,
            "bytes": answer.bytes,
            "seconds": answer.seconds,
        }
        for program, answer in done.answers
    ]


def _memory_entry(program: Program, answer: Compiled) -> dict[str, int] | None:
    held = memory.held_by(program, answer)
    if answer.memory is None or held is None:
        return None
    parts = {"weights": held.weights, "pool": held.pool, "temporaries": held.extra, "total": answer.memory.total}
    return parts | dataclasses.asdict(answer.memory)


def instance_entry(done: Done) -> dict[str, Any]:
    """For summary.json's `instances`. Bytes are those of one chip of the fullest stage."""
    spec, fit = done.job.spec, done.fit
    return {
        "target": done.job.target.text,
        "instance": done.job.name,
        "pp": spec.pp,
        "tp": spec.devices // spec.pp,
        "dtype": done.job.dtype,
        "attention": done.job.attention,
        "stage": fit.stage,
        "memory": {
            "weights": fit.need.weights,
            "pool": fit.pool,
            "temporaries": fit.need.extra,
            "total": fit.total,
            "chip": fit.memory,
        },
        "fits": fit.fits,
        "num_pages": spec.num_pages,
        "most_pages": fit.pages,
        "most_requests": fit.batch,
        "longest_context": fit.context,
    }
