"""The workload of `bench_engine` on Hugging Face transformers: float32, static batches of 16, the same core. Enters:
our output tokens per second. Leaves: `vs_transformers`. Called by `pdjax.experiments.bench_programs --peers`.

Weights are random, of the same shape: no arithmetic depends on their values. A static batch is padded to its longest
prompt, and all of it is done when its last row is.
"""

import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pdjax.experiments import bench_cases, bench_engine

BAR, BATCH = 2.0, 16
NEEDED = ("torch", "transformers")  # slow to import, and only installed where they are asked for


def check() -> None:
    """Raises ValueError if what this module needs is not installed."""
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"peers is True, and {name} is not installed; allowed with: pip install 'pdjax[peers]'")


def measure(ours: float, report: Callable[[str], None]) -> dict[str, Any]:
    """The entry of `vs_transformers`, for `ours` output tokens per second."""
    torch, transformers = (importlib.import_module(name) for name in NEEDED)

    torch.set_num_threads(1)
    shape = bench_cases.MODEL
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_position,
        rope_theta=shape.rope_theta,
        tie_word_embeddings=shape.tied,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    items = bench_engine.workload().items
    tokens, began = 0, time.perf_counter()
    for at in range(0, len(items), BATCH):
        batch = items[at : at + BATCH]
        answer, longest = batch[0].sampling.max_tokens, max(len(item.prompt) for item in batch)
        ids = np.zeros((len(batch), longest), np.int64)
        mask = np.zeros_like(ids)
        for row, item in enumerate(batch):
            own = slice(longest - len(item.prompt), None)
            ids[row, own], mask[row, own] = np.array(item.prompt), 1
        with torch.inference_mode():
            model.generate(
                torch.from_numpy(ids),
                attention_mask=torch.from_numpy(mask),
                do_sample=False,
                min_new_tokens=answer,
                max_new_tokens=answer,
                pad_token_id=0,
            )
        tokens += sum(item.sampling.max_tokens for item in batch)
    theirs = tokens / (time.perf_counter() - began)
    report(f"transformers, float32: {theirs:.1f} output tokens/s; pdjax: {ours:.1f}")
    value = ours / theirs
    return {"value": value, "bar": BAR, "ok": value >= BAR, "at_most": False, "theirs_tokens_per_s": theirs}
