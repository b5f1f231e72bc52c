"""Shares of ranks, against the head plan and the definition of a split."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdjax.transfer.parcel import Side
from pdjax.transfer.parcels import Share, heads_of, shares
from pdjax.transfer.plan import head_plan
from pdjax.transfer.staging import slot_bytes


@st.composite
def sides(draw, kv_heads, first):
    kv = draw(st.sampled_from([n for n in range(1, kv_heads + 1) if kv_heads % n == 0]))
    rep = draw(st.integers(1, 4))
    ranks = draw(st.sampled_from([n for n in range(1, kv * rep + 1) if kv * rep % n == 0]))
    return Side(kv, rep, tuple(range(first, first + ranks)))


@st.composite
def cuts(draw):
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 5, 8]))
    return kv_heads, draw(sides(kv_heads, 1)), draw(sides(kv_heads, 100))


def rank_of(side, shard):
    return side.ranks[shard * len(side.ranks) // (side.kv * side.rep)]


@given(cuts())
def test_every_rank_gets_the_heads_that_the_plan_gives_its_shards_each_once_from_who_holds_them(cut):
    kv_heads, src, dst = cut
    pieces, got = head_plan(kv_heads, src, dst), shares(kv_heads, src, dst)
    for rank in dst.ranks:
        needed = {h for p in pieces if rank_of(dst, p.dst_shard) == rank for h in range(p.start, p.stop)}
        heads = [head for share in got if share.dst_rank == rank for head in range(share.start, share.stop)]
        assert heads == sorted(needed) == list(heads_of(kv_heads, dst, rank))
    for share in got:
        assert set(range(share.start, share.stop)) <= set(heads_of(kv_heads, src, share.src_rank))


@given(cuts())
def test_neighbours_from_one_rank_are_one_share_unless_others_hold_them_too(cut):
    kv_heads, src, dst = cut
    got = shares(kv_heads, src, dst)
    for one, two in itertools.pairwise(got):
        if (one.src_rank, one.dst_rank, one.stop) == (two.src_rank, two.dst_rank, two.start):
            assert one.stop == heads_of(kv_heads, src, one.src_rank).stop


def test_replicas_of_a_source_take_turns():
    src, dst = Side(1, 2, (1, 2)), Side(2, 1, (3, 4))
    assert shares(2, src, dst) == (Share(1, 3, 0, 1), Share(2, 4, 1, 2))


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"src is .*allowed: kv a divisor of the 3 kv heads"):
        shares(3, Side(2, 1, (1,)), Side(1, 1, (2,)))


def test_a_parcel_that_no_message_holds_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match="1073741824 bytes for each kv head, and a parcel 2147483648; allowed: up to"):
        slot_bytes([Share(1, 2, 0, 2)], 1 << 30)
    assert slot_bytes([Share(1, 2, 0, 2), Share(1, 3, 2, 5)], 10) == 30
