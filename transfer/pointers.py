"""Device memory handed to MPI by its address, where the MPI library can take it. Enters: single-device arrays. Leaves:
what a carrier ships from, or fetches into, in place of host memory. Called by the outbox, the inbox, and at start-up.

Neither JAX nor MPI checks anything here. An array is computed before its address is given away (MPI knows no streams),
it is kept until the carrier is done with it, and only an array that nobody else has seen is written to.
"""

import ctypes
import dataclasses
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from pdjax.transfer.parcel import Carrier

TEST_BYTES = 1 << 20
TEST_TAG = 0  # no parcel has it: outboxes count from higher up


@dataclasses.dataclass(frozen=True, slots=True)
class Pointer:
    """The memory of a computed single-device array. `array` is there to be kept alive."""

    address: int
    nbytes: int
    array: jax.Array


def pointer(array: jax.Array) -> Pointer:
    """Waits until the array is computed."""
    array = jax.block_until_ready(array)
    return Pointer(array.unsafe_buffer_pointer(), array.nbytes, array)


def fresh(shape: tuple[int, ...], dtype: str, device: jax.Device) -> jax.Array:
    """An array of its own, to be received into."""
    return jax.device_put(np.zeros(shape, dtype), device, may_alias=False)


def cuda_aware(library: Any = None, environ: Mapping[str, str] | None = None) -> tuple[bool, str]:
    """Whether the MPI library says that it takes device pointers, and why. `library`: the loaded one; None: this
    process's own, which has to have imported `mpi4py.MPI`."""
    environ = os.environ if environ is None else environ
    if environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1":
        return True, "MPICH_GPU_SUPPORT_ENABLED is 1"
    for name in ("MV2_USE_CUDA", "MVP_USE_CUDA"):
        if environ.get(name) == "1":
            return True, f"{name} is 1"
    try:
        query = (_library() if library is None else library).MPIX_Query_cuda_support
    except AttributeError:
        return False, "the MPI library does not know MPIX_Query_cuda_support"
    said = int(query())
    return said == 1, f"MPIX_Query_cuda_support says {said}"


def _library() -> Any:
    """Python loads libmpi where only mpi4py's own module sees it: what is asked of that is looked up in both."""
    return ctypes.CDLL(sys.modules["mpi4py.MPI"].__file__)


def self_test(carrier: Carrier, before: int, after: int, device: jax.Device, timeout_s: float) -> str | None:
    """Sends a device array to rank `after` while one from rank `before` comes in; every rank of a ring calls it at the
    same time, and waits. Returns what went wrong, or None: what came is what was sent, byte for byte."""
    sent = jax.device_put(_pattern(carrier.rank), device)
    got = fresh((TEST_BYTES,), "uint8", device)
    errors: list[Exception | None] = []
    both = threading.Semaphore(0)

    def done(error: Exception | None) -> None:
        errors.append(error)
        both.release()

    try:
        room, gift = pointer(got), pointer(sent)
    except RuntimeError as refused:  # not every backend tells addresses
        return f"{type(refused).__name__}: {refused}"
    carrier.fetch(before, TEST_TAG, room, done)
    carrier.ship(after, TEST_TAG, gift, done)
    if not all(both.acquire(timeout=timeout_s) for _ in range(2)):
        return f"no answer of ranks {before} and {after} within {timeout_s:g} s"
    for error in errors:
        if error is not None:
            return f"{type(error).__name__}: {error}"
    return None if np.array_equal(np.asarray(got), _pattern(before)) else f"other bytes came from rank {before}"


def _pattern(rank: int) -> np.ndarray:
    """Bytes that tell one rank from another."""
    return np.random.default_rng(rank).integers(0, 256, TEST_BYTES, np.uint8)
