"""Rank 0's side of a job: it speaks to the ranks, and an engine's instances are built on them. Called by
`pdjax.mpi.job` at the start and the end, and by engines in between, one after the other.
"""

import contextlib
import dataclasses
import itertools
import os
import signal
import socket
from collections.abc import Callable, Sequence

from pdjax.build import Progress, Warmup, check_meshes, dtype_of, specs_of
from pdjax.cluster import Cluster
from pdjax.config import EngineConfig
from pdjax.latency import Probe
from pdjax.messages import InstanceSpec
from pdjax.models.source import Source
from pdjax.mpi import words
from pdjax.mpi.cluster import MpiCluster
from pdjax.mpi.facts import Facts
from pdjax.mpi.layout import Layout, layout_of
from pdjax.mpi.line import Line
from pdjax.mpi.post import Post
from pdjax.schedulers.base import Traits


class Head:
    """One for the process.

    Args:
        post, layout, facts: of the job.
        survives: whether the job goes on when a rank dies.
    """

    def __init__(self, post: Post, layout: Layout, facts: tuple[Facts, ...], survives: bool) -> None:
        self.layout, self.facts, self.survives = layout, facts, survives
        self.lost: dict[int, str] = {}  # rank -> why
        self._engines = itertools.count(1)
        self._cluster: MpiCluster | None = None
        self.line = Line(post, layout, 0.0, heard=_unexpected, lost=self._lost)

    def ranks(self, config: EngineConfig, source: Source, traits: Traits) -> "Ranks":
        """Where the instances of an engine will live.

        Raises:
            ValueError: they are not laid out as the job's are, or too large for the ranks.
            RuntimeError: a rank was lost, or another engine is open.
        """
        layout = layout_of(config, traits)
        if layout != self.layout:
            raise ValueError(
                f"the instances need the ranks {layout.ranks}; allowed in this job: {self.layout.ranks}; start another "
                "mpirun for another layout"
            )
        self.check_whole()
        return Ranks(self, config, source, traits)

    def open(self, build: words.Build, check: Callable[[], None]) -> MpiCluster:
        """Builds an engine's instances on the ranks."""
        if self._cluster is not None and not self._cluster.closed:
            raise RuntimeError("the ranks of this job serve another engine; close it first")
        self._cluster = MpiCluster(self.line, dataclasses.replace(build, engine=next(self._engines)))
        try:
            self._cluster.build(check)
            self.check_whole()  # also of what was lost before the cluster was there
        except BaseException:
            self._cluster.close()
            raise
        return self._cluster

    def check_whole(self) -> None:
        """RuntimeError if a rank was lost: no other engine can start."""
        if self.lost:
            raise RuntimeError(f"{'; '.join(self.lost.values())}: an engine needs all of its ranks to start")

    def goodbye(self, status: int, timeout_s: float) -> bool:
        """Tells every rank to end, and ends the post's thread. Ranks of this host that are silent are killed, or mpirun
        would wait for them. Whether all went well, so that MPI can be finalized."""
        silent = set(self.lost)
        if self._cluster is not None:
            self._cluster.close()
            silent.update(self._cluster.late)
        for rank in range(1, self.layout.size):
            self.line.last_word(rank, words.Goodbye(status))
        clean = self.line.close(timeout_s)
        for rank in silent:
            if self.facts[rank].host == socket.gethostname():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.facts[rank].pid, signal.SIGKILL)
        return clean and not silent

    def _lost(self, rank: int, why: str) -> None:
        """In the post's thread."""
        self.lost[rank] = why
        if self._cluster is not None and not self._cluster.closed:
            self._cluster.lose(rank, why)


class Ranks:
    """Implements `pdjax.home.Home`; see `Head.ranks`."""

    def __init__(self, head: Head, config: EngineConfig, source: Source, traits: Traits) -> None:
        check_meshes(config, source.config, traits)
        self._head, self._config = head, config
        self._cluster: MpiCluster | None = None
        self._compile_s = 0.0
        platform = head.facts[1].platform
        if head.survives and config.on_failure == "recompute" and not traits.colocated:
            # Whoever is left must be able to take over what the others did.
            traits = dataclasses.replace(traits, prefill_decodes=True, decode_prefills=True)
        specs = specs_of(config, source.config, traits, platform)
        self.specs: tuple[InstanceSpec, ...] = tuple(
            dataclasses.replace(spec, ranks=ranks) for spec, ranks in zip(specs, head.layout.ranks, strict=True)
        )
        self._build = words.Build(
            engine=0,
            specs=self.specs,
            dtype=dtype_of(config, platform),
            stream_layers=config.stream_layers,
            transfer=config.transfer,
            verify_kv=config.verify_kv,
            transfer_timeout_s=float(config.transfer_timeout_s),
            compilation_cache=config.compilation_cache,
        )
        for spec in self.specs:
            for rank in spec.ranks:
                have, need = head.facts[rank].devices, spec.devices // len(spec.ranks)
                if have < need:
                    raise ValueError(f"rank {rank} has {have} devices; instance {spec.index} needs {need} there")

    def open(self, check: Callable[[], None]) -> Cluster:
        self._cluster = self._head.open(self._build, check)
        return self._cluster

    @property
    def dtype(self) -> str:
        return self._build.dtype

    @property
    def hardware(self) -> str:
        return self._head.facts[1].hardware

    def warm(self, probes: Sequence[Probe] | None, progress: Progress | None, check: Callable[[], None]) -> Warmup:
        assert self._cluster is not None, "the cluster is not open"
        done = self._cluster.warm(probes, progress, check)
        self._compile_s = done.compile_s
        return done

    def compiled(self) -> tuple[int, float]:
        """Since the warm-up; the seconds are those of the warm-up, added over the ranks."""
        return 0 if self._cluster is None else self._cluster.compiled(), self._compile_s


def _unexpected(rank: int, word: object) -> None:
    raise RuntimeError(f"rank {rank} says {word} before there is an engine")
