"""Moves KV between meshes of one process with `jax.device_put`, shard by shard along the head plan.

Enters: units on the source's devices, maybe still being computed. Leaves: the same units on the destination's
devices. Called by the local cluster, whose lanes must never wait for a device: the waiting is done by threads here.

Why shard by shard: `jax.device_put` of a whole array onto a mesh of another size is fast for some pairs of meshes,
but for others (1 device to 4, say) it compiles a program for every new shape, and it keeps its caller until the array
is computed. Moving single-device arrays, or numpy views of them, does neither. Seen with jax 0.10.2 and 0.12.0.
"""

import dataclasses
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pdjax.transfer.base import TransferState, Unit, advance
from pdjax.transfer.plan import Piece, head_plan

SPEC = PartitionSpec(None, None, None, "kv")
CLOSE_S = 5.0
_log = logging.getLogger("pdjax")


@dataclasses.dataclass(frozen=True, slots=True)
class _Split:
    kv: int
    rep: int


@dataclasses.dataclass(slots=True)
class _Transfer:
    """One transfer. `lock` is held while a callback of it runs, so that `abort` can wait for a running one."""

    key: int
    src: Sequence[NamedSharding]  # by layer
    dst: Sequence[NamedSharding]
    lane: "queue.SimpleQueue[_Item]"
    deliver: Callable[[Unit], None]
    failed: Callable[[str], None]
    state: TransferState = TransferState.STARTED
    lock: Any = dataclasses.field(default_factory=threading.RLock)  # reentrant: a callback may end its own transfer
    filled: dict[int, int] = dataclasses.field(default_factory=dict)  # layer -> tokens taken so far


_Item = tuple[_Transfer, Unit] | None  # None ends the thread


class DevicePut:
    """The `Transport` of one process; instance i has the wire arrays of layer j sharded as `shardings[i][j]`.

    There is one thread per (source, destination) pair, made when first used. Units of one source become ready in the
    order in which they are sent, so a thread that waits for the first of them delays no other that could move; with
    one thread per destination, a slow prefill would hold up what another instance has ready.

    The queues have no bound of their own: `send` may not block, and a dropped unit is a failed transfer. What waits
    is bounded by the destination's pool, since pages are reserved before a transfer starts.

    Args:
        shardings: per instance and layer, of [layers, 2, T, K, H]: `SPEC` over a ("kv", "rep") mesh. Layers of one
            unit have the same.
        clock: gives the seconds of `Unit.moved_s`.

    Raises:
        ValueError: a sharding is not of that kind.
    """

    def __init__(self, shardings: Sequence[Sequence[NamedSharding]], clock: Callable[[], float] = time.perf_counter):
        for index, layers in enumerate(shardings):
            for sharding in layers:
                if sharding.mesh.axis_names != ("kv", "rep") or sharding.spec != SPEC:
                    raise ValueError(f'shardings[{index}] has {sharding}; allowed: {SPEC} over a mesh ("kv", "rep")')
        self._shardings = tuple(tuple(layers) for layers in shardings)
        self._clock = clock
        self._lock = threading.Lock()  # of the three below
        self._transfers: dict[int, _Transfer] = {}  # STARTED ones only
        self._lanes: dict[tuple[int, int], tuple[queue.SimpleQueue[_Item], threading.Thread]] = {}
        self._closed = False

    def start(
        self,
        key: int,
        src: int,
        dst: int,
        deliver: Callable[[Unit], None],
        failed: Callable[[str], None],
    ) -> None:
        """Opens a transfer.

        Both callbacks should only enqueue: while one runs, `abort` of that transfer waits.

        Raises:
            ValueError: `key` is open already, or there is no such instance.
            RuntimeError: the transport is closed.
        """
        for name, index in (("src", src), ("dst", dst)):
            if not 0 <= index < len(self._shardings):
                raise ValueError(f"{name} is {index}; allowed: an instance, 0..{len(self._shardings) - 1}")
        with self._lock:
            if self._closed:
                raise RuntimeError("the transport is closed")
            if key in self._transfers:
                raise ValueError(f"key is {key}; allowed: a key that no open transfer has")
            if (src, dst) not in self._lanes:
                new: queue.SimpleQueue[_Item] = queue.SimpleQueue()
                thread = threading.Thread(target=self._work, args=(new,), name=f"transfer-{src}-{dst}", daemon=True)
                thread.start()
                self._lanes[src, dst] = (new, thread)
            lane, _ = self._lanes[src, dst]
            self._transfers[key] = _Transfer(key, self._shardings[src], self._shardings[dst], lane, deliver, failed)

    def send(self, unit: Unit) -> None:
        """Offers a unit to its transfer's thread; drops it if that transfer has ended."""
        with self._lock:
            transfer = self._transfers.get(unit.header.key)
            if transfer is not None:
                transfer.lane.put((transfer, unit))

    def finish(self, key: int) -> None:
        """STARTED -> COMMITTED; RuntimeError if the transfer has ended or never was."""
        if self._end(key, TransferState.COMMITTED) is None:
            raise RuntimeError(f"transfer {key} is not open; it cannot be committed")

    def abort(self, key: int) -> bool:
        """STARTED -> ABORTED; False if it had ended. Waits for a callback that is running, never for a device."""
        transfer = self._end(key, TransferState.ABORTED)
        if transfer is None:
            return False
        with transfer.lock:
            return True

    def close(self) -> None:
        """Aborts what is open, then joins the threads, 5 s at most. Idempotent."""
        with self._lock:
            self._closed = True
            keys = list(self._transfers)
            lanes, self._lanes = list(self._lanes.values()), {}
        for key in keys:
            self._end(key, TransferState.ABORTED)
        for lane, _ in lanes:
            lane.put(None)
        deadline = time.monotonic() + CLOSE_S
        for _, thread in lanes:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _log.warning("%s still waits for a device or a callback and was left behind", thread.name)

    def _end(self, key: int, state: TransferState) -> _Transfer | None:
        """Closes an open transfer. Of several who try, one gets it."""
        with self._lock:
            transfer = self._transfers.pop(key, None)
            if transfer is not None:
                transfer.state = advance(transfer.state, state)
            return transfer

    def _work(self, lane: "queue.SimpleQueue[_Item]") -> None:
        while (item := lane.get()) is not None:
            self._move(*item)
            del item  # or the last unit would stay in device memory until the next comes

    def _move(self, transfer: _Transfer, unit: Unit) -> None:
        try:
            if transfer.state is not TransferState.STARTED:
                return
            _check(transfer, unit)
            jax.block_until_ready(unit.kv)
            begun = self._clock()
            layer = unit.header.layer
            kv = jax.block_until_ready(move(unit.kv, transfer.src[layer], transfer.dst[layer]))
            moved = Unit(unit.header, kv, (begun, self._clock()))
            with transfer.lock:
                if transfer.state is TransferState.STARTED:
                    transfer.deliver(moved)
        except Exception as error:
            self._fail(transfer, f"{type(error).__name__}: {error}")

    def _fail(self, transfer: _Transfer, why: str) -> None:
        with transfer.lock:
            if self._end(transfer.key, TransferState.FAILED) is None:
                _log.debug("transfer %d had ended when a unit of it failed: %s", transfer.key, why)
                return
            try:
                transfer.failed(why)
            except Exception:  # the thread serves other transfers too
                _log.exception("the failure of transfer %d could not be told: %s", transfer.key, why)


def move(kv: jax.Array, src: NamedSharding, dst: NamedSharding) -> jax.Array:
    """`kv` [layers, 2, T, K, H], sharded as `src`, onto `dst`, both `SPEC` over ("kv", "rep"). Compiles nothing.

    A shard that both sides cut alike goes from device to device. Others are cut or joined in numpy: on CPU that is a
    view of the source and one copy; elsewhere it goes through the host.
    """
    plan = _plan(kv.shape[3], _split(src), _split(dst))
    shards = {shard.device: shard.data for shard in kv.addressable_shards}
    sources = [shards[device] for device in src.mesh.devices.flat]
    heads = kv.shape[3] // dst.mesh.shape["kv"]
    cut: dict[int, np.ndarray] = {}  # first head -> host array: replicas are joined once
    parts: list[Any] = []
    for pieces in plan:
        source = sources[pieces[0].src_shard]
        if len(pieces) == 1 and source.shape[3] == heads:
            parts.append(source)
            continue
        if pieces[0].start not in cut:
            views = [_view(sources[piece.src_shard], piece) for piece in pieces]
            cut[pieces[0].start] = views[0] if len(views) == 1 else _join(views)
        parts.append(cut[pieces[0].start])
    placed = jax.device_put(parts, list(dst.mesh.devices.flat))
    return jax.make_array_from_single_device_arrays(kv.shape, dst, placed)


def _check(transfer: _Transfer, unit: Unit) -> None:
    """Compares a header with its array and with what came before it; ValueError says what is wrong."""
    header, kv = unit.header, unit.kv
    if kv.shape != header.shape or str(kv.dtype) != header.dtype:
        raise ValueError(f"the header says {header.dtype}{header.shape}, the array is {kv.dtype}{kv.shape}")
    if len(kv.shape) != 5 or kv.shape[:2] != (header.layers, 2) or not 0 < header.tokens <= kv.shape[2]:
        raise ValueError(
            f"shape is {kv.shape}; allowed: ({header.layers} layers, 2, at least {header.tokens} tokens, K, H)"
        )
    source = transfer.src[header.layer]
    if not kv.sharding.is_equivalent_to(source, kv.ndim):
        raise ValueError(f"the array is sharded as {kv.sharding}; allowed: that of its source, {source}")
    for layer in range(header.layer, header.layer + header.layers):
        # Each layer's tokens come in order from 0: one rule against gaps, overlaps and repeats.
        expected = transfer.filled.get(layer, 0)
        if header.start != expected:
            raise ValueError(f"start is {header.start} in layer {layer}; allowed: {expected}, where the last one ended")
        transfer.filled[layer] = header.start + header.tokens


def _split(sharding: NamedSharding) -> _Split:
    return _Split(sharding.mesh.shape["kv"], sharding.mesh.shape["rep"])


@functools.lru_cache
def _plan(kv_heads: int, src: _Split, dst: _Split) -> tuple[tuple[Piece, ...], ...]:
    """The head plan, one group of pieces per destination shard."""
    pieces = head_plan(kv_heads, src, dst)
    return tuple(tuple(p for p in pieces if p.dst_shard == shard) for shard in range(dst.kv * dst.rep))


def _view(source: jax.Array, piece: Piece) -> np.ndarray:
    return np.asarray(source)[:, :, :, piece.src_offset : piece.src_offset + piece.heads]


def _join(views: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenates along the heads, in memory that a CPU device takes over without a copy (64-byte aligned)."""
    shape = (*views[0].shape[:3], sum(view.shape[3] for view in views), views[0].shape[4])
    dtype = views[0].dtype
    nbytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    joined = raw[offset : offset + nbytes].view(dtype).reshape(shape)
    return np.concatenate(views, axis=3, out=joined)
