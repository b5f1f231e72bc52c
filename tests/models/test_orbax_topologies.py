"""An orbax folder that one topology wrote is restored on another: with its shardings, not those that were saved."""

import jax
import numpy as np
import pytest

from pdjax.models import weights
from pdjax.models.checkpoints import orbax
from pdjax.models.config import ModelConfig
from pdjax.models.sharding import make_mesh

# Two kv heads on eight devices: some axes are split, others replicated, and nothing is padded.
CONFIG = ModelConfig(64, 32, 48, 1, num_heads=8, num_kv_heads=2, head_dim=4)


def leaves(loaded):
    return jax.tree.leaves_with_path((loaded.outer, loaded.layers))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved_by_eight")
    orbax.save(path, CONFIG, weights.random(CONFIG, make_mesh(CONFIG, jax.devices()[:8]), "float32"))
    return path


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_what_eight_devices_saved_lies_on_a_smaller_mesh_as_that_mesh_wants_it(folder, tp):
    mesh = make_mesh(CONFIG, jax.devices()[-tp:])
    wanted = weights.random(CONFIG, mesh, "float32")
    restored = orbax.restore(folder, CONFIG, mesh, "float32")
    for (path, got), (_, want) in zip(leaves(restored), leaves(wanted), strict=True):
        assert got.sharding == want.sharding, path
        assert np.array_equal(np.asarray(got), np.asarray(want)), path
