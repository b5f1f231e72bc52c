"""Lengths that break other systems: at the edges of pages, chunks, buckets and the context, alone in the batch."""

import pytest

from pdjax.testing import World, fake_tokens
from tests.replicas import Driver, prompt, small
from tests.worlds import ask, policy, specs

SIZES = (1, 7, 16)


@pytest.mark.parametrize("page", SIZES)
@pytest.mark.parametrize("chunk", SIZES)
@pytest.mark.parametrize("name", ["chunked", "pull", "stream", "dynamic"])
def test_a_request_alone_gets_its_tokens_at_every_edge_of_pages_and_chunks(name, chunk, page):
    lengths = sorted({1, *(k * size + off for size in (page, chunk) for k in (1, 2, 3) for off in (-1, 0, 1))} - {0})
    pages = 1 + 60 // page + 1
    w = World(specs(name, page_size=page, max_chunk=chunk, num_pages=pages, max_model_len=60), policy(name))
    requests = [ask(i, prompt=length, tokens=9, at_s=100.0 * i) for i, length in enumerate(lengths)]
    w.add(*requests)
    records = w.run().records
    assert [records[r.id].token_ids for r in requests] == [fake_tokens(r) for r in requests]


@pytest.mark.parametrize("page", SIZES)
@pytest.mark.parametrize("name", ["colocated", "pull", "stream"])
def test_a_request_may_fill_the_last_page_of_the_smallest_pool(name, page):
    pages = 1 + -(-33 // page)  # what one request of max_model_len needs, and the zero page
    w = World(specs(name, page_size=page, num_pages=pages, max_model_len=33), policy(name))
    requests = [ask(i, prompt=length, tokens=33 - length) for i, length in enumerate((1, 16, 32))]
    w.add(*requests)
    records = w.run().records
    assert [records[r.id].token_ids for r in requests] == [fake_tokens(r) for r in requests]


@pytest.mark.slow
def test_a_context_that_no_bucket_and_no_page_divides_is_filled_to_its_last_token():
    """18 tokens in pages of 16 and passes of 16: nothing beyond the true length is refused, read or written."""
    tight = Driver(small(max_model_len=18))
    roomy = Driver(small())
    for length in (1, 13, 17):
        text = prompt(5, length)
        assert tight.generate(text, 18 - length) == roomy.generate(text, 18 - length)


def test_the_limit_of_tokens_is_the_users_whatever_programs_are_padded_to():
    """Eight rows of other lengths, padded together: each ends at its own number of tokens."""
    w = World(specs("colocated"), policy("colocated"))
    requests = [ask(i, prompt=5 + i, tokens=1 + i) for i in range(8)]
    w.add(*requests)
    records = w.run().records
    assert [len(records[r.id].token_ids) for r in requests] == list(range(1, 9))
