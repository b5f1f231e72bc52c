"""What a policy changes about its earlier decisions: rows go on on another instance, roles flip, requests are dropped.
Called by `pdjax.decisions`, once per event, with the books; what is to be written down goes to `books.revised`.

An instance that is to change its role has two parts of work: what its new role does as well stays, what it does not do
is waited for, and no more of it is sent there. When nothing of that is left, the role is the new one; weights, pages
and programs are what they were.
"""

from collections.abc import Sequence
from typing import Protocol

from pdjax.books import Books
from pdjax.lane import Lane
from pdjax.live import Live
from pdjax.messages import Role
from pdjax.record import FlipRecord, MoveRecord
from pdjax.request import State
from pdjax.schedulers.base import ClusterView, Drop, Flip, Move, Revision, Scheduler, traits_of

PREFILL, DECODE = (Role.PREFILL, Role.MIXED), (Role.DECODE, Role.MIXED)  # the roles that do it


class Reviser(Protocol):
    """A policy that has the method."""

    def revise(self, cluster: ClusterView) -> Sequence[Revision]: ...


def reviser_of(scheduler: Scheduler) -> Reviser | None:
    """The policy, if it revises.

    Raises:
        ValueError: it calls itself steady: between its answers whole runs of steps would go by.
    """
    if not callable(getattr(scheduler, "revise", None)):
        return None
    if traits_of(scheduler).steady:
        raise ValueError(f"{type(scheduler).__name__}.traits: steady is True; allowed with a method revise: False")
    return scheduler  # type: ignore[return-value]


def revise(books: Books, policy: Reviser) -> list[tuple[Live, str]]:
    """Asks the policy, and does what it says.

    Returns:
        The requests that it drops, each with its reason.

    Raises:
        ValueError: it named what is not there.
    """
    name = f"{type(policy).__name__}.revise"
    dropped = []
    for revision in policy.revise(books):
        match revision:
            case Move():
                _move(books, name, revision)
            case Flip():
                _flip(books, name, revision)
            case Drop():
                dropped.append((_drop(books, name, revision), f"dropped: {revision.reason}"))
            case _:
                raise ValueError(f"{name} has {revision!r}; allowed: Move, Flip, Drop")
    return dropped


def turn(books: Books) -> None:
    """Gives their new roles to the instances whose hand-offs are done."""
    for index, (started_s, reason) in list(books.flips.items()):
        lane = books.instances[index]
        assert lane.next_role is not None
        if not _busy(books, lane, lane.next_role):
            before, lane.role, lane.next_role = lane.role, lane.next_role, None
            del books.flips[index]
            books.stirred.add(index)  # a prompt may start that could not
            books.revised.append(FlipRecord(index, before, lane.role, started_s, books.now, reason))


def _move(books: Books, name: str, move: Move) -> None:
    live = books.live.get(move.ask.id)
    if live is None or live.state is not State.DECODING or not books.instances[live.home].holds(live):
        raise ValueError(f"{name} moves request {move.ask.id}; allowed: a row that runs")
    if not books.living(move.to) or move.to == live.home or not books.instances[move.to].spec.max_rows:
        raise ValueError(
            f"{name} moves request {live.id} to {move.to!r}; allowed: another living instance that has rows"
        )
    if not books.instances[live.home].spec.moves:
        raise ValueError(f"{name} moves request {live.id}; allowed: where the policy's traits say moves=True")
    live.moves.append(MoveRecord(live.name, live.home, move.to, books.now, move.reason))
    books.revised.append(live.moves[-1])
    books.move(live, move.to)


def _drop(books: Books, name: str, drop: Drop) -> Live:
    live = books.live.get(drop.ask.id)
    if live is None or live.state is not State.WAITING:
        raise ValueError(f"{name} drops request {drop.ask.id}; allowed: one that waits")
    if live.place is not None:
        books.unplace(live)
    books.queue.remove(live)
    return live


def _flip(books: Books, name: str, flip: Flip) -> None:
    what = f"{name} makes instance {flip.instance!r} {flip.role!r}"
    if not books.living(flip.instance):
        raise ValueError(f"{what}; allowed: a living instance")
    lane = books.instances[flip.instance]
    if not isinstance(flip.role, Role) or flip.role is (lane.next_role or lane.role):
        raise ValueError(f"{what}; allowed: a pdjax.messages.Role that it does not have and is not about to have")
    if (flip.role in PREFILL and not lane.spec.max_chunk) or (flip.role in DECODE and not lane.spec.max_rows):
        raise ValueError(f"{what}; allowed: a role that it has programs for")
    roles = [flip.role if other is lane else other.next_role or other.role for other in books.instances if other.alive]
    for able, work in ((PREFILL, "prefill"), (DECODE, "decode")):
        if not any(role in able for role in roles):
            raise ValueError(f"{what}; allowed: a role with which some instance can still {work}")
    if flip.role is lane.role:  # it has not begun to be another
        lane.next_role = None
        del books.flips[flip.instance]
        return
    lane.next_role = flip.role
    books.flips[flip.instance] = books.now, flip.reason
    for live in _not_begun(books, lane, flip.role):
        books.unplace(live)
    turn(books)


def _not_begun(books: Books, lane: Lane, role: Role) -> list[Live]:
    """The requests that were placed there for what the role does not do, and that nothing was done of."""
    prompts = [live for other in books.instances for live in other.prefills if live.state is State.WAITING]
    index = lane.spec.index
    return [
        live
        for live in prompts
        if live.place is not None
        and (
            (role not in PREFILL and live.place.prefill == index)
            or (role not in DECODE and live.place.decode == index and not live.single)
        )
    ]


def _busy(books: Books, lane: Lane, role: Role) -> bool:
    """Whether something is left there of what the role does not do."""
    if role is Role.MIXED:
        return False
    if role is Role.PREFILL and (lane.batch or lane.incoming):
        return True
    begun = (State.PREFILLING, State.MIGRATING, State.DECODING)
    here = _decodes if role is Role.PREFILL else _gives
    # Whoever has no pages here may be on the way at most: nobody else is looked at.
    known = [books.live[owner] for owner in lane.pool.owners] + [books.live[ask.id] for ask in lane.assigned]
    return any(live.state in begun and here(live, lane.spec.index) for live in known)


def _decodes(live: Live, index: int) -> bool:
    """Its row is there, or will be as far as one knows."""
    assert live.place is not None
    if live.state is State.DECODING:
        return index in (live.home, live.moving)
    return not live.single and index == (live.place.decode if live.decode_on is None else live.decode_on)


def _gives(live: Live, index: int) -> bool:
    """It is prefilled there, or its KV is to leave from there."""
    assert live.place is not None
    if live.state is State.DECODING:
        return live.moving is not None and live.home == index
    return live.place.prefill == index
