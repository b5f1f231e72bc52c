"""Rooflines: hand-computed terms, memory that is left for KV, and published measurements within the stated error."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax import fleet, hardware, published, roofline
from pdjax.latency import Load
from pdjax.messages import Role
from pdjax.models.config import ModelConfig
from pdjax.models.presets import PRESETS
from pdjax.roofline import EAGER, Efficiency

# A layer has 10 * (2 * (4 + 2) * 5 + 3 * 20) = 1200 weights, the head 100 * 10.
SMALL = ModelConfig(
    vocab_size=100, hidden_size=10, ffn_size=20, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=5, tied=True
)
DEVICE = hardware.Hardware("device", 1e3, 2e3, 1e5, 1e4, 1e3, 100.0, 1.0, 1.0)
IDEAL = Efficiency(compute=1.0, memory=1.0, link=1.0, layer_s=0.0, hop_s=0.0, used=1.0)
# OPT's feed-forward has two matrices of 4 D: as many weights as three of 8/3 D.
OPT_13B = ModelConfig(50272, 5120, 13653, 40, 40, 40, 128, tied=True)


def seconds(load, config=SMALL, device=DEVICE, tp=1, pp=1, **options):
    pool = roofline.pool(Role.MIXED, 1, config, device, tp, pp, **({"efficiency": IDEAL} | options))
    return pool.latency.iteration_s(fleet.build([pool]).specs[0], load)


def test_a_step_of_few_rows_reads_the_weights_and_its_kv():
    # 2 bytes of 2 * 1200 + 1000 weights; a token has 2 * 2 * 2 * 5 numbers of 2 bytes.
    assert seconds(Load((), 0)) == 0.0
    one = dataclasses.replace(DEVICE, flops=1e9)
    assert seconds(Load((), 1, 50, 50), device=one) == pytest.approx((6800 + 50 * 80) / 1e4)


def test_a_prompt_computes():
    # 2 FLOP per weight and token, the head once; 4 per head dimension, head, layer and pair.
    assert seconds(Load(((30, 0),))) == pytest.approx((2 * 2400 * 30 + 2 * 1000 + 4 * 2 * 20 * 450) / 1e3)


def test_a_chunk_behind_a_long_prompt_reads_its_kv():
    one = dataclasses.replace(DEVICE, flops=1e12)
    assert seconds(Load(((1, 1000),)), device=one) == pytest.approx((6800 + 1001 * 80) / 1e4)


def test_weights_are_read_once_whoever_rides_along():
    one = dataclasses.replace(DEVICE, flops=1e6)
    step, prompt, both = (
        seconds(load, device=one) for load in (Load((), 2, 80, 80), Load(((3, 0),)), Load(((3, 0),), 2, 80, 80))
    )
    assert step + prompt - both == pytest.approx(6800 / 1e4)


def test_weights_of_eight_bits_halve_the_reading_and_compute_as_fast_as_the_device_can():
    load = Load(((30, 0),))
    attention = 4 * 2 * 20 * 450 / 1e3
    assert seconds(load, dtype_bytes=1) - attention == pytest.approx((seconds(load) - attention) / 2)


def test_tensor_parallelism_shares_the_work_and_pays_for_two_reductions_a_layer():
    whole, half = (seconds(Load(((30, 0),)), tp=tp) for tp in (1, 2))
    assert half == pytest.approx(whole / 2 + 2 * 2 * 2 * (1 / 2) * 30 * 10 * 2 / 1e3)


def test_a_pipeline_sends_once_and_its_rows_step_in_groups():
    load, group = Load((), 4, 80, 80), Load((), 2, 40, 40)
    assert seconds(load, pp=2) == pytest.approx(seconds(group) + 2 * 10 * 2 / 1e3)


def test_launches_and_hops_are_per_pass():
    slow = dataclasses.replace(IDEAL, layer_s=1.0, hop_s=0.5)
    load = Load((), 1, 1, 1)
    assert seconds(load, tp=2, pp=2, efficiency=slow) - seconds(load, tp=2, pp=2) == pytest.approx(2.0 + 5 * 0.5)


def test_kv_has_what_the_weights_leave():
    made = roofline.pool(Role.DECODE, 3, SMALL, DEVICE, 2, efficiency=IDEAL, max_rows=7)
    assert made.kv_tokens == (200_000 - 6800) // 80
    assert (made.count, made.devices, made.kv_bytes_per_token, made.max_rows) == (3, 2, 80, 7)


def test_kv_heads_are_kept_twice_where_there_are_twice_as_many_devices():
    assert roofline.pool(Role.DECODE, 1, SMALL, DEVICE, 4, efficiency=IDEAL).kv_tokens == (400_000 - 6800) // 160


def test_a_model_that_does_not_fit_says_by_how_much():
    config, device = PRESETS["llama2-70b"], hardware.get("a100-80g")
    with pytest.raises(
        ValueError, match=r"weights are 138\.0 GB; allowed on tp 1 x pp 1 a100-80g: less than the 77\.3 GB"
    ):
        roofline.pool(Role.MIXED, 1, config, device)
    assert roofline.pool(Role.MIXED, 1, config, device, 2).kv_tokens > 0


def test_a_model_divides_into_some_parts_only():
    with pytest.raises(ValueError, match="tp is 3; allowed with 4 heads: a divisor"):
        roofline.latency(SMALL, DEVICE, 3)
    with pytest.raises(ValueError, match="pp is 3; allowed with 2 layers: 1 to as many"):
        roofline.latency(SMALL, DEVICE, 1, 3)


@pytest.mark.parametrize(("name", "value"), [("compute", 0.0), ("used", 1.5), ("layer_s", -1.0)])
def test_efficiencies_are_parts_of_one(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}; allowed: "):
        Efficiency(**{name: value})


@pytest.mark.parametrize(
    ("load", "error"),
    [(Load(((512, 0),)), 0.35), (Load((), 32, 32 * 512, 32 * 512), 0.32)],
    ids=["prefill", "decode"],
)
def test_opt_13b_is_within_the_stated_error(load, error):
    measured = seconds_of("opt-13b-a100-80g-distserve-tp1-pp1", load)
    ours = seconds(load, OPT_13B, hardware.get("a100-80g"), efficiency=EAGER)
    assert ours == pytest.approx(measured, rel=error)


def test_a_step_on_h200_is_within_the_stated_error():
    load = Load((), 97, 290_709, 290_709)  # measured: 15.48 ms
    ours = seconds(load, PRESETS["llama3.1-8b"], hardware.get("h200"), dtype_bytes=1, efficiency=Efficiency())
    assert ours == pytest.approx(15.48e-3, rel=0.19)


def seconds_of(name, load):
    entry = published.get(name)
    return entry.latency.iteration_s(fleet.build([entry.pool(Role.MIXED)]).specs[0], load)


@pytest.mark.parametrize("device", hardware.names())
def test_every_device_runs_a_7b_model_and_a_longer_prompt_takes_longer(device):
    made = roofline.pool(Role.MIXED, 1, PRESETS["llama2-7b"], hardware.get(device), 2)
    spec = fleet.build([made]).specs[0]
    times = [made.latency.prefill_s(spec, tokens) for tokens in (1, 500, 2000, 4000)]
    assert times == sorted(set(times))
    assert made.latency.transfer_s(2e9) > made.latency.transfer_s(1e9) > 0


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(0, 10**6), st.integers(1, 40), st.sampled_from([1, 2]), st.floats(1e-12, 9.0))
def test_many_steps_are_to_the_last_bit_each_of_them(rows, context, steps, pp, context_s):
    made = dataclasses.replace(roofline.latency(SMALL, DEVICE, pp=pp), context_s=context_s)
    spec = fleet.build([roofline.pool(Role.MIXED, 1, SMALL, DEVICE, pp=pp)]).specs[0]
    single = [made.iteration_s(spec, Load((), rows, context + rows * step, 0)) for step in range(steps)]
    assert np.array_equal(made.steps_s(spec, Load((), rows, context, 0), steps), single)
