"""Orbax folders give back what was saved, on any mesh, and say what is wrong with a broken one."""

import dataclasses
import gc
import json
import shutil

import jax
import numpy as np
import pytest

from pdjax.models import source
from pdjax.models.checkpoints import orbax
from pdjax.models.config import RopeScaling
from pdjax.models.sharding import make_mesh


def load(model, tp, dtype="float32"):
    found = source.resolve(str(model))
    return found.load(make_mesh(found.config, jax.devices()[:tp]), dtype)


def parts(weights):
    return [weights.outer, *weights.layers.values()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("orbax") / "tiny"
    path.mkdir()
    orbax.save(path, source.resolve("tiny").config, load("tiny", 1))
    return path


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_any_mesh_restores_what_was_saved(folder, tp):
    for restored, original in zip(parts(load(folder, tp)), parts(load("tiny", tp)), strict=True):
        assert restored.keys() == original.keys()
        for name, array in restored.items():
            assert array.sharding == original[name].sharding
            assert np.array_equal(np.asarray(array), np.asarray(original[name])), name


def test_another_dtype_is_converted_on_the_way(folder):
    restored, original = load(folder, 2, "bfloat16"), load("tiny", 2, "bfloat16")
    assert restored.layers[0]["attn_norm"].dtype == np.float32
    assert np.array_equal(np.asarray(restored.outer["embed"]), np.asarray(original.outer["embed"]))


def test_a_config_comes_back_whole(tmp_path):
    config = dataclasses.replace(
        source.resolve("tiny").config, rope_scaling=RopeScaling("llama3", 8.0), eos_ids=(3, 5), bos_id=None
    )
    manifest = {"format": 1, "config": dataclasses.asdict(config)}
    (tmp_path / orbax.MANIFEST).write_text(json.dumps(manifest))
    assert orbax.read_config(tmp_path) == config


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 2, "config": {}}', '{"format": 1, "config": {"color": 3}}'])
def test_broken_manifest_is_named(tmp_path, text):
    (tmp_path / orbax.MANIFEST).write_text(text)
    with pytest.raises(ValueError, match=r"pdjax.json: not a manifest"):
        source.resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 3}, r"array 'layers.2.attn_norm' is missing"),
        ({"num_layers": 1}, r"array 'layers.1.attn_norm' has shape \[64\]; allowed by the config: no such array"),
        ({"ffn_size": 160}, r"array 'layers.0.w_down' has shape \[64, 172\]; allowed by the config: shape \[64, 160\]"),
        ({"tied": False}, r"array 'outer.head' is missing"),
    ],
)
def test_arrays_that_do_not_fit_the_config_are_named(folder, tmp_path, change, message):
    config = dataclasses.replace(source.resolve("tiny").config, **change)
    with pytest.raises(ValueError, match=message):
        orbax.restore(folder, config, make_mesh(config, jax.devices()[:1]), "float32")


def test_manifest_without_weights_is_named(folder, tmp_path):
    (tmp_path / orbax.MANIFEST).write_text((folder / orbax.MANIFEST).read_text())
    with pytest.raises(ValueError, match=r"weights: not an orbax checkpoint"):
        load(tmp_path, 1)


# orbax leaves the reads that were under way to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damaged_data_are_named(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    largest = max((tmp_path / "copy" / orbax.WEIGHTS).rglob("d/*"), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    quarter = len(data) // 4
    data[quarter : 2 * quarter] = bytes(quarter)
    largest.write_bytes(data)
    with pytest.raises(ValueError, match=r"weights: cannot restore '(outer|layers.0|layers.1)': "):
        load(tmp_path / "copy", 1)
    gc.collect()


def test_an_orbax_folder_has_no_single_tensors(folder):
    with pytest.raises(ValueError, match="orbax folder"):
        source.resolve(str(folder)).tensors()
