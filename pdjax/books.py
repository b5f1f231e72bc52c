"""What is where: every live request, every instance's lane, every open transfer, and the moves between them.

The controller changes it as events come, the decisions as the policy decides; policies read it (it is their
`ClusterView`). A move that concerns an instance leaves a command in `commands`.
"""

import bisect
import dataclasses
import heapq
import math
from collections import deque
from collections.abc import Sequence
from typing import Literal

from pdjax.lane import Lane
from pdjax.latency import Latency
from pdjax.live import Live
from pdjax.messages import AbortTransfer, Command, InstanceSpec, Role, StartTransfer
from pdjax.record import FlipRecord, MoveRecord
from pdjax.request import Request, State
from pdjax.traffic import Traffic


class Books:
    """The state of a controller.

    Attributes:
        now: the time of the event being handled, seconds.
        steady: whether the policy is (`pdjax.schedulers.base.Traits`).
        max_steps: of a run.
        instances: a lane per instance.
        live: engine id -> request, until it has ended and nothing can touch its pages any more.
        queue: WAITING and not placed, first come first.
        held: MIGRATING without a transfer: their KV waits on the prefill side.
        backlog: some held request found no room.
        relieved: numbers of the lanes whose pages or slots have come back, or which others may use now, since the held
            requests were asked about.
        round: of hand-offs.
        unasked: some held request was not asked about yet, or may be due to be now.
        streams: some request was to be streamed.
        traffic: what arrived lately.
        wait: why the first of the queue waits, in the policy's words.
        commands: what to submit, in order.
        stirred: numbers of the lanes to ask the policy about; all others have no work or no room, can issue nothing
            (`Lane.blocked`), or were left idle by a steady policy.
        flips: instances that change their role, and since when and why.
        revised: what to write down about revisions.
    """

    def __init__(
        self,
        specs: Sequence[InstanceSpec],
        latency: Sequence[Latency],
        transfer_timeout_s: float,
        max_steps: int = 1,
        *,
        steady: bool = False,
    ) -> None:
        self.now = 0.0
        self.steady = steady
        self.max_steps = max_steps if steady else 1
        sizes: dict[InstanceSpec, int] = {}
        self.instances = [
            Lane(spec, model, self, sizes.setdefault(_sizes(spec), spec.index))
            for spec, model in zip(specs, latency, strict=True)
        ]
        self.live: dict[int, Live] = {}
        self.queue: list[Live] = []
        self.held: list[Live] = []
        self.backlog = False
        self.relieved: set[int] = set()
        self.round = 0
        self.unasked = self.streams = False
        self.traffic = Traffic()
        self.wait = ""
        self.commands: list[Command] = []
        self.stirred: set[int] = set()
        self.transfers: dict[int, Live] = {}
        self.flips: dict[int, tuple[float, str]] = {}
        self.revised: list[FlipRecord | MoveRecord] = []
        self._deadlines: deque[tuple[float, int]] = deque()
        self._expiries: list[tuple[float, int]] = []  # a heap of (deadline, request)
        self._timeout = transfer_timeout_s
        self._key = 0
        self._flying = self.instances[0]  # a lane that had something in flight: asked first

    @property
    def stalled(self) -> bool:
        """Requests are live, but nothing that is under way can move them: only another event could."""
        if not self.live or self.transfers or self._flying.in_flight:
            return False
        self._flying = next((lane for lane in self.instances if lane.in_flight), self._flying)
        return not self._flying.in_flight

    def living(self, index: object) -> bool:
        """Whether a policy may name it."""
        if not isinstance(index, int) or isinstance(index, bool):
            return False
        return 0 <= index < len(self.instances) and self.instances[index].alive

    # --- in ---------------------------------------------------------------------------------------------------------

    def admit(self, request: Request) -> Live:
        live = self.live[request.id] = Live.of(request)
        if request.deadline_s is not None:
            heapq.heappush(self._expiries, (request.deadline_s, request.id))
        self.enqueue(live)
        return live

    @property
    def waiting(self) -> int:
        """Requests without a first pass."""
        return len(self.queue) + sum(not live.prefilled for lane in self.instances for live in lane.prefills)

    def expired(self) -> list[Live]:
        """Requests whose deadline has passed and that have not ended; each is told once."""
        out = []
        while self._expiries and self._expiries[0][0] <= self.now:
            live = self.live.get(heapq.heappop(self._expiries)[1])
            if live is not None and not live.state.terminal:
                out.append(live)
        return out

    def enqueue(self, live: Live) -> None:
        bisect.insort(self.queue, live, key=lambda other: other.order)

    def hold(self, live: Live) -> None:
        bisect.insort(self.held, live, key=lambda other: other.order)
        live.refused, self.unasked = None, True

    def asked(self, waiting: list[Live]) -> None:
        """The policy was asked about the held requests, and these have to wait."""
        if (self.backlog and not waiting) or (self.streams and self.relieved):
            self.stirred.update(range(len(self.instances)))  # prompts may start that could not
        self.held, self.backlog, self.unasked = waiting, bool(waiting), False
        self.relieved.clear()

    def relieve_all(self) -> None:
        """Who may use which lane has changed."""
        self.relieved.update(range(len(self.instances)))
        self.stirred.update(self.relieved)

    def fits(self, lane: Lane, live: Live) -> bool:
        """Whether the first chunk can have its pages and slot: nobody who holds KV must be waiting for them."""
        place = live.place
        if place is None or lane.starved:
            return False
        if self.backlog and (lane.role is not Role.PREFILL or live.decodes_here):
            return False
        if live.decodes_here and not lane.has_slot:
            return False
        if lane.pool.free < lane.spec.pages_for(live.context_tokens + live.decodes_here):
            return False
        if place.mode != "stream" or live.local or place.decode is None:
            return True
        return not self.backlog and self.instances[place.decode].room_for(live)

    def start(self, lane: Lane, live: Live) -> bool:
        if not self.fits(lane, live):
            return False
        assert live.place is not None
        lane.reserve(live, live.context_tokens + live.decodes_here, slot=live.decodes_here)
        live.to(State.PREFILLING)
        if live.place.mode == "stream" and not live.local and live.place.decode is not None:
            self.instances[live.place.decode].expect(live)
            self.transfer(live, live.place.decode, "stream")
        return True

    def transfer(self, live: Live, target: int, mode: Literal["stream", "whole"]) -> None:
        assert live.place is not None
        self._key += 1
        live.transfer, live.decode_on = self._key, target
        self.transfers[self._key] = live
        self._deadlines.append((self.now + self._timeout, self._key))
        self.commands.append(
            StartTransfer(
                key=self._key,
                request=live.id,
                attempt=live.attempt,
                src=live.place.prefill,
                dst=target,
                src_pages=self.instances[live.place.prefill].pool.pages(live.id),
                dst_pages=self.instances[target].pool.pages(live.id),
                tokens=live.context_tokens,
                mode=mode,
            )
        )

    def ended(self, key: int) -> tuple[Live, bool]:
        """An open transfer is over: its request, and whether that still wanted it (otherwise it only waited for this
        to give its pages back)."""
        live = self.transfers.pop(key)
        live.transfer = None
        if not live.holds:
            return live, True
        live.holds -= 1
        self.freed([live])
        return live, False

    def next_deadline(self) -> float | None:
        """When the oldest open transfer, or the next request with a deadline, is to be given up."""
        while self._deadlines and self._deadlines[0][1] not in self.transfers:
            self._deadlines.popleft()
        while self._expiries and self._expiries[0][1] not in self.live:
            heapq.heappop(self._expiries)
        if not self._expiries:
            return self._deadlines[0][0] if self._deadlines else None
        return min(self._expiries[0][0], self._deadlines[0][0] if self._deadlines else math.inf)

    def overdue(self) -> list[tuple[int, Live]]:
        """Transfers past their deadline that nobody has given up yet; each is told once."""
        out = []
        while self._deadlines and self._deadlines[0][0] <= self.now:
            _, key = self._deadlines.popleft()
            live = self.transfers.get(key)
            if live is not None and not live.holds:
                out.append((key, live))
        return out

    def unplace(self, live: Live) -> None:
        """Back to the queue: it waits, and nothing of it was begun."""
        assert live.place is not None
        self.instances[live.place.prefill].dequeue(live)
        self._unassign(live)
        live.place = None
        self.enqueue(live)

    def move(self, live: Live, target: int) -> None:
        """Takes a row out of its batch, to go on on another instance. The steps in flight still give their tokens; when
        they are done, its KV waits to be handed off."""
        lane = self.instances[live.home]
        lane.leave(live)
        live.moving = target
        self.instances[target].assign(live)
        live.attempt += 1  # what is filed under the old one means a stay that is over
        if not lane.barrier(live):
            self._uproot(live)

    def _uproot(self, live: Live) -> None:
        self.instances[live.home].uproot(live)
        live.uproot()
        self.hold(live)

    def stay(self, live: Live) -> None:
        """The instance that its row was to go to is lost: it goes on where its KV is, when it can."""
        self._unassign(live)
        live.moving = live.home
        if live.state is State.MIGRATING:
            assert live.place is not None
            live.place = dataclasses.replace(live.place, decode=live.home)

    def join(self, live: Live) -> None:
        assert live.place is not None and live.decode_on is not None
        self.instances[live.place.prefill].give_back(live, slot=None)
        self.instances[live.decode_on].join(live, live.first)
        live.to(State.DECODING)
        live.moving = None

    def keep(self, live: Live) -> None:
        """A request whose KV waits where it was computed decodes there: nothing moves."""
        assert live.place is not None
        lane = self.instances[live.place.prefill]
        self._unassign(live)
        lane.keep(live)
        live.place = dataclasses.replace(live.place, decode=live.place.prefill)
        lane.join(live, live.first)
        live.to(State.DECODING)
        live.moving = None

    # --- out --------------------------------------------------------------------------------------------------------

    def retire(self, live: Live, state: State) -> None:
        lanes = self._lanes(live)
        if live.state is State.DECODING:  # it holds nothing where it was computed
            lanes = [self.instances[live.home]]
            lanes[0].settle(live)
        self._unassign(live)
        live.to(state)
        if live in self.queue:
            self.queue.remove(live)
        if live in self.held:
            self.held.remove(live)
            self.unasked = True  # one behind it may have come so far to the front that it is asked about
        for lane in lanes:
            lane.leave(live)
            if live in lane.prefills:
                lane.dequeue(live)
            lane.barrier(live)
        if live.transfer is not None:
            live.holds += 1
            self.commands.append(AbortTransfer(live.transfer))
        self.freed([live])

    def freed(self, lives: Sequence[Live]) -> None:
        """Gives back what the requests held, if nothing can touch it any more; preempted ones wait again, and rows
        that move wait for their hand-off."""
        for live in lives:
            if live.holds or live.id not in self.live:
                continue
            if live.state is State.DECODING:  # its row left its batch only to go on elsewhere
                self._uproot(live)
                continue
            for lane in self._lanes(live):
                decodes = lane.spec.index == live.decode_on or live.local
                lane.give_back(live, slot=live.slot if decodes else None)
            live.slot = None
            if live.state.terminal:
                del self.live[live.id]
            else:
                live.start_over()
                self.enqueue(live)

    def _unassign(self, live: Live) -> None:
        """It does not go on where it was to."""
        for index in (live.moving, None if live.place is None else live.place.decode):
            if index is not None:
                self.instances[index].unassign(live)

    def _lanes(self, live: Live) -> list[Lane]:
        if live.place is None:
            return []
        indices = {live.place.prefill, live.decode_on if live.decode_on is not None else live.place.prefill}
        return [self.instances[index] for index in sorted(indices)]


def _sizes(spec: InstanceSpec) -> InstanceSpec:
    """What is equal for instances of one make."""
    return dataclasses.replace(spec, index=0, role=Role.MIXED, ranks=())
