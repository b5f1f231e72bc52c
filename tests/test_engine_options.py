"""What a request may ask for beside its tokens, and an engine beside its size: stop texts, log probabilities,
asynchronous streams, deadlines, a bounded queue, a warm-up of its own."""

import asyncio
import contextlib
import dataclasses
import re
import threading

import pytest
import tokenizers
from tokenizers import decoders, models

import pdjax
from pdjax.messages import Tick
from pdjax.models.tokenizer import Tokenizer
from pdjax.schedulers import Wait
from tests.engines import GREEDY, WAIT_S, First, engine, first_token_of, ids, sampled, settle, usable, wire

pytest_plugins = ["tests.shared_engines"]
pytestmark = pytest.mark.usefixtures("everything_ends")

LONG = pdjax.SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PROMPT = "hello"


def text(deltas):
    return "".join(delta.text for delta in deltas)


async def read(deltas):
    return [delta async for delta in deltas]


# --- stop texts -----------------------------------------------------------------------------------------------------


@pytest.fixture
def lettered(monkeypatch):
    """Gives every token of an engine a letter of its own, so that whatever random weights answer is a text."""
    backend = tokenizers.Tokenizer(models.WordLevel({chr(0x4E00 + token): token for token in range(512)}, chr(0x4E00)))
    backend.decoder = decoders.Fuse()

    def letter(served):
        monkeypatch.setattr(
            served, "_source", dataclasses.replace(served._source, tokenizer_or_none=Tokenizer(backend))
        )

    return letter


def test_a_stop_text_across_tokens_ends_the_request_there_however_it_is_read(apart, colocated, lettered):
    lettered(apart)
    prompt, params = ids(4, 9), sampled(3)
    free = "".join(chr(0x4E00 + token) for token in colocated.generate([prompt], params)[0].token_ids)
    stop = free[4:6]
    stopped = dataclasses.replace(params, stop=stop)
    (result,) = apart.generate([prompt], stopped)
    assert (result.finish_reason, result.text) == ("stop", free[: free.index(stop)])
    assert len(result.token_ids) == free.index(stop) + 2
    assert text(apart.stream(prompt, stopped)) == text(asyncio.run(read(apart.astream(prompt, stopped)))) == result.text


def test_a_stop_text_in_the_first_token_ends_the_request_where_it_is_prefilled(apart, lettered):
    lettered(apart)
    (free,) = apart.generate([ids(4, 9)], GREEDY)
    before = wire(apart).started
    (result,) = apart.generate([ids(4, 9)], dataclasses.replace(GREEDY, stop=(free.text[0],)))
    assert (result.text, result.token_ids, result.finish_reason) == ("", free.token_ids[:1], "stop")
    assert result.record.timeline.decode_start_s is None
    assert apart.config.stream_layers or wire(apart).started == before  # what streams was on its way already


def test_stop_texts_of_one_request_stop_no_other(apart, lettered):
    lettered(apart)
    (free,) = apart.generate([ids(4, 9)], GREEDY)
    each = [dataclasses.replace(GREEDY, stop=free.text[4:6]), GREEDY]
    stopped, other = apart.generate([ids(4, 9)] * 2, each)
    assert (stopped.finish_reason, other.finish_reason) == ("stop", "length") and other.text == free.text


def test_stop_texts_need_a_model_with_a_tokenizer(pulled, monkeypatch):
    monkeypatch.setattr(pulled, "_source", dataclasses.replace(pulled._source, tokenizer_or_none=None))
    for ask in (pulled.submit, pulled.check, pulled.stream, pulled.astream):
        with pytest.raises(ValueError, match=re.escape("stop is ('x',); allowed: none, since 'tiny' has no tokenizer")):
            ask([1, 2], pdjax.SamplingParams(stop="x"))


# --- log probabilities ----------------------------------------------------------------------------------------------


def test_log_probabilities_are_those_of_the_colocated_engine(apart, colocated):
    params = sampled(3, logprobs=True)
    (got,), (want,) = (served.generate([ids(4, 20)], params) for served in (apart, colocated))
    assert got.token_ids == want.token_ids and len(got.logprobs) == len(got.token_ids)
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4) and max(got.logprobs) < 0
    streamed = [score for delta in apart.stream(ids(4, 20), params) for score in delta.logprobs]
    assert streamed == pytest.approx(want.logprobs, abs=1e-4)


def test_only_who_asks_gets_log_probabilities(apart):
    with_them, without = apart.generate([PROMPT] * 2, [dataclasses.replace(GREEDY, logprobs=True), GREEDY])
    assert with_them.token_ids == without.token_ids
    assert without.logprobs is None and without.record.logprobs == ()
    assert all(score < 0 for score in with_them.logprobs)


# --- asynchronous streams -------------------------------------------------------------------------------------------


def test_many_asynchronous_requests_share_one_event_loop(apart, colocated):
    prompts = [ids(seed, 5 + seed) for seed in range(8)]

    async def ask():
        streams = [read(apart.astream(prompt, GREEDY)) for prompt in prompts]
        results = [apart.submit(prompt, GREEDY).aresult() for prompt in prompts]
        return await asyncio.gather(*streams, *results)

    answers, want = asyncio.run(ask()), colocated.generate(prompts, GREEDY)
    assert [text(deltas) for deltas in answers[:8]] == [result.text for result in want]
    assert [result.token_ids for result in answers[8:]] == [result.token_ids for result in want]


@pytest.mark.parametrize("how", ["closed", "cancelled"])
def test_an_asynchronous_stream_left_early_gives_its_pages_back(apart, how):
    async def leave():
        deltas = apart.astream(ids(13, 9), LONG)
        if how == "closed":
            async with contextlib.aclosing(deltas):
                await anext(deltas)
        else:
            task = asyncio.ensure_future(read(deltas))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return deltas._handle

    assert asyncio.run(leave()).result(WAIT_S).finish_reason == "abort"
    settle(apart)


# --- deadlines and the queue ----------------------------------------------------------------------------------------


def test_a_deadline_ends_a_request_with_the_tokens_that_it_has(pulled, monkeypatch):
    wire(pulled).hold()
    late, other = pulled.submit(ids(3, 5), GREEDY, deadline_s=30), pulled.submit(ids(4, 5), GREEDY)
    first_token_of(late)
    now = pulled._cluster.now
    monkeypatch.setattr(pulled._cluster, "now", lambda: now() + 31)  # and no transfer is given up before 60 s
    pulled._cluster.post(Tick())
    result = late.result(WAIT_S)
    assert (result.finish_reason, len(result.token_ids)) == ("deadline", 1) and "deadline" in result.placement.reason
    assert not other.done
    wire(pulled).release()
    assert other.result(WAIT_S).finish_reason == "length"


def test_a_request_that_is_done_in_time_knows_no_deadline(pulled):
    assert pulled.submit(ids(3, 5), GREEDY, deadline_s=1e6).result(WAIT_S).finish_reason == "length"


@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), float("inf"), 1e7, "soon", True])
def test_an_impossible_deadline_is_refused(pulled, bad):
    with pytest.raises(ValueError, match=re.escape(f"deadline_s is {bad!r}; allowed: seconds > 0, at most 1000000")):
        pulled.submit(PROMPT, GREEDY, deadline_s=bad)


class Waits(First):
    """Until `gate` is set, nobody is placed."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()

    def place(self, ask, cluster):
        return super().place(ask, cluster) if self.gate.is_set() else Wait("the gate is shut")


def test_one_request_too_many_in_the_queue_is_rejected_with_the_reason():
    policy = Waits()
    with engine(scheduler=policy, max_queue=2) as served:
        waiting = [served.submit(PROMPT, GREEDY) for _ in range(2)]
        result = served.submit(PROMPT, GREEDY).result(WAIT_S)
        assert (result.finish_reason, result.token_ids, result.text) == ("rejected", (), "")
        assert "max_queue" in result.placement.reason
        assert not any(handle.done for handle in waiting)
        policy.gate.set()
        waiting.append(served.submit(PROMPT, GREEDY))  # an event: the policy is asked again; this one is still too many
        assert [handle.result(WAIT_S).finish_reason for handle in waiting] == ["length", "length", "rejected"]
        settle(served)


# --- warm-up --------------------------------------------------------------------------------------------------------


def test_a_warm_up_may_come_later_and_compiles_all_that_serves():
    told = []
    with engine(stream_layers=0) as served:
        done = served.warmup(lambda *report: told.append(report))
        assert served.warmup() is done and done.seconds > 0 and done.compile_s >= 0
        assert {name.split(":")[0] for name in done.programs} == {"prefill instance 0", "decode instance 1"}
        assert len(set(done.programs)) == len(done.programs) < len(told)
        served.generate([ids(1, 40)] * 3, sampled(1))
        assert served.compiles_while_serving == 0
        assert served._controller.books.instances[0].latency.iteration[0] > 0
        assert served.warmup() is done
        settle(served)


def test_an_engine_that_warmed_up_at_its_start_tells_what_it_did(streamed):
    done = streamed.warmup()
    assert {name.split(":")[0] for name in done.programs} == {"prefill instance 0", "decode instance 1"}
    assert done.seconds <= streamed.warmup_s


def test_a_warm_up_after_the_first_request_is_refused(pulled):
    pulled.generate(PROMPT, GREEDY)
    with pytest.raises(RuntimeError, match=r"warmup\(\) comes before the first request"):
        pulled.warmup()


def test_an_error_while_warming_up_reaches_the_caller_and_the_engine_lives():
    def burst(done, total, what):
        raise OSError("no terminal")

    with engine(stream_layers=0) as served:
        with pytest.raises(OSError, match="no terminal"):
            served.warmup(burst)
        assert len(served.generate(PROMPT, GREEDY)[0].token_ids) == 12


def test_closing_ends_a_warm_up():
    begun, closed, seen = threading.Event(), threading.Event(), []

    def wait(done, total, what):
        begun.set()
        assert closed.wait(WAIT_S)

    served = engine(stream_layers=0)

    def warm():
        with pytest.raises(RuntimeError) as caught:
            served.warmup(wait)
        seen.append(str(caught.value))

    thread = threading.Thread(target=warm)
    thread.start()
    assert begun.wait(WAIT_S)
    served._closing.set()  # what `close` does first; it then waits for the lane, which waits here
    closed.set()
    thread.join(WAIT_S)
    served._closing.clear()
    served.close()
    assert seen == ["the engine is closed"]


# --- ids ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [5, b"me", ["me"]])
def test_an_id_that_is_no_text_is_refused(pulled, bad):
    with pytest.raises(ValueError, match=re.escape(f"user_id is {bad!r}; allowed: a text, or None")):
        pulled.submit(PROMPT, GREEDY, user_id=bad)


def test_token_ids_are_never_changed_and_no_bos_is_doubled(pulled):
    bos = pulled._source.tokenizer().bos_id
    for prompt in ([97], [bos, 97], [bos, bos, 97]):
        assert pulled.check(prompt) == tuple(prompt)
    assert pulled.check("<bos>a") == pulled.check("a") == (bos, 97)


def test_all_pages_are_free_when_a_first_token_was_the_last(pulled):
    first_token_of(pulled.submit(PROMPT, dataclasses.replace(GREEDY, max_tokens=1)))
    settle(pulled)
    assert pulled.free_pages == usable(pulled)
