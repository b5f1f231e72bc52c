"""Paged attention against dense attention in float64, with poison wherever nothing may look."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pdjax.messages import Chunk
from pdjax.models.attention import attend_blocks, attend_rows, read_pages, write_pages, write_rows
from pdjax.models.kv import LayerKV
from pdjax.models.plan import SAMPLING_WORDS, PassShape, RowArrays, pack_pass, table_of, unpack_pass
from pdjax.request import SamplingParams

K, G, H = 2, 3, 8
PAGES = {1: 260, 7: 48, 16: 32, 64: 16}
GREEDY = SamplingParams(temperature=0.0)
rng = np.random.default_rng(0)


def numbers(*shape):
    return rng.standard_normal(shape).astype(np.float32)


def pool(P, owned, stale=1e4):
    """Pages that nobody owns hold NaN, owned ones stale finite numbers, page 0 zeros."""
    k, v = np.full((PAGES[P], K, H, P), np.nan, np.float32), np.full((PAGES[P], K, P, H), np.nan, np.float32)
    for page in owned:
        k[page], v[page] = stale, stale
    k[0], v[0] = 0, 0
    return LayerKV(k, v)


def fill(cache, pages, k, v):
    """Writes whole contexts on the host."""
    P = cache.v.shape[2]
    for i in range(len(k)):
        cache.k[pages[i // P], :, :, i % P], cache.v[pages[i // P], :, i % P] = k[i], v[i]


def dense(q, k, v, position):
    """One query [K, G, H] at `position` over k, v [n, K, H]."""
    k, v = k[: position + 1].astype(np.float64), v[: position + 1].astype(np.float64)
    scores = np.einsum("kgh,nkh->kgn", q, k) / np.sqrt(H)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("kgn,nkh->kgh", weights / weights.sum(-1, keepdims=True), v)


def pages_of(P, requests, tokens):
    """Disjoint scattered block tables."""
    width = -(-tokens // P)
    return [tuple(1 + r + requests * i for i in range(width)) for r in range(requests)]


def shape(P, T, B):
    return PassShape(T, B, 3 if T else 0, -(-128 // P), P, PAGES[P], 5)


@functools.cache
def compiled(P, T, B, read=0):
    """(cache, q, k, v, vector, pages, offset) -> (attention output or the tokens read back, cache)."""
    sizes = shape(P, T, B)

    @jax.jit
    def run(cache, q, k, v, vector, pages, offset):
        _, step, _ = unpack_pass(sizes, vector, jnp.zeros(5, jnp.int32))
        cache = write_pages(cache, k, v, step.writes) if T else write_rows(cache, k, v, step.rows)
        if read:
            return read_pages(cache, pages, offset, read), cache
        return attend_blocks(q, cache, step.blocks) if T else attend_rows(q, cache, step.rows), cache

    return lambda cache, q, k, v, vector, pages=(0,), offset=0: run(
        cache, q, k, v, vector, np.asarray(pages, np.int32), np.int32(offset)
    )


def chunk(n, start, pages):
    return Chunk(0, (0,) * n, start, pages, 0, True, GREEDY)


@pytest.mark.parametrize("P", [1, 7, 64])
@pytest.mark.parametrize(
    "parts", [[(70, 0)], [(1, 0)], [(5, 9), (30, 0), (12, 63)], [(16, 16), (16, 48)], [(3, 0), (61, 3)]]
)
def test_packed_chunks_see_their_own_past_and_nothing_else(P, parts):
    T, tables = 80, pages_of(P, 2 if P == 1 else 3, 80)
    if len(parts) > len(tables):
        pytest.skip("the pool of one-token pages holds two tables")
    cache = pool(P, [page for pages in tables for page in pages])
    contexts = [(numbers(start + n, K, H), numbers(start + n, K, H)) for n, start in parts]
    for (_, start), (k, v), pages in zip(parts, contexts, tables, strict=False):
        fill(cache, pages, k[:start], v[:start])
    q = numbers(T, K, G, H)
    k, v = (np.concatenate([c[i][start:] for c, (_, start) in zip(contexts, parts, strict=True)]) for i in (0, 1))
    fresh = [np.concatenate([a, numbers(T - len(a), K, H)]) for a in (k, v)]
    sizes = shape(P, T, 0)
    vector = pack_pass(sizes, [chunk(n, start, p) for (n, start), p in zip(parts, tables, strict=False)], None)
    out, after = compiled(P, T, 0)(cache, q, *fresh, vector)
    at = 0
    for (n, start), (k, v) in zip(parts, contexts, strict=True):
        want = np.stack([dense(q[at + i], k, v, start + i) for i in range(n)])
        np.testing.assert_allclose(np.asarray(out)[at : at + n], want, atol=2e-6)
        at += n
    assert np.isfinite(np.asarray(out)).all()
    assert not np.asarray(after.k[0]).any() and not np.asarray(after.v[0]).any()


@pytest.mark.parametrize("P", [1, 7, 64])
def test_rows_of_any_length_see_their_own_past_and_nothing_else(P):
    positions = np.array([0, 100, 63] if P > 1 else [0, 100], np.int32)
    n, B = len(positions), 4
    tables = pages_of(P, n, 101)
    cache = pool(P, [page for pages in tables for page in pages])
    contexts = [(numbers(p + 1, K, H), numbers(p + 1, K, H)) for p in positions]
    for p, (k, v), pages in zip(positions, contexts, tables, strict=True):
        fill(cache, pages, k[:p], v[:p])
    q, k, v = numbers(B, K, G, H), numbers(B, K, H), numbers(B, K, H)
    for i, p in enumerate(positions):
        k[i], v[i] = contexts[i][0][p], contexts[i][1][p]
    sizes = shape(P, 0, B)
    width = sizes.table
    rows = RowArrays(
        np.arange(n), np.zeros(n, np.int32), positions, np.stack([table_of(t, width) for t in tables]),
        np.zeros((n, SAMPLING_WORDS), np.int32),
    )  # fmt: skip
    out, after = compiled(P, 0, B)(cache, q, k, v, pack_pass(sizes, [], rows))
    for i, p in enumerate(positions):
        np.testing.assert_allclose(np.asarray(out)[i], dense(q[i], *contexts[i], p), atol=2e-6)
    assert np.isfinite(np.asarray(out)).all()
    assert not np.asarray(after.k[0]).any() and not np.asarray(after.v[0]).any()


@pytest.mark.parametrize("P", [7, 16])
@pytest.mark.parametrize(("start", "n"), [(0, 1), (0, 16), (5, 20), (31, 1), (14, 21)])
def test_tokens_written_to_pages_are_read_back_and_neighbours_stay(P, start, n):
    pages, T = pages_of(P, 2, 40)[0], 24
    cache, k, v = pool(P, pages, stale=5.0), numbers(T, K, H), numbers(T, K, H)
    vector = pack_pass(shape(P, T, 0), [chunk(n, start, pages)], None)
    W = -(-(T + P - 1) // P)
    span = table_of(pages[start // P :][:W], W)
    got, after = compiled(P, T, 0, read=T)(cache, numbers(T, K, G, H), k, v, vector, span, start % P)
    assert (np.asarray(got)[:, :n] == np.stack([k[:n], v[:n]])).all()
    expect = pool(P, pages, stale=5.0)
    for i in range(n):
        page, at = pages[(start + i) // P], (start + i) % P
        expect.k[page, :, :, at], expect.v[page, :, at] = k[i], v[i]
    np.testing.assert_array_equal(np.asarray(after.k), expect.k)
    np.testing.assert_array_equal(np.asarray(after.v), expect.v)
