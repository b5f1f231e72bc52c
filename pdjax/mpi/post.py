"""The seam to MPI: one thread per rank that makes every MPI call after start-up, for control and for data.

Enters: messages and buffers from any thread. Leaves: what other ranks sent, and news of ranks that died, as callbacks
in that thread. `pdjax.mpi.line` speaks through it; `MpiPost` is the real one.
"""

from collections.abc import Callable
from typing import Any, Protocol

from pdjax.transfer.parcel import Done


class Post(Protocol):
    """Thread-safe; nothing here blocks but `close`."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def start(self, heard: Callable[[int, bytes], None], lost: Callable[[int, str], None]) -> None:
        """Begins to listen. Both callbacks run in the post's thread, which they must not keep: `heard` takes each
        message with its sender, in the order in which that sent them; `lost` says once that a rank died, and how that
        was noticed; nothing is heard from it afterwards. On rank 0 a rank that gives no sign for too long is lost, too:
        it can still be told so, and what is open with it stays open until it wakes up. What either raises ends the
        process (`pdjax.mpi.ends.crash`)."""
        ...

    def tell(self, rank: int, message: bytes) -> None:
        """Sends a message. One to a dead rank is dropped; one to a rank that was given up for its silence is not, so
        that it learns of it when it wakes up. To itself is not allowed."""
        ...

    def ship(self, rank: int, tag: int, buffer: Any, done: Done) -> None:
        """Sends the bytes of a buffer under a tag; see `pdjax.transfer.parcel.Carrier`."""
        ...

    def fetch(self, rank: int, tag: int, buffer: Any, done: Done) -> None:
        """Receives the bytes that a rank ships under a tag."""
        ...

    def expect(self, more: int) -> None:
        """Changes how many answers are awaited: while there are any, the thread looks often."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Sends what is still to be told, then ends the thread; later calls are dropped, their `done` says so. Whether
        nothing was left open and no rank is lost: only then MPI can be finalized (else `pdjax.mpi.ends.leave`)."""
        ...
