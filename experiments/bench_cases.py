"""The programs that `bench_programs` measures, and what their times are compared with. Enters: a case's name. Leaves: a
function that measures it once and gives (ratio, seconds). Called by `pdjax.experiments.bench_programs`.

Every measurement takes the machine's limits anew, between its own steps, so that a slow moment of a shared machine
slows both sides of a ratio. The passes are those that serve: `Instance.run`, with pages written and tokens read back.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from pdjax.instance import Instance
from pdjax.messages import Chunk, InstanceSpec, Iteration, Join, Role
from pdjax.models import attention, weights
from pdjax.models.config import ModelConfig
from pdjax.models.kv import LayerKV, kv_bytes_per_token, make_pool
from pdjax.models.params import Weights
from pdjax.models.presets import PRESETS
from pdjax.models.sharding import make_mesh
from pdjax.request import SamplingParams

MODEL = PRESETS["smollm2-135m"]
PAGE, MAX_LEN, CONTEXT, STEPS = 64, 1024, 256, 8
_TABLE = MAX_LEN // PAGE
_GREEDY = SamplingParams(temperature=0.0)

Measure = Callable[[], tuple[float, float]]  # -> (ratio, seconds of what it is named after)


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A ratio and what it must reach: at least `bar`, or at most where `ceiling`."""

    bar: float
    prepare: Callable[[], Measure]
    ceiling: bool = False

    def ok(self, value: float) -> bool:
        return value <= self.bar if self.ceiling else value >= self.bar


def read_bandwidth() -> float:
    """Bytes per second of a sum over 256 MB; the median of 5."""
    add, array = _adder()
    return array.nbytes / float(np.median([seconds(lambda: add(array)) for _ in range(5)]))


def peak_flops() -> float:
    """FLOP per second of XLA's float32 product of two matrices of 1024 x 1024; the median of 5."""
    square, matrix = _squarer()
    return 2 * 1024**3 / float(np.median([seconds(lambda: square(matrix)) for _ in range(5)]))


def seconds(run: Callable[[], object]) -> float:
    """Seconds until what `run` returns is computed."""
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began


def cases() -> dict[str, Case]:
    """Every ratio of programs, by name."""
    found = {}
    for name, dtype, bars in (
        ("f32", "float32", {1: 0.65, 8: 0.32, 32: 0.21}),
        ("bf16", "bfloat16", {8: 0.25, 32: 0.19}),
    ):
        for rows, bar in bars.items():
            found[f"decode_{name}_b{rows}"] = Case(bar, _decode(dtype, rows))
    for tokens, bar in {128: 0.62, 512: 0.72, 1024: 0.62}.items():
        found[f"prefill_f32_{tokens}"] = Case(bar, _prefill("float32", tokens))
    found["prefill_bf16_512"] = Case(1.1, _prefill("bfloat16", 512))
    found["paged_over_dense_b8"] = Case(1.3, _paged_over_dense, ceiling=True)
    found["mixed_128_8"] = Case(1.2, _mixed, ceiling=True)
    found["groups_5"] = Case(1.05, _groups, ceiling=True)
    return found


def decode_floor(dtype: str, rows: int, context: int, bandwidth: float) -> float:
    """Seconds in which the weights and the KV of `rows` contexts can be read."""
    held = _weights(dtype)
    arrays = [*held.outer.values(), *(array for layer in held.layers.values() for array in layer.values())]
    kv = kv_bytes_per_token(MODEL, np.float32) * rows * context
    return (sum(array.nbytes for array in arrays) + kv) / bandwidth


def prefill_flops(config: ModelConfig, tokens: int) -> float:
    """FLOP of a prompt from its start: products of the layers, causal attention at half, the head for one row."""
    D, F, heads, H = config.hidden_size, config.ffn_size, config.num_heads, config.head_dim
    linears = 2 * D * (2 * heads * H + 2 * config.num_kv_heads * H + 3 * F)
    attended = 4 * heads * H * tokens / 2
    return config.num_layers * tokens * (linears + attended) + 2.0 * D * config.vocab_size


def instance(spec: InstanceSpec, dtype: str, *, stream_layers: int = 0) -> Instance:
    """An instance of the model's shape with random weights."""
    held = [_weights(dtype)]
    return Instance(spec, MODEL, held, [_mesh()], stream_layers=stream_layers, exchanges=stream_layers > 0)


def _decode(dtype: str, rows: int) -> Callable[[], Measure]:
    def prepare() -> Measure:
        one = instance(_spec(0, rows), dtype)
        step = _start_rows(one, rows)

        def measure() -> tuple[float, float]:
            # The rows go back to where they were, so that every measurement reads the same context.
            _start_rows(one, rows, leave=True)
            bandwidth = read_bandwidth()
            taken = float(np.median([seconds(step) for _ in range(STEPS)]))
            bandwidth = (bandwidth + read_bandwidth()) / 2
            return decode_floor(dtype, rows, CONTEXT, bandwidth) / taken, taken

        return measure

    return prepare


def _prefill(dtype: str, tokens: int) -> Callable[[], Measure]:
    def prepare() -> Measure:
        run = _chunk_alone(instance(_spec(tokens, 1), dtype), tokens)

        def measure() -> tuple[float, float]:
            peak = peak_flops()
            taken = seconds(run)
            return prefill_flops(MODEL, tokens) / taken / ((peak + peak_flops()) / 2), taken

        return measure

    return prepare


def _mixed() -> Measure:
    one = instance(_spec(128, 8), "float32")
    alone = _chunk_alone(one, 128)
    _start_rows(one, 8)

    def together() -> None:
        one.run(Iteration(0, 0, chunks=(_chunk(one, 128),), decode=True), lambda unit: None).wait()

    together()
    return lambda: _alternate(together, alone)


def _groups() -> Measure:
    one, five = (_chunk_alone(instance(_spec(128, 1), "float32", stream_layers=n), 128) for n in (30, 5))
    return lambda: _alternate(five, one)


def _paged_over_dense() -> Measure:
    """Decode attention of 8 rows at context 256, all layers: on pages, and on dense slots of 512 tokens."""
    B, K, G, H = 8, MODEL.num_kv_heads, MODEL.group, MODEL.head_dim
    position = jnp.full(B, CONTEXT - 1, jnp.int32)
    tables = jnp.arange(1, 1 + B * _TABLE, dtype=jnp.int32).reshape(_TABLE, B).T
    rows = attention.Rows(tables, position, tables[:, (CONTEXT - 1) // PAGE])
    backend = attention.backend_for(_mesh())
    k = jnp.ones((B, K, H))

    def dense(cache: LayerKV, q: jax.Array) -> tuple[LayerKV, jax.Array]:
        n, at = jnp.arange(B * K), jnp.repeat(position, K)
        fresh = k.reshape(B * K, H)
        kept = LayerKV(cache.k.at[n, :, at].set(fresh), cache.v.at[n, at].set(fresh))
        scores = jnp.einsum("ngh,nhs->ngs", q.reshape(B * K, G, H) * H**-0.5, kept.k, precision=lax.Precision.HIGHEST)
        scores = jnp.where(jnp.arange(512)[None, None] <= at[:, None, None], scores, -1e30)
        share = jax.nn.softmax(scores, axis=-1)
        return kept, jnp.einsum("ngs,nsh->ngh", share, kept.v, precision=lax.Precision.HIGHEST).reshape(q.shape)

    def paged(cache: LayerKV, q: jax.Array) -> tuple[LayerKV, jax.Array]:
        kept = backend.write_rows(cache, k, k, rows)
        return kept, backend.attend_rows(q, kept, rows)

    def runner(
        attend: Callable[[LayerKV, jax.Array], tuple[LayerKV, jax.Array]], pool: list[LayerKV]
    ) -> Callable[[], object]:
        def layers(pool: list[LayerKV], q: jax.Array) -> tuple[list[LayerKV], jax.Array]:
            kept = []
            for cache in pool:
                cache, o = attend(cache, q)
                q = q + 1e-3 * o
                kept.append(cache)
            return kept, q

        program, held = jax.jit(layers, donate_argnums=0), [pool]

        def run() -> jax.Array:
            held[0], out = program(held[0], jnp.ones((B, K, G, H)))
            return out

        seconds(run)
        return run

    slots = [LayerKV(jnp.ones((B * K, H, 512)), jnp.ones((B * K, 512, H))) for _ in range(MODEL.num_layers)]
    pages = make_pool(MODEL, _mesh(), 1 + B * _TABLE, PAGE, np.float32)
    on_pages, on_slots = runner(paged, pages), runner(dense, slots)
    return lambda: _alternate(on_pages, on_slots)


def _alternate(one: Callable[[], object], other: Callable[[], object]) -> tuple[float, float]:
    """(time of one / time of other, seconds of one), medians of 5 taken in turn."""
    times = np.array([(seconds(one), seconds(other)) for _ in range(5)])
    first, second = np.median(times, axis=0)
    return float(first / second), float(first)


@functools.cache
def _adder() -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
    return _ready(jax.jit(jnp.sum), jnp.ones(64 << 20))


@functools.cache
def _squarer() -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
    return _ready(jax.jit(lambda a: a @ a), jnp.ones((1024, 1024)))


def _ready(program: Any, array: jax.Array) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
    jax.block_until_ready(program(array))
    return program, array


@functools.cache
def _mesh() -> Mesh:
    return make_mesh(MODEL, jax.devices()[:1])


@functools.cache
def _weights(dtype: str) -> Weights:
    return weights.random(MODEL, _mesh(), dtype)


def one_size(
    config: ModelConfig, chunk: int, rows: int, *, chunks: int, page: int, pages: int, longest: int, dtype: Any
) -> InstanceSpec:
    """An instance with one size of each kind of pass, `chunk` tokens of at most `chunks` prompts and `rows` rows, and
    so many pages of `page` tokens. `longest`: most tokens of a request; `dtype`: of KV."""
    return InstanceSpec(
        index=0,
        role=Role.MIXED,
        devices=1,
        max_rows=rows,
        max_chunk=chunk,
        max_chunks=chunks,
        page_size=page,
        num_pages=pages,
        max_model_len=longest,
        kv_bytes_per_token=kv_bytes_per_token(config, dtype),
        chunk_buckets=(chunk,) if chunk else (),
        row_buckets=(rows,) if rows else (),
    )


def _spec(chunk: int, rows: int) -> InstanceSpec:
    """Pages for the rows and one prompt."""
    pages = 1 + (rows + 1) * _TABLE
    return one_size(MODEL, chunk, rows, chunks=4, page=PAGE, pages=pages, longest=MAX_LEN, dtype=np.float32)


def _start_rows(one: Instance, rows: int, leave: bool = False) -> Callable[[], None]:
    """Rows whose context grows to about CONTEXT over STEPS steps; returns a step."""
    joins = tuple(
        Join(i, i, CONTEXT - STEPS // 2 - 2, tuple(1 + i * _TABLE + j for j in range(_TABLE)), 5, _GREEDY)
        for i in range(rows)
    )
    leaves = tuple(range(rows)) if leave else ()
    one.run(Iteration(0, 0, leaves=leaves, joins=joins, decode=True), lambda unit: None).wait()

    def step() -> None:
        one.run(Iteration(0, 0, decode=True), lambda unit: None).wait()

    return step


def _chunk(one: Instance, tokens: int) -> Chunk:
    """A whole prompt, in the last pages of the instance's pool; its token goes to the scratch slot."""
    pages = tuple(range(one.spec.num_pages - _TABLE, one.spec.num_pages))
    return Chunk(0, tuple(range(3, 3 + tokens)), 0, pages, one.spec.max_rows, True, _GREEDY)


def _chunk_alone(one: Instance, tokens: int) -> Callable[[], None]:
    chunk = _chunk(one, tokens)

    def run() -> None:
        one.run(Iteration(0, 0, chunks=(chunk,)), lambda unit: None).wait()

    run()
    return run
