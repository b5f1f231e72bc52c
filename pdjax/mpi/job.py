"""The start and the end of an `mpirun` job. Called by launchers and by users' scripts, in every rank.

Enters: a configuration. Leaves: on rank 0 what `main` returns; the other ranks serve, and leave with its status.

    1 MPI starts; every rank knows how many there are, and which of them are which instance
    2 cores and devices are chosen, before JAX looks for any
    3 facts are compared: versions, model, configuration; then clocks
    4 ranks of one instance join as a cluster of JAX; devices are counted
    5 the post's thread takes MPI over; no collective and no blocking call from now on
"""

import contextlib
import dataclasses
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pdjax.codec import decode, encode
from pdjax.config import EngineConfig
from pdjax.mpi import ends, facts
from pdjax.mpi.facts import Facts
from pdjax.mpi.layout import Layout, check_size, layout_of
from pdjax.mpi.post import Post

if TYPE_CHECKING:
    from pdjax.mpi.head import Head

START_S = 60.0  # for every rank to come to a point of the start
CLOSE_S = 5.0
_ECHOES = 20
T = TypeVar("T")
_head: "Head | None" = None
_log = logging.getLogger("pdjax")


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What the start-up made, in every rank.

    Attributes:
        post: speaks to the other ranks.
        layout: which rank is which instance.
        facts: of every rank, by number.
        offset_s: what to add to `time.perf_counter()` to get rank 0's clock.
        survives: whether the job goes on when a rank dies (`mpirun --with-ft ulfm`).
    """

    post: Post
    layout: Layout
    facts: tuple[Facts, ...]
    offset_s: float
    survives: bool


def current() -> "Head | None":
    """The job that this process is rank 0 of; None outside of `run`."""
    return _head


def launched() -> bool:
    """Whether mpirun, or srun with an MPI, has started this process with others."""
    sizes = (os.environ.get(name, "1") for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"))
    return any(size.isdigit() and int(size) > 1 for size in sizes)


def run(main: Callable[[], T], config: EngineConfig) -> T:
    """Runs a job: to be called once, by every rank, with the same configuration.

    Args:
        main: called on rank 0; engines that it makes have their instances on the other ranks.
        config: of the first engine. Later ones must have the same layout.

    Raises:
        ValueError: on rank 0, if the ranks cannot work together; the others leave with status 2.
    """
    from pdjax.build import scheduler_of
    from pdjax.schedulers.base import traits_of

    layout = layout_of(config, traits_of(scheduler_of(config)))
    if not launched():
        raise ValueError(
            f"transfer is {config.transfer!r}; allowed: in a job of {layout.size} ranks, "
            f"started by mpirun -n {layout.size} python ..."
        )
    try:
        import mpi4py

        mpi4py.rc.finalize = False  # where ranks are lost it would wait for them
        from mpi4py import MPI
    except ImportError as error:
        raise ValueError(
            f"transfer is {config.transfer!r}; allowed with mpi4py (pip install pdjax[mpi]): {error}"
        ) from None
    ends.install()
    world = MPI.COMM_WORLD
    with _quietly(world.rank):
        job = _start(world, layout, config)
    return _control(job, main) if world.rank == 0 else _follow(job, config)


@contextlib.contextmanager
def _quietly(rank: int) -> Any:
    """All ranks find the same mistakes: rank 0 tells."""
    try:
        yield
    except ValueError:
        if rank == 0:
            _finalize(2)
            raise
        _finalize(2)
        sys.exit(2)


def _control(job: Job, main: Callable[[], T]) -> T:
    """Rank 0."""
    global _head
    from pdjax.mpi.head import Head

    _head, status = Head(job.post, job.layout, job.facts, job.survives), 1
    signal.signal(signal.SIGTERM, _ended_from_outside)
    try:
        result = main()
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        raise
    except KeyboardInterrupt:
        status = 130
        raise
    except ValueError:
        status = 2
        raise
    except BaseException as error:
        ends.crash(error)
    finally:
        head, _head = _head, None
        if head.goodbye(status, CLOSE_S):
            _finalize(status)
    return result


def _follow(job: Job, config: EngineConfig) -> NoReturn:
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


def _start(world: Any, layout: Layout, config: EngineConfig) -> Job:
    """Everything that all ranks do together."""
    from mpi4py import MPI

    from pdjax.mpi import devices, pin
    from pdjax.mpi.mpi_post import MpiPost

    rank = world.rank
    check_size(layout, config, world.size)
    survives = os.environ.get("OMPI_MCA_mpi_ft_enable") == "1"  # noqa: SIM112  so mpirun --with-ft ulfm spells it
    hosts = _exchange(world, MPI.Get_processor_name())
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    if config.pin:
        pin.pin(pin.cores_of(rank, here, layout, sorted(os.sched_getaffinity(0))))
    index = layout.instance_of(rank) if rank else None
    ranks = () if index is None else layout.ranks[index]
    _log.info("MPI is %s", MPI.Get_library_version().split(",")[0])

    own = facts.collect(rank, config)
    try:
        each = _devices_per_rank(config, layout, rank)
        devices.choose(rank, [other for other in here if other], each)
    except ValueError as error:
        own = dataclasses.replace(own, error=own.error or str(error))
    _agree(_compared(world, own))
    own = dataclasses.replace(own, offset_s=_clock_offset(world))
    group = world.Split(MPI.UNDEFINED if index is None else index, rank)
    if len(ranks) > 1:
        devices.join_ranks(group, len({hosts[other] for other in ranks}) == 1)
    if rank:
        platform, count = devices.has()
        own = dataclasses.replace(own, platform=platform, devices=count)
    everybody = _compared(world, own)
    _agree(everybody)
    control, data = world.Dup(), world.Dup()
    for communicator in (world, control, data):
        communicator.Set_errhandler(MPI.ERRORS_RETURN)
    post = MpiPost(control, data, survives, float(config.peer_timeout_s))
    return Job(post, layout, everybody, own.offset_s, survives)


def _devices_per_rank(config: EngineConfig, layout: Layout, rank: int) -> int:
    """How many devices a rank's part of its instance needs, or `devices_per_rank`."""
    if rank == 0:
        return 0
    prefills = layout.instance_of(rank) < config.prefill_instances
    side = (
        "prefill" if prefills and len(layout.ranks) == config.prefill_instances + config.decode_instances else "decode"
    )
    pp, tp, ranks = (getattr(config, f"{side}_{name}") for name in ("pp", "tp", "ranks"))
    need: int = pp * tp // ranks
    if 0 < config.devices_per_rank < need:
        raise ValueError(
            f"devices_per_rank is {config.devices_per_rank}; allowed: at least {need}, which rank {rank} needs"
        )
    return config.devices_per_rank or need


def _exchange(world: Any, text: str) -> list[str]:
    """Every rank's text, on every rank. A rank that does not come within START_S ends the job, with a line that names
    it."""
    from mpi4py import MPI

    came = [False] * world.size

    def late() -> None:
        missing = [rank for rank, there in enumerate(came) if not there]
        if world.rank == 0:
            print(f"error: ranks {missing} did not come within {START_S:g} s", file=sys.stderr, flush=True)
        world.Abort(1)

    watchdog = threading.Timer(START_S, late)
    watchdog.daemon = True
    watchdog.start()
    mine = text.encode()
    if world.rank:
        world.Send([mine, MPI.BYTE], 0)
    texts, status = [mine] * world.size, MPI.Status()
    came[0] = True
    for _ in range(world.size - 1 if world.rank == 0 else 0):
        world.Probe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        buffer = bytearray(status.Get_count(MPI.BYTE))
        world.Recv([buffer, MPI.BYTE], status.Get_source())
        texts[status.Get_source()] = bytes(buffer)
        came[status.Get_source()] = True
    whole = json.dumps([each.decode() for each in texts]).encode() if world.rank == 0 else b""
    length = bytearray(len(whole).to_bytes(8, "little"))
    world.Bcast([length, MPI.BYTE])
    buffer = bytearray(whole) or bytearray(int.from_bytes(length, "little"))
    world.Bcast([buffer, MPI.BYTE])
    watchdog.cancel()
    everybody: list[str] = json.loads(buffer)
    return everybody


def _compared(world: Any, own: Facts) -> tuple[Facts, ...]:
    return tuple(decode(Facts, json.loads(text)) for text in _exchange(world, json.dumps(encode(own))))


def _agree(everybody: tuple[Facts, ...]) -> None:
    if (why := facts.disagreement(everybody)) is not None:
        raise ValueError(why)


def _clock_offset(world: Any) -> float:
    """What to add to this rank's clock to get rank 0's: from the fastest of some echoes. Rank after rank."""
    import numpy as np
    from mpi4py import MPI

    box = np.zeros(1)
    if world.rank:
        for _ in range(_ECHOES):
            world.Recv([box, MPI.DOUBLE], 0)
            box[0] = time.perf_counter()
            world.Send([box, MPI.DOUBLE], 0)
        world.Recv([box, MPI.DOUBLE], 0)
        return float(box[0])
    for rank in range(1, world.size):
        echoes = []
        for _ in range(_ECHOES):
            began = time.perf_counter()
            world.Send([box, MPI.DOUBLE], rank)
            world.Recv([box, MPI.DOUBLE], rank)
            echoes.append((began, time.perf_counter(), float(box[0])))
        took, offset = fastest(echoes)
        _log.info("rank %d answers in %.0f us; its clock is %+.6f s off", rank, 1e6 * took, -offset)
        box[0] = offset
        world.Send([box, MPI.DOUBLE], rank)
    return 0.0


def fastest(echoes: list[tuple[float, float, float]]) -> tuple[float, float]:
    """(round trip, offset) of the fastest of (sent, came back, the other's clock between): the other clock is read
    about in the middle, and the shorter the trip, the less "about" is."""
    began, ended, other = min(echoes, key=lambda echo: echo[1] - echo[0])
    return ended - began, (began + ended) / 2 - other
