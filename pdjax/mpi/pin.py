"""CPU cores for ranks (`EngineConfig.pin`). Enters: which ranks share this host, and the layout. Leaves: this process
on its cores. Called by `pdjax.mpi.job` before JAX makes its threads.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from pdjax.mpi.layout import Layout


def cores_of(rank: int, here: Sequence[int], layout: Layout, cores: Sequence[int]) -> tuple[int, ...]:
    """The cores of a rank: those of the host in equal runs, one for each instance that has ranks here. Ranks of one
    instance share its cores; rank 0 shares those of the first instance, which prefills.

    Args:
        here: ranks on this host.
        cores: that they may use.

    Raises:
        ValueError: fewer cores than instances.
    """
    instances = sorted({layout.instance_of(other) for other in here if other})
    if not instances:
        return tuple(cores)
    if len(cores) < len(instances):
        raise ValueError(
            f"pin is True, with {len(instances)} instances on a host where a rank may use {len(cores)} cores; allowed: "
            "a core for each (mpirun --bind-to none lets ranks use all)"
        )
    which = instances.index(layout.instance_of(rank)) if rank else 0
    bounds = [len(cores) * i // len(instances) for i in range(len(instances) + 1)]
    return tuple(cores[bounds[which] : bounds[which + 1]])


def pin(cores: Sequence[int]) -> None:
    """Puts every thread of this process onto the cores; those that it starts later inherit them."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(task.name), cores)
