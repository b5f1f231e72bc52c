"""What a user asks for, and the states an ask goes through.

Enters: prompts and options from the engine's front door. Leaves: frozen `Request` objects that every other
module reads and none changes. The state machine is a table; `advance` refuses what the table does not list.
"""

import dataclasses
import enum
import math
from collections.abc import Iterable

from pdjax.checks import check_whole, is_number


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        temperature: 0 is greedy; otherwise logits are divided by it. At least 0.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches top_p; in (0, 1].
        seed: makes the request repeatable; a token depends on (seed, position) and the context only, never on
            batch or placement. None lets the engine choose one.
        stop_token_ids: ids that end the request, besides the model's EOS ids. They are part of `token_ids`.
        ignore_eos: generate on past EOS (explicit `stop_token_ids` still stop).
        stop: texts that end the answer as soon as one is complete, across token borders; not part of the text.
        logprobs: also give the log probability of every chosen token under the model, before temperature and cuts.

    Raises:
        ValueError: a field outside its range; the message names field, value and what is allowed.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    logprobs: bool = False

    def __post_init__(self) -> None:
        check_whole("max_tokens", self.max_tokens, 1)
        check_whole("top_k", self.top_k, 0)
        if self.seed is not None:
            check_whole("seed", self.seed, 0)
        if not is_number(self.temperature) or self.temperature < 0 or math.isinf(self.temperature):
            raise ValueError(f"temperature is {self.temperature!r}; allowed: a finite number >= 0")
        if not is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p!r}; allowed: a number in (0, 1]")
        for name in ("ignore_eos", "logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: True, False")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        stop = tuple(stop) if isinstance(stop, Iterable) else (None,)
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop is {self.stop!r}; allowed: a text, or a sequence of texts, none of them empty")
        object.__setattr__(self, "stop", stop)
        if not isinstance(self.stop_token_ids, Iterable):
            raise ValueError(f"stop_token_ids is {self.stop_token_ids!r}; allowed: a sequence of token ids")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))


@dataclasses.dataclass(frozen=True, slots=True)
class SLO:
    """Limits, in milliseconds, that one request must keep; None is no limit. It is met when all hold."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    itl_p99_ms: float | None = None
    e2e_ms: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and (not is_number(value) or not 0 < value < math.inf):
                raise ValueError(f"{field.name} is {value!r}; allowed: a finite number of milliseconds > 0, or None")


@dataclasses.dataclass(frozen=True, slots=True)
class SLOClass:
    """Requests of one kind, with limits of their own.

    Attributes:
        name: what requests and reports call it.
        slo: the limits of its requests.
        degrade_to: name of a laxer class that its requests may be put into where their own cannot be kept; "": none.
    """

    name: str
    slo: SLO
    degrade_to: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One immutable ask.

    Attributes:
        id: the engine's own number; the user's id and a transfer's key are different things.
        prompt_ids: token ids, at least one.
        sampling: how tokens are chosen; its seed is set.
        stop_ids: every id that ends the request: EOS (unless ignored) and the user's own.
        slo: the limits it asks for, those of its class if it has one.
        slo_class: the name of its class; "": it brought limits of its own, or none.
        laxer: the classes that it may be degraded to, in this order.
        arrival_s: the cluster's clock when the user asked.
        user_id: what the user calls it, for reports only.
        deadline_s: the cluster's clock when it is ended if it is not done by then; None: never.
    """

    id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    slo: SLO = SLO()
    arrival_s: float = 0.0
    user_id: str | None = None
    deadline_s: float | None = None
    slo_class: str = ""
    laxer: tuple[SLOClass, ...] = ()

    @property
    def total_tokens(self) -> int:
        """The most tokens it may ever hold: prompt and output."""
        return len(self.prompt_ids) + self.sampling.max_tokens


class State(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"  # holds no KV
    PREFILLING = "prefilling"  # pages on the prefill side
    MIGRATING = "migrating"  # first token given, or taken out of its batch; KV not yet all on the decode side
    DECODING = "decoding"
    PREEMPTED = "preempted"  # its pages were taken; goes back to WAITING
    RESTARTING = "restarting"  # an instance or a transfer was lost; goes back to WAITING
    FINISHED = "finished"
    REJECTED = "rejected"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def terminal(self) -> bool:
        return not TRANSITIONS[self]


_ENDS = {State.ABORTED, State.FAILED}
TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PREFILLING, State.REJECTED} | _ENDS),
    State.PREFILLING: frozenset(
        {State.MIGRATING, State.DECODING, State.FINISHED, State.PREEMPTED, State.RESTARTING} | _ENDS
    ),
    State.MIGRATING: frozenset({State.DECODING, State.PREEMPTED, State.RESTARTING} | _ENDS),
    State.DECODING: frozenset({State.MIGRATING, State.FINISHED, State.PREEMPTED, State.RESTARTING} | _ENDS),
    State.PREEMPTED: frozenset({State.WAITING} | _ENDS),
    State.RESTARTING: frozenset({State.WAITING} | _ENDS),
    State.FINISHED: frozenset(),
    State.REJECTED: frozenset(),
    State.ABORTED: frozenset(),
    State.FAILED: frozenset(),
}


def advance(old: State, new: State) -> State:
    """Returns `new`; raises RuntimeError if the table does not allow the step."""
    if new not in TRANSITIONS[old]:
        raise RuntimeError(f"illegal request transition {old.value} -> {new.value}")
    return new
