"""Host memory that KV passes through on its way to and from another rank. Enters: slots that are taken and given back.
Leaves: slots. Called by the outbox and the inbox.

A slot is touched when it is made: the first write to a page of fresh memory costs more than the copy itself. It is
never handed to JAX, which on CPU takes host memory over without a copy and would see the next parcel in it.
"""

from collections.abc import Iterable

import numpy as np

from pdjax.transfer.parcels import Share

SLOTS = 4  # parcels on their way from one rank to another
MAX_BYTES = 2**31 - 1  # of one message


class Ring:
    """`slots` buffers of `nbytes` bytes for one peer. Not thread-safe.

    What a peer that was lost has not let go of is quarantined by dropping the ring: whoever still may touch a slot (the
    post, on behalf of MPI) keeps it.
    """

    def __init__(self, slots: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._free = [np.zeros(nbytes, np.uint8) for _ in range(slots)]
        for slot in self._free:
            slot.fill(1)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> np.ndarray:
        return self._free.pop()

    def give(self, slot: np.ndarray) -> None:
        self._free.append(slot)


def slot_bytes(shares: Iterable[Share], head_bytes: int) -> int:
    """Bytes of the largest parcel of these shares.

    Raises:
        ValueError: no message may be as long.
    """
    nbytes = max((share.stop - share.start for share in shares), default=0) * head_bytes
    if nbytes > MAX_BYTES:
        raise ValueError(
            f"a unit has {head_bytes} bytes for each kv head, and a parcel {nbytes}; allowed: up to {MAX_BYTES} "
            "in a message (fewer stream_layers or a smaller prefill_chunk make units smaller)"
        )
    return nbytes
