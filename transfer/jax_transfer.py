"""Moves KV with `jax.experimental.transfer`: through host memory and sockets, as between hosts.

Enters: units on the source's devices. Leaves: the same units on the destination's devices. Called by the threads of
`pdjax.transfer.pairs`. The source side registers single-device arrays under a number with its server and says so in
an `Offer`, which is plain data; the destination compares it with what it expects, then pulls. Here both sides live in
one process and the offer goes from one to the other by a call.

The library trusts its caller: a pull with another axis or another dtype of the same size returns wrong values without
an error, an unknown number or a dead peer is waited for without end, and its own `timeout` has no effect (seen with
jax 0.10.2). Hence the offer, whole single-device arrays instead of sharded ones, and the deadline of `Pairs`. A server
keeps what is registered until it is pulled; dropping the server frees it, so a pair that failed gets a new one.
"""

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from pdjax.transfer.base import Unit, UnitHeader
from pdjax.transfer.pairs import TIMEOUT_S, Pairs
from pdjax.transfer.shards import Split, cut, join, pieces_by_shard, place, shards_of, split_of

HOST = "127.0.0.1"
PROBE_S = 20.0  # for the first pull, which tells whether the library works on these devices


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """What a source has registered for one unit.

    Attributes:
        address: of the server that has it.
        number: the library's name for it there; it can be pulled once.
        header: of the unit.
        pieces: shape and dtype of each array, in the order of the head plan.
    """

    address: str
    number: int
    header: UnitHeader
    pieces: tuple[tuple[tuple[int, ...], str], ...]


class JaxTransfer(Pairs):
    """The `Transport` by transfer servers, one for each pair of instances; arguments: see `pdjax.transfer.pairs`.

    Raises:
        ValueError: this jax, or its backend, cannot do it.
    """

    def __init__(
        self,
        shardings: Sequence[Sequence[NamedSharding]],
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.perf_counter,
    ):
        super().__init__(shardings, lambda src, dst: _Loop(_device(shardings[src])), timeout_s, clock)
        _probe(_device(shardings[0]), PROBE_S)


class Source:
    """A server and what it offers. Used by one thread."""

    def __init__(self, device: jax.Device, host: str = HOST):
        from jax.experimental import transfer

        self.server: Any = transfer.start_transfer_server(device.client, f"{host}:0", [f"{host}:0"])
        self._numbers = itertools.count(1)

    def register(self, arrays: list[Any]) -> int:
        """Keeps single-device arrays until they are pulled, once, by the number that is returned."""
        number = next(self._numbers)
        self.server.await_pull(number, arrays)
        return number

    def offer(self, unit: Unit, src: NamedSharding, dst: Split) -> Offer:
        """Registers the pieces of a unit, which is computed and lies on `src`."""
        sources = shards_of(unit.kv, src)
        pieces = []
        for piece in itertools.chain(*pieces_by_shard(unit.header.shape[3], split_of(src), dst)):
            whole = sources[piece.src_shard]
            part = whole if piece.heads == whole.shape[3] else jax.device_put(cut(whole, piece), whole.device)
            pieces.append(part)
        number = self.register(pieces)
        told = tuple((piece.shape, str(piece.dtype)) for piece in pieces)
        return Offer(self.server.address(), number, unit.header, told)


def take(connection: Any, offer: Offer, header: UnitHeader, src: Split, dst: NamedSharding) -> jax.Array:
    """Pulls what was offered and puts it together on `dst`.

    `connection`: to the offer's address. `header`, `src`: what this side knows of the unit and of the other's split.

    Raises:
        ValueError: the offer is of something else.
    """
    plan = pieces_by_shard(header.shape[3], src, split_of(dst))
    expected = tuple(
        ((*header.shape[:3], piece.heads, header.shape[4]), header.dtype) for pieces in plan for piece in pieces
    )
    if offer.header != header or offer.pieces != expected:
        raise ValueError(f"the offer is {offer.header} in pieces {offer.pieces}; allowed: {header} in {expected}")
    devices = [device for device, pieces in zip(dst.mesh.devices.flat, plan, strict=True) for _ in pieces]
    pulled = iter(
        connection.pull(
            offer.number,
            [
                jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=SingleDeviceSharding(device))
                for (shape, dtype), device in zip(offer.pieces, devices, strict=True)
            ],
        )
    )
    shards = []
    for pieces in plan:
        parts = [next(pulled) for _ in pieces]
        shards.append(parts[0] if len(parts) == 1 else join([np.asarray(part) for part in parts]))
    return place(header.shape, shards, dst)


class _Loop:
    """A `Link` whose two ends are in this process."""

    def __init__(self, device: jax.Device):
        self._source: Source | None = Source(device)
        self._connection = self._source.server.connect(self._source.server.address())

    def move(self, unit: Unit, src: NamedSharding, dst: NamedSharding) -> jax.Array:
        source, connection = self._source, self._connection
        if source is None:
            raise ConnectionError("the link is closed")
        return take(connection, source.offer(unit, src, split_of(dst)), unit.header, split_of(src), dst)

    def close(self) -> None:
        connection, self._connection, self._source = self._connection, None, None
        if hasattr(connection, "_poison_connection"):  # else a pull that hangs keeps its thread
            connection._poison_connection()


def _device(layers: Sequence[NamedSharding]) -> jax.Device:
    device: jax.Device = layers[0].mesh.devices.flat[0]
    return device


def _probe(device: jax.Device, limit_s: float) -> None:
    """Moves a small array there and back again; ValueError if it does not come or is not the same."""
    sent = np.arange(64, dtype=np.float32)
    got: list[Any] = []

    def pull() -> None:
        try:
            source = Source(device)
            connection = source.server.connect(source.server.address())
            source.server.await_pull(1, [jax.device_put(sent, device)])
            spec = jax.ShapeDtypeStruct(sent.shape, sent.dtype, sharding=SingleDeviceSharding(device))
            got.append(np.asarray(connection.pull(1, [spec])[0]))
        except Exception as error:
            got.append(error)

    thread = threading.Thread(target=pull, name="transfer-probe", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not got:
        why: object = f"a pull did not come back within {limit_s:g} s"
    elif isinstance(got[0], Exception):
        why = f"{type(got[0]).__name__}: {got[0]}"
    elif not np.array_equal(got[0], sent):
        why = "a pull brought other values"
    else:
        return
    raise ValueError(
        f"transfer is 'jax_transfer', which jax {jax.__version__} cannot do on {device.platform}: {why}; "
        "allowed: device_put, or a jax (0.10.2 or newer) with a working jax.experimental.transfer"
    )
