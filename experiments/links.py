"""Links between two ranks, and what plain MPI moves over them. Enters: a name, and the arguments of a job. Leaves: the
command line that runs the job over that link; in a job, the seconds of a plain send. Called by
`pdjax.experiments.transfer`.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pdjax.experiments import mpirun

SCRIPT = Path(__file__).with_name("two_hosts.sh")
RATES = {"tcp_10g": "10gbit", "tcp_1g": "1gbit"}
NAMES = ("shared_memory", *RATES, "balanced")
WORDS = {
    "shared_memory": "shared memory",
    "tcp_10g": "TCP, at most 10 Gb/s",
    "tcp_1g": "TCP, 1 Gb/s",
    "balanced": "TCP, KV as long as prefill",
}
PREFILL, DECODE = 1, 2  # ranks
_CHECK_S = 30.0


def command(name: str, argv: Sequence[str], rate: str | None = None) -> list[str]:
    """The command line of a job of three ranks, the last of which is at the other end of the link.

    Args:
        name: one of NAMES.
        argv: arguments of this Python.
        rate: of the balanced link, as `tc` writes it.
    """
    if name == "shared_memory":
        return mpirun.command(3, argv, options=("--mca", "pml", "ob1", "--mca", "btl", "sm,self"))
    rate = RATES.get(name, rate)
    return [str(SCRIPT), f"--rate={rate}", "--", sys.executable, *argv]


def missing(name: str) -> str | None:
    """Why this machine has no such link; None if it has."""
    if name == "shared_memory":
        return None
    try:
        done = subprocess.run(
            [str(SCRIPT), "--check"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_CHECK_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stderr.strip().removeprefix("error: ") if done.returncode else None


def balanced_rate(nbytes: int, seconds: float) -> str:
    """The rate at which so many bytes take so long, as `tc` writes it."""
    return f"{max(1, round(8e-3 * nbytes / seconds))}kbit"


def raw(world: Any, nbytes: int, message: int, repeats: int) -> list[float]:
    """Seconds that plain Isend and Irecv take for `nbytes` bytes from the prefill rank to the decode rank, in messages
    of at most `message` bytes that are all asked for at once. A first send, which makes the connection, does not count.
    Called by every rank; the result is rank 0's, the others get an empty list.
    """
    from mpi4py import MPI

    rank, go = world.Get_rank(), np.zeros(1, np.uint8)
    took = np.zeros(repeats)
    if rank in (PREFILL, DECODE):
        room = np.ones(nbytes, np.uint8)  # touched
        parts = [[room[at : at + message], MPI.BYTE] for at in range(0, nbytes, message)]
        for number in range(-1, repeats):
            if rank == PREFILL:
                world.Recv([go, MPI.BYTE], DECODE)
                MPI.Request.Waitall([world.Isend(part, DECODE) for part in parts])
            else:
                requests = [world.Irecv(part, PREFILL) for part in parts]
                began = time.perf_counter()
                world.Send([go, MPI.BYTE], PREFILL)
                MPI.Request.Waitall(requests)
                if number >= 0:
                    took[number] = time.perf_counter() - began
    if rank == DECODE:
        world.Send([took, MPI.DOUBLE], 0)
    if rank:
        return []
    request = world.Irecv([took, MPI.DOUBLE], DECODE)
    while not request.Test():
        time.sleep(2e-3)  # a wait would keep a core from those that are measured
    return [float(seconds) for seconds in took]
