"""The scheduler seam: what a policy sees, what it decides, and the packing rule that all of them share.

Pure host logic. A policy never sees an array, a page number or a thread: it reads views, which the controller keeps
up to date, and returns decisions, each with a reason. The same object runs on real meshes and in simulation.
"""

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np

from pdjax.latency import Latency, Load, bucket
from pdjax.messages import InstanceSpec, Role
from pdjax.record import Predicted
from pdjax.request import SLO, SLOClass
from pdjax.traffic import Traffic


class Ask(Protocol):
    """A request as policies see it."""

    @property
    def id(self) -> int: ...
    @property
    def arrival_s(self) -> float: ...
    @property
    def slo(self) -> SLO:
        """The limits that it is to keep: those it asked for, or those of the class it was degraded to."""
        ...

    @property
    def laxer(self) -> Sequence[SLOClass]:
        """The classes that it may still be degraded to, in this order."""
        ...

    @property
    def context_tokens(self) -> int:
        """Tokens that prefill must compute: the prompt, and what was generated before a preemption or restart."""
        ...

    @property
    def prefilled(self) -> int:
        """How many of these have been issued to its prefill instance."""
        ...

    @property
    def max_new_tokens(self) -> int:
        """Tokens it may still generate."""
        ...

    @property
    def open_ended(self) -> bool:
        """Whether its answer may end before that, by a stop."""
        ...


class Row(NamedTuple):  # quickly made: a decision may look at hundreds
    """A decode row as policies see it.

    Attributes:
        generated: tokens that have been handed out, the first of them at `first_s`.
        issued: the same and those of the passes in flight.
        most: that its answer may have in the end.
    """

    ask: Ask
    generated: int
    issued: int
    most: int
    first_s: float


class RowTable(NamedTuple):
    """The decode rows of an instance and those on their way to it, as arrays: [n] each, in the order of their slots.

    Attributes:
        asks: the requests.
        here: whether it is in the batch and its first token is on the host.
        issued: tokens handed out or in flight, the first token included.
        most: tokens that the answer may have in the end; `open_ended`: it may end before, by a stop.
        first_s: when its first token was handed out; inf: it was not yet.
        tpot_s, pass_s: limits on TPOT and on single gaps, seconds; inf: none.
        end_s: when its limit on E2E is reached, on the cluster's clock; inf: none.
    """

    asks: Sequence[Ask]
    here: np.ndarray
    issued: np.ndarray
    most: np.ndarray
    open_ended: np.ndarray
    first_s: np.ndarray
    tpot_s: np.ndarray
    pass_s: np.ndarray
    end_s: np.ndarray


class InstanceView(Protocol):
    """One instance as policies see it. Everything counts iterations already issued."""

    @property
    def spec(self) -> InstanceSpec: ...
    @property
    def twin(self) -> int:
        """The first instance of the cluster with these sizes: by one model, the same passes take as long there."""
        ...

    @property
    def role(self) -> Role: ...
    @property
    def next_role(self) -> Role | None:
        """What it becomes when its hand-offs are done; None: it stays what it is."""
        ...

    @property
    def alive(self) -> bool: ...
    @property
    def latency(self) -> Latency:
        """Predicts this instance's iterations and the transfers it sends, as corrected by what they took."""
        ...

    @property
    def busy_s(self) -> float:
        """Seconds from now until everything that was issued is done, as predicted."""
        ...

    @property
    def prefills(self) -> Sequence[Ask]:
        """Requests routed here whose prompts are not fully issued: started ones first, then in arrival order."""
        ...

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens of `prefills` not issued yet."""
        ...

    @property
    def rows(self) -> int:
        """Decode rows running here."""
        ...

    @property
    def running(self) -> Sequence[Row]:
        """These rows one by one, in batch order, but for those whose first token is on its way to the host. Made when
        asked for: who looks at many instances uses the sums or the table."""
        ...

    @property
    def table(self) -> RowTable:
        """All rows here, and those on their way."""
        ...

    @property
    def incoming(self) -> int:
        """Rows on their way here: pages are reserved or KV is moving."""
        ...

    @property
    def assigned(self) -> Collection[Ask]:
        """Requests that were placed on another instance to decode here, and are not on their way yet."""
        ...

    @property
    def rows_due(self) -> int:
        """Decode rows that run here, are on their way, or are assigned."""
        ...

    @property
    def context_tokens(self) -> int:
        """Sum of the rows' contexts."""
        ...

    @property
    def load(self) -> Load:
        """Of the next decode step of the rows here."""
        ...

    @property
    def full_load(self) -> Load:
        """Of a decode step when those on their way are here, too."""
        ...

    @property
    def free_pages(self) -> int: ...
    @property
    def prefill_streak(self) -> int:
        """Iterations in a row that carried chunks while rows stood still."""
        ...

    def startable(self, ask: Ask) -> bool:
        """Whether the first chunk of `ask` can get its pages (on both sides, when it streams) and its slot now."""
        ...

    def room_for(self, ask: Ask) -> bool:
        """Whether `ask` could be handed to this instance for decoding now: pages and a row slot. Where its KV waits
        already, a slot and a page for the next token are enough."""
        ...


class ClusterView(Protocol):
    """Everything a policy may look at."""

    @property
    def now(self) -> float: ...
    @property
    def instances(self) -> Sequence[InstanceView]: ...
    @property
    def queue(self) -> Sequence[Ask]:
        """Requests that wait to be placed, first come first."""
        ...

    @property
    def held(self) -> Sequence[Ask]:
        """Requests whose KV waits where it was computed, until somebody decodes them."""
        ...

    @property
    def traffic(self) -> Traffic:
        """What arrived lately, and how long answers were."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Prefill on one instance, decode on another (or the same: no transfer).

    `decode` None: chosen by `hand_off` once the prompt is computed (pull). `mode` "stream" pushes KV while prefill
    runs and needs `decode`; "whole" moves it afterwards. `predicted`: what the policy expects of the request.
    `slo_class`: one of the request's laxer classes, which it is put into; "": it keeps its limits.
    """

    prefill: int
    decode: int | None
    mode: Literal["stream", "whole"]
    reason: str
    predicted: Predicted | None = None
    slo_class: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """Keep the request in the controller's queue; asked again when something changes. It holds up those behind it,
    unless it steps `aside`: then they are asked too, and it stays the first to be asked the next time."""

    reason: str
    aside: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Reject:
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """A decode row goes on on another instance: it leaves its batch, its KV is moved as a whole, it joins there. It
    waits where it is, outside of the batch, until the other instance has room."""

    ask: Ask
    to: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Flip:
    """An instance changes its role. From now on it gets no work of either role; prompts that it has not begun are
    placed anew, and it takes the new role when it has nothing left of what the new role does not do."""

    instance: int
    role: Role
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Drop:
    """A request that has not begun is rejected, wherever it waits."""

    ask: Ask
    reason: str


Revision = Move | Flip | Drop


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The next iteration of an instance: tokens to take from each prompt, and whether the rows make a step."""

    chunks: tuple[tuple[Ask, int], ...] = ()
    decode: bool = False

    def __bool__(self) -> bool:
        return bool(self.chunks) or self.decode


@dataclasses.dataclass(frozen=True, slots=True)
class Traits:
    """What an engine builds for a policy: which instances, and which programs they are warmed up for.

    Attributes:
        colocated: all instances are MIXED; otherwise there are PREFILL and DECODE ones.
        prefill_decodes, decode_prefills: whether instances of that role also do the other's work.
        steady: what the policy answers changes only with arrivals, ends, and what is issued or moved, never with the
            time or the growth of contexts alone; `iterate` lets rows beside no prompts go on, and an instance stay idle
            until something changes there or KV that waited has found room; `hand_off` finds no room for a row until
            some has come back where there is `room_for` it. It is then asked seldom. One that revises is not steady.
        moves: KV may go from any instance to any other at any time: the policy moves rows (`Move`), or flips instances
            that are all MIXED.
    """

    colocated: bool = False
    prefill_decodes: bool = True
    decode_prefills: bool = True
    steady: bool = False
    moves: bool = False


class Scheduler(Protocol):
    """A placement policy. Three methods, called by the controller; none may keep it waiting.

    A policy may have an attribute `traits`; without it, its engine has PREFILL and DECODE instances that can do all.
    It may have a fourth method, `revise(cluster) -> Sequence[Move | Flip | Drop]`: what to change about requests and
    instances that were decided on before. It is asked after every event, before all others.
    """

    def place(self, ask: Ask, cluster: ClusterView) -> Place | Wait | Reject:
        """Where a waiting request goes."""
        ...

    def hand_off(self, ask: Ask, cluster: ClusterView) -> int | None:
        """Which instance decodes a request whose prompt is computed and whose Place named none, the one that computed
        it included; None: not yet."""
        ...

    def iterate(self, instance: InstanceView, cluster: ClusterView) -> Plan:
        """What an instance with room for one more iteration does next; an empty plan leaves it idle."""
        ...


def take_chunks(instance: InstanceView, budget: int, queue: Iterable[Ask] | None = None) -> tuple[tuple[Ask, int], ...]:
    """Prompt tokens in the order of `queue` (None: of the instance's) until the budget is filled exactly.

    A prompt that cannot get its pages now ends the list: those behind it must not overtake it for ever.
    """
    chunks: list[tuple[Ask, int]] = []
    left = min(budget, instance.spec.max_chunk)
    for ask in instance.prefills if queue is None else queue:
        if left <= 0 or len(chunks) == instance.spec.max_chunks:
            break
        if ask.prefilled == 0 and not instance.startable(ask):
            break
        take = min(left, ask.context_tokens - ask.prefilled)
        chunks.append((ask, take))
        left -= take
    return tuple(chunks)


def take_prompts(instance: InstanceView, limit: int) -> tuple[tuple[Ask, int], ...]:
    """Prompts in queue order, each as a whole, while together they have at most `limit` tokens (DistServe's L_m).

    A longer prompt goes alone, in chunks of `max_chunk`, but for prompts that fit into the padding of its pass, where
    they cost nothing. As in `take_chunks`, nobody is overtaken.
    """
    chunks = take_chunks(instance, instance.spec.max_chunk)
    if not chunks:
        return ()
    room = max(limit, bucket(instance.spec.chunk_buckets, chunks[0][1]))
    count, total = 1, chunks[0][1]
    for ask, take in chunks[1:]:
        total += take
        if total > room or take < ask.context_tokens - ask.prefilled:
            break
        count += 1
    return chunks[:count]


def traits_of(scheduler: Scheduler) -> Traits:
    """The policy's `traits`, or those of a policy that says nothing."""
    traits = getattr(scheduler, "traits", Traits())
    if not isinstance(traits, Traits):
        raise ValueError(f"{type(scheduler).__name__}.traits is {traits!r}; allowed: a pdjax.schedulers.Traits")
    return traits


def able(instances: Iterable[InstanceView], *roles: Role) -> list[InstanceView]:
    """The living instances that have one of the roles, and are not about to lose it."""
    turning = (None, *roles)  # made once: asked for with every decision
    return [view for view in instances if view.role in roles and view.alive and view.next_role in turning]


def prefillers(instances: Sequence[InstanceView]) -> list[InstanceView]:
    """Who takes prompts: the living PREFILL and MIXED instances, or if none is left, all that can."""
    found = able(instances, Role.PREFILL, Role.MIXED)
    return found or [view for view in instances if view.alive and view.spec.max_chunk]


def decoders(instances: Sequence[InstanceView]) -> list[InstanceView]:
    """Who takes rows: the living DECODE and MIXED instances, or if none is left, all that can."""
    found = able(instances, Role.DECODE, Role.MIXED)
    return found or [view for view in instances if view.alive and view.spec.max_rows]
