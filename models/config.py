"""The numbers that define a LLaMA-family model. Pure data; `models.hf_config` reads it from files."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary frequency scaling. `kind` "linear" uses factor only; "llama3" uses all (lengths in tokens)."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder of the LLaMA family.

    Attributes:
        num_heads: query heads, K * G.
        attention_bias: biases on q, k and v; `output_bias` on o; `mlp_bias` on gate, up and down.
        tied: the head is the embedding.
        eos_ids: ids that end a text.
        bos_id: id put in front of a text prompt by the tokenizer, if any.
    """

    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_eps: float = 1e-5
    max_position: int = 2048
    tied: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    @property
    def group(self) -> int:
        """G: query heads per kv head."""
        return self.num_heads // self.num_kv_heads
