"""Prefill in two parts, and the kernels of TPUs and GPUs, against dense attention in float64 on a CPU: ragged lengths,
grouped queries, page sizes, packed prompts, earlier contexts, poison wherever nothing may look.

Kernels run as plain operations, which take long to compile: nearly all of their tests are slow. How the two parts are
put together is seen with kernels of a few lines."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pdjax.models.attention import gpu, paged, parts, tpu
from pdjax.models.attention.base import MASKED, QueryBlocks
from pdjax.models.plan import pack_pass, unpack_pass
from pdjax.models.presets import PRESETS
from tests.paged import Sizes, check_prompts, check_rows, chunk

TPU, PALLAS = tpu.backend(interpret=True), gpu.backend(interpret=True, cudnn="left out")
CUDNN = gpu.backend(interpret=True)  # the call that cuDNN would serve
slow = pytest.mark.slow

PACKED, WHOLE = [(5, 9), (30, 0), (12, 63)], [(70, 0)]
SEVERAL, EXACT = [(16, 16), (1, 300), (20, 0)], [(3, 256), (61, 3)]  # turns; the last ends with the context


def dense(q, k, v, seen):
    """A kernel's outputs and logarithms; seen [T or 1, keys]."""
    scores = jnp.where(seen[None, None], jnp.einsum("kgth,kch->kgtc", q, k), MASKED)
    lse = jax.nn.logsumexp(scores, axis=-1)
    return jnp.einsum("kgtc,kch->kgth", jnp.exp(scores - lse[..., None]), v), lse


def fresh(q, k, v, prompt):
    at = jnp.arange(len(prompt))
    return dense(q, k, v, (prompt[:, None] == prompt[None]) & (at[:, None] >= at[None]))


def prior(q, k, v, mine, length):
    return dense(q, k, v, (jnp.arange(k.shape[1]) < length)[None])


PARTS = dataclasses.replace(tpu.backend(), attend_prompts=functools.partial(parts.attend_prompts, fresh, prior, 32))


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    """A context of 300 tokens takes three turns. For all tests here: they share programs."""
    monkeypatch.setattr(parts, "_CONTEXT", 128)


@pytest.mark.parametrize(
    ("backend", "G", "P", "pieces"),
    [
        pytest.param(PARTS, 3, 16, PACKED, id="parts, packed"),
        pytest.param(PARTS, 3, 16, WHOLE, id="parts, whole"),
        pytest.param(PARTS, 3, 16, SEVERAL, id="parts, several turns"),
        pytest.param(PARTS, 3, 16, EXACT, id="parts, turns that end with the context"),
        pytest.param(TPU, 3, 16, PACKED, marks=slow, id="tpu, packed"),
        pytest.param(TPU, 1, 7, WHOLE, marks=slow, id="tpu, whole"),
        pytest.param(TPU, 4, 64, SEVERAL, marks=slow, id="tpu, several turns"),
        pytest.param(TPU, 8, 16, EXACT, marks=slow, id="tpu, turns that end with the context"),
        pytest.param(PALLAS, 3, 16, PACKED, marks=slow, id="gpu, packed"),
        pytest.param(PALLAS, 1, 7, WHOLE, marks=slow, id="gpu, whole"),
        pytest.param(PALLAS, 4, 64, SEVERAL, marks=slow, id="gpu, several turns"),
        pytest.param(PALLAS, 8, 16, EXACT, marks=slow, id="gpu, turns that end with the context"),
        pytest.param(CUDNN, 3, 16, PACKED, id="cudnn, packed"),
        pytest.param(CUDNN, 1, 7, WHOLE, marks=slow, id="cudnn, whole"),
        pytest.param(CUDNN, 4, 64, SEVERAL, marks=slow, id="cudnn, a long context"),
        pytest.param(CUDNN, 8, 16, EXACT, marks=slow, id="cudnn, eight queries"),
    ],
)
def test_packed_chunks_see_their_own_past_and_nothing_else(backend, G, P, pieces):
    check_prompts(backend, Sizes(P, -(-1200 // P), 320, G=G), 80, pieces, atol=5e-6)


@pytest.mark.parametrize(
    ("backend", "G", "P", "positions"),
    [
        pytest.param(TPU, 3, 16, [0, 100, 63], marks=slow, id="tpu, ragged"),
        pytest.param(TPU, 1, 64, [127, 128], marks=slow, id="tpu, ends of pages"),
        pytest.param(TPU, 4, 32, [300, 6], marks=slow, id="tpu, more than one step"),
        pytest.param(TPU, 8, 128, [0, 290], marks=slow, id="tpu, eight queries"),
        pytest.param(PALLAS, 3, 16, [0, 100, 63], id="gpu, ragged"),
        pytest.param(PALLAS, 1, 64, [127, 128], marks=slow, id="gpu, ends of pages"),
        pytest.param(PALLAS, 4, 8, [300, 6], marks=slow, id="gpu, more than one step"),
        pytest.param(PALLAS, 8, 16, [0, 290], marks=slow, id="gpu, eight queries"),
    ],
)
def test_rows_of_any_length_see_their_own_past_and_nothing_else(backend, G, P, positions):
    check_rows(backend, Sizes(P, -(-1200 // P), 320, G=G), 4, positions, atol=5e-6)


def test_tokens_of_a_pass_know_their_prompt_and_what_came_before():
    size = Sizes(7, 48, 128)
    shape, tables = size.shape(80, 0), size.tables(2, 100)
    vector = pack_pass(shape, [chunk(66, 9, tables[0]), chunk(3, 0, tables[1])], None)
    _, step, _ = unpack_pass(shape, jnp.asarray(vector), jnp.zeros(5, jnp.int32))
    assert parts.prompt_of_tokens(step.blocks, 80).tolist() == [0] * 66 + [1] * 14
    assert parts.tokens_before(step.blocks).tolist() == [9, 0, 0]


def test_a_pass_without_prompts_has_no_context_before_it():
    empty = QueryBlocks(jnp.int32(0), *(jnp.zeros(2, jnp.int32) for _ in range(4)), jnp.zeros((2, 3), jnp.int32))
    assert parts.tokens_before(empty).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("backend", "model", "P", "dtype", "prefill", "decode"),
    [
        (tpu.backend(), "llama3.1-8b", 16, "bfloat16", "pallas splash", "pallas paged"),
        (tpu.backend(), "llama3.1-8b", 8, "bfloat16", "pallas splash", "plain: page_size is 8"),
        (tpu.backend(), "smollm2-135m", 16, "bfloat16", "plain: head_dim is 64", "plain: head_dim is 64"),
        (tpu.backend(), "llama3.1-8b", 16, "float32", "plain: the kernels multiply bf", "plain: the kernels mu"),
        (gpu.backend(cudnn="none"), "llama3.1-8b", 16, "bfloat16", "pallas mha (no cuDNN: none)", "pallas paged"),
        (gpu.backend(), "llama3.1-8b", 48, "bfloat16", "cudnn", "plain: page_size is 48"),
        (gpu.backend(), "llama3.1-8b", 16, "float32", "plain: the kernels multiply 16", "plain: the kernels mu"),
    ],
)
def test_what_a_kernel_refuses_is_plain_and_says_why(backend, model, P, dtype, prefill, decode):
    forms = backend.kernels(PRESETS[model], P, dtype)
    assert forms["prefill"].startswith(prefill) and forms["decode"].startswith(decode)
    plain = [not form.startswith(("pallas", "cudnn")) for form in (forms["decode"], forms["prefill"])]
    assert backend.blocks(PRESETS[model], P, dtype) == (8 if plain[0] else 1, 64 if plain[1] else 0)


@pytest.mark.parametrize("package", ["jax.experimental.pallas.ops.gpu", "jax.experimental.nowhere"])
def test_a_kernel_that_this_jax_has_not_is_refused(package):
    reasons = paged.missing(package, (("prefill", "no_attention"), ("decode", "no_attention")))
    assert reasons == {"prefill": "this jax has no no_attention", "decode": "this jax has no no_attention"}


def test_logarithms_put_parts_together():
    """Weights 1 and 3 of values 8 and 0: together 2, and a sum of 4."""
    one, other = ((jnp.full((1, 1, 1, 1), o), jnp.full((1, 1, 1), np.log(w))) for o, w in ((8.0, 1.0), (0.0, 3.0)))
    o, lse = parts._merge(one, other)
    assert float(o[0, 0, 0, 0]) == pytest.approx(2.0) and float(lse[0, 0, 0]) == pytest.approx(np.log(4.0))
