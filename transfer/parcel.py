"""What ranks say to each other about KV that crosses between them, and the seam to whoever carries it.

A unit (`pdjax.transfer.base`) crosses as parcels: the heads [start, stop) that one source rank gives to one destination
rank, [layers, 2, tokens, heads, H] without padding, contiguous, as bytes. A `Parcel` is said first, its bytes follow
under its tag. Arrays that go from device to device as they are have their padding with them. A destination gives every
source rank `Credit` for as many parcels as it has buffers for; a source without credit waits. Called by
`pdjax.mpi.part`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import ml_dtypes  # noqa: F401  bfloat16 as a numpy dtype
import numpy as np

from pdjax.transfer.base import UnitHeader


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """How an instance cuts its kv heads, in every stage, and over which ranks.

    `kv` equal parts, each held by `rep` shards (`pdjax.transfer.plan.HeadSplit`); shard s is on rank
    `ranks[s * len(ranks) // (kv * rep)]`.
    """

    kv: int
    rep: int
    ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """Where a transfer server has a parcel's array (`pdjax.transfer.pulls`), in place of bytes under a tag."""

    address: str
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Parcel:
    """Said by a source rank; its bytes follow.

    Attributes:
        unit: of which it is a part; `unit.shape` has all K heads and the padded tokens.
        start, stop: global head numbers.
        tag: of the bytes, among those from this rank.
        sent_s: when they began to move, on rank 0's clock.
        offer: then the destination pulls, and no bytes follow.
        padded: all T tokens cross.
    """

    unit: UnitHeader
    start: int
    stop: int
    tag: int
    sent_s: float
    offer: Offer | None = None
    padded: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Of the array that crosses, [layers, 2, tokens, heads, H]."""
        layers, two, T, _, dim = self.unit.shape
        return layers, two, T if self.padded else self.unit.tokens, self.stop - self.start, dim

    @property
    def nbytes(self) -> int:
        """Bytes of that array."""
        return math.prod(self.shape) * np.dtype(self.unit.dtype).itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Credit:
    """Said by a destination rank: it has buffers for so many parcels more."""

    parcels: int


Done = Callable[[Exception | None], None]  # what went wrong, or None


class Carrier(Protocol):
    """Speaks to other ranks and moves bytes between them (`pdjax.mpi.line`). Thread-safe; nothing here blocks.

    `done` is called once, from the carrier's thread, which it must not keep: when the buffer may be used again, or the
    peer is known to be dead. A stopped peer's may stay open for ever.
    """

    @property
    def rank(self) -> int: ...
    def now(self) -> float:
        """Seconds on rank 0's clock."""
        ...

    def tell(self, rank: int, word: Any) -> None:
        """Says a word of `pdjax.mpi.words`; words to one rank arrive in order."""
        ...

    def ship(self, rank: int, tag: int, buffer: Any, done: Done) -> None:
        """Sends the bytes of a buffer (C-contiguous numpy array, or `pdjax.transfer.pointers.Pointer`)."""
        ...

    def fetch(self, rank: int, tag: int, buffer: Any, done: Done) -> None:
        """Receives exactly as many bytes as the buffer has."""
        ...
