"""Paged attention for tests: pools full of poison, contexts written on the host, dense attention in float64.
Imported as `tests.paged`."""

import contextlib
import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pdjax.messages import Chunk
from pdjax.models import attention
from pdjax.models.attention import Backend, LayerKV, Layout
from pdjax.models.plan import SAMPLING_WORDS, PassShape, RowArrays, pack_pass, table_of, unpack_pass
from pdjax.models.programs import extract_program, insert_program, pass_programs
from pdjax.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
_numbers = np.random.default_rng(0)


@contextlib.contextmanager
def forced(choose):
    """Meanwhile programs and pages are made for the backend that `choose` names for a mesh, whatever its devices are.
    Programs are kept by mesh, so those of others are forgotten before and after."""

    def forget():
        for programs in (pass_programs, insert_program, extract_program):
            programs.cache_clear()

    with mock.patch.object(attention, "backend_for", choose):
        forget()
        try:
            yield
        finally:
            forget()


def numbers(*shape):
    """Normal numbers that bfloat16 holds exactly: what a kernel rounds to it stays as it is."""
    return _numbers.standard_normal(shape).astype(ml_dtypes.bfloat16).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the arrays of a test. N pages of P tokens, block tables of `tokens`."""

    P: int
    N: int
    tokens: int
    K: int = 2
    G: int = 3
    H: int = 8

    def q(self, n):
        return numbers(n, self.K, self.G, self.H)

    def kv(self, n):
        return numbers(n, self.K, self.H), numbers(n, self.K, self.H)

    def shape(self, T, B):
        return PassShape(T, B, 3 if T else 0, -(-self.tokens // self.P), self.P, self.N, 5)

    def tables(self, requests, tokens):
        """Disjoint scattered block tables."""
        return [tuple(1 + r + requests * i for i in range(-(-tokens // self.P))) for r in range(requests)]


def pool(sizes: Sizes, layout: Layout, owned, stale=1e4) -> LayerKV:
    """Pages that nobody owns hold NaN, owned ones stale finite numbers, page 0 zeros."""
    arrays = [np.full(shape, np.nan, np.float32) for shape in layout.shape(sizes.N, sizes.K, sizes.H, sizes.P)]
    for array in arrays:
        pages = np.moveaxis(array, layout.pages_axis, 0)
        pages[list(owned)], pages[0] = stale, 0
    return LayerKV(*arrays)


def rows(layout: Layout, cache) -> tuple[np.ndarray, np.ndarray]:
    """Views [N, P, K, H] of k and v."""
    return tuple(
        np.transpose(array, [axes.index(axis) for axis in "NPKH"])
        for array, axes in zip(cache, (layout.k, layout.v), strict=True)
    )


def fill(layout: Layout, cache, pages, k, v):
    """Writes the first tokens of a context on the host."""
    for view, values in zip(rows(layout, cache), (k, v), strict=True):
        P = view.shape[1]
        for i, value in enumerate(values):
            view[pages[i // P], i % P] = value


def dense(q, k, v, position):
    """One query [K, G, H] at `position` over k, v [n, K, H]."""
    k, v = k[: position + 1].astype(np.float64), v[: position + 1].astype(np.float64)
    scores = np.einsum("kgh,nkh->kgn", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("kgn,nkh->kgh", weights / weights.sum(-1, keepdims=True), v)


def chunk(n, start, pages):
    return Chunk(0, (0,) * n, start, pages, 0, True, GREEDY)


def check_prompts(backend: Backend, sizes: Sizes, T: int, parts, atol):
    """Packed chunks, (tokens, tokens before) each, see their own past and nothing else; page 0 stays zero."""
    longest = max(n + start for n, start in parts)
    layout, tables = backend.layout, sizes.tables(len(parts), longest)
    cache = pool(sizes, layout, [page for pages in tables for page in pages])
    contexts = [sizes.kv(start + n) for n, start in parts]
    for (_, start), (k, v), pages in zip(parts, contexts, tables, strict=True):
        fill(layout, cache, pages, k[:start], v[:start])
    q = sizes.q(T)
    k, v = (np.concatenate([c[i][start:] for c, (_, start) in zip(contexts, parts, strict=True)]) for i in (0, 1))
    k, v = (np.concatenate([x, numbers(T - len(x), sizes.K, sizes.H)]) for x in (k, v))
    shape = sizes.shape(T, 0)
    vector = pack_pass(shape, [chunk(n, start, p) for (n, start), p in zip(parts, tables, strict=True)], None)

    out, after = _compiled(backend, shape)(cache, q, k, v, vector)
    at = 0
    for (n, start), (k, v) in zip(parts, contexts, strict=True):
        want = np.stack([dense(q[at + i], k, v, start + i) for i in range(n)])
        np.testing.assert_allclose(np.asarray(out)[at : at + n], want, atol=atol)
        at += n
    assert np.isfinite(np.asarray(out)).all()
    assert not any(view[0].any() for view in rows(layout, after))


def check_rows(backend: Backend, sizes: Sizes, B: int, positions, atol):
    """Decode rows of any length see their own past and nothing else; page 0 stays zero."""
    layout, n = backend.layout, len(positions)
    positions = np.array(positions, np.int32)
    tables = sizes.tables(n, positions.max() + 1)
    cache = pool(sizes, layout, [page for pages in tables for page in pages])
    contexts = [sizes.kv(p + 1) for p in positions]
    for p, (k, v), pages in zip(positions, contexts, tables, strict=True):
        fill(layout, cache, pages, k[:p], v[:p])
    q, (k, v) = sizes.q(B), sizes.kv(B)
    for i, p in enumerate(positions):
        k[i], v[i] = contexts[i][0][p], contexts[i][1][p]
    shape = sizes.shape(0, B)
    arrays = RowArrays(
        np.arange(n), np.zeros(n, np.int32), positions, np.stack([table_of(t, shape.table) for t in tables]),
        np.zeros((n, SAMPLING_WORDS), np.int32),
    )  # fmt: skip

    out, after = _compiled(backend, shape)(cache, q, k, v, pack_pass(shape, [], arrays))
    for i, p in enumerate(positions):
        np.testing.assert_allclose(np.asarray(out)[i], dense(q[i], *contexts[i], p), atol=atol)
    assert np.isfinite(np.asarray(out)).all()
    assert not any(view[0].any() for view in rows(layout, after))


@functools.cache
def _compiled(backend: Backend, shape: PassShape):
    """(cache, q, k, v, vector) -> (what prompts or rows attend to, cache): one program for all tests of such a pass."""

    @jax.jit
    def run(cache, q, k, v, vector):
        _, step, _ = unpack_pass(shape, vector, jnp.zeros(shape.slots, jnp.int32))
        if shape.tokens:
            cache = backend.write_pages(cache, k, v, step.writes)
            return backend.attend_prompts(q, k, v, cache, step.blocks), cache
        cache = backend.write_rows(cache, k, v, step.rows)
        return backend.attend_rows(q, cache, step.rows), cache

    return run
