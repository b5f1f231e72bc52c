"""What a compiler says of a program. Enters: a `Program` whose arguments are shapes on devices that are not there.
Leave: whether it compiles, its memory, whether donated pages stay in place, its collectives and its costs. Called by
`pdjax.experiments.aot`.

All bytes and operations are those of one device. Loops whose length depends on data (the pages of a prompt) count as
if they went round once, and a kernel of our own may count nothing: compilers do not look into either.
"""

import dataclasses
import math
import re
import time
from collections import Counter
from typing import Any

import jax
from jax.sharding import AbstractMesh, use_abstract_mesh

from pdjax.catalogue import Program

_COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
# An instruction is "%name = shape opcode(operands)"; what runs in the background is counted where it starts.
_COLLECTIVE = re.compile(rf" ({'|'.join(_COLLECTIVES)})(?:-start)?\(")
_ALIAS = re.compile(r"\{[\d, ]*\}: \(\d+, \{[\d, ]*\}")
_REASON_CHARACTERS = 500


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device.

    Attributes:
        argument, output: as they lie there, padding of tiles included.
        alias: of the output, what is in the place of an argument.
        temp: what the program needs beside them.
    """

    argument: int
    output: int
    alias: int
    temp: int

    @property
    def total(self) -> int:
        """While the program runs."""
        return self.argument + self.output - self.alias + self.temp


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """A program and its compiler's answer.

    Attributes:
        name: of the program.
        seconds_to_compile: tracing and lowering included.
        memory: None: it was refused.
        donated: bytes of the arguments that are to be updated in place, without padding.
        pool_aliased: every donated argument is: the compiled program says so of each, and their bytes agree. None:
            nothing is donated.
        collectives: how many instructions of each kind; one in a loop counts once.
        flops: by the compiler; where it tells none, those of the matrix products that it was given.
        bytes, seconds: by the compiler; None where it tells none.
        error: why it was refused; None: it was not.
    """

    name: str
    seconds_to_compile: float
    memory: Memory | None = None
    donated: int = 0
    pool_aliased: bool | None = None
    collectives: dict[str, int] = dataclasses.field(default_factory=dict)
    flops: float | None = None
    bytes: float | None = None
    seconds: float | None = None
    error: str | None = None


def compile(program: Program) -> Compiled:
    """Compiles a program for the devices of its arguments. What the compiler raises becomes `error`."""
    began = time.perf_counter()
    try:
        with use_abstract_mesh(_chip(program)):
            traced = program.fn.trace(*program.args)
            lowered = traced.lower()
        done = lowered.compile()
    except Exception as error:  # whatever stops it is the answer: compilers and kernels raise all kinds
        return Compiled(program.name, time.perf_counter() - began, error=reason(error))
    seconds = time.perf_counter() - began
    infos = zip(jax.tree.leaves(lowered.args_info), jax.tree.leaves(program.args), strict=True)
    donated = [bytes_on_device(leaf) for info, leaf in infos if info.donated]
    stats, text = done.memory_analysis(), done.as_text()
    memory = Memory(
        argument=stats.argument_size_in_bytes,
        output=stats.output_size_in_bytes,
        alias=stats.alias_size_in_bytes,
        temp=stats.temp_size_in_bytes,
    )
    costs = done.cost_analysis() or {}
    return Compiled(
        name=program.name,
        seconds_to_compile=seconds,
        memory=memory,
        donated=sum(donated),
        # Tiles that an array does not fill make what is aliased larger than the array.
        pool_aliased=aliases(text) == len(donated) and memory.alias >= sum(donated) if donated else None,
        collectives=collectives(text),
        flops=costs.get("flops") or matmul_flops(traced.jaxpr.jaxpr),
        bytes=costs.get("bytes accessed"),
        seconds=seconds_told if (seconds_told := costs.get("optimal_seconds", 0.0)) > 0 else None,  # -1: it cannot tell
    )


def _chip(program: Program) -> AbstractMesh:
    """Its devices, for kernels that ask what they are lowered for; otherwise they take what this process has."""
    mesh = next(leaf.sharding.mesh for leaf in jax.tree.leaves(program.args) if leaf.sharding is not None)
    return AbstractMesh((), (), abstract_device=mesh.abstract_mesh.abstract_device)


def bytes_on_device(shape: jax.ShapeDtypeStruct) -> int:
    """What one device has of an array, without padding; all of it if it comes from the host."""
    sharding: Any = shape.sharding
    local = shape.shape if sharding is None else sharding.shard_shape(shape.shape)
    return math.prod(local) * shape.dtype.itemsize


def collectives(text: str) -> dict[str, int]:
    """Kind -> how many instructions of it a compiled program has; `text` is its HLO."""
    return dict(sorted(Counter(_COLLECTIVE.findall(text)).items()))


def aliases(text: str) -> int:
    """How many arguments of a compiled program are updated in place; `text` is its HLO."""
    header = text.partition("\n")[0]
    _, found, rest = header.partition("input_output_alias={")
    # The map ends where the next attribute of the module begins.
    return len(_ALIAS.findall(rest.partition("entry_computation_layout")[0])) if found else 0


def matmul_flops(jaxpr: Any) -> float:
    """Operations of the matrix products of a traced program on one device; kernels of our own are left out."""
    total = 0.0
    for equation in jaxpr.eqns:
        kind, params = equation.primitive.name, equation.params
        if kind == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            left, (out,) = equation.invars[0].aval.shape, equation.outvars
            total += 2.0 * math.prod(out.aval.shape) * math.prod(left[axis] for axis in contracted)
        elif kind == "cond":  # one of its branches runs; where they are forms for platforms, they compute the same
            total += max(matmul_flops(branch.jaxpr) for branch in params["branches"])
        elif kind != "pallas_call":
            inner = [value for value in params.values() if hasattr(value, "eqns") or hasattr(value, "jaxpr")]
            total += params.get("length", 1) * sum(matmul_flops(getattr(each, "jaxpr", each)) for each in inner)
    return total


def reason(error: Exception) -> str:
    """What stopped something, in a line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_REASON_CHARACTERS]}"
