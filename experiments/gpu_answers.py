"""Prefill, decode and mixed passes of a device against the same passes of the CPU in float32. Enters: a model, a
device, and a CPU device of the same process. Leaves: for each dtype, how many tokens are equal, and how far
off the KV is. Called by `pdjax.experiments.gpu_check`.

Three prompts are played through one instance: two packed into a pass, of which one goes on in the next, then decode
steps, a pass that prefills the third beside the rows of the others, and decode steps of all three. Every page that was
written is read back and compared: the KV of a layer follows from the attention of those below, so it tells for each
token of each kind of pass whether that was right.

With float32 weights the device runs freely, each token feeding the next step on the device, and must choose the CPU's
tokens. With bfloat16 it is given the CPU's tokens, since two that are all but equally likely may change places; the
CPU then has the same weights, rounded to bfloat16 and kept in float32.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pdjax.experiments.bench_cases import one_size
from pdjax.experiments.gpu_goals import judge
from pdjax.instance import Instance
from pdjax.messages import Chunk, Iteration, Join
from pdjax.models import attention, weights
from pdjax.models.config import ModelConfig
from pdjax.models.kv import kv_dtype
from pdjax.models.params import Weights
from pdjax.models.presets import PRESETS
from pdjax.models.sharding import make_mesh
from pdjax.request import SamplingParams

PAGE, CHUNK, ROWS, LENGTH = 64, 256, 4, 256
PROMPTS = {0: 150, 1: 140, 2: 120}  # request, which is its slot, too -> tokens; none ends with a page
SPLIT = 40  # tokens of request 1 in the first pass
STEPS = 4  # decode steps before the mixed pass, and after it
_TABLE = LENGTH // PAGE
_GREEDY = SamplingParams(temperature=0.0)

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Answers:
    """By request: the tokens, and the KV [L, 2, tokens, K, H] of the prompt and of all of them but the last."""

    tokens: dict[int, list[int]]
    kv: dict[int, Array]


# What attention kernels are made for is the heads of Llama-3.1-8B: here they have little else around them.
MODELS = {
    "tiny": PRESETS["tiny"],
    "heads": dataclasses.replace(
        PRESETS["llama3.1-8b"], num_layers=2, hidden_size=1024, ffn_size=2048, vocab_size=4096, eos_ids=(), bos_id=None
    ),
    "smollm2": PRESETS["smollm2-135m"],
}
# Dtype of the weights, and most tokens of a request: kernels may differ by the width of a block table.
VARIANTS = {
    "float32": ("float32", LENGTH),
    "bfloat16": ("bfloat16", LENGTH),
    "bfloat16, long tables": ("bfloat16", 1 << 14),
}


def measure(model: str, device: jax.Device, home: jax.Device, small: bool = False) -> dict[str, Any]:
    """Compares one of MODELS: {"variants": {name: {attention, tokens, equal, kv_error, kv_error_mean}}, "checks": ...}.

    Errors are those of the KV of one token in one layer, relative to its norm: the largest, and the mean.

    Args:
        home: of the CPU.
        small: with two layers and few words.
    """
    config = MODELS[model]
    if small:
        config = dataclasses.replace(config, num_layers=2, vocab_size=512, eos_ids=(), bos_id=None)
    # Wide tables change kernels by the shape of heads that these are made for.
    variants = {name: its for name, its in VARIANTS.items() if its[1] == LENGTH or model == "heads"}
    found = compare(config, device, home, variants)
    checks = {}
    for name, (dtype, _) in variants.items():
        checks[f"{model}, {name}: KV"] = judge(f"kv_error_{dtype}", found[name]["kv_error"])
    free = found["float32"]
    checks[f"{model}, float32: tokens"] = judge("tokens_equal_float32", free["equal"] / free["tokens"])
    return {"variants": found, "checks": checks}


def compare(
    config: ModelConfig, device: jax.Device, home: jax.Device, variants: Mapping[str, tuple[str, int]]
) -> dict[str, dict[str, Any]]:
    """Variants of a model with random weights; see `measure`."""
    there, here = make_mesh(config, [device]), make_mesh(config, [home])
    exact = weights.random(config, here, "float32")
    rounded = cast(exact, "bfloat16")
    held = {"float32": exact, "bfloat16": rounded}
    expected = {
        "float32": play(replica(config, exact, here)),
        "bfloat16": play(replica(config, cast(rounded, "float32"), here)),
    }
    found = {}
    for name, (dtype, longest) in variants.items():
        instance = replica(config, weights.copy_to(held[dtype], there), there, longest)
        got = play(instance, None if dtype == "float32" else expected[dtype].tokens)
        kernels = attention.backend_for(there).kernels(config, PAGE, kv_dtype(dtype, [device]))
        found[name] = {"attention": kernels, **difference(got, expected[dtype])}
    return found


def difference(got: Answers, expected: Answers) -> dict[str, Any]:
    """{tokens, equal, kv_error, kv_error_mean}; see `measure`."""
    pairs = [
        pair for request, tokens in expected.tokens.items() for pair in zip(got.tokens[request], tokens, strict=True)
    ]
    errors = np.concatenate([_errors(got.kv[request], kv).ravel() for request, kv in expected.kv.items()])
    return {
        "tokens": len(pairs),
        "equal": sum(one == other for one, other in pairs),
        "kv_error": float(errors.max()),
        "kv_error_mean": float(errors.mean()),
    }


def _errors(got: Array, expected: Array) -> Array:
    """[L, 2, tokens] of the two [L, 2, tokens, K, H]."""
    off, whole = (np.sqrt(np.sum(np.square(array), axis=(3, 4))) for array in (got - expected, expected))
    return np.asarray(off / whole)


def replica(config: ModelConfig, held: Weights, mesh: Mesh, longest: int = LENGTH) -> Instance:
    """An instance that can play: one size of each kind of pass, block tables for `longest` tokens."""
    pages = 1 + len(PROMPTS) * _TABLE
    spec = one_size(config, CHUNK, ROWS, chunks=2, page=PAGE, pages=pages, longest=longest, dtype=np.float32)
    return Instance(spec, config, [held], [mesh], exchanges=False)


def play(instance: Instance, given: Mapping[int, Sequence[int]] | None = None) -> Answers:
    """Plays the three prompts. `given`: tokens that decode steps take as their inputs, in place of their own."""
    draw = np.random.default_rng(0)
    prompts = {
        request: tuple(draw.integers(instance.config.vocab_size, size=size).tolist())
        for request, size in PROMPTS.items()
    }
    tokens: dict[int, list[int]] = {request: [] for request in PROMPTS}
    batch: list[int] = []  # requests

    def part(request: int, start: int, stop: int) -> Chunk:
        prompt = prompts[request]
        return Chunk(request, prompt[start:stop], start, _pages(request), request, stop == len(prompt), _GREEDY)

    def step(chunks: Sequence[Chunk], rows: Sequence[int]) -> None:
        again = rows if given is not None else [request for request in rows if request not in batch]
        leaves = tuple(request for request in batch if request in again)
        joins = tuple(
            Join(
                request,
                request,
                len(prompts[request]) + len(tokens[request]) - 1,
                _pages(request),
                None if given is None else given[request][len(tokens[request]) - 1],
                _GREEDY,
            )
            for request in again
        )
        batch[:] = rows
        iteration = Iteration(0, 0, chunks=tuple(chunks), leaves=leaves, joins=joins, decode=bool(rows))
        sampled = instance.run(iteration, lambda unit: None).wait()
        for request, token in (*sampled.rows, *sampled.firsts):
            tokens[request].append(token)

    step([part(0, 0, PROMPTS[0]), part(1, 0, SPLIT)], [])
    step([part(1, SPLIT, PROMPTS[1])], [])
    for _ in range(STEPS):
        step([], [0, 1])
    step([part(2, 0, PROMPTS[2])], [0, 1])
    for _ in range(STEPS):
        step([], [0, 1, 2])
    held = {request: PROMPTS[request] + len(tokens[request]) - 1 for request in PROMPTS}
    kv = {request: instance.read_kv(_pages(request), held[request]).astype(np.float32) for request in PROMPTS}
    return Answers(tokens, kv)


def cast(held: Weights, dtype: str) -> Weights:
    """The same weights in another dtype; norms, the only vectors among them here, stay float32."""

    def one(array: jax.Array) -> jax.Array:
        return array if array.ndim == 1 else jax.device_put(array.astype(jnp.dtype(dtype)), array.sharding)

    def each(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: one(array) for name, array in arrays.items()}

    return Weights(each(held.outer), {number: each(layer) for number, layer in held.layers.items()})


def _pages(request: int) -> tuple[int, ...]:
    return tuple(range(1 + request * _TABLE, 1 + (request + 1) * _TABLE))
