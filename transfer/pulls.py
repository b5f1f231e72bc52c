"""Pulls parcels from the transfer servers of other ranks. Enters: parcels that say where their array is. Leaves: the
array on a device of this process, or what went wrong. Called by the inbox; the servers are the outbox's.

The library waits for ever for a peer that is dead or stopped (`pdjax.transfer.jax_transfer`). So one thread per source
rank pulls, another one has the patience: if it is over, the connection is poisoned and the pulling thread is left
behind, and the next parcel gets new ones.
"""

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from pdjax.transfer.jax_transfer import Source
from pdjax.transfer.parcel import Parcel

_log = logging.getLogger("pdjax")

Pulled = Callable[[jax.Array | None, Exception | None], None]  # exactly one of the two


@dataclasses.dataclass(slots=True, eq=False)
class _Hand:
    """A thread that pulls. `address`: of the server it is connected to."""

    todo: "queue.SimpleQueue[Parcel | None]" = dataclasses.field(default_factory=queue.SimpleQueue)
    got: "queue.SimpleQueue[jax.Array | Exception | None]" = dataclasses.field(default_factory=queue.SimpleQueue)
    address: str = ""
    connection: Any = None

    def work(self, server: Any, device: jax.Device) -> None:
        while (parcel := self.todo.get()) is not None:
            try:
                self.got.put(self._pull(server, device, parcel))
            except Exception as error:
                self.got.put(error)
            del parcel

    def _pull(self, server: Any, device: jax.Device, parcel: Parcel) -> jax.Array:
        offer = parcel.offer
        assert offer is not None
        if self.address != offer.address:
            self.connection, self.address = server.connect(offer.address), offer.address
        spec = jax.ShapeDtypeStruct(parcel.shape, np.dtype(parcel.unit.dtype), sharding=SingleDeviceSharding(device))
        pulled: jax.Array = jax.block_until_ready(self.connection.pull(offer.number, [spec])[0])
        return pulled

    def drop(self) -> None:
        """Ends the thread, now or when its pull ends, which poison should bring about."""
        self.todo.put(None)
        self.got.put(None)
        if hasattr(self.connection, "_poison_connection"):
            self.connection._poison_connection()


class Puller:
    """From one source rank. Thread-safe; nothing blocks.

    Args:
        device: that arrays are pulled to.
        host: address of this host.
        timeout_s: of one pull.
    """

    def __init__(self, device: jax.Device, host: str, timeout_s: float, name: str) -> None:
        self._device, self._host, self._timeout_s, self._name = device, host, timeout_s, name
        self._todo: queue.SimpleQueue[tuple[Parcel, Pulled] | None] = queue.SimpleQueue()
        self._hand: _Hand | None = None
        self._ended = False
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def pull(self, parcel: Parcel, done: Pulled) -> None:
        """`done` is called once, from a thread of the puller's, unless it has ended."""
        self._todo.put((parcel, done))

    def end(self) -> None:
        """Ends the threads."""
        self._ended = True
        self._todo.put(None)
        if (hand := self._hand) is not None:
            hand.drop()

    def _work(self) -> None:
        server: Any = None
        while (item := self._todo.get()) is not None and not self._ended:
            parcel, done = item
            try:
                server = server or Source(self._device, self._host).server
                done(self._pull(server, parcel), None)
            except Exception as error:
                done(None, error)
            del item

    def _pull(self, server: Any, parcel: Parcel) -> jax.Array | None:
        hand = self._hand
        if hand is None:
            hand = self._hand = _Hand()
            threading.Thread(target=hand.work, args=(server, self._device), name=self._name, daemon=True).start()
        hand.todo.put(parcel)
        try:
            got = hand.got.get(timeout=self._timeout_s)
        except queue.Empty:
            _log.warning("%s hangs in a parcel of transfer %d: left behind", self._name, parcel.unit.key)
            got = TimeoutError(f"a parcel was not pulled within {self._timeout_s:g} s")
        if isinstance(got, Exception) or got is None:
            self._hand = None
            hand.drop()
            raise got or ConnectionError("the puller has ended")
        return got
