"""From the policy's decisions to commands: called after every event, until nothing is left to decide.

Requests that hold KV come first, so that none ever waits behind one that holds none: hand-offs before new prompts,
pages for running rows before pages for prompts. What a policy says is checked here, once, for all policies.
"""

from collections.abc import Iterator, Sequence

from pdjax.books import Books
from pdjax.lane import Lane
from pdjax.live import Live
from pdjax.messages import Chunk
from pdjax.request import State
from pdjax.revisions import Reviser, revise, turn
from pdjax.schedulers.base import Ask, Place, Plan, Reject, Scheduler, Wait

MAX_ASIDE = 16  # requests that may step aside at a time: each is asked about again after every event

MAX_WAITING = 4  # requests whose KV waits, and who find no room, before those behind them are not asked about


def decide(books: Books, scheduler: Scheduler, reviser: Reviser | None = None) -> list[tuple[Live, str]]:
    """Everything that can be decided now. Commands go to `books.commands`.

    Args:
        reviser: the policy, if it revises.

    Returns:
        The requests that the policy rejects or drops, each with its reason.

    Raises:
        ValueError: the policy named what is not there.
    """
    if books.flips:
        turn(books)
    rejected = [] if reviser is None else revise(books, reviser)
    progress = True
    while progress:  # somebody may have been preempted: its pages are free, and it waits again
        progress = False
        if not books.held:
            books.asked([])
        elif books.relieved or books.unasked or not books.steady:  # a steady one finds no room until some comes back
            _hand_off(books, scheduler)
        rejected += _place(books, scheduler)
        for lane in _stirred(books):
            while (room := (lane.prefills or lane.batch) and lane.has_room) and _iterate(books, scheduler, lane):
                progress = True
            if room and not books.steady and not lane.blocked:
                books.stirred.add(lane.spec.index)
        progress = progress or _make_room(books)
    if books.flips:
        turn(books)
    return rejected


def _stirred(books: Books) -> Iterator[Lane]:
    """The lanes that may have something to do, in order, each taken out of `books.stirred`. Others may be stirred
    meanwhile, and the same again by what happens to it, such as a preemption."""
    at = -1
    while later := [index for index in books.stirred if index > at]:
        at = min(later)
        books.stirred.discard(at)
        yield books.instances[at]


def _hand_off(books: Books, scheduler: Scheduler) -> None:
    waiting: list[Live] = []
    books.round += 1
    for at, live in enumerate(books.held):
        if len(waiting) == MAX_WAITING and not books.stalled:
            waiting += books.held[at:]  # where that many find no room, those behind them hardly do
            break
        roomless = books.steady and live.refused == books.round - 1  # all that has changed since is known
        live.refused = books.round
        if roomless and not any(books.instances[index].room_for(live) for index in books.relieved):
            waiting.append(live)
            continue
        assert live.place is not None
        target = live.place.decode
        if target is None:
            target = scheduler.hand_off(live, books)
            if target is not None and not books.living(target):
                raise ValueError(
                    f"{type(scheduler).__name__}.hand_off is {target!r}; allowed: a living instance, or None"
                )
        if target is None or not books.instances[target].room_for(live):
            waiting.append(live)
        elif target == live.place.prefill:
            books.keep(live)
        else:
            books.instances[target].expect(live)
            books.transfer(live, target, "whole")
    books.asked(waiting)


def _make_room(books: Books) -> bool:
    """Where KV that waits fills the only instances that could still decode, as it may when all others are lost, or when
    rows of two full instances are to change places: a row that moves stays where it is, if it can, otherwise the latest
    arrival gives way. True if one did."""
    if not (books.held and books.stalled):
        return False
    for live in books.held:
        assert live.place is not None
        if live.moving is not None and books.instances[live.place.prefill].room_for(live):
            books.held.remove(live)
            books.keep(live)
            return True
    if any(lane.room_for(live) for live in books.held for lane in _targets(books, live)):
        return False  # the policy has not named it, yet
    victim = books.held[-1]
    victim.preemptions += 1
    books.retire(victim, State.PREEMPTED)
    return True


def _targets(books: Books, live: Live) -> Sequence[Lane]:
    assert live.place is not None
    return books.instances if live.place.decode is None else [books.instances[live.place.decode]]


def _place(books: Books, scheduler: Scheduler) -> list[tuple[Live, str]]:
    rejected = []
    books.wait = ""
    aside = 0
    while aside < min(len(books.queue), MAX_ASIDE):
        live = books.queue[aside]
        decision = scheduler.place(live, books)
        if isinstance(decision, Wait):
            books.wait = books.wait or decision.reason
            if not decision.aside:
                break
            aside += 1
            continue
        del books.queue[aside]
        if isinstance(decision, Reject):
            rejected.append((live, decision.reason))
        else:
            _check(books, scheduler, live, decision)
            live.place = decision
            books.streams = books.streams or decision.mode == "stream"
            if decision.slo_class:
                live.degraded = next(kind for kind in live.laxer if kind.name == decision.slo_class)
            books.instances[decision.prefill].enqueue(live)
            if decision.decode is not None and not live.local:
                books.instances[decision.decode].assign(live)
    return rejected


def _check(books: Books, scheduler: Scheduler, live: Live, place: Place) -> None:
    policy = f"{type(scheduler).__name__}.place"
    if not isinstance(place, Place):
        raise ValueError(f"{policy} is {place!r}; allowed: Place, Wait or Reject")
    for index in (place.prefill,) if place.decode is None else (place.prefill, place.decode):
        if not books.living(index):
            raise ValueError(f"{policy} named instance {index!r}, which is not there")
    if place.mode not in ("stream", "whole"):
        raise ValueError(f"{policy}: mode is {place.mode!r}; allowed: 'stream', 'whole'")
    if place.mode == "stream" and place.decode is None:
        raise ValueError(f"{policy}: mode is 'stream' without a decode instance; allowed: 'whole'")
    laxer = [kind.name for kind in live.laxer]
    if place.slo_class and place.slo_class not in laxer:
        raise ValueError(
            f"{policy}: slo_class of request {live.id} is {place.slo_class!r}; allowed: {', '.join(laxer) or 'none'}"
        )


def _iterate(books: Books, scheduler: Scheduler, lane: Lane) -> bool:
    plan = scheduler.iterate(lane, books)
    if not isinstance(plan, Plan):
        raise ValueError(f"{type(scheduler).__name__}.iterate is {plan!r}; allowed: a Plan")
    decode = plan.decode and bool(lane.batch) and _grow(books, lane) and bool(lane.batch)
    chunks = _chunks(books, scheduler, lane, plan.chunks)
    if not chunks and not decode:
        return False
    steps = lane.steady_steps(books.max_steps) if books.max_steps > 1 and not chunks else 1
    books.commands.append(lane.issue(chunks, decode, steps))
    for chunk in chunks:
        live = books.live[chunk.request]
        if chunk.last and live.decodes_here:
            lane.join(live, None)
    return True


def _grow(books: Books, lane: Lane) -> bool:
    """Gives every row the page it needs for the next step; preempts the latest arrivals when there are none.

    False: no step now, the pages of preempted rows come back when what is in flight is done.
    """
    for live in lane.batch.growing():
        while lane.holds(live) and not lane.grow(live):
            lane.starved = True
            if lane.draining:
                return False
            started = [other for other in lane.prefills if other.prefilled and other.local]
            victim = max([*lane.batch.rows.values(), *started], key=lambda other: other.order)
            victim.preemptions += 1
            books.retire(victim, State.PREEMPTED)
    if lane.starved:
        books.relieved.add(lane.spec.index)
        lane.starved = False
    return True


def _chunks(books: Books, scheduler: Scheduler, lane: Lane, wanted: Sequence[tuple[Ask, int]]) -> tuple[Chunk, ...]:
    chunks: list[Chunk] = []
    left = lane.spec.max_chunk
    for ask, tokens in wanted:
        live = books.live.get(ask.id)
        if live is not None and (live.place is None or live.state not in (State.WAITING, State.PREFILLING)):
            continue  # preempted a moment ago, to let a row grow
        if live is None or live.place is None or live.place.prefill != lane.spec.index:
            raise ValueError(f"{type(scheduler).__name__}.iterate: request {ask.id} is not in the queue it was shown")
        start, end = live.prefilled, live.prefilled + tokens
        if not start < end <= live.context_tokens:
            raise ValueError(f"{type(scheduler).__name__}.iterate: {tokens} tokens of request {live.id}")
        left -= tokens
        if left < 0 or len(chunks) == lane.spec.max_chunks:
            raise ValueError(f"{type(scheduler).__name__}.iterate: more than instance {lane.spec.index} takes at once")
        if start == 0 and not books.start(lane, live):
            break
        chunks.append(
            Chunk(
                request=live.id,
                tokens=live.context[start:end],
                start=start,
                pages=lane.pool.pages(live.id),
                slot=live.slot if live.decodes_here and live.slot is not None else lane.spec.max_rows,
                last=end == live.context_tokens,
                sampling=live.request.sampling,
                stream=live.transfer,
            )
        )
        lane.advance_prefill(live, tokens)
    return tuple(chunks)
