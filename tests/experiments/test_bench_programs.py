"""The bench launcher without its measurements: what a ratio must reach, what a prompt costs, and its refusals."""

import subprocess
import sys

from pdjax.experiments.bench_cases import Case, cases, prefill_flops
from pdjax.models.config import ModelConfig


def test_a_ratio_must_reach_its_bar_and_a_ceiling_must_not_be_passed():
    assert Case(0.5, None).ok(0.5) and not Case(0.5, None).ok(0.49)
    assert Case(1.2, None, ceiling=True).ok(1.2) and not Case(1.2, None, ceiling=True).ok(1.21)


def test_every_ratio_of_programs_has_a_case():
    decode = {"decode_f32_b1", "decode_f32_b8", "decode_f32_b32", "decode_bf16_b8", "decode_bf16_b32"}
    prefill = {"prefill_f32_128", "prefill_f32_512", "prefill_f32_1024", "prefill_bf16_512"}
    assert set(cases()) == decode | prefill | {"paged_over_dense_b8", "mixed_128_8", "groups_5"}


def test_prefill_flops_are_those_of_the_products_written_out():
    config = ModelConfig(
        vocab_size=50, hidden_size=8, ffn_size=12, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=2, tied=True
    )
    weights = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 12  # q, k and v, o, gate and up and down
    scores_and_values = 2 * 2 * (4 * 2) * 10 / 2  # per token, causal at half
    assert prefill_flops(config, 10) == 3 * 10 * (2 * weights + scores_and_values) + 2 * 8 * 50


def test_an_unknown_ratio_ends_with_one_line():
    command = [sys.executable, "-m", "pdjax.experiments.bench_programs", "--only=decode,nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: only has 'nothing'; allowed: the start of one of decode_f32_b1,")
