"""The grid of placements that must all give the same tokens: its rows, a cover of them in which every pair of settings
occurs, and the comparison with stored greedy runs. Called by `grid_check` and by the tests. Pure but for reading files.
"""

import dataclasses
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pdjax.schedulers.base import Ask, ClusterView, Place, Wait
from pdjax.schedulers.colocated import Colocated
from pdjax.schedulers.disaggregated import Disaggregated

NEAR_TIE = 1e-4  # a split where the reference's two best logits are closer than this is counted, not an error
LOGIT_TOLERANCE = 1e-3

_TP, _PP = (1, 2, 3, 4, 8), (1, 5)
_PAGES = (1, 7, 16, 64)
_CHUNKS = (1, 7, 64, 0)  # 0: the whole prompt
_MODES = ("colocated", "whole", "pulled", "streamed", "dynamic")


class Named(Disaggregated):
    """Names the decode instance in advance and moves KV when the prompt is computed."""

    def place(self, ask: Ask, cluster: ClusterView) -> Place | Wait:
        placed = super().place(ask, cluster)
        return dataclasses.replace(placed, mode="whole") if isinstance(placed, Place) else placed


class OnFirst(Colocated):
    """Serves all on the first instance: the others are like it, and would only compile the same again."""

    def place(self, ask: Ask, cluster: ClusterView) -> Place | Wait:
        return Place(0, 0, "whole", "the first")


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Row:
    """One placement: two pools of one instance each; when colocated, two equal instances of which one is used."""

    prefill_pp: int
    prefill_tp: int
    decode_pp: int
    decode_tp: int
    page_size: int
    chunk: int  # most prompt tokens of a pass; 0: all of a prompt
    mode: str

    @property
    def prefill(self) -> tuple[int, int]:
        """Stages and tp of that pool."""
        return self.prefill_pp, self.prefill_tp

    @property
    def decode_devices(self) -> int:
        return self.decode_pp * self.decode_tp

    @property
    def devices(self) -> int:
        return self.prefill_pp * self.prefill_tp + self.decode_devices

    @property
    def name(self) -> str:
        prefill, decode = f"{self.prefill_pp}x{self.prefill_tp}", f"{self.decode_pp}x{self.decode_tp}"
        return f"{self.mode} {prefill}->{decode} page {self.page_size} chunk {self.chunk or 'whole'}"

    def fields(self, max_model_len: int) -> dict[str, Any]:
        """Of `EngineConfig`."""
        schedulers = {
            "colocated": OnFirst(),
            "whole": Named(1),
            "pulled": Disaggregated(None),
            "streamed": Disaggregated(1),
            "dynamic": "dynamic",
        }
        return {
            "scheduler": schedulers[self.mode],
            # 0: programs that stream nothing; 2: of 5 layers, one is left over. Single layers compile fastest.
            "stream_layers": {"whole": 0, "streamed": 2}.get(self.mode, 1),
            "prefill_pp": self.prefill_pp,
            "prefill_tp": self.prefill_tp,
            "decode_pp": self.decode_pp,
            "decode_tp": self.decode_tp,
            "page_size": self.page_size,
            "prefill_chunk": self.chunk or max_model_len,
            "max_model_len": max_model_len,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A stored greedy run: ids, the gap between the two best logits of each step, the first token's log probability
    (None: not stored)."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]
    first_logprob: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """Where an answer leaves its reference: `step` 0 is the first token; `gap` is the reference's there."""

    case: str
    step: int
    expected: int | None
    got: int | None
    gap: float

    @property
    def near_tie(self) -> bool:
        return self.gap < NEAR_TIE


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What one row gave: where answers leave their references, and how far the first tokens' log probabilities lie
    from theirs at most (None: not stored). `error`: what kept it from answering."""

    row: Row
    seconds: float
    splits: tuple[Split, ...] = ()
    logprob_error: float | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        close = self.logprob_error is None or self.logprob_error <= LOGIT_TOLERANCE
        return not self.error and close and all(split.near_tie for split in self.splits)


def rows(heads: int, layers: int) -> list[Row]:
    """The full grid for a model of so many query heads and layers, in an order in which neighbours share programs."""
    sizes = [(pp, tp) for pp in _PP if pp <= layers for tp in _TP if heads % tp == 0]
    every = itertools.product(sizes, sizes, _PAGES, _CHUNKS, _MODES)
    return sorted(
        Row(*prefill, *decode, page, chunk, mode)
        for prefill, decode, page, chunk, mode in every
        if mode != "colocated" or prefill == decode
    )


def cover(of: Sequence[Row]) -> list[Row]:
    """Rows in which every pair of settings that occurs in `of` occurs; few, but not the fewest. In the order of `of`.

    Greedy: always the row with the most pairs that are new (as AETG does: Cohen et al., IEEE TSE 23(7), 1997).
    """
    pairs = [frozenset(itertools.combinations(enumerate(dataclasses.astuple(row)), 2)) for row in of]
    missing, chosen = frozenset[Any]().union(*pairs), []
    while missing:
        best = max(range(len(of)), key=lambda i: len(pairs[i] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return [of[i] for i in sorted(chosen)]


def sample(of: Sequence[Row], count: int, seed: int) -> list[Row]:
    """So many rows at random, in the order of `of`."""
    return [of[i] for i in sorted(random.Random(seed).sample(range(len(of)), min(count, len(of))))]


def read_cases(path: Path) -> dict[str, Case]:
    """Stored greedy runs by name: `cases` of a JSON file, each with `name`, `prompt_ids`, `generated_ids` and
    `top2_gap`; beside it, if there, an .npz with `NAME.first_logits`.

    Raises:
        ValueError: not such a file.
    """
    try:
        arrays = path.with_suffix(".npz")
        logits: Mapping[str, Any] = np.load(arrays) if arrays.exists() else {}
        stored = json.loads(path.read_text())["cases"]
        cases = {case["name"]: _case(case, logits) for case in stored}
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(f"references is {str(path)!r}, which cannot be read: {error!r}; allowed: see --help") from None
    if not cases:
        raise ValueError(f"references is {str(path)!r}, which has no case; allowed: at least one in its cases")
    return cases


def compare(
    row: Row,
    cases: Mapping[str, Case],
    answers: Sequence[tuple[Sequence[int], Sequence[float] | None]],
    max_tokens: int,
    seconds: float = 0.0,
) -> Outcome:
    """Answers (tokens, their log probabilities), in the order of the cases, against the first `max_tokens` stored."""
    splits: list[Split] = []
    errors: list[float] = []
    for (name, case), (token_ids, logprobs) in zip(cases.items(), answers, strict=True):
        split = first_split(name, case, token_ids, max_tokens)
        if split is not None:
            splits.append(split)
        elif case.first_logprob is not None and logprobs:
            errors.append(abs(logprobs[0] - case.first_logprob))
    return Outcome(row, seconds, tuple(splits), max(errors, default=None))


def first_split(name: str, case: Case, token_ids: Sequence[int], most: int) -> Split | None:
    """Compares an answer with the first `most` tokens of its reference."""
    expected = case.token_ids[:most]
    for step, (want, got) in enumerate(itertools.zip_longest(expected, token_ids)):
        if want != got:
            return Split(name, step, want, got, case.gaps[min(step, len(case.gaps) - 1)])
    return None


def _case(stored: Mapping[str, Any], logits: Mapping[str, Any]) -> Case:
    ids, first, key = tuple(stored["generated_ids"]), None, f"{stored['name']}.first_logits"
    if key in logits:
        scores = np.asarray(logits[key], np.float64)
        first = float(scores[ids[0]] - scores.max() - np.log(np.exp(scores - scores.max()).sum()))
    prompt_ids, gaps = tuple(stored["prompt_ids"]), tuple(stored["top2_gap"])
    if not (prompt_ids and ids and gaps):
        raise ValueError(f"case {stored['name']} has an empty list")
    return Case(prompt_ids, ids, gaps, first)
