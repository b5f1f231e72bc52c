"""What is written down: marks in time of a request and how it ended, passes of an instance, transfers.

Filled by the controller; read by metrics, reports and users. All times are seconds of the cluster's clock.
"""

import dataclasses
from typing import Literal

from pdjax.messages import Role
from pdjax.request import SLO, State

FinishReason = Literal["stop", "length", "abort", "deadline", "rejected", "error"]


@dataclasses.dataclass(slots=True)
class Timeline:
    """Marks in seconds of the cluster's clock; None: it never came to that. A restart overwrites the marks of the
    lost attempt, except those a user has seen (`arrival_s`, `token_s`).

    `token_s[i]` is when token i was handed to the user. `transfer_start_s` and `transfer_end_s` are those of its
    hand-off; bytes and times count later moves too. `transfer_busy_s` is time in which bytes moved, of which
    `transfer_hidden_s` lay before the end of the prefill.
    """

    arrival_s: float
    prefill_start_s: float | None = None
    prefill_end_s: float | None = None
    transfer_start_s: float | None = None
    transfer_end_s: float | None = None
    transfer_bytes: int = 0
    transfer_busy_s: float = 0.0
    transfer_hidden_s: float = 0.0
    decode_start_s: float | None = None
    finished_s: float | None = None
    token_s: list[float] = dataclasses.field(default_factory=list)

    @property
    def first_token_s(self) -> float | None:
        return self.token_s[0] if self.token_s else None

    @property
    def last_token_s(self) -> float | None:
        return self.token_s[-1] if self.token_s else None


@dataclasses.dataclass(frozen=True, slots=True)
class Predicted:
    """What a policy expects of a request, in milliseconds; compared with what comes of it. None: nothing is said."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class MoveRecord:
    """A decode row that was taken out of its batch at `time_s`, to go on on another instance."""

    request_id: str
    src: int
    dst: int
    time_s: float
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that reached its terminal state.

    Attributes:
        request_id: the user's id if one was given, else the engine's number as text.
        token_ids: what was generated, a final stop token included.
        state: terminal.
        prefill_instance, decode_instance: where the last attempt ran; None if it never did.
        reason: why the scheduler placed it there, or why it was refused or failed.
        logprobs: of every token, if they were asked for.
        slo: the limits it is judged by; of the class `slo_class`, if it has one ("": none).
        degraded_from: the class that it asked for, if it was put into a laxer one; "": it was not.
        predicted: what its last placement expected of it.
        moves: of its row, which went on on another instance each time.
    """

    request_id: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    state: State
    finish_reason: FinishReason
    slo: SLO
    timeline: Timeline
    prefill_instance: int | None = None
    decode_instance: int | None = None
    reason: str = ""
    preemptions: int = 0
    restarts: int = 0
    logprobs: tuple[float, ...] = ()
    slo_class: str = ""
    degraded_from: str = ""
    predicted: Predicted | None = None
    moves: tuple[MoveRecord, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class IterationRecord:
    """One pass of one instance.

    Attributes:
        number: its number on that instance, as in `pdjax.messages.Iteration`.
        chunk_tokens: prompt tokens computed.
        rows: decode rows that made a step.
        started_s, finished_s: when the device could start it (dispatched, the one before it done), and when its
            tokens were on the host: iterations of one instance do not overlap.
        requests: ids, as in `RequestRecord.request_id`, of the requests whose prompt tokens it computed.
        host_gap_s: how long the device stood still between the decode step before and this one.
        steps: decode steps; more than one in simulation only, with `number` the last of them.
        predicted_s: how long it, or one of its steps, was expected to take when it was issued.
    """

    instance: int
    number: int
    chunk_tokens: int
    rows: int
    started_s: float
    finished_s: float
    requests: tuple[str, ...] = ()
    host_gap_s: float = 0.0
    steps: int = 1
    predicted_s: float = 0.0

    @property
    def kind(self) -> str:
        """One of `pdjax.latency.KINDS`."""
        return ("mixed" if self.rows else "prefill") if self.chunk_tokens else "decode"


@dataclasses.dataclass(frozen=True, slots=True)
class TransferRecord:
    """KV of one request that moved from instance `src` to instance `dst`: `nbytes` between first and last byte.
    `streamed`: while it was computed; otherwise it was expected to take `predicted_s` seconds."""

    request_id: str
    src: int
    dst: int
    nbytes: int
    started_s: float
    finished_s: float
    streamed: bool = False
    predicted_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class FlipRecord:
    """An instance changed its role: asked for at `started_s`, done when its hand-offs were, at `finished_s`."""

    instance: int
    before: Role
    after: Role
    started_s: float
    finished_s: float
    reason: str
