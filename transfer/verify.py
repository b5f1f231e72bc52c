"""Digests of a request's KV, to compare the pages of two instances bit for bit (`EngineConfig.verify_kv`).

Enters: KV as both sides read it back from their pages. Leaves: a text per layer, and what differs. Called by the
local cluster. A digest is short, so it can be compared where the KV itself cannot be.
"""

import hashlib
from collections.abc import Sequence

import numpy as np


def digests(kv: np.ndarray) -> tuple[str, ...]:
    """Of each layer of [layers, 2, T, K, H]: 16 hexadecimal digits over the bytes."""
    return tuple(hashlib.blake2b(layer.tobytes(), digest_size=8).hexdigest() for layer in kv)


def difference(src: Sequence[str], dst: Sequence[str]) -> str | None:
    """What differs between the digests of both sides; None if nothing does."""
    if len(src) != len(dst):
        return f"the source has {len(src)} layers, the destination {len(dst)}"
    wrong = [layer for layer, (a, b) in enumerate(zip(src, dst, strict=True)) if a != b]
    if not wrong:
        return None
    first = wrong[0]
    more = f" ({len(wrong)} layers differ)" if len(wrong) > 1 else ""
    return f"layer {first} has digest {src[first]} at the source and {dst[first]} at the destination{more}"
