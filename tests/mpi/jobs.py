"""Jobs for tests: what an `mpirun` of this machine says and how it ends. Imported as `tests.mpi.jobs`."""

import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdjax.experiments import mpirun

HERE = Path(sys.executable).with_name("mpirun").exists() or shutil.which("mpirun")
NEEDS_MPI = pytest.mark.skipif(
    not HERE or importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py and mpirun (pip install pdjax[mpi])"
)
LIMIT_S = 180


@dataclasses.dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: str
    seconds: float

    @property
    def said(self):
        """What pdjax said on stderr: one line, or a traceback."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


def run(ranks, *argv, **options):
    """A job of this Python; a job that takes longer than LIMIT_S fails the test."""
    return ended(mpirun.command(ranks, argv, **options))


def mixed(*apps):
    """A job of several (ranks, arguments), which mpirun calls MPMD."""
    line = mpirun.command(apps[0][0], apps[0][1])
    for ranks, argv in apps[1:]:
        line += [":", "-n", str(ranks), sys.executable, *argv]
    return ended(line)


def ended(line):
    began = time.monotonic()
    done = mpirun.run(line, LIMIT_S)
    return Ended(done.returncode, done.stdout, done.stderr, time.monotonic() - began)


def alone(*argv):
    """The same without mpirun."""
    began = time.monotonic()
    without = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PRTE_"))}
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=LIMIT_S, env=without)
    return Ended(done.returncode, done.stdout, done.stderr, time.monotonic() - began)
