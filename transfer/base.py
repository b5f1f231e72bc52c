"""The transport seam: how a request's KV gets from the pages of one instance to the pages of another.

Enters: units of fresh KV that the source's lane offers. Leaves: the same units on the destination's devices, handed
to the destination's lane, which inserts them between two steps. Called by a cluster; never by the controller.
"""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np


class TransferState(enum.Enum):
    """STARTED while units move; then exactly one of the others."""

    STARTED = "started"
    COMMITTED = "committed"  # every unit was taken by the destination
    FAILED = "failed"
    ABORTED = "aborted"


TRANSITIONS: dict[TransferState, set[TransferState]] = {
    TransferState.STARTED: {TransferState.COMMITTED, TransferState.FAILED, TransferState.ABORTED},
    TransferState.COMMITTED: set(),
    TransferState.FAILED: set(),
    TransferState.ABORTED: set(),
}


def advance(old: TransferState, new: TransferState) -> TransferState:
    """Returns `new`; raises RuntimeError if the table does not allow the step."""
    if new not in TRANSITIONS[old]:
        raise RuntimeError(f"illegal transfer transition {old.value} -> {new.value}")
    return new


@dataclasses.dataclass(frozen=True, slots=True)
class UnitHeader:
    """Says what a unit is; compared with what arrived before a byte of it is used.

    Attributes:
        key: the transfer.
        layer, layers: first layer and how many.
        start, tokens: token range inside the request.
        shape, dtype: of the wire array, [layers, 2, T, K, H] with T >= tokens (padded to a bucket).
    """

    key: int
    layer: int
    layers: int
    start: int
    tokens: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Payload bytes: the padding is not counted."""
        layers, two, _, heads, dim = self.shape
        return layers * two * self.tokens * heads * dim * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """A header and the KV it describes, on whichever devices it lies now.

    `moved_s`: when its bytes began to move and when they had arrived, on the transport's clock; set on arrival.
    """

    header: UnitHeader
    kv: Any  # jax.Array [layers, 2, T, K, H]
    moved_s: tuple[float, float] = (0.0, 0.0)


class Transport(Protocol):
    """Moves units. Thread-safe. `deliver` and `failed` are called from the transport's own thread, in unit order."""

    def start(
        self,
        key: int,
        src: int,
        dst: int,
        deliver: Callable[[Unit], None],
        failed: Callable[[str], None],
    ) -> None:
        """Opens a transfer: `deliver` takes each unit on the destination's devices; `failed` says why it stopped."""
        ...

    def send(self, unit: Unit) -> None:
        """Offers a unit, maybe still being computed; never blocks on a device. An ended transfer's are dropped."""
        ...

    def finish(self, key: int) -> None:
        """The destination has everything: STARTED -> COMMITTED."""
        ...

    def abort(self, key: int) -> bool:
        """Ends a transfer; True if it was still STARTED. After the return no `deliver` of it is called."""
        ...

    def close(self) -> None:
        """Joins every thread within 5 s. Idempotent."""
        ...
