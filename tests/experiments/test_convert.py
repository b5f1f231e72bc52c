"""A converted model is the same model, and needs nothing of the original."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from pdjax.experiments.convert import convert
from pdjax.models import source
from pdjax.models.sharding import make_mesh

STORIES = Path(__file__).parents[3] / "shared" / "weights" / "stories260k-hf"


def assert_same_model(first, second, dtype, tps):
    assert first.config == second.config and first.chat_template == second.chat_template
    text = "The 12 é 你 <s>ok"
    assert first.tokenizer().encode(text) == second.tokenizer().encode(text)
    for tp in tps:
        for part, same in zip(load(first, tp, dtype), load(second, tp, dtype), strict=True):
            for name, array in part.items():
                assert array.sharding == same[name].sharding and array.dtype == same[name].dtype
                assert np.array_equal(np.asarray(array), np.asarray(same[name])), name


def load(found, tp, dtype):
    weights = found.load(make_mesh(found.config, jax.devices()[:tp]), dtype)
    return [weights.outer, *weights.layers.values()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiny(tmp_path, dtype):
    convert("tiny", tmp_path, dtype)
    assert_same_model(source.resolve("tiny"), source.resolve(str(tmp_path)), dtype, (1, 8))


@pytest.mark.skipif(not STORIES.is_dir(), reason="no ../shared/weights beside the repository")
def test_hugging_face_folder(tmp_path):
    convert(str(STORIES), tmp_path, "float32")
    found = source.resolve(str(tmp_path))
    assert found.config.eos_ids == (1, 2)
    assert_same_model(source.resolve(str(STORIES)), found, "float32", (1, 4))


@pytest.mark.slow
def test_gguf_file(tmp_path):
    try:
        original = source.resolve("smollm2-135m")
    except ValueError as error:
        pytest.skip(str(error))
    convert("smollm2-135m", tmp_path, "bfloat16")
    converted = source.resolve(str(tmp_path))
    assert_same_model(original, converted, "bfloat16", (3,))
    one, three = (load(converted, tp, "bfloat16") for tp in (1, 3))
    for part, same in zip(one, three, strict=True):
        assert all(np.array_equal(np.asarray(array), np.asarray(same[name])) for name, array in part.items())


def test_a_folder_with_something_in_it_is_not_overwritten(tmp_path):
    (tmp_path / "precious").touch()
    with pytest.raises(ValueError, match=r"out is .* not empty"):
        convert("tiny", tmp_path, "float32")


@pytest.mark.parametrize("out", ["/proc/no/folder", "/dev/null/folder"])
def test_a_folder_that_cannot_be_made_is_refused(out):
    with pytest.raises(
        ValueError, match=f"out is {out!r}, which is no folder to write to: .*; allowed: a new or empty"
    ):
        convert("tiny", Path(out), "float32")


def test_launcher_says_what_is_wrong_in_one_line(tmp_path):
    command = [sys.executable, "-m", "pdjax.experiments.convert", "--model=lama", f"--out={tmp_path}/new"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: model is 'lama'") and done.stderr.count("\n") == 1
