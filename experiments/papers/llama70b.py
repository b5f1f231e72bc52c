"""Llama2-70B on four A100-80G, the machine of TaiChi's simulations and of SplitFuse. Enter: how many instances of which
role, with which limits. Leave: pools for `pdjax.fleet`, and lengths of prompts and answers. Called by `taichi` and
`sarathi`.

The constants are a least-squares fit of DistServe's form (`pdjax.curves`) to what Splitwise has measured of this model
at TP4 (its perf_model.csv, 19 points, mean error 14 % of prefill, 2.4 % of decode). No result that is reproduced went
into them.
"""

import numpy as np

from pdjax.curves import Curves, Decode
from pdjax.fleet import Pool
from pdjax.messages import Role
from pdjax.network import Link

DEVICES = 4
WEIGHT_BYTES = 69e9 * 2  # fp16
KV_BYTES_PER_TOKEN = 2 * 80 * 8 * 128 * 2  # K and V, layers, kv heads, head size, fp16
KV_TOKENS = int((DEVICES * 80e9 * 0.9 - WEIGHT_BYTES) / KV_BYTES_PER_TOKEN)  # vLLM's default share of the memory
NIC = Link(
    "NIC", DEVICES * 25e9, 1e-3
)  # an HDR InfiniBand port, 200 Gb/s, per A100 (DGX A100 data sheet); start assumed
LATENCY = Curves(
    prefill=(13.1416e-3, 0.242319e-3, 7.37014e-11),
    decode=(Decode(0, 43.3171e-3, 3.71562e-7, 0.182545e-3),),
    alpha_s=NIC.alpha_s,
    bytes_per_s=NIC.bytes_per_s,
)


def pool(role: Role, count: int, *, max_rows: int = 128, max_chunk: int = 16384, max_model_len: int = 32768) -> Pool:
    """Instances of one role. `max_chunk`: as for `Pool`; the default takes every prompt of these papers as a whole."""
    return Pool(
        role,
        count,
        LATENCY,
        KV_TOKENS,
        KV_BYTES_PER_TOKEN,
        devices=DEVICES,
        max_rows=max_rows,
        max_chunk=max_chunk,
        max_model_len=max_model_len,
    )


def lognormal(rng: np.random.Generator, median: float, sigma: float, limits: tuple[int, int], count: int) -> list[int]:
    """Whole tokens of a log-normal distribution, [count], those outside of `limits` moved to them."""
    drawn = np.rint(median * np.exp(sigma * rng.standard_normal(count))).astype(int)
    return [int(tokens) for tokens in np.clip(drawn, *limits)]
