"""Which passes a profile measures, and which it is tried on."""

import dataclasses

import pytest

from pdjax import probes
from pdjax.messages import Role
from pdjax.models.buckets import Buckets
from pdjax.testing import spec

BOTH = dataclasses.replace(
    spec(0, Role.MIXED),
    max_chunk=256,
    max_chunks=4,
    max_rows=32,
    max_model_len=2048,
    chunk_buckets=(32, 64, 128, 192, 256),
    row_buckets=(1, 2, 4, 8, 16, 32),
    row_block=8,
)
PREFILL = dataclasses.replace(BOTH, max_rows=0, row_buckets=())
DECODE = dataclasses.replace(BOTH, max_chunk=0, chunk_buckets=())
SHORT = dataclasses.replace(BOTH, max_model_len=256)
LONE = dataclasses.replace(BOTH, max_chunks=1, max_rows=1, row_buckets=(1,), max_chunk=16, chunk_buckets=(16,))


def every(limits):
    held = [probe for group in probes.held_out(limits).values() for probe in group]
    return [*probes.measured(limits), *held]


@pytest.mark.parametrize("limits", [BOTH, PREFILL, DECODE, SHORT, LONE])
def test_every_probe_is_a_pass_that_the_instance_can_compute(limits):
    buckets = Buckets(limits.chunk_buckets, limits.row_buckets)
    for probe in every(limits):
        buckets.program_for(sum(tokens for tokens, _ in probe.chunks), len(probe.contexts))  # else it raises
        assert len(probe.chunks) <= limits.max_chunks
        assert all(tokens > 0 and 0 <= prior <= limits.max_model_len - tokens for tokens, prior in probe.chunks)
        assert all(1 <= context <= limits.max_model_len for context in probe.contexts)


@pytest.mark.parametrize("limits", [BOTH, PREFILL, DECODE, SHORT, LONE])
def test_every_size_of_pass_is_measured(limits):
    buckets = Buckets(limits.chunk_buckets, limits.row_buckets)
    sizes = {
        buckets.program_for(sum(tokens for tokens, _ in probe.chunks), len(probe.contexts))
        for probe in probes.measured(limits)
    }
    assert sizes == set(buckets.pairs)


@pytest.mark.parametrize("limits", [BOTH, PREFILL, DECODE, SHORT])
def test_what_a_model_is_tried_on_was_not_measured(limits):
    held = [probe for group in probes.held_out(limits).values() for probe in group]
    assert held and not set(held) & set(probes.measured(limits))


def test_one_long_row_stands_among_short_ones_of_a_full_batch():
    for probe in probes.held_out(BOTH)["one long row among short ones"]:
        assert sorted(probe.contexts) == [64] * 31 + [1024]


def test_prompts_and_rows_of_a_pass_have_pages_of_their_own():
    limits = dataclasses.replace(BOTH, page_size=16, num_pages=9)
    probe = probes.Probe(((20, 30), (5, 0)), (16, 17))
    assert list(probes.pages(limits, probe)) == [(1, 2, 3, 4), (5,), (6,), (7, 8)]


def test_pages_go_around_where_the_pool_is_too_small_for_all():
    limits = dataclasses.replace(BOTH, page_size=16, num_pages=4)
    assert list(probes.pages(limits, probes.Probe((), (30, 30)))) == [(1, 2), (3, 1)]
