"""Padded sizes that programs are compiled for. Enters: an instance's limits. Leaves: ascending sizes, and which
(T, B) pair serves a load. Called by the instance, by whoever writes its spec, and by warm-up. Pure arithmetic.
"""

import dataclasses
import itertools
from collections.abc import Iterable

# Every padded token costs what a real one costs, so the steps are small where prompts are short; but every size is
# several programs, and compiling them is most of an instance's start.
_CHUNKS = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
_MIXED_FROM = 64  # smaller chunks ride in a pass of this size: decode rows cost more than the padding
_MIXED_SIZES = 3
_SLICE = 256  # tokens


def chunk_buckets(max_chunk: int) -> tuple[int, ...]:
    """Padded prompt tokens of one pass; the last is max_chunk itself; none for an instance that takes no prompts."""
    return (*(size for size in _CHUNKS if size < max_chunk), max_chunk) if max_chunk else ()


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Padded decode rows of one pass: powers of two and max_rows itself; none for an instance without rows."""
    powers = (1 << i for i in range(max_rows.bit_length()))
    return (*(size for size in powers if size < max_rows), max_rows) if max_rows else ()


def wire_buckets(max_chunk: int, streams: bool = True) -> tuple[int, ...]:
    """Padded token counts T of the KV units that an instance with this max_chunk sends.

    Whole transfers are cut into slices of at most `_SLICE` tokens, so that an insert never keeps a decode step waiting
    for long; streamed chunks are sent as they were computed.
    """
    sizes = chunk_buckets(max_chunk)
    return sizes if streams else tuple(size for size in sizes if size <= max(_SLICE, sizes[0]))


def slice_sizes(chunks: tuple[int, ...], padded: int) -> tuple[int, ...]:
    """Sizes that one prompt of a packed pass of `padded` tokens is cut out at: all of it, or about half."""
    return (*[size for size in chunks if size <= padded // 2][-1:], padded)


def layer_groups(num_layers: int, stream_layers: int, cuts: Iterable[int] = ()) -> tuple[tuple[int, ...], ...]:
    """Layer numbers of each group: groups of `stream_layers`, or of about 3; the last before a cut may be smaller.

    `cuts` are first layers of pipeline stages, of any instance: a group is the unit that instances exchange, so it
    must lie within one stage on either side.

    A dispatch costs nothing that could be measured beside a group of even one layer; larger groups compile longer.
    """
    runs = list(itertools.pairwise(sorted({0, *cuts, num_layers})))
    size = stream_layers or next((n for n in (3, 4, 2, 5) if all((end - at) % n == 0 for at, end in runs)), 3)
    return tuple(tuple(range(at, min(at + size, end))) for first, end in runs for at in range(first, end, size))


@dataclasses.dataclass(frozen=True, slots=True)
class Buckets:
    """The passes of one instance. Decode rows beside a chunk are always padded to the largest row bucket."""

    chunks: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def mixed(self) -> tuple[int, ...]:
        """Chunk sizes that decode rows may ride with: the largest, and each about half of the one above."""
        if not self.rows or not self.chunks:
            return ()
        sizes = [self.chunks[-1]]
        for size in self.chunks[::-1]:
            if _MIXED_FROM <= size <= sizes[-1] // 2 and len(sizes) < _MIXED_SIZES:
                sizes.append(size)
        return tuple(sizes[::-1])

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Every (T, B) there is a program for."""
        prefill = [(T, 0) for T in self.chunks]
        decode = [(0, B) for B in self.rows]
        return (*prefill, *decode, *((T, self.rows[-1]) for T in self.mixed))

    def program_for(self, chunk_tokens: int, rows: int) -> tuple[int, int]:
        """The smallest (T, B) that takes this load.

        Raises:
            ValueError: more tokens or rows than the largest bucket.
        """
        for name, size, sizes in (("chunk_tokens", chunk_tokens, self.chunks), ("rows", rows, self.rows)):
            if size > (sizes[-1] if sizes else 0):
                raise ValueError(f"{name} is {size}; allowed: at most {sizes[-1] if sizes else 0}")
        if not rows:
            return _fit(self.chunks, chunk_tokens), 0
        if not chunk_tokens:
            return 0, _fit(self.rows, rows)
        return _fit(self.mixed, chunk_tokens), self.rows[-1]


def _fit(sizes: tuple[int, ...], size: int) -> int:
    return next(bucket for bucket in sizes if bucket >= size)
