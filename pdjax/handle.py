"""What a user holds of a request: tokens as they come, and the result. Filled by the engine's thread.

Tokens are kept here, at most `max_tokens` of them, until the user takes them: a slow reader stalls nobody. A reader is
a thread or a coroutine, makes its text itself, and there may be several, in any number of event loops. Only a request
with stop texts costs the engine's thread a text, since that must know when one is complete.
"""

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

from pdjax import metrics
from pdjax.models.tokenizer import Tokenizer
from pdjax.record import FinishReason, RequestRecord
from pdjax.request import Request
from pdjax.text import AnswerText, text_of


@dataclasses.dataclass(frozen=True, slots=True)
class Delta:
    """New tokens, and the text that they make certain: never half a character, nothing that could still become a stop
    text. `logprobs`: of the tokens, None unless asked for."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Where a request ran, and why there."""

    prefill: int | None
    decode: int | None
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """A request's end.

    Attributes:
        text: without special tokens, up to a stop text; "" if the model has no tokenizer. Equal to all deltas' text.
        token_ids: all that were generated, a stop token and the tokens of a stop text included.
        finish_reason: "stop", "length", "abort", "deadline", "rejected" or "error"; `placement.reason` says more of the
            last three.
        metrics: `ttft_ms`, `tpot_ms` (None for one token), `e2e_ms`, and `parts_ms` that add up to it.
        record: everything that was written down.
        logprobs: of every token, None unless asked for.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    metrics: dict[str, Any]
    placement: Placement
    record: RequestRecord
    logprobs: tuple[float, ...] | None = None


class Handle:
    """A submitted request. Iterate it for `Delta`s (`for` or `async for`), or wait for the result (`result` or
    `await`). Safe from any thread and any event loop."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, abort: Callable[[int], None]) -> None:
        self.request = request
        self._tokenizer = tokenizer
        self._abort = abort
        self._lock = threading.Lock()
        self._grown = _Signal(self._lock)  # a token came, or the end
        self._ended = _Signal(self._lock)
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._record: RequestRecord | None = None
        self._fault: BaseException | None = None
        stop = request.sampling.stop
        self._watch = AnswerText(tokenizer, stop) if stop else None  # of the engine's thread

    def abort(self) -> None:
        """Ends the request; what was generated so far stays. Does nothing if it has ended."""
        self._abort(self.request.id)

    @property
    def done(self) -> bool:
        with self._lock:
            return self._over()

    def __iter__(self) -> Iterator[Delta]:
        """Deltas until the end. Leaving the loop early, by Ctrl-C too, aborts the request."""
        deltas = self._deltas()
        next(deltas)  # a generator that has not started ends without its `finally`
        return deltas

    def _deltas(self) -> Iterator[Delta]:
        """An empty delta at once, then those that come."""
        reader = _Reader(self)
        try:
            yield Delta("", ())
            while not reader.ended:
                with self._lock:
                    self._grown.threads.wait_for(reader.news)
                if delta := reader.take():
                    yield delta
        finally:
            if not reader.ended:
                self.abort()

    def __aiter__(self) -> "AsyncDeltas":
        """Deltas until the end, for the running event loop. Leaving the loop early aborts the request, and so does
        cancelling the task."""
        return AsyncDeltas(self)

    def result(self, timeout_s: float | None = None) -> Result:
        """Waits for the end.

        Raises:
            TimeoutError: it has not ended after timeout_s; it goes on.
            RuntimeError: the engine broke, or was closed.
            KeyboardInterrupt: Ctrl-C; the request is aborted.
        """
        try:
            with self._lock:
                if not self._ended.threads.wait_for(self._over, _bounded(timeout_s)):
                    raise TimeoutError(f"request {self.request.id} has not ended after {timeout_s} s")
        except KeyboardInterrupt:
            self.abort()
            raise
        return self._result()

    async def aresult(self) -> Result:
        """Waits for the end without holding up the event loop; `await handle` is the same.

        Raises:
            RuntimeError: the engine broke, or was closed.
            CancelledError: the task was cancelled; the request is aborted (unless this is under `asyncio.shield`).
        """
        try:
            with self._lock:
                ended = None if self._over() else self._ended.future()
            if ended is not None:
                await ended
        except asyncio.CancelledError:
            self.abort()
            raise
        return self._result()

    def __await__(self) -> Generator[Any, None, Result]:
        return self.aresult().__await__()

    def _result(self) -> Result:
        with self._lock:
            self._raise_fault()
            record = self._record
        assert record is not None
        sampling = self.request.sampling
        timed = bool(record.timeline.token_s)
        return Result(
            request_id=record.request_id,
            text=text_of(self._tokenizer, sampling.stop, record.token_ids),
            token_ids=record.token_ids,
            finish_reason=record.finish_reason,
            metrics={
                "ttft_ms": metrics.ttft_ms(record),
                "tpot_ms": metrics.tpot_ms(record),
                "e2e_ms": metrics.e2e_ms(record),
                "parts_ms": metrics.parts(record) if timed else None,
            },
            placement=Placement(record.prefill_instance, record.decode_instance, record.reason),
            record=record,
            logprobs=record.logprobs if sampling.logprobs else None,
        )

    # --- the engine's side ------------------------------------------------------------------------------------------

    def push(self, token: int, logprob: float | None) -> bool:
        """Takes the next token; True if the text ends with it."""
        with self._lock:
            self._tokens.append(token)
            if logprob is not None:
                self._logprobs.append(logprob)
            self._grown.wake()
        if self._watch is None:
            return False
        self._watch.push((token,))
        return self._watch.stopped

    def finish(self, record: RequestRecord) -> None:
        self._end(record, None)

    def fail(self, fault: BaseException) -> None:
        """The engine broke or was closed: whoever waits, now or later, gets the error and its cause."""
        self._end(None, fault)

    def _end(self, record: RequestRecord | None, fault: BaseException | None) -> None:
        with self._lock:
            if self._over():
                return
            self._record, self._fault = record, fault
            self._abort = _nothing  # a kept handle does not keep its engine
            self._grown.wake()
            self._ended.wake()

    def _over(self) -> bool:
        return self._record is not None or self._fault is not None

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise RuntimeError(str(self._fault)) from self._fault.__cause__


class AsyncDeltas:
    """The deltas of a request for one task: an asynchronous iterator.

    The request is aborted when this is closed or dropped before the end, and when the task that waits is cancelled.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._reader = _Reader(handle)

    def __aiter__(self) -> "AsyncDeltas":
        return self

    async def __anext__(self) -> Delta:
        """Raises RuntimeError if the engine broke, or was closed."""
        handle, reader = self._handle, self._reader
        try:
            while not reader.ended:
                with handle._lock:
                    news = None if reader.news() else handle._grown.future()
                if news is not None:
                    await news
                if delta := reader.take():
                    return delta
        except asyncio.CancelledError:
            handle.abort()
            raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Aborts the request unless everything was read; `contextlib.aclosing` calls it."""
        self._drop()

    def __del__(self) -> None:
        self._drop()

    def _drop(self) -> None:
        if not self._reader.ended:
            self._handle.abort()


class _Reader:
    """How far one reader has come.

    Attributes:
        ended: everything was taken.
    """

    def __init__(self, handle: Handle) -> None:
        self.ended = False
        self._handle = handle
        self._taken = 0
        self._text = AnswerText(handle._tokenizer, handle.request.sampling.stop)

    def news(self) -> bool:
        """Whether `take` has something to do. Under the handle's lock."""
        return len(self._handle._tokens) > self._taken or self._handle._over()

    def take(self) -> Delta | None:
        """What came since the last time; None if that is nothing. RuntimeError if the engine broke."""
        handle = self._handle
        with handle._lock:
            handle._raise_fault()
            tokens = tuple(handle._tokens[self._taken :])
            scores = tuple(handle._logprobs[self._taken :])
            self.ended = handle._over()
        self._taken += len(tokens)
        text = self._text.push(tokens) + (self._text.finish() if self.ended else "")
        if not tokens and not text:
            return None
        return Delta(text, tokens, scores if handle.request.sampling.logprobs else None)


class _Signal:
    """Wakes the threads and the coroutines that wait for something. All under one lock."""

    def __init__(self, lock: threading.Lock) -> None:
        self.threads = threading.Condition(lock)
        self._futures: list[asyncio.Future[None]] = []

    def future(self) -> asyncio.Future[None]:
        """Done, in the running event loop, after the next `wake`."""
        future = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        return future

    def wake(self) -> None:
        self.threads.notify_all()
        woken, self._futures = self._futures, []
        for future in woken:
            with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits there any more
                future.get_loop().call_soon_threadsafe(_resolve, future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():  # its task may have been cancelled
        future.set_result(None)


def _bounded(timeout_s: float | None) -> float | None:
    """What a lock can wait for; longer is for ever."""
    return None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)


def _nothing(request_id: int) -> None:
    """There is nothing left to abort."""
