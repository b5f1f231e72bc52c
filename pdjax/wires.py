"""KV on its way between simulated instances. Enter: transfers, and the bytes of them that are there to be sent. Leaves:
when the last byte is there. Called by `pdjax.simulated`; two ways to play the same words:

    `Alone`   every transfer has a wire to itself: what the latency model of its source says
    `Shared`  transfers share the links of a `pdjax.network.Network` in equal parts

With layer streaming the KV of a pass leaves in groups of layers while it is computed: on a wire of its own group after
group; on shared links what all groups but the last hold flows as fast as it is computed, at most.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from pdjax.latency import Latency
from pdjax.messages import StartTransfer
from pdjax.network import Network


@dataclasses.dataclass(slots=True)
class Transfer:
    """One transfer.

    Attributes:
        left: bytes that are not there to be sent yet.
        busy_s: how long bytes moved until now.
        computed_s: when the last of them was there to be sent.
    """

    command: StartTransfer
    started_s: float
    left: float
    busy_s: float = 0.0
    computed_s: float = 0.0


class Wires(Protocol):
    """How transfers spend their time."""

    def open(self, transfer: Transfer) -> None: ...
    def close(self, key: int) -> None:
        """It is aborted."""
        ...

    def computing(self, transfer: Transfer, nbytes: float, start_s: float, end_s: float) -> None:
        """A pass that computes KV of it has begun, and will end."""
        ...

    def push(self, transfer: Transfer, nbytes: float, start_s: float) -> None:
        """KV that was computed from `start_s` until now may be sent, as far as `computing` has not seen to it."""
        ...


At = Callable[[float, Callable[[], None]], None]  # a time, and what to do then


class Alone:
    """See the module's text.

    Args:
        latency: of each instance.
        groups: by instance, in how many parts the KV of a pass is streamed.
        now: the clock. `at`: does something later. `arrived`: the last byte is there.
    """

    def __init__(
        self,
        latency: Sequence[Latency],
        groups: Sequence[int],
        now: Callable[[], float],
        at: At,
        arrived: Callable[[int], None],
    ) -> None:
        self._latency, self._groups = latency, groups
        self._now, self._at, self._arrived = now, at, arrived
        self._free_s: dict[int, float] = {}  # by transfer: when its wire is

    def open(self, transfer: Transfer) -> None:
        self._free_s[transfer.command.key] = 0.0

    def close(self, key: int) -> None:
        self._free_s.pop(key, None)

    def computing(self, transfer: Transfer, nbytes: float, start_s: float, end_s: float) -> None:
        pass  # nobody else is on the wire: `push` knows what happened

    def push(self, transfer: Transfer, nbytes: float, start_s: float) -> None:
        key, source, now = transfer.command.key, transfer.command.src, self._now()
        groups = self._groups[source] if transfer.command.mode == "stream" else 1
        seconds = self._latency[source].transfer_s(nbytes / groups)
        free_s, computing_s = self._free_s[key], now - start_s
        for left in range(groups - 1, -1, -1):
            free_s = max(free_s, now - computing_s * left / groups) + seconds
        self._free_s[key] = free_s
        transfer.busy_s += groups * seconds
        if not transfer.left:
            self._at(free_s, lambda: self._end(key))

    def _end(self, key: int) -> None:
        if self._free_s.pop(key, None) is not None:
            self._arrived(key)


@dataclasses.dataclass(slots=True)
class _Flow:
    transfer: Transfer
    route: tuple[int, ...]
    left: float = 0.0  # bytes that are there and not sent
    most: float = float("inf")  # bytes per second that are computed
    rate: float = 0.0
    since_s: float = 0.0  # `left` is of this time
    active: bool = False  # it is on its links
    version: int = 0  # of its end: a new rate makes a new one


class Shared:
    """See the module's text; arguments as for `Alone`, and the links."""

    def __init__(
        self,
        network: Network,
        groups: Sequence[int],
        now: Callable[[], float],
        at: At,
        arrived: Callable[[int], None],
    ) -> None:
        self._network, self._groups = network, groups
        self._now, self._at, self._arrived = now, at, arrived
        self._flows: dict[int, _Flow] = {}
        self._on: list[dict[int, _Flow]] = [{} for _ in network.links]  # by link: who has bytes for it

    def open(self, transfer: Transfer) -> None:
        command = transfer.command
        self._flows[command.key] = _Flow(transfer, self._network.route(command.src, command.dst))

    def close(self, key: int) -> None:
        flow = self._flows.pop(key, None)
        if flow is not None and flow.active:
            self._leave(key, flow)

    def computing(self, transfer: Transfer, nbytes: float, start_s: float, end_s: float) -> None:
        groups = self._groups[transfer.command.src]
        if groups > 1 and end_s > start_s:
            self._offer(transfer, nbytes * (groups - 1) / groups, nbytes / (end_s - start_s))

    def push(self, transfer: Transfer, nbytes: float, start_s: float) -> None:
        groups = self._groups[transfer.command.src] if transfer.command.mode == "stream" else 1
        streamed = groups > 1 and self._now() > start_s
        self._offer(transfer, nbytes / groups if streamed else nbytes, float("inf"))

    def _offer(self, transfer: Transfer, nbytes: float, most: float) -> None:
        key = transfer.command.key
        flow = self._flows[key]
        self._settle(flow)
        joins = not flow.active
        flow.left, flow.most, flow.active = flow.left + nbytes, most, True
        if joins:
            for link in flow.route:
                self._on[link][key] = flow
        self._retime(flow.route if joins else (), flow)

    def _leave(self, key: int, flow: _Flow) -> None:
        flow.active = False
        for link in flow.route:
            del self._on[link][key]
        self._retime(flow.route, None)

    def _retime(self, links: Sequence[int], flow: _Flow | None) -> None:
        """The rates of all that are on these links, and of one flow, may have changed."""
        touched = {id(other): other for link in links for other in self._on[link].values()}
        if flow is not None:
            touched[id(flow)] = flow
        for other in touched.values():
            share = min(self._network.links[link].bytes_per_s / len(self._on[link]) for link in other.route)
            rate = min(share, other.most)
            if rate == other.rate and other is not flow:
                continue
            self._settle(other)
            other.rate = rate
            other.version += 1
            self._await(other, other.version)

    def _await(self, flow: _Flow, version: int) -> None:
        self._at(flow.since_s + flow.left / flow.rate, lambda: self._sent(flow, version))

    def _settle(self, flow: _Flow) -> None:
        now = self._now()
        if flow.active:
            flow.left = max(0.0, flow.left - flow.rate * (now - flow.since_s))
            flow.transfer.busy_s += now - flow.since_s
        flow.since_s = now

    def _sent(self, flow: _Flow, version: int) -> None:
        key = flow.transfer.command.key
        if flow.version != version or self._flows.get(key) is not flow:
            return
        self._settle(flow)
        flow.left, flow.rate = 0.0, 0.0
        self._leave(key, flow)
        if not flow.transfer.left:
            delay_s = sum(self._network.links[link].alpha_s for link in flow.route)
            self._at(self._now() + delay_s, lambda: self._end(key, flow))

    def _end(self, key: int, flow: _Flow) -> None:
        if self._flows.get(key) is flow:
            del self._flows[key]
            self._arrived(key)
