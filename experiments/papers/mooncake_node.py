"""LLaMA3-70B on a node of 8 A800, as Mooncake is measured (FAST'25, section 5): constants, pools and the trace. Called
by `mooncake` and what it is made of.

Prefill takes the paper's FLOPs at `MFU` of the node's peak, the part that `pdjax.experiments.kv_cost` takes by default;
a decode step is what Splitwise measured of the same shape. No result that is reproduced went into either.
"""

from pathlib import Path

from pdjax import prefix, traces
from pdjax.curves import Curves, Decode
from pdjax.fleet import Pool
from pdjax.messages import Role

LAYERS, HIDDEN, QUERIES_PER_KV = 80, 8192, 8
A800_FLOPS, H800_FLOPS = 8 * 312e12, 8 * 989.5e12  # bf16 of a node, as A100 and H100 (NVIDIA's data sheets)
MFU = 0.5
KV_BYTES_PER_TOKEN = 2 * LAYERS * (HIDDEN // QUERIES_PER_KV) * 2  # 320 KB
KV_TOKENS = int((8 * 80e9 * 0.9 - 2 * 70e9) / KV_BYTES_PER_TOKEN)  # vLLM's default share of the memory
CACHE_TOKENS = 3_000_000  # of a node's memory (section 5.4, local cache)
NIC_BYTES_PER_S = 100e9  # 800 Gb/s
PREFILLERS = DECODERS = 8  # its 16 nodes, one to one
TTFT_S, TBT_S = 30.0, 0.1  # limits on the real trace (arXiv 2407.00079, section 8)

# Least squares on Splitwise's perf_model.csv, Llama2-70B on A100-80G, TP8 (19 points, mean error 1.8 %): of a step, of
# a context token, of a row.
DECODE = Decode(0, 44.0719e-3, 3.35434e-7, 0.189749e-3)


def flops(tokens: float, prior: float = 0.0) -> float:
    """Of a prefill."""
    return prefix.prefill_flops(tokens, prior, layers=LAYERS, hidden=HIDDEN)


def alone_tokens(work: float) -> float:
    """The prompt without reuse that takes so many FLOPs."""
    return prefix.alone_tokens(work, layers=LAYERS, hidden=HIDDEN)


def latency() -> Curves:
    """Of a node."""
    token_s = LAYERS * prefix.TOKEN_FLOPS * HIDDEN**2 / (MFU * A800_FLOPS)
    square_s = LAYERS * prefix.ATTENTION_FLOPS * HIDDEN / (MFU * A800_FLOPS)
    return Curves((0.0, token_s, square_s), (DECODE,), bytes_per_s=NIC_BYTES_PER_S)


def pool(role: Role, count: int) -> Pool:
    """Nodes of one role. A prompt is one pass however long it is: layer by layer its KV leaves the node (section 3.3),
    so that what is computed needs no room for what waits."""
    tokens = KV_TOKENS if role is Role.DECODE else 1 << 23
    longest = 1 << 18
    return Pool(
        role, count, latency(), tokens, KV_BYTES_PER_TOKEN, 8, max_chunk=longest, max_model_len=longest, page_size=512
    )


def trace(folder: Path, limit: int | None = None) -> list[traces.Row]:
    """The released conversation trace, in order of arrival; its first `limit` rows."""
    return traces.read_mooncake(folder / "mooncake" / "conversation_trace.jsonl")[:limit]
