"""Which programs an instance has, and which one serves a load."""

import itertools

import pytest

from pdjax.models.buckets import Buckets, chunk_buckets, layer_groups, row_buckets, wire_buckets


@pytest.mark.parametrize("most", [1, 7, 16, 17, 256, 1000, 8192])
def test_the_largest_bucket_is_the_limit_itself(most):
    for sizes in (chunk_buckets(most), row_buckets(most)):
        assert sizes[-1] == most and list(sizes) == sorted(set(sizes))


def test_no_work_means_no_programs():
    assert Buckets(chunk_buckets(0), row_buckets(0)).pairs == ()
    assert all(T == 0 for T, _ in Buckets((), row_buckets(8)).pairs)
    assert all(B == 0 for _, B in Buckets(chunk_buckets(256), ()).pairs)


@pytest.mark.parametrize(("chunk", "rows"), [(7, 1), (64, 4), (256, 8), (100, 33)])
def test_every_load_gets_a_compiled_pair_that_holds_it(chunk, rows):
    buckets = Buckets(chunk_buckets(chunk), row_buckets(rows))
    for tokens, n in itertools.product(range(chunk + 1), range(rows + 1)):
        if tokens or n:
            T, B = buckets.program_for(tokens, n)
            assert (T, B) in buckets.pairs and tokens <= T and n <= B
            assert (T == 0) == (tokens == 0) and (B == 0) == (n == 0)


@pytest.mark.parametrize(("chunk", "rows"), [(256, 8), (2048, 32), (8192, 64)])
def test_an_instance_has_at_most_about_24_passes(chunk, rows):
    assert len(Buckets(chunk_buckets(chunk), row_buckets(rows)).pairs) <= 28


@pytest.mark.parametrize(("tokens", "rows", "message"), [(65, 1, "chunk_tokens is 65; allowed: at most 64"), (1, 9, "rows is 9; allowed: at most 8")])  # fmt: skip  # noqa: E501
def test_too_large_a_load_is_refused(tokens, rows, message):
    with pytest.raises(ValueError, match=message):
        Buckets(chunk_buckets(64), row_buckets(8)).program_for(tokens, rows)


def test_whole_transfers_travel_in_bounded_slices():
    assert max(wire_buckets(2048, streams=False)) == 256
    assert wire_buckets(2048, streams=True) == chunk_buckets(2048)


@pytest.mark.parametrize(("layers", "stream"), [(30, 0), (32, 0), (5, 0), (7, 0), (1, 0), (5, 2), (30, 4), (4, 9)])
def test_groups_cover_all_layers_in_order_and_only_the_last_is_smaller(layers, stream):
    groups = layer_groups(layers, stream)
    sizes = [len(group) for group in groups]
    assert [layer for group in groups for layer in group] == list(range(layers))
    assert len({*sizes[:-1]}) <= 1 and 0 < sizes[-1] <= sizes[0] == min(stream or sizes[0], layers)


@pytest.mark.parametrize(("stream", "sizes"), [(0, {3}), (2, {1, 2}), (9, {3, 9})])
def test_no_group_crosses_the_start_of_a_stage(stream, sizes):
    groups = layer_groups(30, stream, cuts=[0, 3, 12, 21])
    assert [layer for group in groups for layer in group] == list(range(30))
    assert {0, 3, 12, 21} <= {group[0] for group in groups} and {len(group) for group in groups} == sizes
