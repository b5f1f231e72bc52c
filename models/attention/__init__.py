"""Attention over paged KV: one form for each kind of device, behind `Backend`. Enters: the mesh whose devices will run
a program. Leaves: how pages lie there, and the functions that write them, read them and attend to them. Called by
`models.programs`, `models.kv` and by whoever reads pages on the host; `docs/attention.md` has the table.
"""

from jax.sharding import Mesh

from pdjax.models.attention import gpu, plain, tpu
from pdjax.models.attention.base import (
    QUERY_BLOCK,
    ROW_BLOCK,
    Backend,
    LayerKV,
    Layout,
    PageWrites,
    QueryBlocks,
    Rows,
)

__all__ = [
    "QUERY_BLOCK",
    "ROW_BLOCK",
    "Backend",
    "LayerKV",
    "Layout",
    "PageWrites",
    "QueryBlocks",
    "Rows",
    "backend_for",
    "backend_on",
]

_GPUS = ("gpu", "cuda", "rocm")  # what JAX calls them


def backend_for(mesh: Mesh) -> Backend:
    """What the devices of a mesh run: never what this process happens to have, so that a mesh that is there for
    compiling only gets its own."""
    device = mesh.devices.flat[0]
    if device.platform in _GPUS:
        return gpu.backend(cudnn=gpu.no_cudnn(device))
    return backend_on(device.platform)


def backend_on(platform: str) -> Backend:
    """The same, of a platform that this process may have no device of; of GPUs, what they run without cuDNN."""
    if platform in _GPUS:
        return gpu.backend(cudnn="no device to ask")
    return tpu.backend() if platform == "tpu" else plain.backend()
