"""What a user holds of a request, filled by hand: streams in threads and event loops, results, ends."""

import asyncio
import contextlib
import gc
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.handle import Handle
from pdjax.models.tokenizer import byte_tokenizer
from pdjax.record import RequestRecord, Timeline
from pdjax.request import SLO, Request, SamplingParams, State

WAIT_S = 60
BYTES = byte_tokenizer()
EXAMPLES = settings(derandomize=True, deadline=None, max_examples=40)


class Filled:
    """A handle and what the engine would do with it."""

    def __init__(self, **sampling):
        self.aborted = []
        self.request = Request(7, (1,), SamplingParams(**sampling))
        self.handle = Handle(self.request, BYTES, self.aborted.append)
        self.tokens = []
        self.logprobs = []

    def push(self, *tokens, logprob=None):
        for token in tokens:
            self.tokens.append(token)
            self.logprobs += [] if logprob is None else [logprob]
            if self.handle.push(token, logprob):
                return True
        return False

    def finish(self, reason="length"):
        times = Timeline(0.0, finished_s=1.0)
        ids, scores = tuple(self.tokens), tuple(self.logprobs)
        self.handle.finish(RequestRecord("7", 1, ids, State.FINISHED, reason, SLO(), times, logprobs=scores))


async def read(deltas):
    return [delta async for delta in deltas]


def text(deltas):
    return "".join(delta.text for delta in deltas)


@EXAMPLES
@given(
    st.text("aé你🎉b", max_size=15),
    st.lists(st.text("aé你b", min_size=1, max_size=3), max_size=2),
    st.lists(st.booleans(), min_size=60, max_size=60),
)
def test_every_way_to_read_gives_the_same_text_and_tokens(answer, stops, pauses):
    filled = Filled(stop=stops)

    async def serve():
        reading = asyncio.ensure_future(read(filled.handle))
        for byte, pause in zip(answer.encode(), pauses, strict=False):
            if filled.push(byte):
                break
            if pause:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        filled.finish()
        return await reading, await filled.handle

    asynchronous, result = asyncio.run(serve())
    threaded = list(filled.handle)
    assert text(asynchronous) == text(threaded) == result.text == filled.handle.result().text
    for deltas in (asynchronous, threaded):
        assert tuple(token for delta in deltas for token in delta.token_ids) == result.token_ids
    assert not filled.aborted


@EXAMPLES
@given(st.text("aé你b", max_size=15), st.lists(st.text("aé你b", min_size=1, max_size=3), min_size=1, max_size=2))
def test_a_request_ends_with_the_token_that_completes_a_stop_text(answer, stops):
    filled, ids = Filled(stop=stops), list(answer.encode())
    # Half a character is no text yet, and no stop text holds the sign for one.
    texts = [BYTES.decode(ids[:count]).rstrip("\ufffd") for count in range(1, len(ids) + 1)]
    ends = [count for count, shown in enumerate(texts, start=1) if any(stop in shown for stop in stops)]
    assert filled.push(*ids) == bool(ends)
    assert not ends or len(filled.tokens) == ends[0]


def test_requests_without_stop_texts_cost_the_engine_no_text(monkeypatch):
    filled = Filled()
    monkeypatch.setattr(type(BYTES), "decode", lambda *arguments: pytest.fail("it made text"))
    assert not filled.push(*b"text")


def test_log_probabilities_come_with_their_tokens():
    filled = Filled(logprobs=True)
    deltas = iter(filled.handle)
    filled.push(97, logprob=-0.5)
    assert next(deltas).logprobs == (-0.5,)
    filled.push(98, 99, logprob=-1.5)
    filled.finish()
    assert [delta.logprobs for delta in deltas] == [(-1.5, -1.5)]
    assert filled.handle.result().logprobs == (-0.5, -1.5, -1.5)


def test_who_asks_for_no_log_probabilities_gets_none():
    filled = Filled()
    filled.push(97)
    filled.finish()
    assert filled.handle.result().logprobs is None and [delta.logprobs for delta in filled.handle] == [None]


def test_readers_in_several_event_loops_and_threads_get_everything():
    filled, got, ready = Filled(), {}, threading.Barrier(7)

    def follow(number):
        async def inside():
            deltas = aiter(filled.handle)
            first = await anext(deltas)
            ready.wait(WAIT_S)
            return [first, *await read(deltas)]

        if number % 2:
            got[number] = asyncio.run(inside())
        else:
            deltas = iter(filled.handle)
            first = next(deltas)
            ready.wait(WAIT_S)
            got[number] = [first, *deltas]

    threads = [threading.Thread(target=follow, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    filled.push(*b"some")
    ready.wait(WAIT_S)
    filled.push(*b" text")
    filled.finish()
    for thread in threads:
        thread.join(WAIT_S)
    assert [text(got[number]) for number in range(6)] == ["some text"] * 6


# --- leaving early --------------------------------------------------------------------------------------------------


async def cancelled(awaitable):
    task = asyncio.ensure_future(awaitable)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("wait", [lambda handle: read(handle), lambda handle: handle.aresult()], ids=["read", "result"])
def test_cancelling_the_task_that_waits_aborts_the_request(wait):
    filled = Filled()
    filled.push(97)
    asyncio.run(cancelled(wait(filled.handle)))
    assert filled.aborted[0] == 7


def test_a_wait_behind_a_shield_may_be_given_up_without_an_abort():
    filled = Filled()

    async def inside():
        waiting = asyncio.ensure_future(filled.handle.aresult())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.001)
        assert not filled.aborted
        filled.finish()
        assert (await waiting).finish_reason == "length"

    asyncio.run(inside())


@pytest.mark.parametrize("read_before", [0, 1])
@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_an_asynchronous_stream_that_is_left_early_aborts_the_request(how, read_before):
    filled = Filled()
    filled.push(97)

    async def inside():
        deltas = aiter(filled.handle)
        for _ in range(read_before):
            await anext(deltas)
        if how == "closed":
            await deltas.aclose()
        del deltas
        gc.collect()

    asyncio.run(inside())
    assert filled.aborted


def test_a_stream_that_was_read_to_its_end_aborts_nothing():
    filled = Filled()
    filled.push(97)
    filled.finish()
    asyncio.run(read(filled.handle))
    list(filled.handle)
    assert not filled.aborted


def test_an_event_loop_that_was_closed_meanwhile_disturbs_nobody():
    filled, loop = Filled(), asyncio.new_event_loop()
    loop.set_exception_handler(lambda *context: None)  # which says that its task never ended
    task = loop.create_task(read(filled.handle))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    filled.push(97)
    filled.finish()
    assert filled.handle.result().text == "a" and not task.done()


# --- ends -----------------------------------------------------------------------------------------------------------


def test_a_fault_reaches_every_way_of_waiting_with_its_cause():
    filled, fault = Filled(), RuntimeError("it broke")
    fault.__cause__ = KeyError("why")
    filled.handle.fail(fault)
    for wait in (
        lambda: filled.handle.result(),
        lambda: list(filled.handle),
        lambda: asyncio.run(read(filled.handle)),
        lambda: asyncio.run(filled.handle.aresult()),
    ):
        with pytest.raises(RuntimeError, match="it broke") as caught:
            wait()
        assert isinstance(caught.value.__cause__, KeyError)


def test_the_first_end_counts():
    filled = Filled()
    filled.finish()
    filled.handle.fail(RuntimeError("closed later"))
    assert filled.handle.result().finish_reason == "length"


def test_an_ended_handle_holds_on_to_no_engine():
    filled = Filled()
    filled.finish()
    filled.handle.abort()
    assert not filled.aborted
