"""The links between simulated instances. Enter: which links there are and which of them KV from one instance to another
goes over. Leaves: a description that `pdjax.simulated` plays. Made by `pdjax.fleet` and by users.

Transfers that are on a link at the same time share it in equal parts; one that goes over several links is as fast as
the slowest of its parts. What it leaves unused on the others is not given to anybody: so rates depend on counts alone.
"""

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """One direction of a wire: latency in seconds, bytes per second for all that share it."""

    name: str
    bytes_per_s: float
    alpha_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s of link {self.name!r} is {self.bytes_per_s!r}; allowed: > 0")
        if not 0 <= self.alpha_s < math.inf:
            raise ValueError(f"alpha_s of link {self.name!r} is {self.alpha_s!r}; allowed: seconds >= 0")


@dataclasses.dataclass(frozen=True, slots=True)
class Network:
    """Who is connected how.

    Attributes:
        links: all of them.
        out, into: by instance, the numbers of the links that what it sends, and what it receives, goes over.
        node: by instance, where it stands; between two instances of one node KV goes over `inside` instead.
        inside: by node, the numbers of the links inside of it.
    """

    links: tuple[Link, ...]
    out: tuple[tuple[int, ...], ...]
    into: tuple[tuple[int, ...], ...]
    node: tuple[int, ...]
    inside: tuple[tuple[int, ...], ...]

    def route(self, src: int, dst: int) -> tuple[int, ...]:
        """The numbers of the links from one instance to another."""
        if self.node[src] == self.node[dst] and self.inside[self.node[src]]:
            return self.inside[self.node[src]]
        return self.out[src] + self.into[dst]


def switched(nic: Link, instances: int) -> Network:
    """Every instance has a link of its own in each direction to a switch that never fills up."""
    links = tuple(
        dataclasses.replace(nic, name=f"{nic.name} {way} {index}", alpha_s=nic.alpha_s if way == "out" else 0.0)
        for way in ("out", "into")
        for index in range(instances)
    )
    out = tuple((index,) for index in range(instances))
    into = tuple((instances + index,) for index in range(instances))
    return Network(links, out, into, tuple(range(instances)), ((),) * instances)


def nodes(nic: Link, inside: Link, node: Sequence[int]) -> Network:
    """Nodes of several instances: `nic` is the wire of a node to the others, each direction shared by its instances;
    `inside` connects the instances of a node, one for all of them. `node`: by instance, 0 to the number of nodes."""
    count = max(node) + 1
    links = (
        *(dataclasses.replace(nic, name=f"{nic.name} out {index}") for index in range(count)),
        *(dataclasses.replace(nic, name=f"{nic.name} into {index}", alpha_s=0.0) for index in range(count)),
        *(dataclasses.replace(inside, name=f"{inside.name} {index}") for index in range(count)),
    )
    out = tuple((index,) for index in node)
    into = tuple((count + index,) for index in node)
    return Network(links, out, into, tuple(node), tuple((2 * count + index,) for index in range(count)))
