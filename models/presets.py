"""The models known by name: what enters is a name, what leaves is its `ModelConfig`; called by `models.source`.

Only `tiny` and `smollm2-135m` come with weights (random ones, and those of an installed package). The others give the
shapes of well-known models to the simulator, the planner and the compilers.
"""

from pdjax.models.config import ModelConfig, RopeScaling


def _llama2(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=32000,
        hidden_size=hidden,
        ffn_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        max_position=4096,
        eos_ids=(2,),
        bos_id=1,
    )


def _llama31(hidden: int, ffn: int, layers: int, heads: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=128256,
        hidden_size=hidden,
        ffn_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
        max_position=131072,
        eos_ids=(128001, 128008, 128009),
        bos_id=128000,
    )


PRESETS: dict[str, ModelConfig] = {
    # heads * head_dim differs from the hidden size, so a missing transpose cannot pass unseen.
    "tiny": ModelConfig(
        vocab_size=512,
        hidden_size=64,
        ffn_size=172,
        num_layers=2,
        num_heads=8,
        num_kv_heads=4,
        head_dim=16,
        max_position=1024,
        tied=True,
        eos_ids=(257,),
        bos_id=256,
    ),
    "smollm2-135m": ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        ffn_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rope_theta=100000.0,
        max_position=8192,
        tied=True,
        eos_ids=(2,),
    ),
    "llama2-7b": _llama2(4096, 11008, 32, 32, 32),
    "llama2-13b": _llama2(5120, 13824, 40, 40, 40),
    "llama2-70b": _llama2(8192, 28672, 80, 64, 8),
    "llama3.1-8b": _llama31(4096, 14336, 32, 32),
    "llama3.1-70b": _llama31(8192, 28672, 80, 64),
}
