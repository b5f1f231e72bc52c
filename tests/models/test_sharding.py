"""How layers are dealt out to pipeline stages, and what each stage loads."""

import jax
import numpy as np
import pytest

from pdjax.models import source
from pdjax.models.checkpoints import orbax
from pdjax.models.sharding import make_mesh, make_meshes, shares


@pytest.mark.parametrize(("layers", "pp"), [(5, 1), (5, 2), (5, 5), (30, 4), (80, 7)])
def test_stages_hold_every_layer_once_in_order_as_evenly_as_can_be(layers, pp):
    held = shares(layers, pp)
    sizes = [len(share.layers) for share in held]
    assert [layer for share in held for layer in share.layers] == list(range(layers))
    assert len(held) == pp and sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_the_first_stage_has_the_embedding_and_the_last_the_head():
    assert [(share.first, share.last) for share in shares(5, 3)] == [(True, False), (False, False), (False, True)]
    assert [(share.first, share.last) for share in shares(5, 1)] == [(True, True)]


@pytest.mark.parametrize("pp", [0, 6])
def test_more_stages_than_layers_are_refused(pp):
    with pytest.raises(ValueError, match=f"pp is {pp}; allowed: 1 to 5, the layers of the model"):
        shares(5, pp)


def test_stages_lie_on_runs_of_the_devices():
    config, devices = source.resolve("tiny").config, jax.devices()[:6]
    assert [list(mesh.devices.flat) for mesh in make_meshes(config, devices, 3)] == [
        devices[:2],
        devices[2:4],
        devices[4:],
    ]


@pytest.mark.parametrize(("tied", "last"), [(True, {"embed", "final_norm"}), (False, {"head", "final_norm"})])
@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
def test_a_stage_loads_its_own_part_and_nothing_else(files, tmp_path, kind, tied, last):
    table = files.config(tie_word_embeddings=tied)
    found = source.resolve(str(files.write_folder(tmp_path / "hf", table, files.tensors(table))))
    mesh = make_mesh(found.config, jax.devices()[:2])
    whole = found.load(mesh, "float32")
    if kind == "orbax":
        (tmp_path / "orbax").mkdir()
        orbax.save(tmp_path / "orbax", found.config, found.load(make_mesh(found.config, jax.devices()[:1]), "float32"))
        found = source.resolve(str(tmp_path / "orbax"))
    held = shares(found.config.num_layers, found.config.num_layers)
    loaded = [found.load(mesh, "float32", share=share) for share in held]
    assert [set(stage.outer) for stage in (loaded[0], loaded[-1])] == [{"embed"}, last]
    assert not any(stage.outer for stage in loaded[1:-1])
    for share, stage in zip(held, loaded, strict=True):
        assert list(stage.layers) == list(share.layers)
        for got, want in ((stage.outer, whole.outer), *((stage.layers[i], whole.layers[i]) for i in share.layers)):
            for name, array in got.items():
                assert array.sharding == want[name].sharding
                np.testing.assert_array_equal(np.asarray(array), np.asarray(want[name]))
