"""What a cache of prompt blocks would hold, and when its use pays."""

import math

import pytest

from pdjax import prefix
from pdjax.prefix import BlockCache, hits

PROMPTS = [(0, 1, 2), (0, 3), (0, 1, 2, 4), (1, 2)]


def test_a_prefix_ends_at_the_first_block_that_is_not_there():
    cache = BlockCache()
    cache.add((0, 1, 2))
    assert [cache.match(blocks) for blocks in ((0, 1), (0, 3, 2), (3, 1), (), (0, 1, 2, 3))] == [2, 1, 0, 0, 3]


def test_the_least_recently_used_block_goes_first():
    cache = BlockCache(3)
    cache.add((0, 1, 2))
    cache.add((0,))
    cache.add((3,))  # 1 goes
    assert len(cache) == 3
    assert [cache.match((block,)) for block in range(4)] == [1, 0, 1, 1]


def test_a_prompt_longer_than_the_cache_leaves_its_end_there():
    cache = BlockCache(2)
    cache.add((0, 1, 2))
    assert cache.match((0, 1, 2)) == 0
    assert cache.match((1, 2)) == 2


def test_hits_are_blocks_of_prefixes_that_came_before():
    found = hits(PROMPTS)
    assert (found.blocks, found.reused) == (11, 0 + 1 + 3 + 2)
    assert found.rate == pytest.approx(6 / 11)


def test_a_larger_cache_finds_no_less():
    reused = [hits(PROMPTS, capacity).reused for capacity in (1, 2, 3, 4, 5)]
    assert reused == sorted(reused)
    assert reused[-1] == hits(PROMPTS).reused


def test_without_prompts_there_is_no_rate():
    assert math.isnan(hits([]).rate)


def test_a_cache_holds_at_least_a_block():
    with pytest.raises(ValueError, match="capacity is 0; allowed: blocks >= 1, or None"):
        BlockCache(0)


def test_prefix_and_rest_cost_as_much_as_the_whole():
    size = {"layers": 3, "hidden": 64}
    parts = prefix.prefill_flops(100, 0, **size) + prefix.prefill_flops(50, 100, **size)
    assert parts == pytest.approx(prefix.prefill_flops(150, 0, **size))


@pytest.mark.parametrize("tokens", [1, 100, 100_000])
def test_a_prompt_alone_that_costs_as_much_as_itself_is_itself(tokens):
    size = {"layers": 80, "hidden": 8192}
    assert prefix.alone_tokens(prefix.prefill_flops(tokens, 0, **size), **size) == pytest.approx(tokens)


def test_loading_pays_from_the_bandwidth_at_which_it_takes_as_long_as_computing():
    tokens, flops_per_s = 1000, 1e12
    bandwidth = prefix.reuse_pays_bytes_per_s(tokens, flops_per_s, hidden=512, queries_per_kv=4)
    nbytes = tokens * 2 * (512 / 4) * 2
    computed_s = prefix.prefill_flops(tokens, 0, layers=1, hidden=512) / flops_per_s
    assert nbytes / bandwidth == pytest.approx(computed_s)
