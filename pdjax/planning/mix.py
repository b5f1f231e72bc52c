"""What is asked of a cluster that is planned: a workload's description enters, pairs of lengths that requests are drawn
from leave, with the limits that they are to keep. Called by `pdjax.planning.planner`.
"""

import dataclasses
import functools
from pathlib import Path

import numpy as np

from pdjax import traces, workload
from pdjax.metrics import ATTAINMENT
from pdjax.request import SLO

SAMPLE = 2000  # pairs of a kind that is drawn
KINDS = "fixed:IN,OUT, uniform:LO-HI,LO-HI, lengths:FILE, azure:FILE, mooncake:FILE"


@dataclasses.dataclass(frozen=True)
class Mix:
    """Requests come at random (Poisson) with lengths drawn from a sample: DistServe resamples a trace (section 4.1).

    Attributes:
        lengths: tokens of prompt and answer, the sample.
        slo: the limits of each request, at least one of TTFT and TPOT.
        attainment: the share of requests that must keep all limits.
        seed: of arrivals and draws.
        note: what a reader must know of the sample.
    """

    lengths: tuple[tuple[int, int], ...]
    slo: SLO
    attainment: float = ATTAINMENT
    seed: int = 0
    note: str = ""

    def __post_init__(self) -> None:
        if not self.lengths:
            raise ValueError("lengths is empty; allowed: at least one pair of prompt and answer tokens")
        if all(answer < 2 for _, answer in self.lengths):
            raise ValueError(
                "lengths has no answer of two tokens or more; allowed: some, or there is nothing to decode"
            )
        if self.slo.ttft_ms is None and self.slo.tpot_ms is None:
            raise ValueError(
                "slo has neither ttft_ms nor tpot_ms; allowed: at least one of them, or any rate is served"
            )
        if not 0 < self.attainment < 1:
            raise ValueError(f"attainment is {self.attainment!r}; allowed: a share above 0 and below 1")

    @property
    def ttft_s(self) -> float:
        """Infinite without a limit."""
        return float("inf") if self.slo.ttft_ms is None else self.slo.ttft_ms / 1e3

    @property
    def tpot_s(self) -> float:
        """Infinite without a limit."""
        return float("inf") if self.slo.tpot_ms is None else self.slo.tpot_ms / 1e3

    @functools.cached_property
    def prompt_tokens(self) -> float:
        """Mean tokens of a prompt."""
        return float(np.mean([prompt for prompt, _ in self.lengths]))

    @functools.cached_property
    def steps(self) -> float:
        """Mean decode steps of an answer: its first token comes from the prefill."""
        return float(np.mean([answer - 1 for _, answer in self.lengths]))

    @functools.cached_property
    def context_tokens(self) -> float:
        """Mean context of a row, over all decode steps."""
        total = sum((prompt + (answer + 1) / 2) * (answer - 1) for prompt, answer in self.lengths)
        return total / max(self.steps * len(self.lengths), 1e-9)

    @functools.cached_property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(prompt + answer for prompt, answer in self.lengths)

    def draw(self, count: int) -> list[tuple[int, int]]:
        """The lengths of the first `count` requests."""
        picks = np.random.default_rng((self.seed, 1)).integers(len(self.lengths), size=count)
        return [self.lengths[pick] for pick in picks.tolist()]


def sample(kind: str, *, seed: int = 0, max_model_len: int = 1 << 20) -> tuple[tuple[tuple[int, int], ...], str]:
    """Pairs of lengths of a workload's description (`pdjax.workload`), and a note.

    Of files all rows are taken, whatever their times, but for those that no request can have.

    Args:
        kind: one of KINDS.
        seed: of what is drawn.
        max_model_len: longer requests of a file are left out and counted.

    Raises:
        ValueError: another kind, or a file without a usable row.
    """
    name, _, detail = kind.partition(":")
    if name in ("lengths", "azure"):
        rows = traces.read_csv(Path(detail), timed=False)
    elif name == "mooncake":
        rows = traces.read_mooncake(Path(detail))
    elif name in ("fixed", "uniform"):
        drawn = workload.parse(
            kind, num_requests=SAMPLE, vocab_size=2, max_model_len=max_model_len, rate=1.0, seed=seed
        )
        return tuple((len(item.prompt), item.sampling.max_tokens) for item in drawn.items), kind
    else:
        raise ValueError(f"workload is {kind!r}; allowed for a plan: {KINDS}")
    pairs = tuple(
        (row.input_tokens, row.output_tokens)
        for row in rows
        if row.input_tokens and row.output_tokens and row.input_tokens + row.output_tokens <= max_model_len
    )
    if not pairs:
        raise ValueError(
            f"workload is {kind!r}, without a row that can be served; allowed: a prompt and an answer each"
        )
    return pairs, f"{kind}: {len(pairs)} of {len(rows)} rows"
