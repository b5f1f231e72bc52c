"""Plays a workload on an engine: requests go out at their times, records come back as a `Report`."""

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pdjax.handle import Handle
from pdjax.prompts import Prompt
from pdjax.record import IterationRecord, TransferRecord
from pdjax.report import Report
from pdjax.request import SamplingParams
from pdjax.workload import Item, Workload

if TYPE_CHECKING:
    from pdjax.engine import Engine


@dataclasses.dataclass(slots=True)
class Recorder:
    """What the cluster did meanwhile."""

    iterations: list[IterationRecord] = dataclasses.field(default_factory=list)
    transfers: list[TransferRecord] = dataclasses.field(default_factory=list)


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
        on_text: gets (index of the item, new text) as answers grow, from several threads.
        progress: gets (ended, all).

    Raises:
        ValueError: an item that the engine refuses; nothing is started.
        RuntimeError: the engine broke.
    """
    items = workload.items
    check(workload, engine.check)
    run = _Run(engine, len(items), on_text, progress)
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
    records = [handle.result().record for handle in run.handles]
    run.join()
    ends = [record.timeline.finished_s or 0.0 for record in records]
    first = min((record.timeline.arrival_s for record in records), default=0.0)
    return Report(records, recorder.iterations, recorder.transfers, max(ends, default=0.0) - first, engine.specs)


class _Run:
    """The requests of one replay; each has a thread that follows it, so that text is shown as it comes."""

    def __init__(
        self,
        engine: "Engine",
        total: int,
        on_text: Callable[[int, str], None] | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.handles: list[Handle] = []
        self._engine, self._total, self._on_text, self._progress = engine, total, on_text, progress
        self._threads: list[threading.Thread] = []
        self._ended = 0
        self._lock = threading.Lock()
        self._never = threading.Event()

    def pause(self, seconds: float) -> None:
        if seconds > 0:
            self._never.wait(seconds)

    def ask(self, index: int, item: Item, then: Callable[[], None] = lambda: None) -> None:
        handle = self._engine.submit(item.prompt, item.sampling, item.slo, item.user_id)
        self.handles.append(handle)
        thread = threading.Thread(target=self._follow, args=(index, handle, then), name=f"answer-{index}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _follow(self, index: int, handle: Handle, then: Callable[[], None]) -> None:
        try:
            if self._on_text is not None:
                for delta in handle:
                    self._on_text(index, delta.text)
            else:
                handle.result()
        except RuntimeError:
            pass  # the engine broke: `result` tells whoever waits for the report
        finally:
            then()
        with self._lock:
            self._ended += 1
            if self._progress is not None:
                self._progress(self._ended, self._total)
