"""How the processes of a job end. Enters: an exception that nobody caught, or an exit status. Leaves: the process, and
with it the job, or not. Called by `pdjax.mpi.job`, which installs it, and by the post's thread.

One rank that merely exits leaves the others waiting in their MPI calls. Before the job has started, on rank 0, and
where the job does not survive losses, all end together: MPI aborts. Else the others are to go on without this rank,
and must notice: they notice SIGKILL, but not an exit with status 1.
"""

import atexit
import logging
import os
import signal
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import NoReturn

_ABORT_S = 3.0  # for MPI to end the job; then this process kills itself
_EXIT_S = 5.0  # for the interpreter to end
_alone = threading.Event()


def install() -> None:
    """From now on an exception that nobody catches, in any thread, is a `crash`."""
    sys.excepthook = _of_main
    threading.excepthook = _of_thread


def uninstall() -> None:
    """The job is over: exceptions are this process's own matter again. It ends, though, when it wants to: what is left
    of a job that lost ranks does not keep it."""
    sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
    atexit.register(_end_soon)


def end_alone() -> None:
    """From now on a crash ends this rank only. For ranks of instances, once the job has started, under ULFM."""
    _alone.set()


def survivable() -> bool:
    """Whether mpirun lets the other ranks go on when one dies (`--with-ft ulfm`)."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable") == "1"  # noqa: SIM112  so mpirun spells it


def crash(error: BaseException) -> NoReturn:
    """Prints the traceback, then ends the process, and with it the job unless `end_alone` was called. From any thread;
    takes less than 5 s."""
    text = "".join(traceback.format_exception(error))
    try:
        print(text, end="", file=sys.stderr, flush=True)
    finally:
        if not _alone.is_set():
            _abort()
        os.kill(os.getpid(), signal.SIGKILL)
        while True:  # the signal is on its way
            signal.pause()


def leave(status: int) -> NoReturn:
    """Ends this process with a status at once, without a word to MPI: where ranks were lost, MPI_Finalize would wait
    for them for ever."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed, or nobody reads: there is nobody to tell
            continue
    os._exit(status)


def _abort() -> None:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        leave(1)
    # An abort goes through the launcher's daemons; it must not hang with them.
    threading.Thread(target=_kill_later, name="abort", daemon=True).start()
    mpi.COMM_WORLD.Abort(1)


def _end_soon() -> None:
    """At the end of the interpreter, whose status this is too late to change but for 0 and what an exception gave."""
    status = 0 if not hasattr(sys, "last_value") else 1
    watchdog = threading.Timer(_EXIT_S, leave, (status,))
    watchdog.daemon = True
    watchdog.start()


def _kill_later() -> None:
    time.sleep(_ABORT_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _of_main(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    crash(error.with_traceback(trace))


def _of_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        crash(args.exc_value.with_traceback(args.exc_traceback))
