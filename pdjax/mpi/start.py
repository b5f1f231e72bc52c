"""How the ranks of a job come together, before the first engine. Called by `pdjax.mpi.job`, in every rank; the only
place with MPI calls that block.

    1 facts are compared: versions, model, configuration (`pdjax.mpi.facts`)
    2 which ranks are which instance; cores and devices are chosen, before JAX looks for any
    3 clocks are compared
    4 ranks of one instance join as a cluster of JAX; devices are counted
    5 the post gets communicators of its own; no collective and no blocking call from now on

What one rank finds wrong all ranks raise, as one ValueError. A rank that does not come ends the job.
"""

import contextlib
import dataclasses
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pdjax.codec import decode, encode
from pdjax.config import EngineConfig
from pdjax.mpi import devices, ends, facts, pin
from pdjax.mpi.facts import Facts
from pdjax.mpi.job import START_S
from pdjax.mpi.layout import Layout, check_size, layout_of
from pdjax.mpi.post import Post
from pdjax.schedulers.base import Traits

_ECHOES = 20
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


def start(world: Any, config: EngineConfig) -> Job:
    """Everything that all ranks do together: see above. `world`: the communicator of all.

    Raises:
        ValueError: on every rank, if one of them finds a mistake.
    """
    from mpi4py import MPI

    from pdjax.mpi.mpi_post import MpiPost

    rank = world.rank
    _log.info("MPI is %s", MPI.Get_library_version().split(",")[0])
    own = facts.collect(rank, config)
    everybody = _compared(world, own)
    hosts = [one.host for one in everybody]
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    try:
        layout = job_layout(config)
        check_size(layout, config, world.size)
        if config.pin:
            pin.pin(pin.cores_of(rank, here, layout, sorted(os.sched_getaffinity(0))))
        takes = devices.needed(config, _traits(config).colocated)
        devices.choose(rank, here, takes)
    except ValueError as error:
        own = dataclasses.replace(own, error=str(error))
    _compared(world, own)
    with _deadline(world, lambda: "clocks were not compared"):
        own = dataclasses.replace(own, offset_s=_clock_offset(world))
    index = layout.instance_of(rank) if rank else None
    ranks = () if index is None else layout.ranks[index]
    group = world.Split(MPI.UNDEFINED if index is None else index, rank)
    if len(ranks) > 1:
        with _deadline(world, lambda: f"the ranks {ranks} of instance {index} did not find each other"):
            devices.join_ranks(group, len({hosts[other] for other in ranks}) == 1)
    if rank:
        from pdjax.build import hardware_here  # which imports JAX: not before `devices.choose`

        platform, count = devices.platform(), min(takes[rank], devices.count())
        own = dataclasses.replace(own, platform=platform, hardware=hardware_here(), devices=count)
    everybody = _compared(world, own)
    control, data = world.Dup(), world.Dup()
    for communicator in (world, control, data):
        communicator.Set_errhandler(MPI.ERRORS_RETURN)
    post = MpiPost(control, data, ends.survivable(), float(config.peer_timeout_s))
    return Job(post, layout, everybody, own.offset_s, ends.survivable())


def job_layout(config: EngineConfig) -> Layout:
    """Which ranks a configuration needs. ValueError if there are none that it could run on."""
    return layout_of(config, _traits(config))


def _traits(config: EngineConfig) -> Traits:
    from pdjax.build import scheduler_of
    from pdjax.schedulers.base import traits_of

    return traits_of(scheduler_of(config))


def _exchange(world: Any, text: str) -> list[str]:
    """Every rank's text, on every rank. A rank that does not come within START_S ends the job, with a line that names
    it."""
    came = [False] * world.size

    def late() -> str:
        missing = [rank for rank, there in enumerate(came) if not there]
        return f"ranks {missing} did not come" if world.rank == 0 else "rank 0 did not come"

    with _deadline(world, late):
        return _all_texts(world, text.encode(), came)


@contextlib.contextmanager
def _deadline(world: Any, why: Callable[[], str]) -> Iterator[None]:
    """Ends the job, with a line that says why, if what is within takes longer than START_S."""

    def late() -> None:
        print(f"error: {why()} within {START_S:g} s", file=sys.stderr, flush=True)
        world.Abort(1)

    watchdog = threading.Timer(START_S, late)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()


def _all_texts(world: Any, mine: bytes, came: list[bool]) -> list[str]:
    """See `_exchange`; marks who has come."""
    from mpi4py import MPI

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
    everybody: list[str] = json.loads(buffer)
    return everybody


def _compared(world: Any, own: Facts) -> tuple[Facts, ...]:
    """Everybody's facts; ValueError if they do not fit together."""
    everybody = tuple(decode(Facts, json.loads(text)) for text in _exchange(world, json.dumps(encode(own))))
    if (why := facts.disagreement(everybody)) is not None:
        raise ValueError(why)
    return everybody


def _clock_offset(world: Any) -> float:
    """What to add to this rank's clock to get rank 0's: from the fastest of some echoes. Rank after rank."""
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
