"""What every form of attention shares: the index arrays of a pass, the pages of a layer, and what a backend offers.

Enters: nothing but names of axes. Leaves: types. Used by the forms in this package, by `models.plan`, which fills the
index arrays, by `models.kv`, which makes the pages, and by whoever reads pages on the host.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from pdjax.models.config import ModelConfig
from pdjax.models.sharding import KV

QUERY_BLOCK = 64  # queries of a prompt that the plain form takes through its pages together
ROW_BLOCK = 8  # decode rows that it does: as many pages as the longest of them has. Fewer rows at once take longer.
MASKED = -1e30  # a score, or the logarithm of a weight, that counts for nothing


class LayerKV(NamedTuple):
    """The pages of one layer, as the `Layout` of a backend has them."""

    k: jax.Array
    v: jax.Array


class PageWrites(NamedTuple):
    """Which tokens go to which page: entry i < used writes offsets [low, high) of `page`.

    The token for offset 0 of the page is number `first` of the flat tokens (negative where the page began earlier).
    """

    used: jax.Array  # []
    page: jax.Array  # [W]
    first: jax.Array  # [W]
    low: jax.Array  # [W]
    high: jax.Array  # [W]


class QueryBlocks(NamedTuple):
    """Runs of at most QUERY_BLOCK consecutive tokens of one prompt; the first `used` entries, ascending in `first`."""

    used: jax.Array  # []
    prompt: jax.Array  # [blocks] row of `tables`
    first: jax.Array  # [blocks] flat index of the first token
    position: jax.Array  # [blocks] its position in the prompt
    pages: jax.Array  # [blocks] how many pages the last query sees
    tables: jax.Array  # [S, M]


class Rows(NamedTuple):
    """Decode rows. `page` is where the row's fresh token goes: out of range for padding, which drops the write."""

    tables: jax.Array  # [B, M]
    position: jax.Array  # [B]
    page: jax.Array  # [B]


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """How the pages of a layer lie: the order of the axes N, K, P and H of both arrays. N and K each are the same axis
    in both."""

    k: str
    v: str

    def shape(self, N: int, K: int, H: int, P: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of k and v."""
        sizes = {"N": N, "K": K, "H": H, "P": P}
        return tuple(sizes[axis] for axis in self.k), tuple(sizes[axis] for axis in self.v)

    @property
    def spec(self) -> PartitionSpec:
        """Of both arrays: kv heads are split over the mesh axis "kv"."""
        return PartitionSpec(*[None] * self.heads_axis, KV)

    @property
    def pages_axis(self) -> int:
        return self.k.index("N")

    @property
    def heads_axis(self) -> int:
        return self.k.index("K")

    @property
    def page_size_axis(self) -> int:
        """Of v."""
        return self.v.index("P")

    def page(self, cache: LayerKV, page: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One page, [] int32: k [K, H, P] and v [K, P, H]."""
        k, v = (lax.dynamic_index_in_dim(array, page, self.pages_axis, keepdims=False) for array in cache)
        return _ordered(k, self.k.replace("N", ""), "KHP"), _ordered(v, self.v.replace("N", ""), "KPH")

    def pages(self, cache: LayerKV, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Pages [n] int32: k [n, K, H, P] and v [n, K, P, H]."""
        k, v = (
            array[pages] if self.pages_axis == 0 else by_head(array)[pages_by_head(array, pages)] for array in cache
        )
        return _ordered(k, self.k, "NKHP"), _ordered(v, self.v, "NKPH")

    def on_host(self, cache: tuple[np.ndarray, np.ndarray], pages: np.ndarray) -> np.ndarray:
        """KV of each head, [K, 2, tokens, H], in pages [M] of host arrays."""
        taken = (
            _ordered(array.take(pages, self.pages_axis), axes, "KNPH")
            for array, axes in zip(cache, (self.k, self.v), strict=True)
        )
        both = np.stack(list(taken), axis=1)  # [K, 2, M, P, H]
        return both.reshape(*both.shape[:2], -1, both.shape[-1])


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """Attention on one kind of device: how pages lie there, and the functions that write, read and attend to them.

    The functions are called inside traced programs, on the arrays of one device.

    Attributes:
        name: "cpu", "tpu" or "gpu".
        layout: of the pages.
        prefill, decode: what attends to prompts and to decode rows: the name of a kernel, or "plain".
        refused: (head dim, page size, dtype of KV) -> of "prefill" and "decode" those that run plain after all, with
            the reason.
        write_pages: (cache, k [T, K, H], v [T, K, H], writes) -> cache. Page 0 must not be among the pages.
        read_pages: (cache, pages [W], offset [], tokens) -> [2, tokens, K, H]: consecutive tokens from `offset` of the
            first page on.
        write_rows: (cache, k [B, K, H], v [B, K, H], rows) -> cache: one token per row.
        attend_prompts: (q [T, K, G, H], k [T, K, H], v [T, K, H], cache, blocks) -> [T, K, G, H] float32: causal
            attention of prompt tokens to their prompts. k and v are their own, which the pages hold already.
        attend_rows: (q [B, K, G, H], cache, rows) -> [B, K, G, H] float32: of one query per decode row.
    """

    name: str
    layout: Layout
    prefill: str
    decode: str
    refused: Callable[[int, int, np.dtype[Any]], dict[str, str]]
    write_pages: Callable[[LayerKV, jax.Array, jax.Array, PageWrites], LayerKV]
    read_pages: Callable[[LayerKV, jax.Array, jax.Array, int], jax.Array]
    write_rows: Callable[[LayerKV, jax.Array, jax.Array, Rows], LayerKV]
    attend_prompts: Callable[[jax.Array, jax.Array, jax.Array, LayerKV, QueryBlocks], jax.Array]
    attend_rows: Callable[[jax.Array, LayerKV, Rows], jax.Array]

    @property
    def spec(self) -> PartitionSpec:
        """Of both arrays of a layer's pages."""
        return self.layout.spec

    def shape(self, N: int, K: int, H: int, P: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of k and v of a layer's pages."""
        return self.layout.shape(N, K, H, P)

    def kernels(self, config: ModelConfig, page_size: int, dtype: Any = "bfloat16") -> dict[str, str]:
        """What "prefill" and "decode" run with pages of this size and KV of this dtype: the name of a kernel, or
        "plain", with the reason where a kernel refuses."""
        why = self.refused(config.head_dim, page_size, np.dtype(dtype))
        forms = {"prefill": self.prefill, "decode": self.decode}
        return {phase: f"plain: {why[phase]}" if phase in why else form for phase, form in forms.items()}

    def blocks(self, config: ModelConfig, page_size: int, dtype: Any) -> tuple[int, int]:
        """(decode rows that attend together, each as long as the longest of them; prompt tokens that attend together,
        to whole pages). With kernels (1, 0): each row to its own pages, each token to those before it."""
        forms = self.kernels(config, page_size, dtype)
        rows, tokens = (forms[phase].startswith("plain") for phase in ("decode", "prefill"))
        return ROW_BLOCK if rows else 1, QUERY_BLOCK if tokens else 0


def by_head(pages: jax.Array) -> jax.Array:
    """Pages [K, N, ...] as [K * N, ...], the same memory. Where what is indexed comes first, XLA changes no order."""
    return pages.reshape(-1, *pages.shape[2:])


def pages_by_head(pages: jax.Array, page: jax.Array) -> jax.Array:
    """Where pages [n] of every head are in `by_head`: [K, n]."""
    K, N = pages.shape[:2]
    return jnp.arange(K)[:, None] * N + page[None]


def _ordered(array: Any, axes: str, want: str) -> Any:
    return array if axes == want else array.transpose([axes.index(axis) for axis in want])
