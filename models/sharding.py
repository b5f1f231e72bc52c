"""How a model is cut over the devices of one instance.

A mesh has two axes, ("kv", "rep"). With K kv heads, G query heads per kv head and tp devices, kv = gcd(tp, K) and
rep = tp / kv: kv heads are split over "kv" and replicated over "rep"; the G query heads of every kv head are split
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
    """A ("kv", "rep") mesh over the devices of one instance, in their order."""
    parts = split(config, len(devices))
    return Mesh(np.asarray(devices).reshape(parts.kv, parts.rep), TP)


def padded(size: int, tp: int) -> int:
    """`size` rounded up to a multiple of tp: ffn and vocabulary are zero-padded to it."""
    return -(-size // tp) * tp
