"""Rank 0's side of transfers between ranks. Enters: the controller's commands, what ranks say, lost instances. Leaves:
words to ranks, and exactly one event for each transfer. Called by `MpiCluster` under its lock. Knows no MPI.

    MOVING      until every rank of the destination has said `Inserted`; with `verify` then
    COMPARING   until every rank of both sides has said its `Digests`; equal ones commit: `TransferDone`
    STOPPING    aborted, failed, or one side is lost: until every living rank of both sides has said `Stopped`; then
                `TransferAborted` or `TransferFailed`
"""

import dataclasses
import enum
from collections.abc import Callable, Iterable

from pdjax.messages import (
    AbortTransfer,
    Event,
    InstanceSpec,
    Iteration,
    IterationDone,
    StartTransfer,
    TransferAborted,
    TransferDone,
    TransferFailed,
)
from pdjax.mpi.words import Compare, Digests, Failed, Inserted, Settle, Stop, Stopped
from pdjax.transfer.verify import difference

Tell = Callable[[Iterable[int], object], None]


class Stage(enum.Enum):
    MOVING = "moving"
    COMPARING = "comparing"
    STOPPING = "stopping"
    OVER = "over"


TRANSITIONS: dict[Stage, set[Stage]] = {
    Stage.MOVING: {Stage.COMPARING, Stage.STOPPING, Stage.OVER},
    Stage.COMPARING: {Stage.STOPPING, Stage.OVER},
    Stage.STOPPING: {Stage.OVER},
    Stage.OVER: set(),
}


@dataclasses.dataclass(slots=True)
class _Move:
    """`waits`: ranks whose word is awaited in this stage. `moved`: rank -> when each of its parcels moved."""

    command: StartTransfer
    waits: set[int]
    stage: Stage = Stage.MOVING
    nbytes: int = 0
    moved: dict[int, tuple[tuple[float, float], ...]] = dataclasses.field(default_factory=dict)
    digests: dict[bool, dict[tuple[int, int], str]] = dataclasses.field(default_factory=lambda: {True: {}, False: {}})
    prefill_end_s: float | None = None
    failed: str | None = None

    def to(self, stage: Stage, waits: Iterable[int] = ()) -> None:
        if stage not in TRANSITIONS[self.stage]:
            raise RuntimeError(f"illegal transition of transfer {self.command.key}: {self.stage} -> {stage}")
        self.stage, self.waits = stage, set(waits)


class Moves:
    """The open transfers.

    Args:
        specs: with their ranks.
        tell: says a word to ranks.
        post: takes the answers.
        now: seconds on rank 0's clock.
        verify: compare both sides at the end.
    """

    def __init__(
        self,
        specs: tuple[InstanceSpec, ...],
        tell: Tell,
        post: Callable[[Event], None],
        now: Callable[[], float],
        verify: bool,
    ) -> None:
        self._specs, self._tell, self._post, self._now, self._verify = specs, tell, post, now, verify
        self._moves: dict[int, _Move] = {}
        self._ends: dict[tuple[int, int], list[_Move]] = {}  # (instance, iteration) -> whose prompts end in it
        self._dead: set[int] = set()  # ranks

    # --- commands ---------------------------------------------------------------------------------------------------

    def start(self, command: StartTransfer) -> None:
        move = self._moves[command.key] = _Move(command, set(self._specs[command.dst].ranks))
        if command.mode == "whole":
            move.prefill_end_s = self._now()
        self._tell(self._both(move), command)

    def abort(self, command: AbortTransfer) -> None:
        move = self._moves.get(command.key)
        if move is not None and move.stage is not Stage.STOPPING:
            self._stop(move, None)

    def issued(self, iteration: Iteration) -> None:
        """An iteration goes to its instance: prompts that stream may end in it."""
        for chunk in iteration.chunks:
            if chunk.last and chunk.stream in self._moves:
                ends = self._ends.setdefault((iteration.instance, iteration.number), [])
                ends.append(self._moves[chunk.stream])

    # --- what ranks say ---------------------------------------------------------------------------------------------

    def done(self, event: IterationDone) -> None:
        """An iteration is over: so are the prompts that ended in it."""
        for move in self._ends.pop((event.instance, event.number), ()):
            move.prefill_end_s = event.finished_s

    def inserted(self, rank: int, word: Inserted) -> None:
        move = self._expected(rank, word.key, Stage.MOVING)
        if move is None:
            return
        move.nbytes += word.nbytes
        move.moved[rank] = word.moved_s
        if move.waits:
            return
        if self._verify:
            move.to(Stage.COMPARING, self._both(move))
            self._tell(self._both(move), Compare(word.key))
        else:
            self._commit(move)

    def compared(self, rank: int, word: Digests) -> None:
        move = self._expected(rank, word.key, Stage.COMPARING)
        if move is None:
            return
        source = rank in self._specs[move.command.src].ranks
        move.digests[source].update({(layer, head): digest for layer, head, digest in word.heads})
        if move.waits:
            return
        wrong = difference(move.digests[True], move.digests[False])
        if wrong is None:
            self._commit(move)
            return
        command = move.command
        self._stop(move, f"verify_kv: request {command.request}, instance {command.src} to {command.dst}: {wrong}")

    def failed(self, word: Failed) -> None:
        move = self._moves.get(word.key)
        if move is not None and move.stage is not Stage.STOPPING:
            self._stop(move, word.error)

    def stopped(self, rank: int, word: Stopped) -> None:
        move = self._expected(rank, word.key, Stage.STOPPING)
        if move is not None and not move.waits:
            self._end(move)

    def lost(self, instance: int) -> None:
        """Nothing is awaited of its ranks any more. Its transfers are left to the controller, which aborts them."""
        self._dead.update(self._specs[instance].ranks)
        self._ends = {key: moves for key, moves in self._ends.items() if key[0] != instance}
        for move in list(self._moves.values()):
            if move.stage is Stage.STOPPING:
                move.waits -= self._dead
                if not move.waits:
                    self._end(move)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _both(self, move: _Move) -> list[int]:
        ranks = (*self._specs[move.command.src].ranks, *self._specs[move.command.dst].ranks)
        return [rank for rank in ranks if rank not in self._dead]

    def _expected(self, rank: int, key: int, stage: Stage) -> _Move | None:
        """The transfer, if this rank's word was awaited; what comes too late is dropped."""
        move = self._moves.get(key)
        if move is None or move.stage is not stage or rank not in move.waits:
            return None
        move.waits.discard(rank)
        return move

    def _stop(self, move: _Move, failed: str | None) -> None:
        move.failed = failed
        ranks = self._both(move)
        move.to(Stage.STOPPING, ranks)
        self._tell(ranks, Stop(move.command.key))
        if not ranks:
            self._end(move)

    def _end(self, move: _Move) -> None:
        key = move.command.key
        self._over(move)
        self._post(TransferAborted(key) if move.failed is None else TransferFailed(key, move.failed))

    def _commit(self, move: _Move) -> None:
        key, now = move.command.key, self._now()
        self._tell(self._both(move), Settle(key))
        self._over(move)
        end = now if move.prefill_end_s is None else move.prefill_end_s
        spans = _union(span for spans in move.moved.values() for span in spans)
        self._post(
            TransferDone(
                key=key,
                nbytes=move.nbytes,
                started_s=spans[0][0],
                finished_s=now,
                busy_s=sum(stop - start for start, stop in spans),
                hidden_s=sum(max(0.0, min(stop, end) - start) for start, stop in spans),
            )
        )

    def _over(self, move: _Move) -> None:
        move.to(Stage.OVER)
        del self._moves[move.command.key]


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times in spans that do not overlap: several parcels are on their way at a time."""
    out: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], stop)
        else:
            out.append((start, stop))
    return out
