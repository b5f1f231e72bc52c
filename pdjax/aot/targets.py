"""Chips to compile for that are not there. Enters: a text such as "tpu:v5e:2x4" or "gpu:h100:2". Leave: what the chip
is (`pdjax.hardware`), and devices that programs can be compiled for but not run on. Called by whoever compiles.

The compilers are the vendors' own, in the plugins of the extras `aot-tpu` and `aot-gpu`; neither needs a driver.
"""

import dataclasses
import math
import os
from typing import Any

import jax
from jax.experimental import topologies

from pdjax import hardware
from pdjax.hardware import Hardware

_MACHINE = 8  # GPUs of one machine, unless the target says how many

# Chip -> name in `pdjax.hardware`, axes of a topology: Google Cloud's pages on TPU v5e, v5p and v6e.
_TPUS = {"v5e": ("tpu-v5e", 2), "v5p": ("tpu-v5p", 3), "v6e": ("tpu-v6e", 2)}


@dataclasses.dataclass(frozen=True, slots=True)
class _Gpu:
    """What XLA wants to know of a GPU: NVIDIA's data sheets, and the table of compute capabilities in the CUDA
    programming guide (shared memory, registers, threads).

    Attributes:
        hardware: name in `pdjax.hardware`.
        capability: major number; the minor one is 0 for all of these.
        cores: SMs.
        shared: bytes of shared memory of an SM; a block may have 1 kB less.
        l2: bytes.
        ghz: boost clock.
        memory, memory_per_s: bytes that the driver gives (of an A100, taken to be as of an H100), bytes per second.
        kind: what the driver calls it.
    """

    hardware: str
    capability: int
    cores: int
    shared: int
    l2: int
    ghz: float
    memory: int
    memory_per_s: int
    kind: str


_KB, _MB = 2**10, 2**20
_GPUS = {
    "a100": _Gpu("a100-80g", 8, 108, 164 * _KB, 40 * _MB, 1.41, 84978434048, 2039 * 10**9, "NVIDIA A100-SXM4-80GB"),
    "h100": _Gpu("h100", 9, 132, 228 * _KB, 50 * _MB, 1.98, 84978434048, 3352320 * 10**6, "NVIDIA H100 80GB HBM3"),
    "h200": _Gpu("h200", 9, 132, 228 * _KB, 50 * _MB, 1.98, 143771 * _MB, 4800 * 10**9, "NVIDIA H200"),
}
_INSTALL = {
    "tpu": "libtpu: pip install -e '.[aot-tpu]'",
    "gpu": "JAX's CUDA plugin: pip install -e '.[aot-gpu]'",
}


class Missing(ValueError):
    """The compiler for a target is not installed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A number of equal chips.

    Attributes:
        text: as it was asked for.
        platform: "tpu" or "gpu".
        chip: "v5e", "h100".
        topology: chips along each axis, "2x4"; of GPUs, how many there are in the machine.
        hardware: the chip's data sheet.
    """

    text: str
    platform: str
    chip: str
    topology: str
    hardware: Hardware

    @property
    def count(self) -> int:
        """Chips."""
        return math.prod(int(size) for size in self.topology.split("x"))

    def devices(self) -> list[Any]:
        """One per chip. Starts no backend, and takes no chip that is there.

        Raises:
            Missing: the compiler is not installed.
            ValueError: it knows no such topology.
        """
        try:
            if self.platform == "tpu":
                # Else libtpu asks a server that only TPU hosts have, and wants to be the only one on this machine.
                for name in ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
                    os.environ.setdefault(name, "1")
                found = topologies.get_topology_desc(platform="tpu", topology_name=f"{self.chip}:{self.topology}")
            else:
                found = topologies.get_topology_desc(
                    self.chip,
                    platform="cuda",
                    target_config=_described(_GPUS[self.chip]),
                    topology=f"1x1x{self.topology}",  # slices, hosts, devices of each
                )
        except RuntimeError as error:
            if isinstance(error, jax.errors.JaxRuntimeError):
                raise ValueError(f"target is {self.text!r}, which its compiler refuses: {error}") from None
            raise Missing(f"target is {self.text!r}; it needs {_INSTALL[self.platform]} ({error})") from None
        return list(found.devices)


def parse(text: str) -> Target:
    """Reads tpu:CHIP:TOPOLOGY or gpu:CHIP[:COUNT].

    Raises:
        ValueError: no such chip, or no such form.
    """
    platform, _, rest = text.partition(":")
    chip, _, topology = rest.partition(":")
    sizes = topology.split("x")
    whole = all(size.isascii() and size.isdigit() and int(size) > 0 for size in sizes)
    if platform == "tpu" and chip in _TPUS:
        name, axes = _TPUS[chip]
        if whole and len(sizes) == axes:
            return Target(text, platform, chip, topology, hardware.get(name))
    if platform == "gpu" and chip in _GPUS and (not topology or (whole and len(sizes) == 1)):
        return Target(text, platform, chip, topology or str(_MACHINE), hardware.get(_GPUS[chip].hardware))
    tpus = ", ".join(f"tpu:{chip}:{'x'.join('2' * axes)}" for chip, (_, axes) in _TPUS.items())
    gpus = ", ".join(f"gpu:{chip}" for chip in _GPUS)
    raise ValueError(
        f"target is {text!r}; allowed: {tpus}, of any size, {gpus}, with :COUNT for other than {_MACHINE} in a machine"
    )


def _described(gpu: _Gpu) -> str:
    """XLA's text form of a GPU."""
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
          shared_memory_per_block: {48 * _KB} shared_memory_per_core: {gpu.shared}
          shared_memory_per_block_optin: {gpu.shared - _KB}
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          core_count: {gpu.cores} fpus_per_core: {128 if gpu.capability == 9 else 64}
          block_dim_limit_x: {2**31 - 1} block_dim_limit_y: 65535 block_dim_limit_z: 65535
          memory_bandwidth: {gpu.memory_per_s} l2_cache_size: {gpu.l2} clock_rate_ghz: {gpu.ghz}
          device_memory_size: {gpu.memory} cuda_compute_capability {{ major: {gpu.capability} }}
        }}
        platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }} device_description_str: "{gpu.kind}"
    """
