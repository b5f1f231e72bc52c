"""Digests of a request's KV, to compare the pages of two instances bit for bit (`EngineConfig.verify_kv`).

Enters: KV as a side reads it back from its pages, head by head. Leaves: a text for each head of a layer, and what
differs. Called by the clusters. No two sides cut a head, so ranks can make the digests of what they hold, and a digest
is short, so it can be compared where the KV itself cannot be.
"""

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np


def digests(heads: Iterable[tuple[int, int, np.ndarray]]) -> dict[tuple[int, int], str]:
    """Of (layer, head, KV [2, tokens, H]): by (layer, head), 16 hexadecimal digits over the bytes."""
    return {(layer, head): hashlib.blake2b(kv.tobytes(), digest_size=8).hexdigest() for layer, head, kv in heads}


def difference(src: Mapping[tuple[int, int], str], dst: Mapping[tuple[int, int], str]) -> str | None:
    """What differs between the digests of both sides; None if nothing does."""
    wrong = sorted(where for where in src.keys() | dst.keys() if src.get(where) != dst.get(where))
    if not wrong:
        return None
    layer, head = first = wrong[0]
    more = f" ({len(wrong)} heads of layers differ)" if len(wrong) > 1 else ""
    sent, got = (side.get(first, "that is missing") for side in (src, dst))
    return f"layer {layer}, head {head} has digest {sent} at the source and {got} at the destination{more}"
