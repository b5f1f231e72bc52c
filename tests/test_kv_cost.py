"""KV on links: bytes, seconds and queues that one can compute by hand."""

import pytest

from pdjax.kv_cost import LINKS, Job, Link, Shape, cost, prefill_flops, shape_of, suffices
from pdjax.models.presets import PRESETS

GIGABYTE_S = Link("1 GB/s", 8, rdma=False)


def test_llama_7b_has_half_a_mebibyte_a_token_and_a_gibibyte_at_2048():
    shape = shape_of(PRESETS["llama2-7b"])
    assert shape == Shape(32, 32, 32, 128)
    assert shape.bytes_per_token("float16") == 2 * 32 * 32 * 128 * 2 == 2**19
    assert 2048 * shape.bytes_per_token("float16") == 2**30


def test_shared_kv_heads_and_small_dtypes_need_less():
    assert shape_of(PRESETS["llama3.1-8b"]).bytes_per_token("float16") == 2**17
    assert shape_of(PRESETS["llama2-7b"]).bytes_per_token("fp8") == 2**18


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("10 GbE", 1.25), ("25 GbE", 3.125), ("InfiniBand HDR", 25), ("InfiniBand NDR", 50)]
)
def test_links_move_an_eighth_of_their_bits(name, gigabytes):
    job = Job(10**9, prefill_s=1.0, groups=1, rate=0.1)
    assert cost(job, LINKS[name]).whole_s == pytest.approx(1 / gigabytes)
    assert cost(job, LINKS[name], efficiency=0.5).whole_s == pytest.approx(2 / gigabytes)


def test_a_fast_link_leaves_the_last_group():
    job = Job(10**9, prefill_s=2.0, groups=10, rate=0.1)
    assert cost(job, GIGABYTE_S).streamed_s == pytest.approx(0.1)


def test_a_slow_link_is_behind_from_the_first_group_on():
    """Ten groups: the first is there after 0.05 s, and then a second on the wire begins; the prefill takes 0.5 s."""
    job = Job(10**9, prefill_s=0.5, groups=10, rate=0.1)
    assert cost(job, GIGABYTE_S).streamed_s == pytest.approx(0.05 + 1.0 - 0.5)


def test_from_the_hiding_bandwidth_on_only_the_last_group_is_left():
    job = Job(10**9, prefill_s=0.5, groups=10, rate=0.1)
    link = Link("just", job.hiding_bytes_per_s * 8e-9, rdma=False)
    assert cost(job, link).streamed_s == pytest.approx(0.05)
    assert cost(job, Link("less", 0.9 * link.gbits, rdma=False)).streamed_s > 0.1


def test_without_streaming_all_is_left():
    assert cost(Job(10**9, prefill_s=2.0, groups=1, rate=0.1), GIGABYTE_S).streamed_s == pytest.approx(1.0)


def test_a_link_saturates_at_its_bandwidth_over_the_bytes_and_carries_four_fifths_of_that():
    one = cost(Job(10**9 // 4, prefill_s=2.0, groups=1, rate=2.0), GIGABYTE_S)
    assert (one.saturated_rate, one.sustained_rate, one.busy) == pytest.approx((4.0, 3.2, 0.5))


def test_prompts_of_several_instances_wait_for_each_other():
    """Half busy: 0.5 / (2 * 0.5) transfers of 0.25 s."""
    assert cost(Job(10**9 // 4, prefill_s=2.0, groups=1, rate=2.0), GIGABYTE_S).queue_s == pytest.approx(0.125)


def test_prompts_of_one_instance_do_not():
    assert cost(Job(10**9 // 4, prefill_s=0.5, groups=1, rate=2.0), GIGABYTE_S).queue_s == 0.0


def test_a_link_that_cannot_keep_up_never_suffices():
    job = Job(10**9, prefill_s=0.5, groups=100, rate=1.0)
    one = cost(job, GIGABYTE_S)
    assert one.queue_s is None and one.share(job) == float("inf") and not suffices(one, job, share=1e9)


def test_a_link_suffices_by_what_is_seen_of_the_transfer():
    job = Job(10**9, prefill_s=2.0, groups=10, rate=0.4)
    one = cost(job, GIGABYTE_S)
    assert one.share(job) == pytest.approx(0.05)
    assert suffices(one, job, share=0.06) and not suffices(one, job, share=0.04)


def test_a_prompt_of_a_7b_model_takes_two_operations_per_weight_and_token_and_attention():
    """6.476e9 weights in layers, 0.131e9 in the head, which computes one token; scores and values of 4096 wide rows."""
    attention = 32 * 4 * 4096 * 2048 * 2049 / 2
    expected = 2 * 6.476e9 * 2048 + attention + 2 * 0.131e9
    assert prefill_flops(PRESETS["llama2-7b"], 2048) == pytest.approx(expected, rel=1e-3)
