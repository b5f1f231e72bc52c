"""Models that differ have other digests, without all of their weights being read."""

import dataclasses

import numpy as np

from pdjax.models.digest import digest
from pdjax.models.presets import PRESETS
from pdjax.models.source import Source


class Tensors:
    """A `TensorReader` over arrays; counts the rows that are read."""

    def __init__(self, arrays):
        self.arrays, self.rows = arrays, 0

    def names(self):
        return set(self.arrays)

    def shape(self, name):
        return self.arrays[name].shape

    def read(self, name, rows):
        self.rows += rows.stop - rows.start
        return self.arrays[name][rows]

    def file(self, name):
        return "memory"

    def close(self):
        pass


ARRAYS = {"a": np.arange(300.0).reshape(100, 3), "b": np.arange(5.0)}


def source(arrays=ARRAYS, **changes):
    reader = Tensors(arrays)
    config = dataclasses.replace(PRESETS["tiny"], **changes)
    return Source("test", config, open_reader=lambda: reader), reader


def changed(name, row):
    array = ARRAYS[name].copy()
    array[row] += 1
    return ARRAYS | {name: array}


def test_equal_models_have_equal_digests():
    assert digest(source()[0]) == digest(source()[0])


def test_another_config_tensor_or_shape_gives_another_digest():
    ones = [
        source(rope_theta=5e4)[0],
        source(changed("a", 0))[0],
        source(changed("a", 50))[0],
        source(changed("b", 4))[0],
        source(ARRAYS | {"c": np.zeros(1)})[0],
        source({"a": ARRAYS["a"].reshape(300, 1), "b": ARRAYS["b"]})[0],
        source()[0],
    ]
    assert len({digest(one) for one in ones}) == len(ones)


def test_three_rows_of_a_tensor_are_read():
    found, reader = source()
    digest(found)
    assert reader.rows == 6


def test_random_weights_follow_from_the_config():
    assert digest(Source("tiny", PRESETS["tiny"])) != digest(
        Source("tiny", dataclasses.replace(PRESETS["tiny"], tied=False))
    )


def test_an_orbax_folder_is_told_by_its_files(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x").write_bytes(b"1" * 10)
    one = Source("orbax", PRESETS["tiny"], orbax_folder=tmp_path)
    before = digest(one)
    assert digest(one) == before
    (tmp_path / "d" / "x").write_bytes(b"1" * 9 + b"2")
    assert digest(one) != before
