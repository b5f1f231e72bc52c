"""What is written down about one request: its marks in time and how it ended. Filled by the controller."""

import dataclasses
from typing import Literal

from pdjax.request import SLO, State

FinishReason = Literal["stop", "length", "abort", "rejected", "error"]


@dataclasses.dataclass(slots=True)
class Timeline:
    """Marks in seconds of the cluster's clock; None: it never came to that. A restart overwrites the marks of the
    lost attempt, except those a user has seen (`arrival_s`, `token_s`).

    `token_s[i]` is when token i was handed to the user. `transfer_busy_s` is time in which bytes moved, of which
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
class RequestRecord:
    """A request that reached its terminal state.

    Attributes:
        request_id: the user's id if one was given, else the engine's number as text.
        token_ids: what was generated, a final stop token included.
        state: terminal.
        prefill_instance, decode_instance: where the last attempt ran; None if it never did.
        reason: why the scheduler placed it there, or why it was refused or failed.
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
