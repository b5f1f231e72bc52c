"""Operators' tables from files: how often each counts, and what happens where a size is missing."""

import itertools

import pytest

from pdjax import operator_tables

ALL = ("dense.csv", "per_sequence.csv", "attention.csv")


def write(folder, name, header, lines):
    (folder / name).write_text("\n".join([header, *lines]) + "\n")


@pytest.fixture
def gpu(tmp_path):
    """A prompt part of c after p takes c + p, beside rows 10 more; rows take n * k. 32 and 128 are on another grid."""
    dense = {"embedding": 1, "layernorm": 10, "qkv_proj": 100, "final_layernorm": 1000}
    write(
        tmp_path,
        "dense.csv",
        "layer,tokens,time_us",
        [f"{name},{size},{size * time}" for name, time in dense.items() for size in (1, 2)],
    )
    write(
        tmp_path,
        "per_sequence.csv",
        "layer,sequences,time_us",
        ["lm_head,1,5", "lm_head,2,5", "sampler,1,1", "sampler,2,2"],
    )
    lines = [f"0,0,{n},{k},{n * k}" for n in (1, 2) for k in (16, 32, 64, 128)]
    for chunk, sizes in ((16, (0, 16, 64)), (24, (0, 32, 128))):
        lines += [f"{chunk},{prior},0,0,{chunk + prior}" for prior in sizes]
        contexts = [size for size in sizes if size]
        lines += [
            f"{chunk},{p},{n},{k},{chunk + p + 10 + n * k}" for p, n, k in itertools.product(sizes, (1, 2), contexts)
        ]
    write(tmp_path, "attention.csv", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", lines)
    return tmp_path


def test_operators_count_once_per_layer_or_pass_and_norms_twice(gpu):
    model = operator_tables.gpu(gpu, 3)
    assert model.tokens.at(2) == pytest.approx(2 * (1 + 3 * 2 * 10 + 3 * 100 + 1000) * 1e-6)
    assert model.sequences.at(2) == pytest.approx(7e-6)
    assert model.decode.at(2, 64) == pytest.approx(3 * 128e-6)


def test_sizes_that_only_the_other_grid_has_are_interpolated(gpu):
    model = operator_tables.gpu(gpu, 1)
    assert model.prefill.axes == ((16, 24), (0, 16, 32, 64, 128))
    assert model.prefill.at(16, 32) == pytest.approx(48e-6)  # between 16 and 64
    assert model.mixed.at(24, 64, 2, 64) == pytest.approx((24 + 64 + 10 + 128) * 1e-6)
    assert model.mixed.at(24, 0, 2, 16) == pytest.approx((24 + 10 + 32) * 1e-6)  # below the smallest of its grid, 32


def test_more_fields_go_to_the_model(gpu):
    assert operator_tables.gpu(gpu, 1, skew=0.5).skew == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "dense.csv").unlink(), "cannot read .*dense.csv"),
        (lambda folder: write(folder, "dense.csv", "layer,tokens", ["a,1"]), r"\['time_us'\] are missing"),
        (lambda folder: write(folder, "dense.csv", "layer,tokens,time_us", []), "has no line"),
        (
            lambda folder: write(folder, "dense.csv", "layer,tokens,time_us", ["a,1,1", "a,2,nan"]),
            "dense.csv:3: time_us",
        ),
        (lambda folder: write(folder, "dense.csv", "layer,tokens,time_us", ["a,-1,1"]), "dense.csv:2: tokens is '-1'"),
        (
            lambda folder: write(
                folder, "attention.csv", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", ["0,0,1,16,1"]
            ),
            r"prompt parts are \[\]",
        ),
    ],
)
def test_a_bad_table_is_named(gpu, change, message):
    change(gpu)
    with pytest.raises(ValueError, match=message):
        operator_tables.gpu(gpu, 1)


def test_a_byte_order_mark_is_no_part_of_a_column(gpu):
    path = gpu / "dense.csv"
    path.write_text("\ufeff" + path.read_text(), encoding="utf-8")
    assert operator_tables.gpu(gpu, 1).tokens.at(1) > 0


@pytest.fixture
def tpu(tmp_path):
    """down_proj has the work of up_proj for one token; attention is measured up to 96 tokens in all."""
    layers = ["down_proj,1,0,1,20", "down_proj,2,0,1,10", "down_proj,3,0,1,10", "up_proj,2,0,1,10", "up_proj,3,0,1,10"]
    layers += ["act_fn,1,0,1,0", "embedding,1,0,1,1", "embedding,2,0,1,1", "embedding,3,0,1,1"]
    layers += [f"lm_head,{size},0,1,{500 + size}" for size in (1, 2, 3)]
    write(tmp_path, "layers.csv", "layer_name,input,kv_cache,tp_size,latency(ns)", layers)
    attention = ["32,0,1,True,1,1,1,1", "32,32,1,True,3,1,1,1", "32,64,1,True,5,1,1,1"]
    attention += ["64,0,1,True,4,1,1,1", "64,32,1,True,8,1,1,1"]
    attention += [f"0,{context},{rows},False,{rows * context},1,1,1" for rows in (1, 2) for context in (32, 64)]
    header = "prefill_chunk_size,kv_cache_size,batch_size,is_prefill,mean_ns,p50_ns,p90_ns,max_ns"
    write(tmp_path, "attention.csv", header, attention)
    return tmp_path


def test_what_a_fused_operator_has_taken_over_counts_as_nothing(tpu):
    model = operator_tables.tpu(tpu, 2)
    assert [model.tokens.at(size) for size in (1, 2, 3)] == pytest.approx([41e-9] * 3)
    assert model.sequences.at(2) == pytest.approx(502e-9)
    assert operator_tables.operators_of(tpu)["down_proj"] == pytest.approx({1: 20e-9, 2: 10e-9, 3: 10e-9})


def test_where_attention_was_not_measured_context_costs_as_for_the_smaller_prompt_times_its_size(tpu):
    model = operator_tables.tpu(tpu, 1)
    assert model.prefill.at(64, 64) == pytest.approx((8 + 2 * 64 / 32) * 1e-9)
    assert model.decode.at(2, 64) == pytest.approx(128e-9)
    assert model.mixed is None
