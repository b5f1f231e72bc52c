"""What a user holds of a request: tokens as they come, and the result. Filled by the engine's thread.

Tokens are kept here, at most `max_tokens` of them, until the user takes them: a slow reader stalls nobody.
Text is made in the reader's thread.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

from pdjax import metrics
from pdjax.models.tokenizer import Detokenizer, Tokenizer
from pdjax.record import FinishReason, RequestRecord
from pdjax.request import Request


@dataclasses.dataclass(frozen=True, slots=True)
class Delta:
    """New tokens, and the text that they complete (never half a character)."""

    text: str
    token_ids: tuple[int, ...]


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
        text: without special tokens; "" if the model has no tokenizer.
        token_ids: a final stop token included.
        finish_reason: "stop", "length", "abort", "rejected" or "error"; `placement.reason` says more of the last two.
        metrics: `ttft_ms`, `tpot_ms` (None for one token), `e2e_ms`, and `parts_ms` that add up to it.
        record: everything that was written down.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    metrics: dict[str, Any]
    placement: Placement
    record: RequestRecord


class Handle:
    """A submitted request. Iterate it for `Delta`s, or wait for `result`. Safe from any thread."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, abort: Callable[[int], None]) -> None:
        self.request = request
        self._tokenizer = tokenizer
        self._abort = abort
        self._changed = threading.Condition()
        self._tokens: list[int] = []
        self._record: RequestRecord | None = None
        self._fault: BaseException | None = None

    def abort(self) -> None:
        """Ends the request; what was generated so far stays. Does nothing if it has ended."""
        self._abort(self.request.id)

    @property
    def done(self) -> bool:
        with self._changed:
            return self._record is not None or self._fault is not None

    def __iter__(self) -> Iterator[Delta]:
        """Deltas until the end. Leaving the loop early, by Ctrl-C too, aborts the request."""
        deltas = self._deltas()
        next(deltas)  # a generator that has not started ends without its `finally`
        return deltas

    def _deltas(self) -> Iterator[Delta]:
        """An empty delta at once, then those that come."""
        detokenizer = Detokenizer(self._tokenizer) if self._tokenizer else None
        taken, ended = 0, False
        try:
            yield Delta("", ())
            while not ended:
                with self._changed:
                    while len(self._tokens) == taken and not self._over():
                        self._changed.wait()
                    new, ended = tuple(self._tokens[taken:]), self._over()
                    self._raise_fault()
                taken += len(new)
                text = detokenizer.push(new) if detokenizer else ""
                if ended and detokenizer:
                    text += detokenizer.finish()
                if new or text:
                    yield Delta(text, new)
        finally:
            if not ended:
                self.abort()

    def result(self, timeout_s: float | None = None) -> Result:
        """Waits for the end.

        Raises:
            TimeoutError: it has not ended after timeout_s; it goes on.
            RuntimeError: the engine broke, or was closed.
            KeyboardInterrupt: Ctrl-C; the request is aborted.
        """
        try:
            with self._changed:
                if not self._changed.wait_for(self._over, _bounded(timeout_s)):
                    raise TimeoutError(f"request {self.request.id} has not ended after {timeout_s} s")
                self._raise_fault()
                record = self._record
        except KeyboardInterrupt:
            self.abort()
            raise
        assert record is not None
        timed = bool(record.timeline.token_s)
        return Result(
            request_id=record.request_id,
            text=self._tokenizer.decode(record.token_ids) if self._tokenizer else "",
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
        )

    # --- the engine's side ------------------------------------------------------------------------------------------

    def push(self, token: int, logprob: float | None) -> bool:
        """Takes the next token; True if the text ends with it."""
        with self._changed:
            self._tokens.append(token)
            self._changed.notify_all()
        return False

    def finish(self, record: RequestRecord) -> None:
        with self._changed:
            self._record = record
            self._abort = _nothing  # a kept handle does not keep its engine
            self._changed.notify_all()

    def fail(self, fault: BaseException) -> None:
        """The engine broke or was closed: whoever waits, now or later, gets the error and its cause."""
        with self._changed:
            self._fault = fault
            self._abort = _nothing
            self._changed.notify_all()

    def _over(self) -> bool:
        return self._record is not None or self._fault is not None

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise RuntimeError(str(self._fault)) from self._fault.__cause__


def _bounded(timeout_s: float | None) -> float | None:
    """What a lock can wait for; longer is for ever."""
    return None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)


def _nothing(request_id: int) -> None:
    """There is nothing left to abort."""
