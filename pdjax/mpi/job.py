"""The start and the end of an `mpirun` job. Called by launchers and by users' scripts, in every rank.

Enters: a configuration. Leaves: on rank 0 what `main` returns; the other ranks serve, and leave with its status.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn, TypeVar

from pdjax.config import EngineConfig
from pdjax.mpi import ends

if TYPE_CHECKING:
    from pdjax.mpi.head import Head
    from pdjax.mpi.start import Job

GRACE_S = 2.0  # for rank 0 to tell what is wrong, before mpirun ends the job
CLOSE_S = 5.0
START_S = 60.0  # for every rank to come to a point of the start
_WATCHDOG = """
import os, select, signal, sys
if not select.select([sys.stdin], [], [], float(sys.argv[1]))[0]:
    print(sys.argv[2], file=sys.stderr, flush=True)
    for pid in sys.argv[3:]:
        os.kill(int(pid), signal.SIGTERM)
"""
T = TypeVar("T")
_head: "Head | None" = None
_ran = False


def current() -> "Head | None":
    """The job that this process is rank 0 of; None outside of `run`."""
    return _head


def launched() -> bool:
    """Whether mpirun, or srun with an MPI, has started this process with others."""
    sizes = (os.environ.get(name, "1") for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"))
    return any(size.isdigit() and int(size) > 1 for size in sizes)


def rank_here() -> int:
    """The rank that mpirun or srun gave this process, before MPI has started; 0 if none did."""
    names = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), 0) if launched() else 0


def run(main: Callable[[], T], config: EngineConfig) -> T:
    """Runs a job: to be called once, by every rank, with the same configuration.

    Args:
        main: called on rank 0; engines that it makes have their instances on the other ranks.
        config: of the first engine. Later ones must have the same layout.

    Raises:
        ValueError: on rank 0, if the ranks cannot work together; the others leave with status 2.
    """
    global _ran
    from pdjax.mpi.start import job_layout, start

    if _ran:
        raise RuntimeError(
            "pdjax.mpi.run has been called before; make several engines, one after the other, in one main"
        )
    if not launched():
        layout = job_layout(config)
        raise ValueError(
            f"transfer is {config.transfer!r}; allowed: in a job of {layout.size} ranks, "
            f"started by mpirun -n {layout.size} python ..."
        )
    try:
        import mpi4py

        mpi4py.rc.finalize = False  # where ranks are lost it would wait for them
        with _deadline():
            from mpi4py import MPI  # which waits for all ranks
    except ImportError as error:
        raise ValueError(
            f"transfer is {config.transfer!r}; allowed with mpi4py (pip install pdjax[mpi]): {error}"
        ) from None
    _ran = True
    ends.install()
    world = MPI.COMM_WORLD
    try:
        job = start(world, config)
    except ValueError as error:  # every rank has the same: rank 0 tells
        if world.rank == 0:
            raise
        time.sleep(GRACE_S)
        _finalize(2)
        raise SystemExit(2) from error
    return _control(job, main) if world.rank == 0 else _follow(job, config)


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    """Ends this process, with a line, if MPI takes longer than START_S to start. From outside of it: mpi4py keeps the
    interpreter's lock until all ranks have come, so no thread of this process could."""
    line = (
        f"error: rank {rank_here()} has waited for the other ranks for {START_S:g} s; those that do not say this did "
        "not come"
    )
    # With ULFM mpirun goes on without this process: it is told to end as well.
    ended = [os.getppid(), os.getpid()] if ends.survivable() else [os.getpid()]
    command = [sys.executable, "-I", "-S", "-c", _WATCHDOG, str(START_S), line, *map(str, ended)]
    watchdog = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield
    finally:
        watchdog.communicate()


def _control(job: "Job", main: Callable[[], T]) -> T:
    """Rank 0."""
    global _head
    from pdjax.mpi.head import Head

    # What the others end with. What this process makes of an exception is its caller's to decide, and mpirun reports
    # the status that is not 0.
    status = 0
    _head = Head(job.post, job.layout, job.facts, job.survives)
    signal.signal(signal.SIGTERM, _ended_from_outside)
    try:
        result = main()
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        raise
    except (KeyboardInterrupt, ValueError):
        raise
    except BaseException as error:
        ends.crash(error)
    finally:
        head, _head = _head, None
        if head.goodbye(status, CLOSE_S):
            _finalize(status)
        ends.uninstall()
    return result


def _follow(job: "Job", config: EngineConfig) -> NoReturn:
    """A rank of an instance."""
    from pdjax.mpi import rank

    status, clean = rank.serve(job, config)
    if not clean:
        ends.leave(status)
    if len(job.layout.ranks[job.layout.instance_of(job.post.rank)]) > 1:
        import jax

        jax.distributed.shutdown()
    _finalize(status)
    sys.exit(status)


def _ended_from_outside(number: int, frame: object) -> None:
    print(
        "error: the job was ended from outside: a rank died (mpirun --with-ft ulfm lets the others go on), or somebody "
        "stopped mpirun",
        file=sys.stderr,
        flush=True,
    )
    ends.leave(143)


def _finalize(status: int) -> None:
    """Ends MPI, with the other ranks; a rank that does not come must not keep this one."""
    from mpi4py import MPI

    watchdog = threading.Timer(CLOSE_S, ends.leave, (status,))
    watchdog.daemon = True
    watchdog.start()
    MPI.Finalize()
    watchdog.cancel()
