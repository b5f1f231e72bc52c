"""What a large disaggregated cluster can serve, in closed form: assumptions and an instance's latency enter, the split
of the instances, and the rate at which each resource is used up, leave. Called by `scale`. Arithmetic on means: all
requests have the same lengths, and no time is lost between passes.

    prefill instance   1 / T_p(L) requests/s: one prompt of L tokens after the other
    decode instance    B / ((A - 1) * T_d(B)) requests/s with B rows: an answer of A tokens takes A - 1 steps
    split              P / D: the rate of a decode instance over that of a prefill instance
    links              bytes/s of all / (L * KV bytes per token), of those out of P, into D, and between switches
    controller         seconds of its decisions about D / T_d(B) steps and 3 * rate other events: at most 1 in a second
"""

import dataclasses
from collections.abc import Callable

from pdjax import fleet
from pdjax.latency import Load
from pdjax.messages import InstanceSpec, Role
from pdjax.published import Published

MOST_ROWS = 4096  # of a decode batch that is looked at
FIXED_EVENTS = 3  # of a request: its arrival, its prefill pass, its transfer


@dataclasses.dataclass(frozen=True, slots=True)
class Assumptions:
    """Of a cluster.

    Attributes:
        instance: model, hardware, and what passes take.
        instances: of both roles.
        prompt, answer: tokens of every request.
        tpot_ms: a decode step may take so long.
        nic_bytes_per_s: of an instance, each direction.
        oversubscription: how many times more bytes the instances can send than the switches between them can pass on.
    """

    instance: Published
    instances: int
    prompt: int
    answer: int
    tpot_ms: float
    nic_bytes_per_s: float
    oversubscription: float

    @property
    def kv_bytes(self) -> int:
        """That a request moves."""
        return self.prompt * self.instance.kv_bytes_per_token

    @property
    def context(self) -> int:
        """Of a row in the middle of its answer."""
        return self.prompt + self.answer // 2

    def spec(self, role: Role = Role.DECODE) -> InstanceSpec:
        return fleet.build([self.instance.pool(role)]).specs[0]

    def prefill_s(self) -> float:
        return self.instance.latency.prefill_s(self.spec(Role.PREFILL), self.prompt)

    def step_s(self, rows: float) -> float:
        """Of a decode step of so many rows of mean context; between whole numbers, straight lines."""
        low = max(1, int(rows))
        at, after = (self._step_s(count) for count in (low, low + 1))
        return at + (max(rows, 1.0) - low) * (after - at)

    def _step_s(self, rows: int) -> float:
        total = rows * self.context
        return self.instance.latency.iteration_s(self.spec(), Load((), rows, total, total))

    def rows_by_tpot(self) -> int:
        """Rows whose step keeps the limit.

        Raises:
            ValueError: a single row does not.
        """
        fitting = [rows for rows in range(1, MOST_ROWS + 1) if 1e3 * self._step_s(rows) <= self.tpot_ms]
        if not fitting:
            raise ValueError(
                f"tpot_ms is {self.tpot_ms:g}; allowed: at least {1e3 * self._step_s(1):.1f}, one row's step"
            )
        return max(fitting)

    def rows_by_memory(self) -> int:
        """Rows whose KV is there.

        Raises:
            ValueError: none: a request does not fit.
        """
        if self.prompt + self.answer > self.instance.kv_tokens:
            raise ValueError(
                f"prompt and answer are {self.prompt + self.answer} tokens; allowed: the KV of an instance, "
                f"{self.instance.kv_tokens}"
            )
        return self.instance.kv_tokens // self.context

    def decode_rps(self, rows: float) -> float:
        """Requests per second of a decode instance with so many rows."""
        return rows / ((self.answer - 1) * self.step_s(rows))

    def rows_at(self, rps: float) -> float:
        """Rows of a decode instance that gets so many requests per second: Little's law; at most MOST_ROWS."""
        return _largest(lambda rows: self.decode_rps(rows) <= rps, float(MOST_ROWS))


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """Instances of each role."""

    prefill: int
    decode: int


def split_of(assumed: Assumptions) -> Split:
    """In balance: as many prompts are computed as answers are finished; at least one of each."""
    prefill, decode = 1 / assumed.prefill_s(), assumed.decode_rps(rows_of(assumed))
    first = round(assumed.instances * decode / (prefill + decode))
    first = min(max(first, 1), assumed.instances - 1)
    return Split(first, assumed.instances - first)


@dataclasses.dataclass(frozen=True, slots=True)
class Resource:
    """What is used up at a rate, requests per second of the whole cluster; `how`: the form with its numbers."""

    name: str
    rps: float
    how: str


def resources(assumed: Assumptions, split: Split, decision_s: Callable[[float], float]) -> list[Resource]:
    """All of them, the first to be used up first.

    Args:
        decision_s: CPU seconds of the controller per second of serving, at a rate; see `events_per_s`.
    """
    P, D = split.prefill, split.decode
    tpot, memory = assumed.rows_by_tpot(), assumed.rows_by_memory()
    nic, nbytes = assumed.nic_bytes_per_s, assumed.kv_bytes
    held_s = assumed.prefill_s() + nbytes / nic
    spine = assumed.instances / 2 * nic / assumed.oversubscription
    most = min(P / assumed.prefill_s(), D * assumed.decode_rps(rows_of(assumed)))
    control = _largest(lambda rps: decision_s(rps) <= 1.0, 100 * most)
    found = [
        Resource("prefill: computing", P / assumed.prefill_s(), f"{P} / {1e3 * assumed.prefill_s():.1f} ms"),
        Resource(
            "decode: steps within TPOT",
            D * assumed.decode_rps(tpot),
            f"{D} x {tpot} rows / ({assumed.answer - 1} x {1e3 * assumed.step_s(tpot):.1f} ms)",
        ),
        Resource(
            "decode: KV memory",
            D * assumed.decode_rps(memory),
            f"{D} x {memory} rows / ({assumed.answer - 1} x {1e3 * assumed.step_s(memory):.1f} ms)",
        ),
        Resource(
            "prefill: KV memory",
            P * assumed.instance.kv_tokens / assumed.prompt / held_s,
            f"{P} x {assumed.instance.kv_tokens // assumed.prompt} prompts / {1e3 * held_s:.0f} ms computed and sent",
        ),
        Resource("links out of prefill", P * nic / nbytes, f"{P} x {_gb(nic)}/s / {_gb(nbytes)}"),
        Resource("links into decode", D * nic / nbytes, f"{D} x {_gb(nic)}/s / {_gb(nbytes)}"),
        Resource("switches between them", spine / nbytes, f"{_gb(spine)}/s / {_gb(nbytes)}"),
        Resource("one controller", control, f"{events_per_s(assumed, split, control):,.0f} events/s"),
    ]
    return sorted(found, key=lambda each: each.rps)


def events_per_s(assumed: Assumptions, split: Split, rps: float) -> float:
    """That one controller of real instances handles: what every request brings, and every decode step."""
    return FIXED_EVENTS * rps + steps_per_s(assumed, split, rps)


def steps_per_s(assumed: Assumptions, split: Split, rps: float) -> float:
    """Decode steps of all instances; one with less than one row in the mean stands still meanwhile."""
    rows = assumed.rows_at(rps / split.decode)
    return split.decode * min(1.0, rows) / assumed.step_s(rows)


def rows_of(assumed: Assumptions) -> int:
    """Of a decode instance that does all it can within its memory and the limit."""
    return min(assumed.rows_by_tpot(), assumed.rows_by_memory())


def _largest(holds: Callable[[float], bool], most: float) -> float:
    """The largest value up to `most` for which it holds: it does up to there, and no longer beyond."""
    low, high = 0.0, most
    if holds(high):
        return high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB"
