"""The decode batch of one instance in the controller's books: its rows, what their next step computes, and what falls
due at which step. Used by `pdjax.lane` and by the decisions.

What a step costs here is what changes: pages that fall due and rows that end are found by the number of the step, not
by looking at every row. Steps are counted when they are issued.
"""

from collections.abc import Mapping
from types import MappingProxyType

from pdjax.agenda import Agenda
from pdjax.flights import Row
from pdjax.latency import attended
from pdjax.live import Live
from pdjax.messages import InstanceSpec
from pdjax.pages import PagePool


class Batch:
    """See the module's text.

    Attributes:
        rows: slot -> row, in the instance's order.
        steps: issued.
        context_tokens: sum of the rows' contexts.
        offsets: slot -> context at join minus the step of joining.
    """

    def __init__(self, spec: InstanceSpec, pool: PagePool) -> None:
        self.rows: dict[int, Live] = {}
        self.steps = 0
        self.context_tokens = 0
        self.offsets: dict[int, int] = {}
        self._spec, self._pool = spec, pool
        self._due = Agenda()  # rows that need a page for the step
        self._last = Agenda()  # rows for which it is the last step
        self._attended: int | None = None  # of the offsets
        self._snapshot: Mapping[int, Live] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def attended_tokens(self) -> int:
        """As of `pdjax.latency.Load`."""
        if self._attended is None:
            self._attended = attended(tuple(self.offsets.values()), self._spec.row_block)
        return self._attended + self.steps * len(self.offsets)

    @property
    def snapshot(self) -> Mapping[int, Live]:
        """The rows as they are now."""
        if self._snapshot is None:
            self._snapshot = MappingProxyType(dict(self.rows))
        return self._snapshot

    def holds(self, live: Live) -> bool:
        return live.slot is not None and self.rows.get(live.slot) is live

    def join(self, live: Live) -> None:
        """The row takes part in every step issued from now on."""
        assert live.slot is not None
        position, prompt = live.context_tokens, len(live.request.prompt_ids)
        self.rows[live.slot] = live
        live.step = self.steps
        self.offsets[live.slot] = position + 1 - self.steps
        self.context_tokens += position + 1
        row = (live, live.attempt)
        self._due.add(self.steps + self._pool.count(live.id) * self._spec.page_size - position, row)
        self._last.add(self.steps + live.request.sampling.max_tokens - (position - prompt) - 2, row)
        self._attended = self._snapshot = None

    def leave(self, slot: int) -> None:
        del self.rows[slot]
        self.context_tokens -= self.offsets.pop(slot) + self.steps
        self._attended = self._snapshot = None

    def growing(self) -> list[Live]:
        """Rows that need a page before the next step can be issued."""
        due = [row[0] for row in self._due.at(self.steps) if self._here(row)]
        return sorted(due, key=lambda live: live.order)

    def grow(self, live: Live) -> int | None:
        """Gives a due row its page; None if there is none."""
        taken = self._pool.take(live.id, 1)
        if taken is None:
            return None
        row = (live, live.attempt)
        self._due.at(self.steps).remove(row)
        self._due.add(self.steps + self._spec.page_size, row)
        return taken[0]

    def steady_steps(self, most: int) -> int:
        """How many steps from now on, at least one and at most `most`, leave the batch as it is: no row ends, and the
        pages that rows need are there."""
        last, size = self._last.next(self.steps), self._spec.page_size
        stop = self.steps + most if last is None else min(self.steps + most, last)
        if self.has_pages(stop - self.steps):
            return max(1, stop - self.steps)
        due = [step for step, rows in self._due.between(self.steps + 1, stop) for row in rows if self._here(row)]
        if sum(1 + (stop - 1 - step) // size for step in due) > self._pool.free:
            # Each row needs a page every `size` steps: what happens up to its first is enough to go on with.
            first = sorted(step for step in due if step < self.steps + size)
            stop = first[self._pool.free] if self._pool.free < len(first) else self.steps + size
        return max(1, stop - self.steps)

    def has_pages(self, steps: int, besides: int = 0) -> bool:
        """Whether so many steps surely find their pages, `besides` others: every row needs one in `page_size` steps."""
        return len(self.rows) * (1 + steps // self._spec.page_size) <= self._pool.free - besides

    def take_ending(self) -> list[Row]:
        """The rows for which the next step is the last; each is told once."""
        return [row for row in self._last.pop(self.steps) if self._here(row)]

    def step(self, count: int) -> None:
        """Counts steps as issued; gives the pages that fall due before the later ones."""
        stop = self.steps + count
        while (step := self._due.next(self.steps)) is not None and step < stop:
            for row in self._due.pop(step):
                if self._here(row):
                    if self._pool.take(row[0].id, 1) is None:
                        raise RuntimeError(f"instance {self._spec.index} has no page for step {step} of its run")
                    self._due.add(step + self._spec.page_size, row)
        self.steps = stop
        self.context_tokens += count * len(self.rows)

    def _here(self, row: Row) -> bool:
        live, attempt = row
        return live.attempt == attempt and self.holds(live)
