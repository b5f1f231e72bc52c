"""What moving a prompt's KV costs, and how much of it a user sees. Enters: an engine that prefills in one instance and
decodes in another. Leaves: a `Point` per prompt length. Called by `pdjax.experiments.transfer`.

A user who has the first token waits for the second: for a decode step, and for what is left of the transfer by then.
That rest is the visible time.
"""

import dataclasses
import itertools
import random
import statistics
from collections.abc import Sequence
from typing import Any

from pdjax.record import RequestRecord
from pdjax.request import SamplingParams

STEPS = 8  # tokens after the first: their median gap is a decode step
_IDLE_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One prompt length; seconds are medians over requests that ran alone.

    Attributes:
        nbytes: KV of the prompt.
        prefill_s: start of the first chunk to the first token.
        busy_s: time in which bytes were on the wire, into the destination's staging ring.
        arrival_s: from the first byte's departure until all is in the destination's pages.
        visible_s: first to second token, beyond `step_s`.
        step_s: a decode step.
    """

    tokens: int
    nbytes: int
    prefill_s: float
    busy_s: float
    arrival_s: float
    visible_s: float
    step_s: float


def measure(engine: Any, lengths: Sequence[int], repeats: int, seed: int, vocabulary: int) -> list[Point]:
    """Asks for `repeats` prompts of each length, one after the other. A first request, which makes the connection, does
    not count.

    Raises:
        RuntimeError: a request did not end as it should, or its KV did not move.
    """
    rng = random.Random(seed)
    sampling = SamplingParams(temperature=0.0, max_tokens=1 + STEPS, ignore_eos=True)

    def ask(tokens: int) -> RequestRecord:
        record: RequestRecord = (
            engine.submit([rng.randrange(vocabulary) for _ in range(tokens)], sampling).result().record
        )
        if not engine.wait_idle(_IDLE_S):
            raise RuntimeError(f"the engine is not idle {_IDLE_S:g} s after a request")
        return record

    ask(min(lengths))
    return [summary([ask(tokens) for _ in range(repeats)]) for tokens in lengths]


def summary(records: Sequence[RequestRecord]) -> Point:
    """The point of requests of equal length. RuntimeError as of `measure`."""
    points = [_point(record) for record in records]
    medians = {
        field.name: statistics.median(getattr(point, field.name) for point in points)
        for field in dataclasses.fields(Point)
        if field.name.endswith("_s")
    }
    return dataclasses.replace(points[0], **medians)


def _point(record: RequestRecord) -> Point:
    line, times = record.timeline, record.timeline.token_s
    if len(times) != 1 + STEPS or not line.transfer_bytes or record.restarts:
        raise RuntimeError(f"a request was disturbed: {record}")
    assert line.prefill_start_s is not None and line.transfer_start_s is not None and line.transfer_end_s is not None
    gaps = [late - early for early, late in itertools.pairwise(times)]
    step_s = statistics.median(gaps[1:])
    return Point(
        tokens=record.prompt_tokens,
        nbytes=line.transfer_bytes,
        prefill_s=times[0] - line.prefill_start_s,
        busy_s=line.transfer_busy_s,
        arrival_s=line.transfer_end_s - line.transfer_start_s,
        visible_s=gaps[0] - step_s,
        step_s=step_s,
    )


def last_part(tokens: int, chunk: int, layers_last: int, num_layers: int) -> float:
    """The part of a prompt's KV that its last chunk's last layer group brings: it cannot leave before the prefill ends.

    Args:
        chunk: most tokens of a chunk.
        layers_last: layers of the last group.
    """
    return (tokens - (tokens - 1) // chunk * chunk) / tokens * layers_last / num_layers


def hidden(whole: Point, streamed: Point, part: float) -> float | None:
    """How much of the time that could be hidden is: 1 - visible / (serial - last group). `serial` is the visible time
    of a whole transfer, the last group's time that `part` of its wire time. None where there is nothing to hide."""
    could = whole.visible_s - part * whole.busy_s
    return 1 - streamed.visible_s / could if could > 0 else None
