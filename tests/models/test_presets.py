"""The presets are consistent and have the sizes their names promise."""

import math

import pytest

from pdjax.models.presets import PRESETS
from pdjax.models.weights import tables


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("smollm2-135m", 134.5),
        ("llama2-7b", 6738),
        ("llama2-13b", 13016),
        ("llama2-70b", 68977),
        ("llama3.1-8b", 8030),
        ("llama3.1-70b", 70554),
    ],
)
def test_preset_has_its_number_of_parameters(name, millions):
    outer, layers = tables(PRESETS[name], 1)
    count = sum(math.prod(param.shape) for table in (outer, *layers.values()) for param in table.values())
    assert count / 1e6 == pytest.approx(millions, rel=1e-3)


def test_tiny_splits_over_eight_devices():
    assert PRESETS["tiny"].num_heads == 8


def test_heads_are_groups():
    assert all(config.group * config.num_kv_heads == config.num_heads for config in PRESETS.values())
