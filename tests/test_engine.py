"""The engine's public door on a small random model: what a user asks for comes back whole, in order and repeatable."""

import dataclasses
import random

import pytest

import pdjax
from pdjax import compiles
from pdjax.schedulers.base import Traits
from tests.engines import GREEDY, WAIT_S, First, engine, first_token_of, ids, sampled, settle, tokens, wire
from tests.worlds import RoundRobin

pytest_plugins = ["tests.shared_engines"]
pytestmark = pytest.mark.usefixtures("everything_ends")


# --- asking and answering -------------------------------------------------------------------------------------------


def test_text_messages_and_ids_are_prompts(colocated):
    chat = [{"role": "user", "content": "hello"}]
    text, messages, numbers = colocated.generate(["user: hello\nassistant:", chat, ids(1, 7)], GREEDY)
    assert text.token_ids == messages.token_ids  # the template writes just that
    assert numbers.record.prompt_tokens == 7


def test_a_single_text_is_a_list_of_one(colocated):
    assert len(colocated.generate("hello", GREEDY)) == 1


def test_results_come_in_the_order_of_the_prompts(colocated):
    prompts = [ids(seed, 5 + seed) for seed in range(9)]
    each = [pdjax.SamplingParams(temperature=0, max_tokens=9 - seed, ignore_eos=True) for seed in range(9)]
    results = colocated.generate(prompts, each)
    assert [result.record.prompt_tokens for result in results] == [len(prompt) for prompt in prompts]
    assert [len(result.token_ids) for result in results] == [params.max_tokens for params in each]


def test_a_result_says_what_came_out_how_fast_and_where(pulled):
    result = pulled.submit("hello", GREEDY, slo=pdjax.SLO(ttft_ms=500), user_id="mine").result(WAIT_S)
    assert result.request_id == "mine" and result.finish_reason == "length"
    assert isinstance(result.text, str) and len(result.token_ids) == 12
    times = result.metrics
    assert 0 < times["ttft_ms"] < times["e2e_ms"] and times["tpot_ms"] > 0
    assert sum(times["parts_ms"].values()) == pytest.approx(times["e2e_ms"])
    assert (result.placement.prefill, result.placement.decode) == (0, 1) and result.placement.reason
    assert result.record.slo == pdjax.SLO(ttft_ms=500)


def test_a_stream_gives_the_tokens_and_the_text_of_generate(colocated):
    deltas = list(colocated.stream("hello", GREEDY))
    (whole,) = colocated.generate("hello", GREEDY)
    assert tuple(token for delta in deltas for token in delta.token_ids) == whole.token_ids
    assert "".join(delta.text for delta in deltas) == whole.text


def test_a_finished_request_can_be_read_again(colocated):
    handle = colocated.submit("hello", GREEDY)
    result = handle.result(WAIT_S)
    assert handle.done and handle.result() == result
    assert tuple(token for delta in handle for token in delta.token_ids) == result.token_ids
    handle.abort()
    assert handle.result().finish_reason == "length"


@pytest.mark.parametrize("name", ["", "a b", "#/1", "x" * 1000])
def test_any_user_id_is_served_and_two_may_share_it(colocated, name):
    handles = [colocated.submit(ids(seed, 4), GREEDY, user_id=name) for seed in (1, 2)]
    first, second = (handle.result(WAIT_S) for handle in handles)
    assert first.token_ids != second.token_ids
    assert not name or first.request_id == second.request_id == name


def test_a_wait_with_a_limit_ends_and_the_request_goes_on(pulled):
    wire(pulled).hold()
    handle = pulled.submit(ids(2, 5), GREEDY)
    with pytest.raises(TimeoutError, match=r"has not ended after 0\.01 s"):
        handle.result(0.01)
    assert not handle.done and not pulled.wait_idle(0.01)
    wire(pulled).release()
    assert handle.result(WAIT_S).finish_reason == "length"


def test_the_first_token_is_given_while_the_kv_is_still_on_its_way(pulled):
    wire(pulled).hold()
    deltas = pulled.stream(ids(3, 5), GREEDY)
    assert len(next(deltas).token_ids) == 1
    wire(pulled).release()
    assert sum(len(delta.token_ids) for delta in deltas) == 11


# --- how many tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
def test_max_tokens_is_exact_and_one_needs_no_transfer(apart, colocated, count):
    before = wire(apart).started
    (got,) = apart.generate([ids(4, 20)], sampled(1, max_tokens=count))
    (want,) = colocated.generate([ids(4, 20)], sampled(1, max_tokens=count))
    assert len(got.token_ids) == count and got.token_ids == want.token_ids
    assert wire(apart).started - before == (count > 1)


def test_a_request_may_fill_the_context_to_its_last_token(apart):
    (result,) = apart.generate([ids(5, 200)], pdjax.SamplingParams(temperature=0, max_tokens=56, ignore_eos=True))
    assert len(result.token_ids) == 56


def test_lengths_at_the_edges_of_pages_and_chunks_are_served_alike(apart, colocated):
    prompts = [ids(length, length) for length in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127)]
    assert tokens(apart.generate(prompts, GREEDY)) == tokens(colocated.generate(prompts, GREEDY))


def test_a_stop_token_ends_a_request_and_is_kept_in_the_answer(apart):
    (free,) = apart.generate([ids(6, 9)], sampled(3))
    stop = free.token_ids[5]
    (result,) = apart.generate([ids(6, 9)], sampled(3, stop_token_ids=(stop,)))
    assert result.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert result.finish_reason == "stop"


@pytest.fixture
def ending(apart, monkeypatch):
    """`apart`, for whose model the first token of this prompt is an end of text."""
    (free,) = apart.generate([ids(7, 9)], GREEDY)
    config = dataclasses.replace(apart._source.config, eos_ids=(free.token_ids[0],))
    monkeypatch.setattr(apart, "_source", dataclasses.replace(apart._source, config=config))
    return apart, free.token_ids


def test_an_end_of_text_as_first_token_ends_the_request_there(ending):
    served, free = ending
    (result,) = served.generate([ids(7, 9)], pdjax.SamplingParams(temperature=0))
    assert (result.token_ids, result.finish_reason) == (free[:1], "stop")
    assert result.record.timeline.decode_start_s is None


def test_ignore_eos_gives_max_tokens(ending):
    served, free = ending
    (result,) = served.generate([ids(7, 9)], GREEDY)
    assert (result.token_ids, result.finish_reason) == (free, "length")


# --- sampling -------------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_tokens_wherever_it_is_served(apart, colocated):
    each = [sampled(seed) for seed in range(20)]
    prompts = [ids(8, 18)] * 20
    got = tokens(apart.generate(prompts, each))
    assert got == tokens(colocated.generate(prompts, each))
    assert len(set(got)) == 20


def test_without_a_seed_two_equal_requests_differ(colocated):
    first, second = tokens(colocated.generate([ids(9, 5)] * 2, sampled()))
    assert first != second


def test_rows_of_a_mixed_batch_equal_their_single_runs(apart):
    each = [GREEDY, sampled(1), sampled(2, temperature=0.5, top_k=5), sampled(3, top_p=0.8), GREEDY, sampled(4)]
    prompts = [ids(seed, 10 + seed) for seed in range(6)]
    together = tokens(apart.generate(prompts, each))
    single = [tokens(apart.generate([prompt], params))[0] for prompt, params in zip(prompts, each, strict=True)]
    assert together == single


@pytest.mark.parametrize("changes", [{"temperature": 1e-8}, {"top_k": 1}, {"top_p": 1e-9}])
def test_sampling_so_narrow_that_one_token_is_left_is_greedy(colocated, changes):
    assert tokens(colocated.generate([ids(10, 6)], sampled(5, **changes))) == tokens(
        colocated.generate([ids(10, 6)], GREEDY)
    )


def test_top_k_beyond_the_vocabulary_keeps_all(colocated):
    wide, free = tokens(colocated.generate([ids(11, 6)] * 2, [sampled(5, top_k=10**6), sampled(5)]))
    assert wide == free


# --- many at once ---------------------------------------------------------------------------------------------------


def test_many_requests_and_aborts_change_no_token_leak_no_page_and_compile_nothing(streamed, colocated):
    draw = random.Random(15)
    prompts = [ids(seed, draw.randint(1, 150)) for seed in range(40)]
    each = [sampled(seed, max_tokens=draw.randint(1, 40), temperature=seed % 2) for seed in range(40)]
    want = tokens(colocated.generate(prompts, each))
    before = compiles.compiled()[0]
    handles = [streamed.submit(prompt, params) for prompt, params in zip(prompts, each, strict=True)]
    dropped = range(0, 40, 4)
    for number in dropped:
        if number % 8:
            first_token_of(handles[number])
        handles[number].abort()
    got = [handle.result(WAIT_S) for handle in handles]
    assert compiles.compiled()[0] == before
    for number, result in enumerate(got):
        if number in dropped:
            assert result.token_ids == want[number][: len(result.token_ids)]
        else:
            assert result.token_ids == want[number]


@pytest.mark.slow
def test_a_pool_too_small_for_all_rows_preempts_and_changes_no_token(colocated):
    prompts, params = [ids(seed, 40) for seed in range(5)], sampled(1, max_tokens=50)
    with engine(scheduler=First(), decode_num_pages=17) as small:
        results = small.generate(prompts, params)
        settle(small)
    assert sum(result.record.preemptions for result in results) > 0
    assert tokens(results) == tokens(colocated.generate(prompts, params))


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["colocated", "colocated_chunked", "disaggregated", "dynamic"])
def test_a_warm_engine_compiles_nothing_whatever_its_policy(scheduler):
    draw = random.Random(16)
    prompts = [ids(seed, draw.randint(1, 100)) for seed in range(20)]
    each = [sampled(seed, max_tokens=draw.randint(1, 30)) for seed in range(20)]
    with engine(scheduler=scheduler, prefill_chunk=16, decode_max_batch=2, warmup=True) as warm:
        results = warm.generate(prompts, each)
        assert warm.compiles_while_serving == 0
        settle(warm)
    assert [len(result.token_ids) for result in results] == [params.max_tokens for params in each]


@pytest.mark.slow
def test_two_prefill_and_two_decode_instances_share_the_work_and_change_no_token(colocated):
    prompts = [ids(seed, 40) for seed in range(12)]
    with engine(prefill_instances=2, decode_instances=2, stream_layers=2) as four:
        results = four.generate(prompts, sampled(1))
        settle(four)
    assert {result.placement.prefill for result in results} == {0, 1}
    assert {result.placement.decode for result in results} == {2, 3}
    assert tokens(results) == tokens(colocated.generate(prompts, sampled(1)))


# --- policies -------------------------------------------------------------------------------------------------------


class Own(RoundRobin):
    traits = Traits(prefill_decodes=False, decode_prefills=False)


def test_a_policy_of_the_users_own_serves_the_same_tokens(colocated):
    prompts = [ids(seed, 30) for seed in range(6)]
    with engine(scheduler=Own()) as served:
        results = served.generate(prompts, GREEDY)
    assert {result.placement.reason for result in results} == {"its turn"}
    assert tokens(results) == tokens(colocated.generate(prompts, GREEDY))
