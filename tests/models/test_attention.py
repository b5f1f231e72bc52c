"""Paged attention against dense attention in float64, with poison wherever nothing may look: the plain form, on pages
as CPUs have them and as kernels want them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pdjax.models.attention import gpu, plain, tpu
from pdjax.models.plan import pack_pass, table_of, unpack_pass
from tests.paged import Sizes, check_prompts, check_rows, chunk, fill, numbers, pool, rows

# The kernels of the latter two refuse float32: they run plain on pages that lie alike, which they write in two ways.
BACKENDS = {"cpu": plain.backend(), "tpu": tpu.backend(), "gpu": gpu.backend(cudnn="left out")}
PAGES = {1: 310, 7: 48, 16: 32, 64: 16}
T = 80


def sizes(P):
    return Sizes(P, PAGES[P], 128)


LAYOUTS_AND_PAGES = [("cpu", 1), ("cpu", 7), ("cpu", 64), ("tpu", 7), ("tpu", 64)]


@pytest.mark.parametrize(("layout", "P"), LAYOUTS_AND_PAGES)
@pytest.mark.parametrize(
    "parts", [[(70, 0)], [(1, 0)], [(5, 9), (30, 0), (12, 63)], [(16, 16), (16, 48)], [(3, 0), (61, 3)]]
)
def test_packed_chunks_see_their_own_past_and_nothing_else(layout, P, parts):
    check_prompts(BACKENDS[layout], sizes(P), T, parts, atol=2e-6)


@pytest.mark.parametrize(("layout", "P"), LAYOUTS_AND_PAGES)
def test_rows_of_any_length_see_their_own_past_and_nothing_else(layout, P):
    check_rows(BACKENDS[layout], sizes(P), 4, [0, 100, 63], atol=2e-6)


@functools.cache
def written_and_read(backend, shape):
    """(cache, k, v, vector, pages, offset) -> (as many tokens as were written, cache)."""

    @jax.jit
    def run(cache, k, v, vector, pages, offset):
        _, step, _ = unpack_pass(shape, vector, jnp.zeros(shape.slots, jnp.int32))
        cache = backend.write_pages(cache, k, v, step.writes)
        return backend.read_pages(cache, pages, offset, shape.tokens), cache

    return run


@pytest.mark.parametrize("layout", BACKENDS)
@pytest.mark.parametrize("P", [7, 16])
@pytest.mark.parametrize(("start", "n"), [(0, 1), (0, 16), (5, 20), (31, 1), (14, 21)])
def test_tokens_written_to_pages_are_read_back_and_neighbours_stay(layout, P, start, n):
    backend, size, T = BACKENDS[layout], sizes(P), 24
    pages = size.tables(2, 40)[0]
    cache, (k, v) = pool(size, backend.layout, pages, stale=5.0), size.kv(T)
    shape = size.shape(T, 0)
    W = -(-(T + P - 1) // P)
    vector = pack_pass(shape, [chunk(n, start, pages)], None)
    span = table_of(pages[start // P :][:W], W)
    got, after = written_and_read(backend, shape)(cache, k, v, vector, span, np.int32(start % P))
    assert (np.asarray(got)[:, :n] == np.stack([k[:n], v[:n]])).all()
    expect = pool(size, backend.layout, pages, stale=5.0)
    for view, values in zip(rows(backend.layout, expect), (k, v), strict=True):
        for i in range(n):
            view[pages[(start + i) // P], (start + i) % P] = values[i]
    for kept, want in zip(after, expect, strict=True):
        np.testing.assert_array_equal(np.asarray(kept), want)


@pytest.mark.parametrize("layout", BACKENDS)
def test_a_pass_that_keeps_nothing_writes_nothing(layout):
    backend, size, T = BACKENDS[layout], sizes(7), 24
    pages, shape = size.tables(2, 40)[0], size.shape(T, 0)
    cache, (k, v) = pool(size, backend.layout, pages), size.kv(T)
    vector = pack_pass(shape, [chunk(T, 5, pages)], None, dry=True)
    _, after = written_and_read(backend, shape)(cache, k, v, vector, table_of(pages[:5], 5), np.int32(5))
    for kept, want in zip(after, cache, strict=True):
        np.testing.assert_array_equal(np.asarray(kept), want)


@pytest.mark.parametrize("layout", BACKENDS)
def test_the_host_reads_what_a_block_table_holds(layout):
    backend, size = BACKENDS[layout], sizes(7)
    pages, (k, v) = size.tables(2, 28)[1], size.kv(28)
    cache = pool(size, backend.layout, pages)
    fill(backend.layout, cache, pages, k, v)
    held = backend.layout.on_host(cache, np.array(pages))
    np.testing.assert_array_equal(held, np.stack([k, v]).transpose(2, 0, 1, 3))


def test_rows_beyond_the_batch_write_nothing():
    size, backend = sizes(7), BACKENDS["tpu"]
    shape, cache = size.shape(0, 3), pool(size, backend.layout, (), stale=0)
    _, step, _ = unpack_pass(shape, jnp.asarray(pack_pass(shape, [], None)), jnp.zeros(5, jnp.int32))
    after = backend.write_rows(jax.tree.map(jnp.asarray, cache), numbers(3, 2, 8), numbers(3, 2, 8), step.rows)
    for kept, want in zip(after, cache, strict=True):
        np.testing.assert_array_equal(np.asarray(kept), want)
