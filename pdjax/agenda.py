"""What falls due at which decode step: rows that need a page, rows that end. Used by `pdjax.batch` only."""

import heapq
from collections.abc import Iterator

from pdjax.flights import Row


class Agenda:
    """What falls due at which step."""

    def __init__(self) -> None:
        self._rows: dict[int, list[Row]] = {}
        self._steps: list[int] = []  # a heap

    def add(self, step: int, row: Row) -> None:
        if step not in self._rows:
            self._rows[step] = []
            heapq.heappush(self._steps, step)
        self._rows[step].append(row)

    def at(self, step: int) -> list[Row]:
        return self._rows.get(step, [])

    def next(self, step: int) -> int | None:
        """The first step with an entry, from this one on; what lies before it is dropped."""
        while self._steps and (self._steps[0] < step or self._steps[0] not in self._rows):
            self._rows.pop(heapq.heappop(self._steps), None)
        return self._steps[0] if self._steps else None

    def between(self, step: int, stop: int) -> Iterator[tuple[int, list[Row]]]:
        """(step, entries) of every step in [step, stop) that has some, unordered."""
        return ((at, rows) for at, rows in self._rows.items() if step <= at < stop)

    def pop(self, step: int) -> list[Row]:
        """Takes the entries of a step."""
        return self._rows.pop(step, [])
