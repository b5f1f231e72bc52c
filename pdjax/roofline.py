"""How fast a model ought to run on a device that nobody has measured it on, from the device's datasheet. Enter: a
`ModelConfig` and a `Hardware`; leave: a `Latency` and a `Pool` of instances. Called by the planner and by users.

    pass = max(GEMM flops / compute, weights / memory)       weights are read once, whoever rides along
         + attention of each chunk: max(flops / compute, KV / memory)
         + KV of the decode rows / memory
         + all-reduces of TP, sends of PP, launches of the layers

where compute, memory and links are those of all devices at the `Efficiency` that kernels reach. Vocabulary is not
padded, activations are taken to stay in caches, and nothing overlaps but what `max` says.

What it is off by where measurements exist (`pdjax.published`; mean and largest absolute error of a pass):

                                                             prefill             decode
    USUAL   H200, Llama-3.1-8B FP8, vLLM                       15 %, 74 %           7 %, 19 %
            TPU v6e, Llama-3.1-8B, sum of operators            19 %, 33 %          19 %, 57 %
            engines of 2023, all that follow                   28 %, 74 %          37 %, 78 %      nearly all too fast
    EAGER   A100, OPT-13B and 66B, DistServe                   15 %, 35 %          14 %, 32 %
            A100, the same, vLLM                               25 %, 55 %          25 %, 76 %      too fast
            A100, Llama2-70B and BLOOM-176B, TP 8              17 %, 44 %          19 %, 48 %      too fast
            H100, the same                                     23 %, 48 %           9 %, 35 %      too fast

The largest errors are short prompts (an engine's own time per request is not in a roofline), TP of small models, and
attention kernels of long batches on TPU. A prediction is a bound that good engines come near to, not a measurement.
"""

import dataclasses
from typing import Any

import numpy as np

from pdjax.fleet import Pool
from pdjax.hardware import Hardware
from pdjax.latency import Latency, Load
from pdjax.messages import InstanceSpec, Role
from pdjax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, slots=True)
class Efficiency:
    """What engines reach of a datasheet, and what it does not say.

    Attributes:
        compute: of the peak FLOP/s, in the GEMMs and in attention. Prompts ran at 0.5 on H200 (FP8), at 0.57 (vLLM,
            2023) and 0.79 (DistServe) of an A100 with OPT-13B.
        memory: of the bandwidth. Reading KV reached 0.64 to 0.69 on A100 with these engines, 0.85 on H200 with vLLM.
        link: of the bandwidth between devices, inside a machine and between machines. Assumed.
        layer_s: launches of one layer. An engine that captures graphs is near 0.07 ms (H200), those of 2023 between 0.2
            ms (OPT) and 0.4 ms (Llama2-70B on eight A100).
        hop_s: until a collective or a send moves bytes. Assumed.
        used: of the memory; the rest is for activations and the runtime (vLLM's default).
    """

    compute: float = 0.5
    memory: float = 0.8
    link: float = 0.8
    layer_s: float = 1e-4
    hop_s: float = 1e-5
    used: float = 0.9

    def __post_init__(self) -> None:
        for name in ("compute", "memory", "link", "used"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: more than 0, at most 1")
        for name in ("layer_s", "hop_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: seconds >= 0")


USUAL = Efficiency()  # engines that capture a pass as one graph
EAGER = Efficiency(layer_s=2.5e-4, hop_s=3e-5)  # those that launch kernel by kernel
EXPECTED_ERROR = 0.3  # mean absolute error of a pass with USUAL over all these tables: 0.28


@dataclasses.dataclass(frozen=True, slots=True)
class Roofline(Latency):
    """An instance by datasheet, all in seconds; made by `latency`. Rows of a pipeline make their steps in groups, as
    with `pdjax.curves.Curves`.

    Attributes:
        pass_s: launches and first bytes of collectives and sends.
        weights_s: to read all weights once.
        token_s, sampled_s: GEMMs of a token in all layers, and of one that the head is computed for.
        moved_s: all-reduces and sends of a token.
        pair_s: a token that attends to another.
        context_s: to read the KV of a token.
        alpha_s, bytes_per_s: of a transfer alone.
    """

    pass_s: float
    weights_s: float
    token_s: float
    sampled_s: float
    moved_s: float
    pair_s: float
    context_s: float
    alpha_s: float
    bytes_per_s: float

    def __hash__(self) -> int:
        return hash(self.token_s)  # results are looked up by it with every decision: not all constants

    def iteration_s(self, spec: InstanceSpec, load: Load) -> float:
        if not load.chunks and not load.rows:
            return 0.0
        return self._fixed(spec, load) + self.context_s / spec.pp * load.context_tokens

    def steps_s(self, spec: InstanceSpec, load: Load, steps: int) -> np.ndarray:
        contexts = load.context_tokens + np.arange(steps) * load.rows
        seconds: np.ndarray = self._fixed(spec, load) + self.context_s / spec.pp * contexts
        return seconds

    def transfer_s(self, nbytes: float) -> float:
        return self.alpha_s + nbytes / self.bytes_per_s

    def _fixed(self, spec: InstanceSpec, load: Load) -> float:
        """All of a pass but reading the KV of its rows."""
        tokens, attention = load.rows / spec.pp, 0.0
        sampled = tokens + len(load.chunks)
        for size, prior in load.chunks:
            tokens += size
            attention += max(self.pair_s * (size * (prior + size / 2)), self.context_s * (prior + size))
        gemms = max(self.token_s * tokens + self.sampled_s * sampled, self.weights_s)
        return self.pass_s + gemms + self.moved_s * tokens + attention


def latency(
    config: ModelConfig,
    hardware: Hardware,
    tp: int = 1,
    pp: int = 1,
    *,
    dtype_bytes: float = 2,
    kv_dtype_bytes: float = 2,
    efficiency: Efficiency = USUAL,
) -> Roofline:
    """What the passes of one instance of `pp` stages of `tp` devices take.

    Args:
        dtype_bytes: of a weight; with 1 the GEMMs run at the speed of 8-bit ones.
        kv_dtype_bytes: of a number in K or V.

    Raises:
        ValueError: the model does not divide into so many parts.
    """
    _check(config, tp, pp)
    hidden, layers = config.hidden_size, config.num_layers
    peak = hardware.flops if dtype_bytes >= 2 else hardware.flops_8bit
    flops, attention_flops = (efficiency.compute * tp * each for each in (peak, hardware.flops))
    memory, link = efficiency.memory * tp * hardware.memory_bytes_per_s, efficiency.link * hardware.link_bytes_per_s
    head = config.vocab_size * hidden
    reduced = 2 * layers * 2 * (tp - 1) / tp  # two all-reduces a layer; a ring sends each number 2 (tp - 1) / tp times
    sends = pp - 1
    hops = 2 * layers * (tp > 1) + sends
    return Roofline(
        pass_s=layers * efficiency.layer_s + hops * efficiency.hop_s,
        weights_s=dtype_bytes * (layers * _layer(config) + head) / memory,
        token_s=2 * layers * _layer(config) / flops,
        sampled_s=2 * head / flops,
        moved_s=(reduced + sends) * hidden * 2 / link,  # activations are 16-bit
        pair_s=4 * layers * config.num_heads * config.head_dim / attention_flops,
        context_s=_kv_bytes(config, kv_dtype_bytes, tp) / memory,
        alpha_s=efficiency.hop_s,
        bytes_per_s=efficiency.link * tp * pp * hardware.nic_bytes_per_s,
    )


def pool(
    role: Role,
    count: int,
    config: ModelConfig,
    hardware: Hardware,
    tp: int = 1,
    pp: int = 1,
    *,
    dtype_bytes: float = 2,
    kv_dtype_bytes: float = 2,
    efficiency: Efficiency = USUAL,
    **options: Any,
) -> Pool:
    """Equal instances, with the KV memory that the weights leave; `options` are other fields of `Pool`.

    Raises:
        ValueError: the model does not fit, or does not divide into so many parts.
    """
    made = latency(
        config,
        hardware,
        tp,
        pp,
        dtype_bytes=dtype_bytes,
        kv_dtype_bytes=kv_dtype_bytes,
        efficiency=efficiency,
    )
    tables = (1 if config.tied else 2) * config.vocab_size * config.hidden_size
    weights = dtype_bytes * (config.num_layers * _layer(config) + tables)
    usable = efficiency.used * hardware.memory_bytes * tp * pp
    tokens = int((usable - weights) / _kv_bytes(config, kv_dtype_bytes, tp))
    if tokens < 1:
        raise ValueError(
            f"weights are {weights / 1e9:.1f} GB; allowed on tp {tp} x pp {pp} {hardware.name}: less than the "
            f"{usable / 1e9:.1f} GB that can be used"
        )
    options = {"max_model_len": config.max_position} | options
    return Pool(
        role,
        count,
        made,
        kv_tokens=tokens,
        kv_bytes_per_token=int(_kv_bytes(config, kv_dtype_bytes, 1)),
        devices=tp * pp,
        pp=pp,
        **options,
    )


def _check(config: ModelConfig, tp: int, pp: int) -> None:
    if tp < 1 or config.num_heads % tp:
        raise ValueError(f"tp is {tp}; allowed with {config.num_heads} heads: a divisor")
    if not 1 <= pp <= config.num_layers:
        raise ValueError(f"pp is {pp}; allowed with {config.num_layers} layers: 1 to as many")


def _layer(config: ModelConfig) -> int:
    """Weights of a layer: q and o, k and v, gate, up and down; norms and biases are not counted."""
    heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    return config.hidden_size * (heads + 3 * config.ffn_size)


def _kv_bytes(config: ModelConfig, dtype_bytes: float, tp: int) -> float:
    """Of one token, all layers, on all devices together: with more devices than kv heads these are kept many times."""
    return 2 * config.num_layers * max(config.num_kv_heads, tp) * config.head_dim * dtype_bytes
