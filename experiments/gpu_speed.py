"""How much of a device's own matmul rate prefill gets, and how much of its own copy bandwidth decode. Enters: a phase,
a device and sizes. Leaves: both rates, what a pass takes, and the share. Called by `pdjax.experiments.gpu_check`.

Passes are those that serve, `Instance.run` with pages written and tokens read back, and they follow each other as on a
lane: the next one is dispatched before the tokens of the one before are waited for. The device's own rate is taken in
each round before and after the passes, so that its clocks are the same for both. Weights are random, and made on the
device.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from pdjax.experiments.bench_cases import one_size, prefill_flops
from pdjax.experiments.gpu_goals import judge
from pdjax.instance import Instance, Pending
from pdjax.messages import Chunk, InstanceSpec, Iteration, Join
from pdjax.models import attention
from pdjax.models.config import ModelConfig
from pdjax.models.kv import kv_bytes_per_token, kv_dtype
from pdjax.models.params import Param, Weights
from pdjax.models.presets import PRESETS
from pdjax.models.sharding import make_mesh
from pdjax.models.weights import kind_of, tables
from pdjax.request import SamplingParams

DTYPE = "bfloat16"
_GREEDY = SamplingParams(temperature=0.0)
_SPREAD = 0.02  # of random weights: activations stay finite through any number of layers
_USABLE = 0.9  # of the memory that a process may have; the rest is for the programs' temporaries
_OWN = 10  # products, or copies, that the device's own rate is taken from


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """What is measured.

    Attributes:
        model: preset of the shapes.
        prompt: tokens of a prefill pass.
        rows, context: of a decode step; contexts grow through `context` while steps are measured.
        page: tokens in a page.
        square: rows of the matrices whose product is the device's peak.
        copied: bytes that are copied for its bandwidth.
        passes, steps: in a row, each round.
        rounds: of which medians are taken.
    """

    model: str
    prompt: int
    rows: int
    context: int
    page: int
    square: int
    copied: int
    passes: int
    steps: int
    rounds: int


# Matrices and copies are many times the caches.
REAL = Size("llama3.1-8b", 2048, 32, 1024, 64, square=8192, copied=2 << 30, passes=6, steps=32, rounds=5)
SMALL = Size("tiny", 64, 4, 64, 16, square=256, copied=1 << 20, passes=2, steps=4, rounds=2)


@dataclasses.dataclass(frozen=True, slots=True)
class _Phase:
    """A kind of pass and what it is compared with.

    Attributes:
        unit: of work.
        what: its sizes, for people.
        work: that a pass has to do.
        run: dispatches one.
        count: how many are measured in a row.
        own: dispatches what the device does at its best, which is `own_work`.
        again: comes before each row of passes.
    """

    unit: str
    what: str
    goal: str
    work: float
    run: Callable[[], Pending]
    count: int
    own: Callable[[], jax.Array]
    own_work: float
    again: Callable[[], object]


def measure(phase: str, device: jax.Device, size: Size, judged: bool = True) -> dict[str, Any]:
    """{model, layers, dtype, attention, what, unit, work, ms, alone_ms, per_s, own_per_s, share, rounds,
    peak_memory_bytes, checks}; `ms` of passes that follow each other, `alone_ms` of one that is waited for.

    Args:
        phase: "prefill" or "decode".
        judged: whether the sizes are those that the goals are meant for.

    Raises:
        ValueError: not even one layer fits into the device's memory.
    """
    whole = PRESETS[size.model]
    layers = layers_that_fit(whole, size, (device.memory_stats() or {}).get("bytes_limit"))
    config = dataclasses.replace(whole, num_layers=layers)
    mesh, kv = make_mesh(config, [device]), kv_dtype(DTYPE, [device])
    held = on_device(config, mesh)
    instance = Instance(_spec(config, size), config, [held], [mesh], exchanges=False)
    if phase == "prefill":
        one = _Phase(
            "FLOP", f"{size.prompt} tokens", "prefill_of_peak", prefill_flops(config, size.prompt),
            _prefill(instance, size), size.passes, _multiplier(device, size.square), 2.0 * size.square**3, lambda: None,
        )  # fmt: skip
    else:
        one = _Phase(
            "B", f"{size.rows} rows at {size.context}", "decode_of_bandwidth", decode_bytes(config, held, size, kv),
            _step(instance), size.steps, _copier(device, size.copied), 2.0 * size.copied, _restart(instance, size),
        )  # fmt: skip
    one.again()
    one.run().wait()  # compiles, and so does the next
    jax.block_until_ready(one.own())

    rounds: dict[str, list[float]] = {name: [] for name in ("own_per_s", "s", "alone_s")}
    for _ in range(size.rounds):
        rounds["own_per_s"].append(one.own_work / _each(one.own, _OWN))
        one.again()
        rounds["s"].append(in_turn(one.run, one.count))
        rounds["alone_s"].append(in_turn(one.run, 1))
        rounds["own_per_s"].append(one.own_work / _each(one.own, _OWN))
    own, seconds, alone = (float(np.median(values)) for values in rounds.values())
    share = one.work / seconds / own
    return {
        "model": size.model,
        "layers": layers,
        "dtype": DTYPE,
        "attention": attention.backend_for(mesh).kernels(config, size.page, kv),
        "what": one.what,
        "unit": one.unit,
        "work": one.work,
        "ms": 1e3 * seconds,
        "alone_ms": 1e3 * alone,
        "per_s": one.work / seconds,
        "own_per_s": own,
        "share": share,
        "rounds": rounds,
        "peak_memory_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "checks": {f"{phase} of {one.what}, share of the device's own rate": judge(one.goal, share)} if judged else {},
    }


def layers_that_fit(config: ModelConfig, size: Size, memory_bytes: int | None) -> int:
    """How many layers of the model, their pages included; all of them where the memory is not known.

    Raises:
        ValueError: none does.
    """
    if memory_bytes is None:
        return config.num_layers
    outer, layers = tables(config, 1)
    per_token = kv_bytes_per_token(config, DTYPE) // config.num_layers
    spec = _spec(config, size)
    layer = _nbytes(layers[0]) + per_token * spec.num_pages * spec.page_size
    # Two matrices and what is copied are there all the time; beside them a product, and two copies in turn.
    beside = _nbytes(outer) + 3 * 2 * size.square**2 + 3 * size.copied
    fit = math.floor((_USABLE * memory_bytes - beside) / layer)
    if fit < 1:
        raise ValueError(
            f"the device has {memory_bytes / 2**30:.1f} GiB for this process; allowed: at least "
            f"{(beside + layer) / _USABLE / 2**30:.1f} for one layer of {size.model}"
        )
    return min(fit, config.num_layers)


def decode_bytes(config: ModelConfig, held: Weights, size: Size, dtype: Any) -> int:
    """Bytes that a step has to read: every weight but an untied embedding, of which it takes a row for each token, and
    the KV, in `dtype`, of all contexts."""
    outer = [array for name, array in held.outer.items() if name != "embed" or config.tied]
    arrays = [*outer, *(array for layer in held.layers.values() for array in layer.values())]
    return sum(array.nbytes for array in arrays) + kv_bytes_per_token(config, dtype) * size.rows * size.context


def on_device(config: ModelConfig, mesh: Mesh) -> Weights:
    """Random weights, made where they stay: normal numbers, norms 1."""
    outer, layers = tables(config, mesh.size)
    numbers = iter(range(len(outer) + sum(len(layer) for layer in layers.values())))

    def made(table: dict[str, Param]) -> dict[str, jax.Array]:
        return {
            name: _maker(param.shape, kind_of(param, DTYPE), param.norm, NamedSharding(mesh, param.spec))(next(numbers))
            for name, param in table.items()
        }

    return Weights(made(outer), {number: made(layer) for number, layer in layers.items()})


def in_turn(dispatch: Callable[[], Pending], count: int) -> float:
    """Seconds of each of `count` passes, each dispatched before the tokens of the one before are waited for."""
    before = None
    began = time.perf_counter()
    for _ in range(count):
        now = dispatch()
        if before is not None:
            before.wait()
        before = now
    assert before is not None, "count is at least 1"
    before.wait()
    return (time.perf_counter() - began) / count


# --- inside -----------------------------------------------------------------------------------------------------------


@functools.cache
def _maker(shape: tuple[int, ...], dtype: Any, norm: bool, sharding: NamedSharding) -> Callable[[int], jax.Array]:
    def make(number: jax.Array) -> jax.Array:
        if norm:
            return jnp.ones(shape, dtype)
        return _SPREAD * jax.random.normal(jax.random.key(number, impl="rbg"), shape, dtype)  # quick to compile

    return jax.jit(make, out_shardings=sharding)


def _nbytes(table: dict[str, Param]) -> int:
    return sum(math.prod(param.shape) * kind_of(param, DTYPE).itemsize for param in table.values())


def _spec(config: ModelConfig, size: Size) -> InstanceSpec:
    """Pages for the rows and one prompt."""
    longest = max(size.context + size.steps, size.prompt)
    table = -(-longest // size.page)
    pages = 1 + size.rows * _row_pages(size) + table
    return one_size(config, size.prompt, size.rows, chunks=1, page=size.page, pages=pages, longest=longest, dtype=DTYPE)


def _row_pages(size: Size) -> int:
    return -(-(size.context + size.steps) // size.page)


def _prefill(instance: Instance, size: Size) -> Callable[[], Pending]:
    """A whole prompt, in the last pages of the pool; its token goes to the scratch slot."""
    spec = instance.spec
    pages = tuple(range(spec.num_pages - spec.pages_for(size.prompt), spec.num_pages))
    tokens = tuple(np.random.default_rng(0).integers(instance.config.vocab_size, size=size.prompt).tolist())
    iteration = Iteration(0, 0, chunks=(Chunk(0, tokens, 0, pages, spec.max_rows, True, _GREEDY),))
    return lambda: instance.run(iteration, lambda unit: None)


def _step(instance: Instance) -> Callable[[], Pending]:
    return lambda: instance.run(Iteration(0, 0, decode=True), lambda unit: None)


def _restart(instance: Instance, size: Size) -> Callable[[], object]:
    """The rows go back to where `steps` steps from here on have `context` tokens on average, by a step of their own."""
    each = _row_pages(size)
    first = size.context - size.steps // 2 - 2
    joins = tuple(
        Join(row, row, first, tuple(range(1 + row * each, 1 + (row + 1) * each)), 5, _GREEDY)
        for row in range(size.rows)
    )
    batch: list[int] = []

    def restart() -> object:
        leaves = tuple(batch)
        batch[:] = range(size.rows)
        return instance.run(Iteration(0, 0, leaves=leaves, joins=joins, decode=True), lambda unit: None).wait()

    return restart


def _multiplier(device: jax.Device, square: int) -> Callable[[], jax.Array]:
    """A product of two matrices of normal numbers: on zeros a device draws less power, and is faster."""
    one, other = (
        jax.device_put(jax.random.normal(jax.random.key(seed), (square, square), jnp.bfloat16), device)
        for seed in range(2)
    )
    program = jax.jit(jnp.matmul)
    return lambda: program(one, other)


def _copier(device: jax.Device, nbytes: int) -> Callable[[], jax.Array]:
    """Reads and writes so many bytes."""
    array = jax.device_put(jnp.ones(nbytes // 4, jnp.float32), device)
    program = jax.jit(lambda array: array + 1)
    return lambda: program(array)


def _each(run: Callable[[], jax.Array], count: int) -> float:
    """Seconds of each of `count` calls, dispatched one after the other."""
    began = time.perf_counter()
    for _ in range(count):
        last = run()
    jax.block_until_ready(last)
    return (time.perf_counter() - began) / count
