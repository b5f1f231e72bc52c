"""What KV moves at, from, to and within a device, and between two ranks that share it. Enters: a device, or the name of
an `mpirun` job. Leaves: bytes per second by road. Called by `pdjax.experiments.gpu_check`.

Units are those of Llama-3.1-8B: 256 tokens of a group of 3 layers.
"""

import os
import queue
import statistics
import time
from collections.abc import MutableMapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from pdjax.config import EngineConfig
from pdjax.experiments import wire
from pdjax.models.presets import PRESETS
from pdjax.models.sharding import make_mesh
from pdjax.transfer.base import Unit, UnitHeader
from pdjax.transfer.jax_transfer import JaxTransfer
from pdjax.transfer.shards import SPEC

MODEL = PRESETS["llama3.1-8b"]
SHAPE = (wire.LAYERS, 2, wire.TOKENS, MODEL.num_kv_heads, MODEL.head_dim)
LARGE = 256 << 20  # bytes
# How KV crosses, and whether through host memory even where MPI takes device pointers.
JOBS = {"mpi_host": ("mpi", True), "mpi_pointers": ("mpi", False), "mpi_servers": ("jax_transfer", False)}
_UNITS, _REPEATS, _ARRIVAL_S = 32, 5, 20.0

Entry = dict[str, Any]


def copies(device: jax.Device, home: jax.Device) -> Entry:
    """Rates of `jax.device_put` to and from host memory and within the device, of a unit and of many bytes at once.
    `home`: of the CPU."""
    unit = int(np.prod(SHAPE)) * 2
    rates = {}
    for name, nbytes in (("unit", unit), ("large", LARGE)):
        here, there = (jax.device_put(jnp.ones(nbytes, jnp.uint8), side) for side in (home, device))
        ways = {"to_device": (here, device), "to_host": (there, home), "within_device": (there, device)}
        rates[name] = {"bytes": nbytes} | {way: nbytes / _seconds(*pair) for way, pair in ways.items()}
    return {"bytes_per_s": rates}


def servers(device: jax.Device) -> Entry:
    """The rate of JAX's transfer servers in one process, from the device back to it.

    Raises:
        ValueError: this jax cannot do it on this device.
        RuntimeError: a transfer failed, or nothing came for long.
    """
    sharding = NamedSharding(make_mesh(MODEL, [device]), SPEC)
    kv = jax.block_until_ready(jax.device_put(jnp.ones(SHAPE, jnp.bfloat16), sharding))
    transport = JaxTransfer([[sharding] * wire.LAYERS] * 2)
    try:
        for key in (1, 2):  # the first makes connections
            seconds = _transferred(transport, key, kv)
    finally:
        transport.close()
    return {"bytes": _UNITS * kv.nbytes, "moving_s": seconds, "bytes_per_s": _UNITS * kv.nbytes / seconds}


def crossing(name: str) -> Entry | None:
    """In every rank of a job of three: one of JOBS. Rank 0 gets {road, pointers, transfers}, the others None.

    `pointers`: whether MPI was given any; if it was not, `road` says why.

    Raises:
        ValueError: the ranks cannot work together.
        RuntimeError: a transfer failed, or a rank does not answer.
    """
    transfer, staged = JOBS[name]
    config = EngineConfig(model="tiny", scheduler="disaggregated", transfer=transfer)
    heads = MODEL.num_kv_heads, MODEL.head_dim
    done = wire.run(config, lambda line: None, staged=staged, heads=heads)
    if done is None:
        return None
    ways = [
        {"from": src, "to": dst, "bytes": nbytes, "seconds": seconds, "bytes_per_s": nbytes / seconds}
        for src, dst, nbytes, seconds in done.speeds
    ]
    return {"road": done.road, "pointers": done.pointers, "transfers": ways}


def share_device(environ: MutableMapping[str, str]) -> None:
    """Lets all ranks of a job use the first device, each with the memory that it needs: ranks that are not told which
    GPUs they see are given one each, and a process takes most of the memory at its first use of JAX."""
    environ["CUDA_VISIBLE_DEVICES"] = environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def environment() -> Entry:
    """What of the surroundings decides how bytes move, as far as it is set."""
    names = "XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", "UCX_TLS", "UCX_MEMTYPE_CACHE"
    return {name: os.environ[name] for name in names if name in os.environ}


def _seconds(array: jax.Array, target: jax.Device) -> float:
    """The median of some copies."""
    times = []
    for _ in range(1 + _REPEATS):  # the first makes room
        began = time.perf_counter()
        jax.block_until_ready(jax.device_put(array, target, may_alias=False))
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _transferred(transport: JaxTransfer, key: int, kv: jax.Array) -> float:
    """Seconds from the first unit's departure to the last one's arrival."""
    came: queue.SimpleQueue[Unit | str] = queue.SimpleQueue()
    transport.start(key, 0, 1, came.put, came.put)
    for number in range(_UNITS):
        header = UnitHeader(key, 0, wire.LAYERS, number * wire.TOKENS, wire.TOKENS, kv.shape, str(kv.dtype))
        transport.send(Unit(header, kv))
    moved = []
    for _ in range(_UNITS):
        try:
            unit = came.get(timeout=_ARRIVAL_S)
        except queue.Empty:
            raise RuntimeError(f"no unit came for {_ARRIVAL_S:g} s") from None
        if isinstance(unit, str):
            raise RuntimeError(f"the transfer failed: {unit}")
        moved.append(unit.moved_s)
    transport.finish(key)
    return max(stop for _, stop in moved) - min(start for start, _ in moved)
