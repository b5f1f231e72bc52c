"""Which configs are read, what they become, and which are refused."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdjax.models.config import RopeScaling
from pdjax.models.hf_config import HARMLESS, NEUTRAL, USED, from_dict, merge_ids

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_the_three_key_lists_do_not_overlap():
    assert not USED & HARMLESS and not USED & NEUTRAL.keys() and not HARMLESS & NEUTRAL.keys()


def test_sizes_are_read(files):
    config = from_dict(files.config())
    sizes = (config.hidden_size, config.ffn_size, config.num_layers, config.num_heads, config.num_kv_heads)
    assert sizes == (48, 42, 2, 8, 2)
    assert (config.head_dim, config.vocab_size, config.max_position, config.rms_eps) == (4, 101, 64, 1e-5)


def test_old_llama_config_has_as_many_kv_heads_as_heads(files):
    config = from_dict(files.config(num_key_value_heads=None, head_dim=None))
    assert (config.num_kv_heads, config.head_dim) == (8, 6)


def test_head_dim_may_leave_hidden_size_undivided(files):
    assert (
        from_dict(files.config(hidden_size=64, num_attention_heads=3, num_key_value_heads=3, head_dim=32)).head_dim
        == 32
    )


@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_llama3_rope_reads_the_same_in_both_versions(files, spelling):
    old = from_dict(files.config(rope_theta=500000.0, rope_scaling={spelling: "llama3"} | LLAMA3))
    new = from_dict(
        files.config(rope_theta=None, rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0} | LLAMA3)
    )
    assert old == new
    assert old.rope_theta == 500000.0 and old.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def test_linear_rope_is_read(files):
    assert from_dict(files.config(rope_scaling={"type": "linear", "factor": 4})).rope_scaling == RopeScaling(
        "linear", 4.0
    )


def test_dynamic_rope_is_plain_within_the_context(files):
    assert from_dict(files.config(rope_scaling={"type": "dynamic", "factor": 2.0})).rope_scaling is None


def test_absent_theta_is_the_documented_default_and_it_is_said(files, caplog):
    with caplog.at_level(logging.INFO, "pdjax"):
        assert from_dict(files.config(rope_theta=None)).rope_theta == 10000.0
    assert "no rope_theta in the config: 10000" in caplog.text


def test_qwen2_has_biases_on_qkv_only(files):
    config = from_dict(files.config(model_type="qwen2", architectures=["Qwen2ForCausalLM"]))
    assert (config.attention_bias, config.output_bias, config.mlp_bias) == (True, False, False)


def test_llama_attention_bias_includes_the_output(files):
    config = from_dict(files.config(attention_bias=True, mlp_bias=True))
    assert (config.attention_bias, config.output_bias, config.mlp_bias) == (True, True, True)


def test_biases_the_config_does_not_mention_are_found_in_the_tensors(files):
    names = files.shapes(files.config(attention_bias=True, mlp_bias=True))
    assert from_dict(files.config(), has_tensor=names.__contains__).mlp_bias


def test_eos_is_the_union_of_config_and_generation_config(files):
    assert from_dict(files.config(eos_token_id=-1), {"eos_token_id": [7, 5]}).eos_ids == (5, 7)
    assert from_dict(files.config(eos_token_id=[2, 3]), {"eos_token_id": 7}).eos_ids == (2, 3, 7)


def test_padding_never_ends_a_text(files):
    assert from_dict(files.config(eos_token_id=None, pad_token_id=0)).eos_ids == ()


def test_window_is_accepted_where_it_hides_nothing(files):
    mistral = files.config(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=8)
    assert from_dict(mistral, max_len=8).max_position == 8
    for max_len in (0, 9):
        with pytest.raises(ValueError, match="sliding_window is 8"):
            from_dict(mistral, max_len=max_len)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 8, "use_sliding_window": False},
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "sliding_window": 8},
        {"sliding_window": 8, "layer_types": ["full_attention", "full_attention"]},
    ],
)
def test_window_that_is_off_is_full_attention(files, changes):
    assert from_dict(files.config(**changes)).max_position == 64


def test_unknown_key_is_named_in_a_warning(files, caplog):
    with caplog.at_level(logging.WARNING, "pdjax"):
        from_dict(files.config(mystery_factor=3))
    assert "mystery_factor" in caplog.text


def test_unknown_key_is_an_error_when_strict(files):
    with pytest.raises(ValueError, match="mystery_factor"):
        from_dict(files.config(mystery_factor=3), strict=True)


def test_known_keys_warn_about_nothing(files, caplog):
    with caplog.at_level(logging.WARNING, "pdjax"):
        from_dict(files.config(pretraining_tp=2, use_cache=True, initializer_range=0.02, logits_scaling=1.0))
    assert not caplog.records


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma2"}, "gemma2"),
        ({"model_type": "qwen3"}, "qwen3"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"hidden_size": 50, "head_dim": None}, "head_dim"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}}, "beta"),
        ({"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}}, "differ"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "layer type"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_theta"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "linear", "factor": 4}},
            "both the same",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"residual_multiplier": 0.2}, "residual_multiplier"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": "</s>"}, "token id"),
    ],
)
def test_refused_by_name(files, changes, named):
    with pytest.raises(ValueError, match=named):
        from_dict(files.config(**changes))


def test_promised_bias_that_is_not_there_is_refused(files):
    with pytest.raises(ValueError, match=r"attention_bias is True.*q_proj.bias"):
        from_dict(files.config(attention_bias=True), has_tensor=files.shapes(files.config()).__contains__)


@given(st.lists(st.one_of(st.none(), st.integers(-1, 9), st.lists(st.integers(-1, 9)))))
def test_merged_ids_are_ascending_and_distinct(values):
    ids = merge_ids(*values)
    assert list(ids) == sorted(set(ids)) and all(i >= 0 for i in ids)
