"""How many inserts of KV go between two decode steps. Enters: inserts with their predicted seconds, and which passes
are dispatched and done. Leaves: inserts, run when it is their turn. Called by a lane's thread, for its instance.

While rows run, inserts are held back so that those between two passes take at most SHARE of a decode step: a prompt
that arrives delays no token of the others by more. One insert goes between two passes whatever it takes, or a long one
would never go; where no row is in flight nobody waits, and all go at once.
"""

from collections import deque
from collections.abc import Callable

SHARE = 0.2  # of the last decode step


class Pacing:
    """The inserts that wait on one instance, in order."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, Callable[[], bool]]] = deque()
        self._before: deque[float] = deque()  # of each decode pass in flight: seconds of inserts in front of it
        self._spent_s = 0.0  # of inserts behind the last decode pass
        self._any = False  # there was such an insert
        self._step_s = 0.0  # of the last pass of decode rows alone; 0: not known yet

    def add(self, seconds: float, insert: Callable[[], bool]) -> None:
        """An insert that is predicted to take so long (inf: not known); it returns False if it was not wanted."""
        self._waiting.append((seconds, insert))
        self._release()

    def dispatched(self) -> None:
        """A pass that decodes is in the device's queue: a new gap begins behind it."""
        self._before.append(self._spent_s)
        self._spent_s, self._any = 0.0, False
        self._release()

    def done(self, seconds: float, alone: bool) -> None:
        """The first of the passes in flight that decode has ended; `alone`: it had no prompt tokens."""
        before_s = self._before.popleft()
        if alone and before_s <= seconds / 2:  # behind more inserts than that, its own time is not to be seen
            self._step_s = seconds - before_s
        self._release()

    def _release(self) -> None:
        while self._waiting:
            seconds, insert = self._waiting[0]
            if self._before and self._any and self._spent_s + seconds > SHARE * self._step_s:
                return
            self._waiting.popleft()
            if insert():
                self._spent_s += seconds
                self._any = True
