"""Where the instances of an engine live: the seam between the engine and its cluster's construction. `Here` is this
process; `pdjax.mpi.head.Ranks` are the ranks of an `mpirun` job. Called by the engine, once.
"""

import os
from collections.abc import Callable, Sequence
from typing import Protocol

import jax

from pdjax import compiles
from pdjax.build import (
    Progress,
    Warmup,
    build,
    check_meshes,
    devices_for,
    dtype_of,
    hardware_here,
    specs_of,
    transport_of,
    warm,
)
from pdjax.cluster import Cluster
from pdjax.config import EngineConfig
from pdjax.latency import Probe
from pdjax.local import LocalCluster
from pdjax.messages import InstanceSpec
from pdjax.models.source import Source
from pdjax.schedulers.base import Traits


class Home(Protocol):
    """Knows its instances from the start; what can be refused is refused before anything is loaded."""

    @property
    def specs(self) -> tuple[InstanceSpec, ...]: ...
    def open(self, check: Callable[[], None]) -> Cluster:
        """Loads the weights and makes the pages. `check` is called now and then; what it raises ends it."""
        ...

    @property
    def dtype(self) -> str:
        """Of the weights."""
        ...

    @property
    def hardware(self) -> str:
        """What the devices are: their kind, or on CPU the processor's name."""
        ...

    def warm(self, probes: Sequence[Probe] | None, progress: Progress | None, check: Callable[[], None]) -> Warmup:
        """Compiles every program of the open cluster, and measures these passes, or (None) a few of each size."""
        ...

    def compiled(self) -> tuple[int, float]:
        """Programs handed to XLA so far, and seconds in it."""
        ...


class Here:
    """The devices of this process.

    Args:
        devices: to use; None: the first that JAX has.

    Raises:
        ValueError: the model cannot be cut for the meshes, or there are too few devices or pages.
    """

    def __init__(self, config: EngineConfig, source: Source, traits: Traits, devices: Sequence[jax.Device] | None):
        check_meshes(config, source.config, traits)
        self._config, self._source = config, source
        self._devices = devices_for(config.devices, devices)
        self.specs = specs_of(config, source.config, traits)
        use_cache(config.compilation_cache)

    def open(self, check: Callable[[], None]) -> Cluster:
        config = self._config
        instances = build(config, self._source, self.specs, self._devices)
        layers = self._source.config.num_layers
        self._cluster = LocalCluster(instances, transport_of(config, instances), layers, config.verify_kv)
        return self._cluster

    @property
    def dtype(self) -> str:
        return dtype_of(self._config)

    @property
    def hardware(self) -> str:
        return hardware_here()

    def warm(self, probes: Sequence[Probe] | None, progress: Progress | None, check: Callable[[], None]) -> Warmup:
        return warm(self._cluster, probes, progress, check)

    def compiled(self) -> tuple[int, float]:
        return compiles.compiled()


def use_cache(folder: str) -> None:
    """Keeps XLA's results in a folder; "" changes nothing."""
    if folder:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
