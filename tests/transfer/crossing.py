"""Ranks of two instances in one process, with a real outbox and inbox each, over a network that a test decides on.

Rank 0 is nobody; the source's ranks come first. All devices are of this process, so every rank "holds" all shards: the
test looks at the heads that are a rank's own.
"""

import dataclasses
import queue

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from pdjax.mpi.layout import deal
from pdjax.mpi.line import Line
from pdjax.transfer.base import Unit, UnitHeader
from pdjax.transfer.inbox import Inbox
from pdjax.transfer.outbox import Outbox
from pdjax.transfer.parcel import Credit, Parcel, Side
from pdjax.transfer.parcels import heads_of
from pdjax.transfer.shards import SPEC
from tests.mpi.posts import FakeNetwork

WAIT_S = 20
LAYERS, T, H = 2, 8, 4


@dataclasses.dataclass
class Split:
    """`kv` parts, `rep` shards each, over `ranks` ranks."""

    kv: int
    rep: int = 1
    ranks: int = 1


class Crossing:
    """Instance 0 sends to instance 1. `units` and `errors` by destination rank, `given_up` by source rank."""

    def __init__(self, kv_heads, src, dst, hold=False, dtype="float32", timeout_s=WAIT_S, **options):
        self.K, self.dtype = kv_heads, dtype
        self.network = FakeNetwork(1 + src.ranks + dst.ranks, hold)
        layout = deal([src.ranks, dst.ranks])
        self.src, self.dst = layout.ranks
        self.sides = [Side(split.kv, split.rep, ranks) for split, ranks in zip((src, dst), layout.ranks, strict=True)]
        meshes = [Mesh(np.array(jax.devices()[: s.kv * s.rep]).reshape(s.kv, s.rep), ("kv", "rep")) for s in (src, dst)]
        self.shardings = [NamedSharding(mesh, SPEC) for mesh in meshes]
        self.boxes, self.lines, self.heard = {}, {}, []
        self.units = {rank: queue.Queue() for rank in self.dst}
        self.errors = {rank: queue.Queue() for rank in self.dst}
        self.given_up = {rank: queue.Queue() for rank in self.src}
        head_bytes = LAYERS * 2 * T * H * np.dtype(dtype).itemsize
        for post in self.network.posts:
            heard = lambda rank, word, to=post.rank: self._heard(to, rank, word)  # noqa: E731
            self.lines[post.rank] = Line(post, layout, 0.0, heard, lambda *_: None)
        for rank in self.src:
            line = self.lines[rank]
            first_tag, to = options.get("first_tag", 1), options.get("host")
            self.boxes[rank] = Outbox(
                line, self.sides, 0, kv_heads, head_bytes, timeout_s, first_tag, options.get("pointers", False), to
            )
        for rank in self.dst:
            shardings = [self.shardings[1]] * 4
            self.boxes[rank] = Inbox(
                self.lines[rank], self.sides, 1, shardings, kv_heads, H, dtype, head_bytes,
                options.get("pointers", False), options.get("host"), timeout_s,
            )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for box in self.boxes.values():
            box.end()
        self.network.__exit__(*error)

    def _heard(self, to, rank, word):
        self.heard.append((rank, to, word))
        if isinstance(word, Parcel):
            self.boxes[to].parcel(rank, word)
        elif isinstance(word, Credit):
            self.boxes[to].credit(rank, word)

    def open_src(self, key=1):
        for rank in self.src:
            self.boxes[rank].open(key, 1, self.given_up[rank].put)

    def open_dst(self, key=1, tokens=1000):
        for rank in self.dst:
            self.boxes[rank].open(key, 0, tokens, self.units[rank].put, self.errors[rank].put)

    def unit(self, key=1, layer=0, start=0, tokens=T, padded=T):
        """Its values say layer, K or V, token and head; the padding is -1."""
        shape = (LAYERS, 2, padded, self.K, H)
        kv = np.full(shape, -1.0)
        kv[:, :, :tokens] = expected(self.K, layer, start, tokens)
        header = UnitHeader(key, layer, LAYERS, start, tokens, shape, self.dtype)
        return Unit(header, jax.device_put(kv.astype(self.dtype), self.shardings[0]))

    def send(self, unit):
        """From every rank of the source."""
        for rank in self.src:
            self.boxes[rank].send(unit)

    def take(self, rank):
        """The next unit at a rank, and whether its heads there are as they were sent."""
        unit = self.units[rank].get(timeout=WAIT_S)
        heads, header = heads_of(self.K, self.sides[1], rank), unit.header
        want = expected(self.K, header.layer, header.start, header.tokens)[:, :, :, heads.start : heads.stop]
        got = np.asarray(unit.kv)[:, :, : header.tokens, heads.start : heads.stop]
        np.testing.assert_array_equal(got, want.astype(self.dtype))
        return unit

    def said(self, kind):
        return [(rank, to, word) for rank, to, word in self.heard if isinstance(word, kind)]


def expected(kv_heads, layer, start, tokens):
    """[LAYERS, 2, tokens, K, H]"""
    layers, two, token, head, dim = np.ix_(
        range(layer, layer + LAYERS), range(2), range(start, start + tokens), range(kv_heads), range(H)
    )
    return ((layers * 2 + two) * 100 + token) * 10 + head + dim / 8.0
