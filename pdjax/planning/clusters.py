"""Which clusters can be made of the devices: stocks and the goodputs of single instances enter, `Cluster`s leave, each
with the rate that it should carry. Called by `pdjax.planning.search`.

`splits` is DistServe's algorithm 1 (section 4.1): instances of both phases are chosen each for itself, and as many of
each taken as match the rate, or all that the devices allow. `units` is its algorithm 2 (section 4.2), for slow links
between nodes: a prefill and a decode instance are cut into as many segments, and one of each shares a node, so that KV
never leaves it.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from pdjax.fleet import Pool
from pdjax.messages import Role
from pdjax.network import Link, Network
from pdjax.planning.mix import Mix
from pdjax.planning.stock import Stock

DEGREES = (1, 2, 4, 8)  # of parallelism, TP and PP


@dataclasses.dataclass(frozen=True)
class Shape:
    """An instance: `tp` devices in each of `pp` stages; `pool` is one of it."""

    stock: Stock
    tp: int
    pp: int
    pool: Pool

    @property
    def devices(self) -> int:
        return self.tp * self.pp

    @property
    def text(self) -> str:
        return f"TP{self.tp}" + (f"xPP{self.pp}" if self.pp > 1 else "")


@dataclasses.dataclass(frozen=True)
class Part:
    """Equal instances of a cluster."""

    role: Role
    shape: Shape
    count: int


@dataclasses.dataclass(frozen=True)
class Cluster:
    """One that may be played.

    Attributes:
        policy: by the name of `pdjax.schedulers`.
        parts: prefill first.
        estimate: requests per second, of what is known of its instances.
        groups: so many equal clusters, of which each keeps to itself; one of them is played.
        chunks: prompt tokens of a pass of its prefill and of its decode instances, TaiChi's sliders S_P and S_D; None:
            what the instances take.
    """

    policy: str
    parts: tuple[Part, ...]
    estimate: float
    groups: int = 1
    chunks: tuple[int, int] | None = None

    @property
    def devices(self) -> dict[str, int]:
        """By the name of their stock."""
        used: dict[str, int] = {}
        for part in self.parts:
            name = part.shape.stock.name
            used[name] = used.get(name, 0) + self.groups * part.count * part.shape.devices
        return used

    @property
    def price_per_hour(self) -> float:
        """Dollars."""
        each = [part.count * part.shape.devices * part.shape.stock.price_per_hour for part in self.parts]
        return self.groups * sum(each)

    def cost(self, by: str) -> float:
        """Devices, or dollars per hour."""
        return self.price_per_hour if by == "dollar" else sum(self.devices.values())

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Of one group."""
        made = []
        for part in self.parts:
            pool = dataclasses.replace(part.shape.pool, role=part.role, count=part.count)
            if self.chunks is not None:
                size = self.chunks[part.role is Role.DECODE]
                pool = dataclasses.replace(pool, max_chunk=min(size, pool.max_chunk))
            made.append(pool)
        return tuple(made)

    @property
    def counts(self) -> tuple[int, ...]:
        """Instances of each part, of all groups."""
        return tuple(self.groups * part.count for part in self.parts)

    @property
    def text(self) -> str:
        """Such as "4 TP1 prefill + 12 TP1 decode"."""
        kinds = len({part.shape.stock.name for part in self.parts}) > 1
        words = []
        for part, count in zip(self.parts, self.counts, strict=True):
            stock = f" {part.shape.stock.name}" if kinds else ""
            role = "" if part.role is Role.MIXED else f" {part.role.value}"
            words.append(f"{count} {part.shape.text}{stock}{role}")
        more = [f"S_P {self.chunks[0]}, S_D {self.chunks[1]}"] if self.chunks is not None else []
        if self.groups > 1:
            more.append(f"in {self.groups} groups")
        return ", ".join([" + ".join(words), *more])

    def network(self) -> Network:
        """Instances fill the nodes of their stock one after the other. Each has the NICs of its devices; in a node all
        share what one device has to the others, which is less than there is."""
        links: list[Link] = []
        node: list[int] = []
        out: list[tuple[int, ...]] = []
        into: list[tuple[int, ...]] = []
        inside: list[tuple[int, ...]] = []
        taken: dict[str, int] = {}
        number: dict[tuple[str, int], int] = {}
        for part in self.parts:
            shape, stock = part.shape, part.shape.stock
            for _ in range(part.count):
                at = taken.get(stock.name, 0)
                taken[stock.name] = at + shape.devices
                key = stock.name, (at if self.groups == 1 else 0) // stock.node_devices
                if key not in number:
                    number[key] = len(number)
                    inside.append((len(links),))
                    links.append(Link(f"inside {key[0]} {key[1]}", stock.link_bytes_per_s))
                node.append(number[key])
                for ways in (out, into):
                    ways.append((len(links),))
                    links.append(Link(f"nic {len(node) - 1} {len(links)}", shape.devices * stock.nic_bytes_per_s))
        return Network(tuple(links), tuple(out), tuple(into), tuple(node), tuple(inside))


def shapes(stocks: Sequence[Stock], mix: Mix) -> list[Shape]:
    """The instances that the model fits on, and that hold the longest request."""
    found = []
    for stock in stocks:
        for tp in DEGREES:
            for pp in DEGREES:
                if tp > stock.node_devices or tp * pp > stock.devices:
                    continue
                pool = stock.source(Role.MIXED, tp, pp)
                if pool is not None and mix.longest <= min(pool.max_model_len, pool.kv_tokens):
                    found.append(Shape(stock, tp, pp, pool))
    return found


def colocated(policy: str, rates: Mapping[Shape, float], rate: float | None) -> Iterator[Cluster]:
    """Equal instances that do both, as many as the rate needs and one more, or all that the devices allow."""
    for shape, each in rates.items():
        most = shape.stock.devices // shape.devices
        for count in _counts(each, rate, most):
            yield Cluster(policy, (Part(Role.MIXED, shape, count),), count * each)


def splits(prefill: Mapping[Shape, float], decode: Mapping[Shape, float], rate: float | None) -> Iterator[Cluster]:
    """Prefill and decode instances, each by what one of it carries: with a rate, as many as match it and one more of
    each; without, every P:D split of the devices, those with the same stock for both filled up."""
    for source, p_rate in prefill.items():
        for target, d_rate in decode.items():
            for p in _counts(p_rate, rate, source.stock.devices // source.devices, every=True):
                left = target.stock.devices - (p * source.devices if source.stock is target.stock else 0)
                most = left // target.devices
                if rate is None and source.stock is not target.stock:
                    most = min(most, math.ceil(p * p_rate / d_rate))  # more decode nobody could feed
                for d in _counts(d_rate, rate, most):
                    parts = Part(Role.PREFILL, source, p), Part(Role.DECODE, target, d)
                    yield Cluster("disaggregated", parts, min(p * p_rate, d * d_rate))


def units(prefill: Mapping[Shape, float], decode: Mapping[Shape, float], rate: float | None) -> Iterator[Cluster]:
    """Pairs whose segments share nodes. `pp` of an instance is that of its segment, times the nodes it lies in."""
    for source, p_rate in prefill.items():
        for target, d_rate in decode.items():
            stock = source.stock
            if target.stock is not stock:
                continue
            if not any(_shares_nodes(source, target, nodes) for nodes in DEGREES):
                continue
            each = min(p_rate, d_rate)
            most = stock.devices // (source.devices + target.devices)
            for count in _counts(each, rate, most):
                parts = Part(Role.PREFILL, source, 1), Part(Role.DECODE, target, 1)
                yield Cluster("disaggregated", parts, count * each, groups=count)


def _shares_nodes(source: Shape, target: Shape, nodes: int) -> bool:
    """Whether both can be cut into `nodes` segments that fit into a node in pairs."""
    if source.pp % nodes or target.pp % nodes:
        return False
    return (source.devices + target.devices) // nodes <= source.stock.node_devices


def _counts(each: float, rate: float | None, most: int, *, every: bool = False) -> Sequence[int]:
    """How many instances: what a rate needs and one more, as far as there are devices; without a rate all, or every
    number of them."""
    if most < 1:
        return ()
    if rate is None:
        return range(1, most + 1) if every else (most,)
    least = math.ceil(rate / each)
    return sorted({min(least, most), min(least + 1, most)})
