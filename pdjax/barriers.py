"""Requests that hold on until an iteration is done, because until then it may touch their pages. Used by `pdjax.lane`
only."""

import bisect

from pdjax.live import Live


class Barriers:
    """See the module's text. While a request is here, it has one of its `holds` for it."""

    def __init__(self) -> None:
        self._until: list[tuple[int, Live]] = []  # by number

    def __bool__(self) -> bool:
        return bool(self._until)

    def add(self, number: int, live: Live) -> None:
        bisect.insort(self._until, (number, live), key=lambda barrier: barrier[0])
        live.holds += 1

    def passed(self, number: int) -> list[Live]:
        """The requests whose barrier ends with this iteration."""
        out = []
        while self._until and self._until[0][0] <= number:
            live = self._until.pop(0)[1]
            live.holds -= 1
            out.append(live)
        return out
