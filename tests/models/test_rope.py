"""Rotary embedding: angles and rotation against complex numbers, and the two frequency scalings."""

import dataclasses
import math

import numpy as np
import pytest

from pdjax.models.config import ModelConfig, RopeScaling
from pdjax.models.rope import angles, frequencies, rotate

CONFIG = ModelConfig(64, 32, 48, 1, 4, 2, 8, rope_theta=500.0)
LLAMA3 = RopeScaling("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)


def scaled(scaling: RopeScaling) -> np.ndarray:
    return frequencies(dataclasses.replace(CONFIG, head_dim=128, rope_theta=500000.0, rope_scaling=scaling))


def test_a_pair_turns_like_a_complex_number():
    positions = np.array([0, 1, 7, 300], np.int32)
    x = np.random.default_rng(0).standard_normal((4, 3, 8)).astype(np.float32)
    turned = np.asarray(rotate(x, *angles(CONFIG, positions)))
    turn = np.exp(1j * positions[:, None] * 500.0 ** (-np.arange(0, 8, 2) / 8))
    want = (x[..., :4] + 1j * x[..., 4:]) * turn[:, None]
    np.testing.assert_allclose(turned, np.concatenate([want.real, want.imag], -1), atol=2e-5)


def test_scores_depend_on_distance_only():
    q, k = np.random.default_rng(1).standard_normal((2, 1, 1, 8)).astype(np.float32)

    def score(m, n):
        at = [angles(CONFIG, np.array([position], np.int32)) for position in (m, n)]
        return np.sum(np.asarray(rotate(q, *at[0])) * np.asarray(rotate(k, *at[1])))

    assert score(5, 2) == pytest.approx(score(105, 102), abs=1e-5)


def test_linear_scaling_stretches_every_wavelength():
    np.testing.assert_allclose(scaled(RopeScaling("linear", 4.0)) * 4, scaled(RopeScaling("linear", 1.0)))


def test_llama3_scaling_keeps_fast_pairs_and_stretches_slow_ones():
    plain, got = scaled(RopeScaling("linear", 1.0)), scaled(LLAMA3)
    wavelength = 2 * math.pi / plain
    fast, slow = wavelength < 8192 / 4, wavelength > 8192
    np.testing.assert_allclose(got[fast], plain[fast])
    np.testing.assert_allclose(got[slow], plain[slow] / 8)
    between = ~fast & ~slow
    assert between.any() and np.all((got[between] < plain[between]) & (got[between] > plain[between] / 8))


@pytest.mark.parametrize("position", [0, 1, 8191, 8192, 100_000])
def test_llama3_angles_are_those_of_its_definition_far_beyond_the_original_context(position):
    """As Llama 3.1 defines them, by wavelength, in float64; float32 angles are off by a few units in the last place."""
    want = []
    for pair in range(64):
        freq = 500000.0 ** (-2 * pair / 128)
        wavelength = 2 * math.pi / freq
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        if wavelength > 8192 / 1.0:
            freq = freq / 8.0
        elif wavelength >= 8192 / 4.0:
            freq = (1 - smooth) * freq / 8.0 + smooth * freq
        want.append(position * freq)
    config = dataclasses.replace(CONFIG, head_dim=128, rope_theta=500000.0, rope_scaling=LLAMA3)
    cos, sin = angles(config, np.array([position], np.int32))
    tolerance = 1e-6 + position * 2**-23
    np.testing.assert_allclose(cos[0], np.cos(want), atol=tolerance)
    np.testing.assert_allclose(sin[0], np.sin(want), atol=tolerance)


def test_an_unknown_scaling_is_refused_by_name():
    with pytest.raises(ValueError, match=r"rope_scaling\.kind is 'yarn'; allowed: linear, llama3"):
        scaled(RopeScaling("yarn", 2.0))
