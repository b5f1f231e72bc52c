"""GGUF files, written by the gguf package, give the tensors and the config of the model they were made from."""

import hashlib

import gguf
import ml_dtypes
import numpy as np
import pytest

from pdjax.models import source
from pdjax.models.checkpoints.gguf import GgufReader, hf_name, read_header
from pdjax.models.checkpoints.gguf_config import model_config
from pdjax.models.config import RopeScaling

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
BYTES = [f"<0x{i:02X}>" for i in range(256)]


def gguf_rows(array, heads):
    """Rows of q or k from Hugging Face's rotary order to GGUF's: row j*(H/2)+i of a head goes to 2i+j."""
    half = array.shape[0] // heads // 2
    order = [h * 2 * half + j * half + i for h in range(heads) for i in range(half) for j in range(2)]
    return array[order]


def write(path, table, arrays, kind="F32", arch="llama", **metadata):
    """A GGUF file of a model; matrices get type `kind`."""
    type_ = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(table["num_hidden_layers"])
    writer.add_context_length(table["max_position_embeddings"])
    writer.add_embedding_length(table["hidden_size"])
    writer.add_feed_forward_length(table["intermediate_size"])
    writer.add_head_count(table["num_attention_heads"])
    writer.add_head_count_kv(table["num_key_value_heads"])
    writer.add_key_length(table["head_dim"])
    writer.add_layer_norm_rms_eps(table["rms_norm_eps"])
    writer.add_rope_freq_base(table["rope_theta"])
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *BYTES])
    writer.add_token_scores([0.0] * 259)
    writer.add_token_types([2, 3, 3] + [6] * 256)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(value)
    for name in sorted(arrays, reverse=True):
        array = arrays[name]
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            array = gguf_rows(array, table["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        short = (
            next(n for n in all_names(table) if hf_name(n) == name) if name.startswith(("model", "lm_head")) else name
        )
        if array.ndim == 1 or kind == "F32":
            writer.add_tensor(short, array.astype(np.float32))
        else:
            writer.add_tensor(short, gguf.quants.quantize(array, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def all_names(table):
    parts = [f"attn_{part}" for part in ("norm", "q", "k", "v", "output")]
    parts += [f"ffn_{part}" for part in ("norm", "gate", "up", "down")]
    stems = [f"blk.{i}.{part}" for i in range(table["num_hidden_layers"]) for part in parts]
    return [f"{stem}.{end}" for stem in [*stems, "token_embd", "output_norm", "output"] for end in ("weight", "bias")]


def reader(path):
    return GgufReader(read_header(path))


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [("F32", 0.0), ("F16", 1e-3), ("BF16", 8e-3), ("Q8_0", 0.02), ("Q4_0", 0.35), ("Q4_1", 0.3)],
)
def test_every_type_reads_back_in_hugging_face_order(files, tmp_path, kind, tolerance):
    table = files.config(**SIZES)
    arrays = files.tensors(table)
    opened = reader(write(tmp_path / "m.gguf", table, arrays, kind))
    assert opened.names() == set(arrays)
    for name, array in arrays.items():
        assert opened.shape(name) == array.shape
        assert (
            np.abs(opened.read(name, slice(None)).astype(np.float32) - array).max() <= tolerance * np.abs(array).max()
        )


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_1"])
def test_any_rows_are_those_of_the_whole(files, tmp_path, kind):
    table = files.config(**SIZES)
    opened = reader(write(tmp_path / "m.gguf", table, files.tensors(table), kind))
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        whole = opened.read(name, slice(None))
        for start, stop in ((0, 1), (3, 5), (7, 9), (5, 40), (63, 64)):
            assert np.array_equal(opened.read(name, slice(start, stop)), whole[start:stop])


def test_config_is_the_models(files, tmp_path):
    table = files.config(**SIZES, rms_norm_eps=1e-5)
    config = model_config(read_header(write(tmp_path / "m.gguf", table, files.tensors(table))))
    assert (config.hidden_size, config.ffn_size, config.num_kv_heads, config.head_dim) == (64, 96, 2, 8)
    assert (config.rms_eps, config.eos_ids, config.tied, config.max_position) == (1e-5, (2,), False, 64)


def test_qwen2_is_not_regrouped_and_has_biases(files, tmp_path):
    table = files.config(**SIZES, model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    arrays = files.tensors(table)
    path = write(tmp_path / "m.gguf", table, arrays, arch="qwen2")
    config, opened = model_config(read_header(path)), reader(path)
    assert (config.attention_bias, config.output_bias) == (True, False)
    assert all(np.array_equal(opened.read(name, slice(None)), array) for name, array in arrays.items())


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_told_from_its_divisors(files, tmp_path, factor):
    table = files.config(**SIZES | {"head_dim": 128}, rope_theta=500000.0)
    divisors = []
    for i in range(64):  # the definition, band by band
        wavelength = 2 * np.pi * 500000.0 ** (2 * i / 128)
        smooth = (8192 / wavelength - 1) / (4 - 1)
        low, high = wavelength > 8192 / 1, wavelength < 8192 / 4
        divisors.append(factor if low else 1.0 if high else 1 / ((1 - smooth) / factor + smooth))
    arrays = files.tensors(table) | {"rope_freqs.weight": np.float32(divisors)}
    path = write(tmp_path / "m.gguf", table, arrays)
    assert model_config(read_header(path)).rope_scaling == RopeScaling("llama3", factor, 1.0, 4.0, 8192)
    assert "rope_freqs.weight" not in reader(path).names()


def test_other_divisors_are_refused(files, tmp_path):
    table = files.config(**SIZES)
    arrays = files.tensors(table) | {"rope_freqs.weight": np.float32([1, 9, 2, 3])}
    with pytest.raises(ValueError, match=r"rope_freqs.weight' is not a llama3 scaling"):
        source.resolve(str(write(tmp_path / "m.gguf", table, arrays)))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"rope_scaling_type": gguf.RopeScalingType.YARN, "rope_scaling_factor": 4.0}, "yarn"),
        ({"expert_count": 8}, "num_local_experts"),
        ({"rope_dimension_count": 4}, "rope.dimension_count is 4"),
        ({"sliding_window": 8}, "sliding_window is 8"),
    ],
)
def test_what_is_not_computed_is_refused(files, tmp_path, metadata, message):
    table = files.config(**SIZES)
    with pytest.raises(ValueError, match=message):
        source.resolve(str(write(tmp_path / "m.gguf", table, files.tensors(table), **metadata)))


def test_other_architectures_are_refused(files, tmp_path):
    table = files.config(**SIZES)
    with pytest.raises(ValueError, match=r"general.architecture is 'gemma'"):
        model_config(read_header(write(tmp_path / "m.gguf", table, files.tensors(table), arch="gemma")))


def test_other_tensor_types_are_refused(files, tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((1, 210), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q6_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"tensor 'token_embd.weight' has type Q6_K; allowed: F32"):
        read_header(path)


def test_truncated_file_names_a_tensor(files, tmp_path):
    table = files.config(**SIZES)
    path = write(tmp_path / "m.gguf", table, files.tensors(table))
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(ValueError, match=r"m.gguf: truncated: tensor 'output.weight'"):
        read_header(path)


@pytest.mark.parametrize("size", [4, 100, 2000])
def test_file_cut_in_its_header_is_named(files, tmp_path, size):
    table = files.config(**SIZES)
    path = write(tmp_path / "m.gguf", table, files.tensors(table))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"m.gguf: truncated or broken in its header"):
        read_header(path)


def test_unknown_tensor_keeps_its_name_and_is_refused(files, tmp_path):
    table = files.config(**SIZES)
    path = write(
        tmp_path / "m.gguf", table, files.tensors(table) | {"blk.0.attn_q_norm.weight": np.ones(8, np.float32)}
    )
    assert "blk.0.attn_q_norm.weight" in reader(path).names()


# First 16 hex digits of sha256 over the bfloat16 bytes, [out, in], Hugging Face rotary order; computed with
# transformers from the same file.
DIGESTS = {
    "model.embed_tokens.weight": "0c8d76d0178f771e",
    "model.layers.0.input_layernorm.weight": "9ab0dc5d065cbff6",
    "model.layers.0.self_attn.q_proj.weight": "d0ff302d4d83d5be",
    "model.layers.0.self_attn.k_proj.weight": "b4b71b9a71396236",
    "model.layers.0.self_attn.v_proj.weight": "0137c731861e2236",
    "model.layers.0.mlp.down_proj.weight": "db9fc00ed498bfb6",
    "model.layers.29.self_attn.q_proj.weight": "75734637d670850d",
    "model.layers.29.mlp.gate_proj.weight": "9172fc73bfe54dc8",
    "model.norm.weight": "b1c3b88d13d30d19",
}


def test_smollm2_has_the_bits_of_its_reference(smollm2):
    opened = smollm2.tensors()
    for name, digest in DIGESTS.items():
        data = opened.read(name, slice(None)).astype(ml_dtypes.bfloat16).tobytes()
        assert hashlib.sha256(data).hexdigest()[:16] == digest, name
    opened.close()
