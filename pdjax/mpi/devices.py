"""Which devices of its host a rank uses. Called by `pdjax.mpi.job`, before JAX looks for devices.

GPUs: rank by rank of a host takes the next ones, by CUDA_VISIBLE_DEVICES, unless that is set. CPU: JAX is asked for as
many as are needed, and as many threads more. TPU: the runtime gives each process those of its host. Rank 0 keeps off
all of them.
"""

import glob
import os
import socket
from typing import Any


def choose(rank: int, here: list[int], each: int) -> None:
    """Settles what JAX will see.

    Args:
        here: the ranks of instances on this host.
        each: devices of a rank.

    Raises:
        ValueError: the host has too few GPUs for its ranks.
    """
    import jax

    if rank == 0:
        jax.config.update("jax_platforms", "cpu")
        return
    gpus = len(glob.glob("/dev/nvidia[0-9]*"))
    if gpus and "CUDA_VISIBLE_DEVICES" not in os.environ and os.environ.get("JAX_PLATFORMS", "") in ("", "cuda", "gpu"):
        first = here.index(rank) * each
        if first + each > gpus:
            raise ValueError(f"a host has {gpus} GPUs; {len(here)} ranks there need {each} each")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in range(first, first + each))
    # See `pdjax.build.devices_for` for why twice as many.
    jax.config.update("jax_num_cpu_devices", 2 * each)


def join_ranks(communicator: Any, one_host: bool) -> None:
    """Makes the ranks of a communicator one cluster of JAX: they see each other's devices. Before any device is used.

    Args:
        communicator: of the ranks of one instance, more than one.
        one_host: all are on this host.
    """
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = None
    if communicator.rank == 0:
        host = "127.0.0.1" if one_host else _address()
        with socket.socket() as free:
            free.bind((host, 0))
            address = f"{host}:{free.getsockname()[1]}"
    address = communicator.bcast(address)
    jax.distributed.initialize(address, communicator.size, communicator.rank, initialization_timeout=60)


def platform() -> str:
    """Of this process's devices; starts JAX's backend, together with the other ranks of the instance."""
    import jax

    name: str = jax.local_devices()[0].platform
    return name


def count() -> int:
    """Devices of this process."""
    import jax

    return len(jax.local_devices())


def _address() -> str:
    """Of this host, as others reach it: that of the interface that leads away from it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; an address that is nobody's (RFC 5737)
            away: str = probe.getsockname()[0]
            return away
        except OSError:  # no way out of here: what the other ranks use is a network of their own
            return socket.gethostbyname(socket.gethostname())
