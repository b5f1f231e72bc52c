"""The KV pool: its dtype, its bytes, how it lies on a mesh."""

import types

import jax
import ml_dtypes
import numpy as np
import pytest

from pdjax.models.attention import gpu, plain
from pdjax.models.config import ModelConfig
from pdjax.models.kv import kv_bytes_per_token, kv_dtype, make_pool
from pdjax.models.sharding import make_mesh
from tests.paged import forced

CONFIG = ModelConfig(64, 32, 48, 2, 6, 3, 8)


@pytest.mark.parametrize(("platform", "want"), [("cpu", np.float32), ("gpu", ml_dtypes.bfloat16), ("tpu", ml_dtypes.bfloat16)])  # fmt: skip  # noqa: E501
def test_kv_of_bfloat16_weights_is_float32_on_cpu_only(platform, want):
    devices = [types.SimpleNamespace(platform=platform)]
    assert kv_dtype(ml_dtypes.bfloat16, devices) == want
    assert kv_dtype(np.float32, devices) == np.float32


@pytest.mark.parametrize("backend", [plain.backend(), gpu.backend(cudnn="left out")], ids=lambda each: each.name)
@pytest.mark.parametrize(("tp", "heads"), [(1, 3), (2, 3), (3, 1), (6, 1)])
def test_a_device_holds_the_bytes_of_its_own_heads(backend, tp, heads):
    with forced(lambda mesh: backend):
        pool = make_pool(CONFIG, make_mesh(CONFIG, jax.devices()[:tp]), 5, 4, np.float32)
    per_device = sum(array.addressable_shards[0].data.nbytes for cache in pool for array in cache)
    assert per_device == kv_bytes_per_token(CONFIG, np.float32) * 5 * 4 * heads // 3
    assert all(not np.asarray(array).any() for cache in pool for array in cache)
