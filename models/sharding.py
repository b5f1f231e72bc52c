"""How a model is cut over the devices of one instance: into pipeline stages, each of them over a mesh.

A stage's mesh has two axes, ("kv", "rep"). With K kv heads, G query heads per kv head and tp devices, kv = gcd(tp, K)
and rep = tp / kv: kv heads are split over "kv" and replicated over "rep"; the G query heads of every kv head are split
over "rep". Since tp divides K*G, rep always divides G, so every tp that divides the query heads works, whatever K is
(3 and 5 included), and no shard ever needs a head that it does not hold.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from pdjax.models.config import ModelConfig

KV, REP = "kv", "rep"
TP = (KV, REP)  # both axes together: ffn and vocabulary


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """The two factors of tp."""

    kv: int
    rep: int

    @property
    def tp(self) -> int:
        return self.kv * self.rep


def split(config: ModelConfig, tp: int) -> Split:
    """Factors tp; ValueError if tp does not divide the query heads."""
    if tp < 1 or config.num_heads % tp:
        allowed = [n for n in range(1, config.num_heads + 1) if config.num_heads % n == 0]
        raise ValueError(f"tp is {tp}; allowed: a divisor of the {config.num_heads} query heads, one of {allowed}")
    kv = math.gcd(tp, config.num_kv_heads)
    return Split(kv, tp // kv)


def make_mesh(config: ModelConfig, devices: Sequence[Any]) -> Mesh:
    """A ("kv", "rep") mesh over the devices of one stage, in their order."""
    parts = split(config, len(devices))
    return Mesh(np.asarray(devices).reshape(parts.kv, parts.rep), TP)


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """What one pipeline stage holds: a run of layers; the first also the embedding, the last final norm and head."""

    layers: range
    first: bool = True
    last: bool = True


def shares(num_layers: int, pp: int) -> tuple[Share, ...]:
    """The stages of a model, layers as equal as possible: earlier ones have one more, as the last has the head.

    Raises:
        ValueError: more stages than layers.
    """
    if not 1 <= pp <= num_layers:
        raise ValueError(f"pp is {pp}; allowed: 1 to {num_layers}, the layers of the model")
    size, more = divmod(num_layers, pp)
    bounds = [stage * size + min(stage, more) for stage in range(pp + 1)]
    return tuple(Share(range(*bounds[i : i + 2]), i == 0, i == pp - 1) for i in range(pp))


def make_meshes(config: ModelConfig, devices: Sequence[Any], pp: int) -> tuple[Mesh, ...]:
    """The meshes of an instance's stages: its devices in their order, in pp equal runs."""
    tp = len(devices) // pp
    return tuple(make_mesh(config, devices[stage * tp : (stage + 1) * tp]) for stage in range(pp))


def meshes_over_ranks(config: ModelConfig, devices: Sequence[Sequence[Any]], pp: int) -> tuple[Mesh, ...]:
    """The same for an instance over several ranks; `devices[r]`: those of rank r, as many for each. Every rank has a
    run of every stage's devices, so that activations go from stage to stage without leaving it."""
    run = len(devices[0]) // pp
    return tuple(
        make_mesh(config, [device for mine in devices for device in mine[stage * run : (stage + 1) * run]])
        for stage in range(pp)
    )


def padded(size: int, tp: int) -> int:
    """`size` rounded up to a multiple of tp: ffn and vocabulary are zero-padded to it."""
    return -(-size // tp) * tp
