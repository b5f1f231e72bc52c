"""Greedy float32 tokens of real checkpoints equal stored ones, however and wherever a request is served, on pages that
are full of NaN and of other requests' rows."""

import pytest

from pdjax import SamplingParams
from pdjax.experiments import grid
from tests.engines import SHARED, STORIES, engine, poison, settle

STORED = SHARED / "ref"
NEEDS_SHARED = pytest.mark.skipif(not STORED.exists(), reason="needs checkpoints and references in ../shared/weights")
TOKENS = 40  # compared where compiling costs more than it tells

ROWS = grid.cover(grid.rows(heads=8, layers=5))
TOLD_TO_THE_END = "streamed 1x1->1x2 page 1 chunk whole"


def cover():
    for row in ROWS:
        tokens = 200 if row.name == TOLD_TO_THE_END else TOKENS
        yield pytest.param(row, tokens, id=row.name)


def check(served, cases, tokens):
    """All at once; each answer is the stored one, or its first `tokens` tokens. Those that are shorter end with EOS."""
    poison(served)
    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=True)
    results = served.generate([list(case.prompt_ids) for case in cases.values()], params)
    for (name, case), result in zip(cases.items(), results, strict=True):
        assert result.token_ids == case.token_ids[:tokens], name
        assert result.logprobs[0] == pytest.approx(case.first_logprob, abs=grid.LOGIT_TOLERANCE), name
    settle(served)


def test_the_story_that_is_told_to_the_end_is_a_row_of_the_cover():
    assert TOLD_TO_THE_END in {row.name for row in ROWS}


@pytest.mark.slow
@NEEDS_SHARED
@pytest.mark.parametrize(("row", "tokens"), list(cover()))
def test_tokens_equal_the_reference(row, tokens):
    with engine(model=str(STORIES), **row.fields(256), decode_max_batch=5) as served:
        check(served, grid.read_cases(STORED / "stories.json"), tokens)
