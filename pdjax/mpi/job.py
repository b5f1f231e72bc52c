"""The start and the end of an `mpirun` job. Called by launchers and by users' scripts, in every rank.

Enters: a configuration. Leaves: on rank 0 what `main` returns; the other ranks serve, and leave with its status.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from pdjax.config import EngineConfig
from pdjax.mpi.facts import Facts
from pdjax.mpi.layout import Layout
from pdjax.mpi.post import Post

T = TypeVar("T")


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


def current() -> Job | None:
    """The job that this process is rank 0 of; None outside of `run`."""
    raise NotImplementedError


def run(main: Callable[[], T], config: EngineConfig) -> T:
    """See the package."""
    raise NotImplementedError
