"""Which devices of its host a rank uses. Called by `pdjax.mpi.job`, before JAX looks for devices.

GPUs: rank by rank of a host takes the next ones, by CUDA_VISIBLE_DEVICES. If that is set, as by Slurm, it takes them of
those that are named there; if they are fewer than the host's ranks need, each rank has been given its own already. CPU:
JAX is asked for as many as are needed, and as many threads more. TPU: the runtime gives each process those of its host.
Rank 0 keeps off all of them.
"""

import contextlib
import glob
import os
import pkgutil
import re
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from pdjax.config import EngineConfig
from pdjax.messages import Role


def needed(config: EngineConfig, colocated: bool) -> tuple[int, ...]:
    """How many devices each rank of a job takes: those of its part of an instance, or `devices_per_rank`. Rank 0: none.

    Raises:
        ValueError: `devices_per_rank` is less than a rank needs.
    """
    takes = [0]
    for role in config.roles(colocated):
        side = "prefill" if role is Role.PREFILL else "decode"
        need = getattr(config, f"{side}_pp") * getattr(config, f"{side}_tp") // config.ranks_of(role)
        if 0 < config.devices_per_rank < need:
            raise ValueError(
                f"devices_per_rank is {config.devices_per_rank}; allowed: 0, or at least {need}, which a rank of a "
                f"{role.value} instance needs"
            )
        takes += [config.devices_per_rank or need] * config.ranks_of(role)
    return tuple(takes)


def choose(rank: int, here: Sequence[int], takes: Sequence[int]) -> None:
    """Settles what JAX will see.

    Args:
        here: the ranks on this host.
        takes: devices of every rank of the job.

    Raises:
        ValueError: the host has too few GPUs for its ranks.
    """
    import jax

    if rank == 0:
        jax.config.update("jax_platforms", "cpu")
        return
    first = os.environ.get("JAX_PLATFORMS", "").split(",")[0]  # whose devices are used
    if first in ("", "cuda", "gpu") and (gpus := _gpus()):
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = given.split(",") if given is not None else [str(number) for number in range(gpus)]
        if given is None or len(names) >= sum(takes[other] for other in here):
            mine = share(rank, here, takes, len(names))
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[number] for number in mine)
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # See `pdjax.build.devices_for` for why twice as many.
        jax.config.update("jax_num_cpu_devices", 2 * takes[rank])


def share(rank: int, here: Sequence[int], takes: Sequence[int], gpus: int) -> range:
    """A rank's part of the GPUs of its host, which are dealt out in the order of the ranks. Arguments as of `choose`.

    Raises:
        ValueError: there are too few.
    """
    need = sum(takes[other] for other in here)
    if need > gpus:
        raise ValueError(f"the host has {gpus} GPUs; allowed: at least {need}, which its ranks need")
    first = sum(takes[other] for other in here if other < rank)
    return range(first, first + takes[rank])


def join_ranks(communicator: Any, one_host: bool) -> None:
    """Makes the ranks of a communicator one cluster of JAX: they see each other's devices. Before any device is used.

    Args:
        communicator: of the ranks of one instance, more than one.
        one_host: all are on this host.
    """
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    with contextlib.ExitStack() as held:
        address = None
        if communicator.rank == 0:
            host = "127.0.0.1" if one_host else host_address()
            address = f"{host}:{held.enter_context(free_port(host))}"
        address = communicator.bcast(address)
        # Under Slurm and mpirun JAX would show each process the one GPU that has the number of its local rank.
        jax.distributed.initialize(
            address,
            communicator.size,
            communicator.rank,
            cluster_detection_method="deactivate",
            initialization_timeout=60,
        )


@contextlib.contextmanager
def free_port(host: str) -> Iterator[int]:
    """A port that nobody has, and nobody gets meanwhile. Who asks for SO_REUSEPORT, as JAX's coordinator does, can
    listen on it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, 0))
        port: int = holder.getsockname()[1]
        yield port


def platform() -> str:
    """Of this process's devices; starts JAX's backend, together with the other ranks of the instance."""
    import jax

    name: str = jax.local_devices()[0].platform
    return name


def count() -> int:
    """Devices of this process."""
    import jax

    return len(jax.local_devices())


def _gpus() -> int:
    """NVIDIA GPUs of this host that JAX can use: none where it is installed without its plugin for them."""
    if not any(re.fullmatch(r"jax_cuda\d+_plugin", module.name) for module in pkgutil.iter_modules()):
        return 0
    return len(glob.glob("/dev/nvidia[0-9]*"))


def host_address() -> str:
    """Of this host, as others reach it: that of the interface that leads away from it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; an address that is nobody's (RFC 5737)
            away: str = probe.getsockname()[0]
            return away
        except OSError:  # no way out of here: what the other ranks use is a network of their own
            return socket.gethostbyname(socket.gethostname())
