"""Runs a launcher's `main(argv)`: flags are parsed, and a user's mistake ends as one line; called by every launcher.

Exit status: 0 after `main`; 2 for a bad flag or a ValueError and 130 for Ctrl-C, with one line on stderr; 1 and a
traceback otherwise.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging
from rich.console import Console

from pdjax import mpi
from pdjax.config import EngineConfig
from pdjax.mpi.facts import Facts

WIDE = 200  # characters of a line where there is no terminal: tables with notes are long
GRACE_S = 2.0  # mpirun ends the job when the first rank ends with a status that is not 0


def run(main: Callable[[list[str]], Any]) -> None:
    """Parses `sys.argv`, calls `main` with what is left of it, and exits the process."""
    # absl shows what every library logs from INFO on; --verbosity still can.
    logging.set_verbosity(logging.WARNING)
    app.run(lambda argv: _guarded(main, argv), flags_parser=_parse)


def on_ranks(main: Callable[[], None], config: EngineConfig) -> None:
    """Calls `main`: here, or if `mpirun` has started this process, on rank 0, while the other ranks serve and leave
    with its status.

    Raises:
        ValueError: `transfer` is not what such a process can do.
    """
    if config.transfer == "mpi" or (mpi.launched() and config.transfer == "jax_transfer"):
        mpi.run(main, config)
    elif mpi.launched():
        raise ValueError(f"transfer is {config.transfer!r}; allowed under mpirun: mpi, jax_transfer")
    else:
        main()


def ranks_for(config: EngineConfig) -> tuple[Facts, ...]:
    """What is known of the ranks that engines of this configuration use; empty if they are in this process."""
    head = mpi.current()
    return () if head is None or config.transfer == "device_put" else head.facts


def console(*, emoji: bool = True) -> Console:
    """Standard output, as wide as its terminal, or WIDE if it is none, or one without a size, as mpirun gives ranks."""
    sized = sys.stdout.isatty() and os.get_terminal_size(sys.stdout.fileno()).columns > 0
    return Console(width=None if sized else WIDE, emoji=emoji)


def control_latency(engine: Any) -> str | None:
    """A line on how long a word takes to the ranks of an engine and back; None if it has none."""
    head = mpi.current()
    if head is None or not engine.specs[0].ranks:
        return None
    times = ", ".join(f"rank {rank} {1e3 * seconds:.2f} ms" for rank, seconds in engine.cluster.latency().items())
    return f"control latency, there and back: {times}; KV by {engine.cluster.roads[engine.specs[0].ranks[0]]}"


def _parse(argv: Sequence[str]) -> list[str]:
    try:
        left = flags.FLAGS(argv)
    except flags.Error as error:
        _stop(error)
    for name, value in flags.FLAGS.flag_values_dict().items():
        if isinstance(value, float) and math.isnan(value):  # within all bounds, as absl compares
            _stop(f"flag --{name}=nan: allowed: a number")
    if left[1:]:
        _stop(f"argument {left[1]!r} is not a flag; flags look like --name=value")
    return left


def _guarded(main: Callable[[list[str]], Any], argv: list[str]) -> None:
    try:
        main(argv)
    except ValueError as error:
        _stop(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)  # as a shell reports a program that Ctrl-C ended


def _stop(error: object) -> NoReturn:
    if mpi.rank_here():  # all ranks of a job find the same mistake: rank 0 tells, and must come to that
        time.sleep(GRACE_S)
        sys.exit(2)
    print("error:", " ".join(str(error).split()), file=sys.stderr)
    sys.exit(2)
