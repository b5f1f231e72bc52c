"""The life of a rank that is an instance, or a part of one. Enters: a job that has started. Leaves: the exit status
that rank 0 says at the end. Called by `pdjax.mpi.job`.

The main thread builds, warms up and closes, one engine after the other; all else happens in the threads of the post,
the lane and the transfers (`pdjax.mpi.part`).
"""

import logging
import queue
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pdjax import compiles
from pdjax.build import instance_of, load
from pdjax.config import EngineConfig
from pdjax.home import use_cache
from pdjax.instance import Instance
from pdjax.latency import Probe
from pdjax.messages import InstanceSpec
from pdjax.models.buckets import wire_buckets
from pdjax.models.config import ModelConfig
from pdjax.models.sharding import meshes_over_ranks, split
from pdjax.models.source import resolve
from pdjax.mpi import ends, words
from pdjax.mpi.devices import host_address
from pdjax.mpi.line import Line
from pdjax.mpi.part import Part
from pdjax.mpi.start import Job
from pdjax.transfer.inbox import Inbox
from pdjax.transfer.outbox import Outbox
from pdjax.transfer.parcel import Credit, Parcel, Side
from pdjax.transfer.pointers import cuda_aware, self_test

CLOSE_S = 5.0
TEST_S = 10.0  # for a device array to cross at the start
_PROGRESS_S = 0.1  # between two reports of a warm-up
_log = logging.getLogger("pdjax")


def serve(job: Job, config: EngineConfig) -> tuple[int, bool]:
    """Serves until rank 0 says goodbye; returns its status, and whether MPI can be finalized."""
    return _Rank(job, config).serve()


class _Rank:
    def __init__(self, job: Job, config: EngineConfig) -> None:
        self._source = resolve(config.model, max_len=config.max_model_len)
        self._todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._instance: Instance | None = None
        self._part: Part | None = None
        self._survives = job.survives
        self._index = job.layout.instance_of(job.post.rank)
        self._one_host = len({facts.host for facts in job.facts}) == 1
        self._line = Line(job.post, job.layout, job.offset_s, self._heard, self._lost)

    def serve(self) -> tuple[int, bool]:
        while True:
            match self._todo.get():
                case words.Build() as build:
                    self._line.epoch = build.engine
                    self._line.tell(0, self._build(build))
                case words.Warm(probes):
                    self._warm(probes)
                case words.EndEngine():
                    self._close()
                    self._line.tell(0, words.Ended())
                case words.Goodbye(status):
                    self._close()
                    return status, self._line.close(CLOSE_S)

    def _build(self, build: words.Build) -> words.Built:
        """Makes this rank's part, or says why it cannot."""
        model, spec = self._source.config, build.specs[self._index]
        use_cache(build.compilation_cache)
        pointers, road = self._road(build)  # all ranks are here now; their weights take unequal times
        try:
            meshes = meshes_over_ranks(model, _devices(spec), spec.pp)
            weights = load(self._source, meshes, build.dtype)
            self._instance = instance = instance_of(spec, build.specs, model, weights, meshes, build.stream_layers)
        except ValueError as error:
            return words.Built(str(error))
        sides, K = [side_of(model, other) for other in build.specs], model.num_kv_heads
        longest = max(wire_buckets(max(other.max_chunk for other in build.specs)))
        head_bytes = instance.unit_bytes(longest) // K
        host = None  # of transfer servers
        if build.transfer == "jax_transfer":
            host = "127.0.0.1" if self._one_host else host_address()
        line, index, timeout_s, first_tag = self._line, self._index, build.transfer_timeout_s, build.engine << 24
        shardings, dtype = instance.kv_shardings, str(instance.kv_dtype)
        try:
            outbox = Outbox(line, sides, index, K, head_bytes, timeout_s, first_tag, pointers, host)
            inbox = Inbox(
                line, sides, index, shardings, K, model.head_dim, dtype, head_bytes, pointers, host, timeout_s
            )
        except ValueError as error:
            return words.Built(str(error))
        self._part = Part(self._line, instance, outbox, inbox, model.num_layers, ends.crash)
        return words.Built(road=road)

    def _road(self, build: words.Build) -> tuple[bool, str]:
        """Whether device memory goes to MPI as it is, and how KV crosses, in words. What the library says of itself is
        proven: each rank sends its neighbour a device array."""
        if build.transfer == "jax_transfer":
            return False, "transfer servers of JAX"
        aware, why = cuda_aware()
        ranks = [rank for spec in build.specs for rank in spec.ranks]
        if aware:
            at = ranks.index(self._line.rank)
            before, after = ranks[at - 1], ranks[(at + 1) % len(ranks)]
            wrong = self_test(self._line, before, after, jax.local_devices()[0], TEST_S)
            aware, why = wrong is None, why if wrong is None else f"{why}, but {wrong}"
        road = f"MPI, {'device pointers' if aware else 'through host memory'} ({why})"
        _log.info("rank %d sends KV by %s", self._line.rank, road)
        return aware, road

    def _warm(self, probes: Sequence[Probe] | None) -> None:
        """In the lane's thread, like all that touches the instance."""
        instance, part = self._instance, self._part
        assert instance is not None and part is not None, "Build comes before Warm"
        told_s = 0.0

        def tell(done: int, total: int, what: str) -> None:
            nonlocal told_s
            if done == total or time.monotonic() - told_s > _PROGRESS_S:
                told_s = time.monotonic()
                self._line.tell(0, words.Progress(done, total, what))

        def work() -> None:
            _, before_s = compiles.compiled()
            samples = tuple(instance.warmup(tell, probes))
            label = f"{instance.spec.role.value} instance {instance.spec.index}"
            programs = tuple(f"{label}: {program.name}" for program in instance.programs())
            part.warmed()
            self._line.tell(0, words.Warmed(samples, programs, compiles.compiled()[1] - before_s))

        part.on_lane(lambda _: work())

    def _close(self) -> None:
        if self._part is not None:
            self._part.close()
        self._part = self._instance = None

    def _heard(self, rank: int, word: Any) -> None:
        """In the post's thread."""
        match word:
            case words.Leave(why):
                _log.warning("rank %d leaves: %s", self._line.rank, why)
                ends.leave(0)  # which the others see as a loss, and mpirun as no failure of the job
            case words.Build() | words.Warm() | words.EndEngine() | words.Goodbye():
                self._todo.put(word)
            case _ if (part := self._part) is not None:
                if self._survives:
                    ends.end_alone()  # the start is over
                part.heard(rank, word)
            case words.Gone(instance):
                self._line.give_up(instance)
            case Parcel():  # of an engine that has just been closed: its bytes are received, and nobody wants them
                self._line.fetch(rank, word.tag, np.empty(word.nbytes, np.uint8), lambda error: None)
            case Credit():
                pass  # likewise
            case _:
                raise RuntimeError(f"rank {rank} says {word} before there is an engine")

    def _lost(self, rank: int, why: str) -> None:
        """In the post's thread. Of the loss of other instances rank 0 tells."""
        if rank == 0:
            _log.error("rank %d leaves: %s", self._line.rank, why)
            ends.leave(1)


def side_of(model: ModelConfig, spec: InstanceSpec) -> Side:
    """How an instance cuts its kv heads."""
    parts = split(model, spec.devices // spec.pp)
    return Side(parts.kv, parts.rep, spec.ranks)


def _devices(spec: InstanceSpec) -> Sequence[Sequence[jax.Device]]:
    """Those of an instance, rank by rank: the first of every process, as many as it needs."""
    each = spec.devices // len(spec.ranks)
    if len(spec.ranks) == 1:
        return [jax.local_devices()[:each]]
    return [[d for d in jax.devices() if d.process_index == process][:each] for process in range(len(spec.ranks))]
