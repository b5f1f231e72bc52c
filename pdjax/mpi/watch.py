"""Who has not been heard of for too long. Enters: signs of life, and the time. Leaves: whom to ask for one, and who is
given up. Called by `pdjax.mpi.mpi_post` on rank 0, in every round of its loop. Pure: no MPI, no clock.
"""

from collections.abc import Iterable

ASKS = 4  # in a timeout: a lost message or two would not do, and a round trip takes far less
STILL = 8  # this part of a timeout between two rounds is a standstill of this process, not of the others


class Watch:
    """Times in seconds, of any clock that goes on.

    Args:
        ranks: to watch.
        timeout_s: a rank without a sign for so long is given up.
        now: nobody can have given a sign before.
    """

    def __init__(self, ranks: Iterable[int], timeout_s: float, now: float) -> None:
        self._timeout_s = timeout_s
        self._seen = dict.fromkeys(ranks, now)
        self._asked = self._looked = now

    def seen(self, rank: int, now: float) -> None:
        """A rank gave a sign. One that is not watched any more is not watched again."""
        if rank in self._seen:
            self._seen[rank] = now

    def forget(self, rank: int) -> None:
        """It is lost already."""
        self._seen.pop(rank, None)

    def look(self, now: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Once a round: the ranks to ask for a sign, and those that are given up, each of them once.

        If this process itself stood still (stopped, or starved of its processor), signs may wait unread: nobody's
        silence counts up to then.
        """
        if now - self._looked > self._timeout_s / STILL:
            self._seen = dict.fromkeys(self._seen, now)
        self._looked = now
        silent = tuple(rank for rank, seen in self._seen.items() if now - seen > self._timeout_s)
        for rank in silent:
            del self._seen[rank]
        if now - self._asked < self._timeout_s / ASKS:
            return (), silent
        self._asked = now
        return tuple(self._seen), silent
