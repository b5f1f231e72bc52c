"""The decode rows of one lane as arrays over row slots, for policies that look at hundreds of them at once. The lane
says who takes and leaves a slot; a `RowTable` leaves. A row costs nothing from step to step.
"""

import math

import numpy as np

from pdjax.live import Live
from pdjax.request import State
from pdjax.schedulers.base import RowTable


class Slots:
    """See the module's text. `count`: of the instance."""

    def __init__(self, count: int) -> None:
        self._lives: list[Live | None] = [None] * count
        self._silent: set[int] = set()  # slots of rows whose first token, of this stay, is not on the host
        self._shown = np.zeros(count, bool)  # the others
        self._taken = np.zeros(count, bool)
        self._here = np.zeros(count, bool)
        self._issued = np.zeros(count, np.int64)  # less the steps of the lane, for those in the batch
        self._most = np.zeros(count, np.int64)
        self._open_ended = np.zeros(count, bool)
        self._first_s, self._tpot_s, self._pass_s, self._end_s = np.zeros((4, count))
        self._kept: tuple[RowTable, np.ndarray] | None = None  # before any step, and who steps: until a row changes

    def take(self, live: Live, issued: int, *, here: bool) -> None:
        """A row has this slot: in the batch, where `issued` grows with the lane's steps, or on its way."""
        slot, slo = live.slot, live.slo
        assert slot is not None
        self._kept = None
        self._lives[slot], self._taken[slot], self._here[slot] = live, True, here
        self._issued[slot], self._most[slot] = issued, live.request.sampling.max_tokens
        self._open_ended[slot] = live.open_ended
        self._first_s[slot] = live.timeline.token_s[0] if live.timeline.token_s else math.inf
        self._shown[slot] = _shown(live)
        if self._shown[slot]:
            self._silent.discard(slot)
        else:
            self._silent.add(slot)
        self._tpot_s[slot] = math.inf if slo.tpot_ms is None else slo.tpot_ms / 1e3
        self._pass_s[slot] = math.inf if slo.itl_p99_ms is None else slo.itl_p99_ms / 1e3
        self._end_s[slot] = math.inf if slo.e2e_ms is None else live.arrival_s + slo.e2e_ms / 1e3

    def leave(self, slot: int) -> None:
        """Nobody has it any more."""
        self._kept = None
        self._lives[slot], self._taken[slot] = None, False
        self._silent.discard(slot)

    def table(self, steps: int) -> RowTable:
        """Of all rows, when the lane has issued so many steps."""
        for slot in list(self._silent):
            live = self._lives[slot]
            if live is not None and _shown(live):
                self._first_s[slot], self._shown[slot] = live.timeline.token_s[0], True
                self._silent.discard(slot)
                self._kept = None
        rows, stepping = self._kept = self._kept or self._rows()
        return rows._replace(issued=rows.issued + steps * stepping)

    def _rows(self) -> tuple[RowTable, np.ndarray]:
        at = self._taken.nonzero()[0]
        here = self._here[at]
        rows = RowTable(
            asks=[live for live in self._lives if live is not None],
            here=here & self._shown[at],
            issued=self._issued[at],
            most=self._most[at],
            open_ended=self._open_ended[at],
            first_s=self._first_s[at],
            tpot_s=self._tpot_s[at],
            pass_s=self._pass_s[at],
            end_s=self._end_s[at],
        )
        return rows, here


def _shown(live: Live) -> bool:
    """Whether its first token is on the host; one that started over has older ones, which say nothing."""
    return bool(live.timeline.token_s) and live.state is not State.PREFILLING
