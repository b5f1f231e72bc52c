"""Whether an instance fits its chips. Enter: an instance and the chip's memory, later what the compiler said of its
programs. Leave: bytes of weights, pages and temporaries on each chip, and how many pages would fit. Called by
`pdjax.experiments.aot`, before anything is compiled and after.

A chip is taken to have all the memory of its data sheet (`pdjax.hardware`). Units of KV that wait for their transfer,
and the activations between programs, are not counted: they are small beside what is.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax

from pdjax.aot.compiled import Compiled, bytes_on_device
from pdjax.aot.programs import Program
from pdjax.hardware import Hardware
from pdjax.messages import InstanceSpec, Role
from pdjax.models.config import ModelConfig
from pdjax.models.params import Param
from pdjax.models.sharding import KV, REP, Share, shares, split
from pdjax.models.weights import kind_of, tables

_GIB = 2**30
# Kind of program -> the argument that holds weights, or pages. All others come and go with a pass.
_WEIGHTS = {"embed": 0, "group": 0, "head": 0}
_PAGES = {"group": 1, "insert": 0, "extract": 0}


@dataclasses.dataclass(frozen=True, slots=True)
class Need:
    """Bytes on each chip of a pipeline stage.

    Attributes:
        weights, page: of all its weights, and of one page in all its layers.
        extra: activations and temporaries of the hungriest of its programs.
    """

    weights: int
    page: int
    extra: int = 0

    def total(self, pages: int) -> int:
        """With a pool of so many pages."""
        return self.weights + pages * self.page + self.extra

    def room(self, chip: Hardware) -> int:
        """Pages that the chip has room for."""
        return max(int(chip.memory_bytes - self.weights - self.extra) // self.page, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one chip while a program runs.

    Attributes:
        weights, pool: those that it takes.
        extra: the rest: activations, results and temporaries.
        padding: how much larger pages lie in memory than they are: tiles that they do not fill.
    """

    weights: int
    pool: int
    extra: int
    padding: float


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """An instance on its chips.

    Attributes:
        stage: the number of the fullest.
        need: of that one.
        pool: bytes of its pages on each chip.
        memory: bytes of a chip.
        fits: whether all stages do.
        pages: the largest pool that fits all, page 0 included.
        batch: requests of the longest kind that its pages hold.
        context: tokens that each of a full batch may have, or each prompt of a full pass.
    """

    stage: int
    need: Need
    pool: int
    memory: int
    fits: bool
    pages: int
    batch: int
    context: int

    @property
    def total(self) -> int:
        return self.need.weights + self.pool + self.need.extra


def needs(spec: InstanceSpec, config: ModelConfig, dtype: str) -> tuple[Need, ...]:
    """Weights and pages of each stage, by arithmetic; `dtype` is that of the weights."""
    tp = spec.devices // spec.pp
    heads = split(config, tp).kv
    return tuple(
        Need(
            weights=_weights_bytes(config, tp, share, dtype),
            page=spec.kv_bytes_per_token * spec.page_size * len(share.layers) // (config.num_layers * heads),
        )
        for share in shares(config.num_layers, spec.pp)
    )


def measured(need: Sequence[Need], programs: Sequence[tuple[Program, Compiled]]) -> tuple[Need, ...]:
    """The same with what the compiler said."""
    extra, padding = [0] * len(need), [1.0] * len(need)
    for program, done in programs:
        if (held := held_by(program, done)) is None:
            continue
        extra[program.stage] = max(extra[program.stage], held.extra)
        padding[program.stage] = max(padding[program.stage], held.padding)
    return tuple(
        dataclasses.replace(each, page=math.ceil(each.page * padding[stage]), extra=extra[stage])
        for stage, each in enumerate(need)
    )


def held_by(program: Program, done: Compiled) -> Held | None:
    """What a program holds of a chip while it runs; None: it was refused."""
    if done.memory is None:
        return None
    weights, pages = (
        sum(map(bytes_on_device, jax.tree.leaves(program.args[where[program.kind]]))) if program.kind in where else 0
        for where in (_WEIGHTS, _PAGES)
    )
    # What is aliased is what lies in memory; pages that are only read are taken to lie there as they are.
    padding = done.memory.alias / done.donated if done.pool_aliased and program.kind in _PAGES else 1.0
    pool = math.ceil(pages * padding)
    return Held(weights, pool, done.memory.total - weights - pool, padding)


def fit(spec: InstanceSpec, config: ModelConfig, need: Sequence[Need], chip: Hardware) -> Fit:
    """How an instance fits chips of this kind."""
    stage = max(range(len(need)), key=lambda number: need[number].total(spec.num_pages))
    fullest, pages = need[stage], min(each.room(chip) for each in need)
    usable = max(pages - 1, 0)
    company = spec.max_rows or spec.max_chunks
    return Fit(
        stage=stage,
        need=fullest,
        pool=fullest.page * spec.num_pages,
        memory=int(chip.memory_bytes),
        fits=fullest.total(spec.num_pages) <= chip.memory_bytes,
        pages=pages,
        batch=usable // spec.pages_for(spec.max_model_len),
        context=min(usable // company * spec.page_size, config.max_position),
    )


def check(spec: InstanceSpec, found: Fit, chip: Hardware) -> None:
    """ValueError, with the numbers, if an instance does not fit."""
    if found.fits:
        return
    side = "prefill" if spec.role is Role.PREFILL else "decode"
    have = (
        f"{found.need.weights / _GIB:.2f} GiB of weights, {found.pool / _GIB:.2f} GiB of pages"
        f"{f' and {found.need.extra / _GIB:.2f} GiB of temporaries' if found.need.extra else ''} on a chip of "
        f"{found.memory / _GIB:g} GiB ({chip.name})"
    )
    least = 1 + spec.pages_for(spec.max_model_len)
    if found.pages < least:
        raise ValueError(
            f"{side}_tp is {spec.devices // spec.pp} and {side}_pp {spec.pp}: {have}; allowed: chips enough for the "
            f"weights and {least} pages, which one request of max_model_len = {spec.max_model_len} needs"
        )
    raise ValueError(f"{side}_num_pages is {spec.num_pages}: {have}; allowed: at most {found.pages}")


def _weights_bytes(config: ModelConfig, tp: int, share: Share, dtype: str) -> int:
    outer, layers = tables(config, tp, share)
    params = [param for table in (outer, *layers.values()) for param in table.values()]
    parts = split(config, tp)
    sizes = {KV: parts.kv, REP: parts.rep}
    return sum(_local(param, sizes) * kind_of(param, dtype).itemsize for param in params)


def _local(param: Param, sizes: dict[str, int]) -> int:
    """Numbers of a parameter that one chip has."""
    entries = [(entry,) if isinstance(entry, str) else entry or () for entry in param.spec]
    return math.prod(param.shape) // math.prod(sizes[axis] for entry in entries for axis in entry)
