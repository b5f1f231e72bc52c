"""What one rank has of an instance of an engine: a lane, and the ends of transfers. Enters: words of rank 0, parcels of
other ranks, in the post's thread. Leaves: events and answers as words. `MpiCluster` is the other end.

Nothing here waits, but for the lane's own threads: words only put work onto the lane, or tell the outbox and the inbox.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from pdjax import compiles
from pdjax.lane_thread import Executor, LaneThread
from pdjax.messages import Event, Iteration, IterationDone, StartTransfer
from pdjax.mpi import words
from pdjax.mpi.line import Line
from pdjax.transfer.base import Unit
from pdjax.transfer.inbox import Inbox
from pdjax.transfer.outbox import Outbox
from pdjax.transfer.parcel import Credit, Parcel
from pdjax.transfer.verify import digests

CLOSE_S = 5.0


@dataclasses.dataclass(slots=True)
class _Move:
    """An open transfer from or to here. Its fields are used by the lane only, but for `closed`."""

    command: StartTransfer
    closed: bool = False
    inserted: int = 0  # tokens times layers
    nbytes: int = 0
    moved_s: list[tuple[float, float]] = dataclasses.field(default_factory=list)


class Part:
    """Implements the lane's `Owner`.

    Args:
        line: to the other ranks.
        executor: this rank's part of the instance.
        outbox, inbox: of this rank.
        num_layers: L; a transfer is in when every token of every layer is inserted.
        fault: takes what a thread here died of.
    """

    def __init__(
        self,
        line: Line,
        executor: Executor,
        outbox: Outbox,
        inbox: Inbox,
        num_layers: int,
        fault: Callable[[BaseException], None],
    ) -> None:
        self._line, self._outbox, self._inbox, self._num_layers = line, outbox, inbox, num_layers
        self._index = executor.spec.index
        self._leads = executor.spec.ranks[0] == line.rank
        self._fault = fault
        self._moves: dict[int, _Move] = {}  # touched by the post's thread only
        self._compiled = compiles.compiled()[0]
        self._told = 0
        self._lane = LaneThread(executor, self)
        self._lane.start()

    def heard(self, rank: int, word: Any) -> None:
        """Takes a word; in the post's thread."""
        match word:
            case Iteration():
                self._line.expect(1)
                self._lane.put(lambda lane: lane.dispatch(word))
            case StartTransfer():
                self._open(word)
            case words.Echo():
                self._line.tell(rank, word)
            case Parcel():
                self._inbox.parcel(rank, word)
            case Credit():
                self._outbox.credit(rank, word)
            case words.Stop(key):
                self._close(key)
                # Behind all that the lane was given: what it did is done, and nothing more of it comes.
                self._lane.put(lambda _: self._line.tell(0, words.Stopped(key)))
            case words.Settle(key):
                self._close(key)
            case words.Compare(key):
                if (move := self._moves.get(key)) is not None:
                    self._lane.put(lambda lane: self._compare(lane, move.command))
            case words.Gone(instance):
                self._line.give_up(instance)
                self._outbox.gone(instance)
                self._inbox.gone(instance)
            case _:
                raise RuntimeError(f"rank {rank} says {word}, which is not for the rank of an instance")

    def on_lane(self, work: Callable[[LaneThread], None]) -> None:
        self._lane.put(work)

    def warmed(self) -> None:
        """What is compiled from now on should not be."""
        self._compiled = compiles.compiled()[0]

    def close(self) -> None:
        """Ends all threads, within 5 s."""
        self._outbox.end()
        self._inbox.end()
        self._lane.put(None)
        self._lane.join(CLOSE_S)

    # --- transfers --------------------------------------------------------------------------------------------------

    def _open(self, command: StartTransfer) -> None:
        move = self._moves[command.key] = _Move(command)
        if command.dst == self._index:
            self._inbox.open(
                command.key,
                command.src,
                command.tokens,
                deliver=lambda unit: self._lane.put(
                    lambda lane: lane.insert(unit, lambda: self._insert(lane, move, unit))
                ),
                failed=lambda error: self._line.tell(0, words.Failed(command.key, error)),
            )
            return
        self._outbox.open(
            command.key, command.dst, failed=lambda error: self._line.tell(0, words.Failed(command.key, error))
        )
        if command.mode == "whole":
            self._lane.put(lambda lane: self._extract(lane, move))

    def _close(self, key: int) -> None:
        """Nothing of it is sent or inserted from now on."""
        move = self._moves.pop(key, None)
        if move is not None:
            move.closed = True
            (self._inbox if move.command.dst == self._index else self._outbox).close(key)

    def _extract(self, lane: LaneThread, move: _Move) -> None:
        for unit in lane.extract(move.command):
            if move.closed:
                return
            self._outbox.send(unit)

    def _insert(self, lane: LaneThread, move: _Move, unit: Unit) -> bool:
        if move.closed:
            return False
        command = move.command
        lane.instance.insert(unit, command.dst_pages)
        move.moved_s.append(unit.moved_s)
        move.nbytes += self._inbox.share(unit.header.nbytes)
        move.inserted += unit.header.tokens * unit.header.layers
        if move.inserted == command.tokens * self._num_layers:
            self._line.tell(0, words.Inserted(command.key, move.nbytes, tuple(move.moved_s)))
        return True

    def _compare(self, lane: LaneThread, command: StartTransfer) -> None:
        pages = command.dst_pages if command.dst == self._index else command.src_pages
        held = digests(lane.instance.held_kv(pages, command.tokens))
        heads = tuple((layer, head, digest) for (layer, head), digest in held.items())
        self._line.tell(0, words.Digests(command.key, heads))

    # --- the lane's owner -------------------------------------------------------------------------------------------

    def now(self) -> float:
        return self._line.now()

    def post(self, event: Event) -> None:
        if isinstance(event, IterationDone):
            self._line.expect(-1)
            if self._leads:
                self._line.tell(0, event)
            count = compiles.compiled()[0] - self._compiled
            if count != self._told:
                self._told = count
                self._line.tell(0, words.Compiled(count))

    def send(self, unit: Unit) -> None:
        self._outbox.send(unit)

    def prefilled(self, iteration: Iteration) -> None:
        """Rank 0 sees it by the event."""

    def fault(self, error: BaseException) -> None:
        self._fault(error)
