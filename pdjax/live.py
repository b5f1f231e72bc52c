"""A request while the controller works on it: its state, its tokens, and what it holds on which instance."""

import dataclasses
from collections.abc import Sequence

from pdjax.record import FinishReason, MoveRecord, RequestRecord, Timeline
from pdjax.request import SLO, Request, SLOClass, State, advance
from pdjax.schedulers.base import Place


@dataclasses.dataclass(slots=True, eq=False)
class Live:
    """Mutable twin of a `Request`; implements the schedulers' `Ask`.

    Attributes:
        tokens: generated so far; every one has been handed to the user. `logprobs`: theirs, if wanted.
        context: what this attempt prefills: the prompt and the tokens of earlier attempts.
        prefilled: tokens of `context` issued to the prefill instance.
        step: the first decode step of its lane whose token is not in `tokens` yet; only where tokens are counted, not
            computed.
        place: where the scheduler put it; `decode_on` is the decode instance once known.
        slot: its row slot on the decode instance, once reserved.
        first: the token that this attempt's prefill sampled, once on the host.
        transfer: key of its open transfer; `arrived`: a transfer of this attempt is complete.
        restarts: how often it started over; `failures`: how often since its transfer failed.
        degraded: the laxer class that it was put into.
        last_pass: number of the last iteration that has its row, once that has left its batch.
        moving: its row was taken out of a batch, to go on on this instance; None once it does.
        moves: what came of it, in order.
        computed_on: where this attempt was prefilled, once its row has moved: `place` then says what is next.
        refused: the last round of hand-offs (`Books.round`) that found no room for it; None since it is held anew.
        holds: what must still end (iterations in flight, an open transfer) before its pages can be given back.
    """

    request: Request
    timeline: Timeline
    state: State = State.WAITING
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    context: tuple[int, ...] = ()
    prefilled: int = 0
    step: int = 0
    place: Place | None = None
    decode_on: int | None = None
    slot: int | None = None
    first: int | None = None
    transfer: int | None = None
    arrived: bool = False
    holds: int = 0
    attempt: int = 0
    preemptions: int = 0
    restarts: int = 0
    failures: int = 0
    note: str = ""
    degraded: SLOClass | None = None
    last_pass: int | None = None
    moving: int | None = None
    moves: list[MoveRecord] = dataclasses.field(default_factory=list)
    computed_on: int | None = None
    refused: int | None = None

    @classmethod
    def of(cls, request: Request) -> "Live":
        return cls(request, Timeline(request.arrival_s), context=request.prompt_ids)

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.request.user_id or str(self.id)

    @property
    def arrival_s(self) -> float:
        return self.request.arrival_s

    @property
    def slo(self) -> SLO:
        return self.request.slo if self.degraded is None else self.degraded.slo

    @property
    def laxer(self) -> Sequence[SLOClass]:
        at = 0 if self.degraded is None else self.request.laxer.index(self.degraded) + 1
        return self.request.laxer[at:]

    @property
    def open_ended(self) -> bool:
        return bool(self.request.stop_ids or self.request.sampling.stop)

    @property
    def context_tokens(self) -> int:
        return len(self.context)

    @property
    def max_new_tokens(self) -> int:
        return self.request.sampling.max_tokens - len(self.tokens)

    @property
    def order(self) -> tuple[float, int]:
        """First come, first served; ties by id."""
        return (self.request.arrival_s, self.request.id)

    @property
    def single(self) -> bool:
        """Ends with the token that prefill samples: needs no decode instance."""
        return self.request.sampling.max_tokens - (len(self.context) - len(self.request.prompt_ids)) == 1

    @property
    def local(self) -> bool:
        """Decodes where it prefills, or does not decode at all."""
        return self.single or (self.place is not None and self.place.decode == self.place.prefill)

    @property
    def decodes_here(self) -> bool:
        """Its prefill instance needs a row slot for it, and a page for the first token."""
        return self.local and not self.single

    def to(self, state: State) -> None:
        self.state = advance(self.state, state)

    @property
    def home(self) -> int:
        """The instance that has its row."""
        assert self.place is not None
        return self.place.prefill if self.decode_on is None else self.decode_on

    def uproot(self) -> None:
        """All steps of its row are done, and it is in no batch: its KV waits where it is, like that of a prompt which
        was computed there, and its last token is the input of the next step."""
        assert self.place is not None and self.moving is not None
        self.to(State.MIGRATING)
        if self.computed_on is None:
            self.computed_on = self.place.prefill
        self.place = dataclasses.replace(self.place, prefill=self.home, decode=self.moving, mode="whole")
        self.context = self.request.prompt_ids + tuple(self.tokens[:-1])
        self.prefilled = len(self.context)
        self.first = self.tokens[-1]
        self.decode_on = self.slot = self.last_pass = None
        self.arrived = False

    @property
    def _prefill_instance(self) -> int | None:
        if self.computed_on is not None:
            return self.computed_on
        return None if self.place is None else self.place.prefill

    @property
    def _decode_instance(self) -> int | None:
        if self.place is None:
            return None
        waits = self.moving is not None and self.decode_on is None  # where it decoded before
        return self.place.prefill if self.local or waits else self.decode_on

    def start_over(self) -> None:
        """Back to WAITING with everything generated so far as context; nothing is emitted twice."""
        self.to(State.WAITING)
        self.context = self.request.prompt_ids + tuple(self.tokens)
        self.prefilled = 0
        self.place = self.decode_on = self.slot = self.first = self.moving = self.computed_on = None
        self.last_pass = None
        self.arrived = False
        self.timeline.transfer_start_s = self.timeline.transfer_end_s = self.timeline.decode_start_s = None
        self.attempt += 1

    def record(self, reason: FinishReason) -> RequestRecord:
        place = self.place
        return RequestRecord(
            request_id=self.name,
            prompt_tokens=len(self.request.prompt_ids),
            token_ids=tuple(self.tokens),
            state=self.state,
            finish_reason=reason,
            slo=self.slo,
            slo_class=self.degraded.name if self.degraded else self.request.slo_class,
            degraded_from=self.request.slo_class if self.degraded else "",
            predicted=place.predicted if place else None,
            timeline=self.timeline,
            prefill_instance=self._prefill_instance,
            decode_instance=self._decode_instance,
            reason=self.note or (place.reason if place else ""),
            preemptions=self.preemptions,
            restarts=self.restarts,
            logprobs=tuple(self.logprobs),
            moves=tuple(self.moves),
        )
