"""Plays a workload on an engine: requests go out at their times, records come back as a `Report`.

Called by `Engine.replay`. The caller's thread asks; one other thread follows all answers, in an event loop, and calls
the caller back. Whatever ends a replay early (an error of a callback, Ctrl-C, an engine that breaks) ends its requests.
"""

import asyncio
import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pdjax.books import Books
from pdjax.capacity import Gauge
from pdjax.handle import Handle
from pdjax.prompts import Prompt
from pdjax.record import FlipRecord, IterationRecord, MoveRecord, RequestRecord, TransferRecord
from pdjax.report import Report
from pdjax.request import SamplingParams
from pdjax.workload import Item, Workload

if TYPE_CHECKING:
    from pdjax.engine import Engine

_END_S = 5.0  # for the answers of a replay that ends early


@dataclasses.dataclass(slots=True)
class Recorder:
    """What the cluster did meanwhile, and what its instances could still have taken on."""

    gauge: Gauge
    iterations: list[IterationRecord] = dataclasses.field(default_factory=list)
    transfers: list[TransferRecord] = dataclasses.field(default_factory=list)
    revisions: list[FlipRecord | MoveRecord] = dataclasses.field(default_factory=list)

    def iteration(self, record: IterationRecord, books: Books) -> None:
        self.iterations.append(record)
        self.gauge.sample(books, record.instance)


def check(workload: Workload, accept: Callable[[Prompt, SamplingParams], object]) -> None:
    """ValueError, with the number of the item, if `accept` refuses one."""
    for index, item in enumerate(workload.items):
        try:
            accept(item.prompt, item.sampling)
        except ValueError as error:
            raise ValueError(f"workload item {index}: {error}") from None


def replay(
    engine: "Engine",
    recorder: Recorder,
    workload: Workload,
    on_text: Callable[[int, str], None] | None,
    progress: Callable[[int, int], None] | None,
) -> Report:
    """Serves all items and waits for the last.

    Args:
        engine: idle; its records go to `recorder` meanwhile.
        workload: open loop by `arrival_s`, or a closed loop of `clients`.
        on_text: gets (index of the item, new text) as answers grow, from one thread that is not the caller's.
        progress: gets (ended, all), from that thread too.

    Raises:
        ValueError: an item that the engine refuses; nothing is started.
        RuntimeError: the engine broke.
        Exception: what a callback raised; no more is asked, and what is live has been aborted.
    """
    items = workload.items
    check(workload, engine.check)
    run = _Run(engine, len(items), on_text, progress)
    try:
        started = time.perf_counter()
        if workload.clients is None:
            for index, item in enumerate(items):
                run.pause(started + item.arrival_s - time.perf_counter())
                run.ask(index, item)
        else:
            room = threading.Semaphore(workload.clients)
            for index, item in enumerate(items):
                room.acquire()
                run.ask(index, item, room.release)
        records = run.records()
    finally:
        run.close()
    ends = [record.timeline.finished_s or 0.0 for record in records]
    first = min((record.timeline.arrival_s for record in records), default=0.0)
    return Report(
        records,
        recorder.iterations,
        recorder.transfers,
        max(ends, default=0.0) - first,
        engine.specs,
        recorder.gauge.summary(),
        tuple(recorder.revisions),
    )


class _Run:
    """The requests of one replay, and the thread that follows their answers."""

    def __init__(
        self,
        engine: "Engine",
        total: int,
        on_text: Callable[[int, str], None] | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._engine, self._total, self._on_text, self._progress = engine, total, on_text, progress
        self._handles: list[Handle] = []
        self._answers: list[concurrent.futures.Future[RequestRecord]] = []
        self._ended = 0
        self._failed = threading.Event()
        self._ending: BaseException | None = None  # what would end the thread, not only an answer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="answers", daemon=True)
        self._thread.start()

    def pause(self, seconds: float) -> None:
        """Less if an answer fails."""
        if seconds > 0:
            self._failed.wait(seconds)

    def ask(self, index: int, item: Item, then: Callable[[], None] = lambda: None) -> None:
        if self._failed.is_set():
            self.records()  # raises
        handle = self._engine.submit(item.prompt, item.sampling, item.slo_class or item.slo, item.user_id)
        self._handles.append(handle)
        self._answers.append(asyncio.run_coroutine_threadsafe(self._follow(index, handle, then), self._loop))

    def records(self) -> list[RequestRecord]:
        """Of all that were asked, in order, when the last has ended; the error if there was one."""
        done = concurrent.futures.wait(self._answers, return_when=concurrent.futures.FIRST_EXCEPTION).done
        if self._ending is not None:
            raise self._ending
        for answer in done:
            answer.result()
        return [answer.result() for answer in self._answers]

    def close(self) -> None:
        """Ends what is live, and the thread."""
        for handle in self._handles:
            handle.abort()
        concurrent.futures.wait(self._answers, _END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _follow(self, index: int, handle: Handle, then: Callable[[], None]) -> RequestRecord:
        try:
            try:
                if self._on_text is not None:
                    async for delta in handle:
                        self._on_text(index, delta.text)
                return (await handle).record
            finally:
                self._ended += 1
                if self._progress is not None:
                    self._progress(self._ended, self._total)
        except (SystemExit, KeyboardInterrupt) as error:  # an event loop would die of it, and answer nobody
            self._ending = error
            self._failed.set()
            raise RuntimeError("a callback ended the replay") from error
        except BaseException:
            self._failed.set()
            raise
        finally:
            then()
