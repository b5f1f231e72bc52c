"""Host memory that KV passes through on its way to and from another rank. Enters: slots that are taken and given back.
Leaves: slots. Called by the outbox and the inbox.

A slot is touched when it is made: the first write to a page of fresh memory costs more than the copy itself. It is
never handed to JAX, which on CPU takes host memory over without a copy and would see the next parcel in it.
"""

import numpy as np


class Ring:
    """At most `slots` buffers of `nbytes` bytes for one peer. Not thread-safe.

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
