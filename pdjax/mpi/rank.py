"""The life of a rank that is an instance, or a part of one. Enters: a job that has started. Leaves: the exit status that
rank 0 says at the end. Called by `pdjax.mpi.job`.

The main thread builds, warms up and closes, one engine after the other; all else happens in the threads of the post,
the lane and the transfers (`pdjax.mpi.part`).
"""

import functools
import logging
import queue
from typing import Any

from pdjax import compiles
from pdjax.build import instance_of, load
from pdjax.config import EngineConfig
from pdjax.home import use_cache
from pdjax.instance import Instance
from pdjax.latency import LatencyModel, fit
from pdjax.models.sharding import split
from pdjax.models.source import Source, resolve
from pdjax.mpi import ends, words
from pdjax.mpi.job import Job
from pdjax.mpi.line import Line
from pdjax.mpi.part import Part
from pdjax.transfer.inbox import Inbox
from pdjax.transfer.outbox import Outbox
from pdjax.transfer.parcel import Side

CLOSE_S = 5.0
_OURS = words.Build | words.Warm | words.EndEngine | words.Goodbye
_log = logging.getLogger("pdjax")


def serve(job: Job, config: EngineConfig) -> int:
    """Serves until rank 0 says goodbye; returns its status."""
    return _Rank(job, config).serve()


class _Rank:
    def __init__(self, job: Job, config: EngineConfig) -> None:
        self._source = resolve(config.model, max_len=config.max_model_len)
        self._todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._part: Part | None = None
        self._index = job.layout.instance_of(job.post.rank)
        self._line = Line(job.post, job.layout, job.offset_s, self._heard, self._lost)

    def serve(self) -> int:
        while True:
            match self._todo.get():
                case words.Build() as build:
                    self._line.tell(0, words.Built(self._build(build)))
                case words.Warm():
                    self._warm()
                case words.EndEngine():
                    self._close()
                    self._line.tell(0, words.Ended())
                case words.Goodbye(status):
                    self._close()
                    self._line.close(CLOSE_S)
                    return status

    def _heard(self, rank: int, word: Any) -> None:
        """In the post's thread."""
        match word:
            case words.Leave(why):
                _log.warning("rank %d leaves: %s", self._line.rank, why)
                ends.leave(0)  # which the others see as a loss, and mpirun as no failure of the job
            case words.Build() | words.Warm() | words.EndEngine() | words.Goodbye():
                self._todo.put(word)
            case _ if self._part is not None:
                self._part.heard(rank, word)
            case _:
                raise RuntimeError(f"rank {rank} says {word} before there is an engine")

    def _lost(self, rank: int, why: str) -> None:
        """In the post's thread. Of the loss of other instances rank 0 tells."""
        if rank == 0:
            _log.error("rank %d leaves: rank 0 %s", self._line.rank, why)
            ends.leave(1)
