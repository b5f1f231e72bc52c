"""A load needs little more memory than the weights that stay: twice the largest tensor and 64 MB at most."""

import json
import math
import subprocess
import sys

import pytest

# Prints what the peak of the process was above the weights, and what it may be.
MEASURE = """
import sys
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 4)
from pdjax.models import source
from pdjax.models.sharding import make_mesh

def status(key):
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

found = source.resolve(sys.argv[1])
mesh = make_mesh(found.config, jax.devices()[: int(sys.argv[2])])
jax.block_until_ready([jax.device_put(np.ones(8), device) for device in jax.devices()])
before = status("VmRSS")
weights = found.load(mesh, "bfloat16")
arrays = [array for part in (weights.outer, *weights.layers.values()) for array in part.values()]
resident = sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)
largest = weights.outer["embed"].nbytes
print(status("VmHWM") - before - resident, 2 * largest + (64 << 20), resident)
"""

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is needed")


def assert_small(model, tp):
    command = [sys.executable, "-c", MEASURE, str(model), str(tp)]
    beyond, limit, resident = map(int, subprocess.check_output(command, text=True, timeout=120).split())
    print(f"tp {tp}: {beyond >> 20} MB beyond {resident >> 20} MB, allowed {limit >> 20} MB")
    assert beyond <= limit < resident


@pytest.mark.slow
def test_float32_file_on_a_mesh(files, tmp_path):
    table = files.config(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=8000,
        tie_word_embeddings=True,
    )
    header, start = {}, 0
    for name, shape in files.shapes(table).items():
        stop = start + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    (tmp_path / "config.json").write_text(json.dumps(table))
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + start)  # zeros that take no disk
    assert_small(tmp_path, 4)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 3])
def test_quantised_file_on_a_mesh(smollm2, tp):
    assert_small(smollm2.name, tp)
