"""A simulated cluster in a few words: pools of equal instances enter, a `Fleet` leaves. Called by the planner, by
launchers, and by users who simulate.

    fleet = fleet.build([Pool(Role.PREFILL, 2, latency, ...), Pool(Role.DECODE, 1, latency, ...)])
    report = simulation.simulate(fleet, requests, Disaggregated())
"""

import dataclasses
import math
from collections.abc import Sequence

from pdjax.latency import Latency
from pdjax.messages import InstanceSpec, Role
from pdjax.network import Network


@dataclasses.dataclass(frozen=True, slots=True)
class Pool:
    """Equal instances.

    Attributes:
        role: their first role.
        count: how many.
        latency: what their passes and transfers take.
        kv_tokens: tokens whose KV one of them holds.
        kv_bytes_per_token: all layers, K and V.
        devices: of one instance: `pp` stages of equal size.
        max_rows: decode rows of one instance.
        max_chunk, max_chunks: prompt tokens and prompts of one pass.
        max_model_len: most tokens of a request.
        page_size: tokens of a page.
        max_in_flight: iterations that are issued before the first is done; 0: one more than there are stages, as our
            instances take. 1: an engine that decides on each step when it has seen the one before.
        layer_groups: in how many parts the KV of a pass is streamed while it is computed.
    """

    role: Role
    count: int
    latency: Latency
    kv_tokens: int
    kv_bytes_per_token: int
    devices: int = 1
    pp: int = 1
    max_rows: int = 256
    max_chunk: int = 8192
    max_chunks: int = 128
    max_model_len: int = 1 << 17
    page_size: int = 16
    max_in_flight: int = 0
    layer_groups: int = 1

    def __post_init__(self) -> None:
        for name in (
            "count",
            "kv_tokens",
            "devices",
            "pp",
            "max_rows",
            "max_chunk",
            "max_chunks",
            "page_size",
            "layer_groups",
        ):
            value = getattr(self, name)
            if not value >= 1:
                raise ValueError(f"{name} is {value!r}; allowed: a whole number >= 1")
        if self.devices % self.pp:
            raise ValueError(f"devices is {self.devices}; allowed with pp {self.pp}: a multiple of it")


@dataclasses.dataclass(frozen=True, slots=True)
class Fleet:
    """Instances, what their passes take, and how they are connected.

    Attributes:
        specs, latency: one of each per instance.
        layer_groups: by instance, in how many parts the KV of a pass is streamed while it is computed.
        network: None: every transfer takes what the latency model of its source says, however many there are.
        believed: what the controller and its policy take passes for, by instance; empty: for what they are.
    """

    specs: tuple[InstanceSpec, ...]
    latency: tuple[Latency, ...]
    layer_groups: tuple[int, ...]
    network: Network | None = None
    believed: tuple[Latency, ...] = ()

    @property
    def devices(self) -> int:
        return sum(spec.devices for spec in self.specs)


def build(pools: Sequence[Pool], network: Network | None = None) -> Fleet:
    """The instances of all pools, in order.

    Raises:
        ValueError: the network is one of another number of instances.
    """
    specs: list[InstanceSpec] = []
    latency: list[Latency] = []
    groups: list[int] = []
    for pool in pools:
        specs += [_spec(pool, len(specs) + number) for number in range(pool.count)]
        latency += [pool.latency] * pool.count
        groups += [pool.layer_groups] * pool.count
    if network is not None and len(network.node) != len(specs):
        raise ValueError(f"network has {len(network.node)} instances; allowed: as many as the pools, {len(specs)}")
    return Fleet(tuple(specs), tuple(latency), tuple(groups), network)


def _spec(pool: Pool, index: int) -> InstanceSpec:
    return InstanceSpec(
        index=index,
        role=pool.role,
        devices=pool.devices,
        max_rows=pool.max_rows,
        max_chunk=pool.max_chunk,
        max_chunks=pool.max_chunks,
        page_size=pool.page_size,
        num_pages=1 + math.ceil(pool.kv_tokens / pool.page_size),
        max_model_len=min(pool.max_model_len, pool.kv_tokens),
        kv_bytes_per_token=pool.kv_bytes_per_token,
        pp=pool.pp,
        max_in_flight=pool.max_in_flight or pool.pp + 1,
    )
