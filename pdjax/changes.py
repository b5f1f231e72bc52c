"""What has changed in a decode batch since its instance was told last: leaves, joins and grown rows of the next
`Iteration`. Used by `pdjax.lane` only."""

from pdjax.live import Live
from pdjax.messages import Join
from pdjax.pages import PagePool


class Changes:
    """See the module's text."""

    def __init__(self) -> None:
        self._leaves: list[int] = []
        self._joins: list[tuple[Live, int | None]] = []
        self._grows: list[tuple[int, int]] = []

    def join(self, live: Live, token: int | None) -> None:
        """`token` None: its slot holds the input token."""
        self._joins.append((live, token))

    def grow(self, slot: int, page: int) -> None:
        self._grows.append((slot, page))

    def leave(self, live: Live, slot: int) -> None:
        for waiting in self._joins:
            if waiting[0] is live:  # the instance never heard of it
                self._joins.remove(waiting)
                return
        self._grows = [grow for grow in self._grows if grow[0] != slot]
        self._leaves.append(slot)

    def take(self, pool: PagePool) -> tuple[tuple[int, ...], tuple[Join, ...], tuple[tuple[int, int], ...]]:
        """All of them, each told once. `pool`: whose pages the rows have."""
        joins = tuple(
            Join(live.slot, live.id, live.context_tokens, pool.pages(live.id), token, live.request.sampling)
            for live, token in self._joins
            if live.slot is not None
        )
        leaves, grows = tuple(self._leaves), tuple(self._grows)
        self._leaves, self._joins, self._grows = [], [], []
        return leaves, joins, grows
