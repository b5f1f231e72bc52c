"""Which passes a profile measures, and which others it is tried on. Enters: an instance's limits. Leaves: probes by
name. Called by `pdjax.experiments.profile` and, for the pages of a pass, by `Instance.rehearse`. Pure arithmetic.
"""

import itertools
from collections.abc import Iterator

from pdjax.latency import Probe
from pdjax.messages import InstanceSpec
from pdjax.models.buckets import Buckets

LONG = 1024  # tokens of a long context
SHORT = 64
_SPREAD = 7  # rows' contexts go up and down in this rhythm


def measured(spec: InstanceSpec) -> tuple[Probe, ...]:
    """Every size of pass: prompts alone and together, without and with a context; batches of equal rows, and of rows of
    which one is long; both in one pass."""
    sizes, rows = spec.chunk_buckets, spec.row_buckets
    probes = []
    for T in sizes:
        some = T in (sizes[0], sizes[len(sizes) // 2], sizes[-1])
        probes += [Probe(((T, prior),)) for prior in ((0, _prior(spec, T, 2), _prior(spec, T, 1)) if some else (0,))]
    for prompts in (2, 4):
        if spec.max_chunks >= prompts and sizes and (part := sizes[-1] // prompts):
            probes.append(Probe(((part, _prior(spec, part, 4)),) * prompts))
    for B in rows:
        probes += [Probe((), (held(spec, context),) * B) for context in (0, LONG // 4, LONG)]
        if B > 1:
            probes.append(Probe((), (held(spec, LONG), *(held(spec, 0),) * (B - 1))))
    for T in Buckets(sizes, rows).mixed:
        B = rows[-1]
        probes.append(Probe(((T, 0),), (held(spec, 0),) * B))
        probes.append(Probe(((T, _prior(spec, T, 2)),), (held(spec, LONG // 2),) * B))
    return tuple(dict.fromkeys(probes))


def held_out(spec: InstanceSpec) -> dict[str, tuple[Probe, ...]]:
    """Passes that are none of these, by what is hard about them. A kind that the instance cannot compute is left
    out."""
    sizes, rows, most = spec.chunk_buckets, spec.row_buckets, spec.max_chunk
    groups: dict[str, list[Probe]] = {}
    if sizes:
        parts = [max(1, most * part // 8) for part in (2, 3, 5, 8)]
        groups["chunks at an offset"] = [
            Probe(((part, _prior(spec, part, by) * 3 // 4),)) for part, by in zip(parts, (1, 4, 1, 2), strict=True)
        ]
        groups["sizes just above a bucket"] = [Probe(((T + 1, 0),)) for T in sizes[:-1]]
        thirds = max(1, most // 3 - 2)
        if spec.max_chunks > 1:
            groups["several prompts"] = [
                Probe(((thirds, 0), (thirds // 2 + 1, 0))),
                Probe(((thirds, _prior(spec, most, 4)), (thirds + 3, 0))),
                Probe(((most // 5 + 1, 0),) * min(spec.max_chunks, 4)),
            ]
    if rows:
        B = rows[-1]
        short, long = (min(context, spec.max_model_len) for context in (SHORT, LONG))
        places = {0, B // 2, B - 1}
        groups["one long row among short ones"] = [
            Probe((), tuple(long if row == place else short for row in range(B))) for place in sorted(places)
        ]
        groups["batches just above a bucket"] = [
            Probe((), (long // by,) * (size + 1)) for size, by in zip(rows[:-1], (1, 3) * len(rows), strict=False)
        ]
        groups["rows of unequal contexts"] = [
            Probe((), tuple(1 + long * (3 * row % _SPREAD) // _SPREAD for row in range(size)))
            for size in sorted({B, max(1, B * 2 // 3), max(1, B // 3)})
        ]
    if sizes and rows:
        groups["prompts beside rows"] = [
            Probe(
                ((max(1, most * part // 8), _prior(spec, most, by)),),
                tuple(1 + long // 2 * (3 * row % _SPREAD) // _SPREAD for row in range(max(1, B * share // 4))),
            )
            for part, by, share in ((1, 4, 3), (3, 2, 1), (5, 1, 4), (8, 3, 2))
        ]
    known = set(measured(spec))
    others = {
        name: tuple(probe for probe in dict.fromkeys(group) if probe not in known) for name, group in groups.items()
    }
    return {name: group for name, group in others.items() if group}


def _prior(spec: InstanceSpec, tokens: int, by: int) -> int:
    """A long context before so many tokens, or a part of it."""
    return max(0, min(LONG, spec.max_model_len - tokens)) // by


def held(spec: InstanceSpec, context: int) -> int:
    """A row's context of about so many tokens, half a page into its last page: a program reads whole pages, which is
    half a page more on the average."""
    page = spec.page_size
    return max(1, min(context // page * page + page // 2, spec.max_model_len))


def pages(spec: InstanceSpec, probe: Probe) -> Iterator[tuple[int, ...]]:
    """The pages of each prompt part with what is before it, then of each row. Each has its own, as those that are
    served have: pages that all read would be in caches. Around where the pool is too small for all."""
    free = itertools.cycle(range(1, 1 + spec.usable_pages))
    for tokens in (*(tokens + prior for tokens, prior in probe.chunks), *probe.contexts):
        yield tuple(itertools.islice(free, spec.pages_for(tokens)))
