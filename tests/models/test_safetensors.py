"""Reading safetensors folders, and what is said about broken ones."""

import json

import ml_dtypes
import numpy as np
import pytest

from pdjax.models.checkpoints.safetensors import SafetensorsReader


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_are_read_bit_for_bit(files, tmp_path, dtype):
    arrays = files.tensors(files.config(), dtype)
    reader = SafetensorsReader(files.write_folder(tmp_path, files.config(), arrays))
    assert reader.names() == set(arrays)
    for name, array in arrays.items():
        assert reader.shape(name) == array.shape
        rows = reader.read(name, slice(3, 17))
        assert rows.dtype == array.dtype and np.array_equal(rows, array[3:17])
    reader.close()


def test_the_safetensors_package_reads_what_the_test_writer_writes(files, tmp_path):
    load_file = pytest.importorskip("safetensors.numpy").load_file
    arrays = files.tensors(files.config())
    files.write_safetensors(tmp_path / "x.safetensors", arrays)
    loaded = load_file(tmp_path / "x.safetensors")
    assert all(np.array_equal(loaded[name], array) for name, array in arrays.items())


def test_shards_are_read_by_their_index(files, tmp_path):
    arrays = files.tensors(files.config(), "bfloat16")
    reader = SafetensorsReader(files.write_folder(tmp_path, files.config(), arrays, shards=3))
    assert reader.names() == set(arrays)
    assert all(np.array_equal(reader.read(name, slice(None)), array) for name, array in arrays.items())
    assert reader.read("model.norm.weight", slice(None)).dtype == ml_dtypes.bfloat16


def test_names_without_prefix_get_one(files, tmp_path):
    arrays = files.tensors(files.config())
    bare = {name.removeprefix("model."): array for name, array in arrays.items()}
    assert SafetensorsReader(files.write_folder(tmp_path, files.config(), bare)).names() == set(arrays)


def test_index_hides_stray_files_and_unlisted_tensors(files, tmp_path):
    arrays = files.tensors(files.config())
    folder = files.write_folder(tmp_path, files.config(), arrays, shards=2)
    files.write_safetensors(folder / "stray.safetensors", {"model.norm.weight": np.zeros(48, np.float32)})
    files.write_safetensors(folder / "model.safetensors", {"model.norm.weight": np.zeros(48, np.float32)})
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())
    del places["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(places))
    reader = SafetensorsReader(folder)
    assert reader.names() == set(arrays) - {"lm_head.weight"}
    assert np.array_equal(reader.read("model.norm.weight", slice(None)), arrays["model.norm.weight"])


def test_missing_shard_is_named(files, tmp_path):
    folder = files.write_folder(tmp_path, files.config(), shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00003.safetensors: missing"):
        SafetensorsReader(folder)


def test_tensor_that_its_file_lacks_is_named(files, tmp_path):
    folder = files.write_folder(tmp_path, files.config(), shards=2)
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())
    places["weight_map"]["model.norm.weight"] = places["weight_map"]["model.embed_tokens.weight"]
    index.write_text(json.dumps(places))
    with pytest.raises(ValueError, match=r"00001-of-00002.safetensors: tensor 'model.norm.weight' is missing"):
        SafetensorsReader(folder)


def test_index_may_not_leave_its_folder(files, tmp_path):
    folder = files.write_folder(tmp_path / "model", files.config(), shards=2)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../other.safetensors"}}))
    with pytest.raises(ValueError, match="same folder"):
        SafetensorsReader(folder)


def test_truncated_file_names_file_and_tensor(files, tmp_path):
    folder = files.write_folder(tmp_path, files.config())
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    last = list(files.shapes(files.config()))[-1]
    with pytest.raises(ValueError, match=f"model.safetensors: truncated: tensor '{last}'"):
        SafetensorsReader(folder)


@pytest.mark.parametrize("size", [0, 4, 20])
def test_file_cut_in_its_header_is_named(files, tmp_path, size):
    folder = files.write_folder(tmp_path, files.config())
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"model.safetensors: not a safetensors file"):
        SafetensorsReader(folder)


@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json"])
def test_git_lfs_pointer_is_called_one(tmp_path, file):
    (tmp_path / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ValueError, match=f"{file}.*Git-LFS pointer"):
        SafetensorsReader(tmp_path)


def test_pickled_weights_are_never_loaded(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"pytorch_model.bin, which is a pickle"):
        SafetensorsReader(tmp_path)


def test_adapter_alone_is_refused(files, tmp_path):
    files.write_safetensors(tmp_path / "adapter_model.safetensors", {"a": np.zeros(1, np.float32)})
    with pytest.raises(ValueError, match="adapter"):
        SafetensorsReader(tmp_path)


def test_unreadable_dtype_is_named(tmp_path):
    header = json.dumps({"w": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    with pytest.raises(ValueError, match="tensor 'w' has dtype F8_E4M3"):
        SafetensorsReader(tmp_path)
