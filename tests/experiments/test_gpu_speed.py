"""What speeds are compared with: bytes and layers counted by hand, passes in the order of a lane."""

import dataclasses

import jax
import pytest

from pdjax.experiments import gpu_speed
from pdjax.experiments.gpu_speed import SMALL, Size
from pdjax.models import weights
from pdjax.models.config import ModelConfig
from pdjax.models.presets import PRESETS
from pdjax.models.sharding import make_mesh

# D 8, K 2, G 2, H 2, F 12, V 50, untied.
CONFIG = ModelConfig(vocab_size=50, hidden_size=8, ffn_size=12, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=2)
SIZE = Size("tiny", 8, 4, 8, 4, square=16, copied=1000, passes=1, steps=4, rounds=1)
LAYER = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 12) + 4 * 2 * 8  # bfloat16 matrices, float32 norms
TABLE, NORM = 2 * 50 * 8, 4 * 8
TOKEN = 2 * 2 * 2 * 2  # K and V of one layer in bfloat16


class Pass:
    """A pass that writes down when it is waited for."""

    def __init__(self, log):
        self.log, self.number = log, len([word for word in log if word.startswith("go")])
        log.append(f"go {self.number}")

    def wait(self):
        self.log.append(f"wait {self.number}")


@pytest.fixture(scope="module")
def held():
    return gpu_speed.on_device(CONFIG, make_mesh(CONFIG, jax.devices()[:1]))


def test_a_pass_is_dispatched_before_the_one_before_it_is_waited_for():
    log = []
    assert gpu_speed.in_turn(lambda: Pass(log), 3) > 0
    assert log == ["go 0", "go 1", "wait 0", "go 2", "wait 1", "wait 2"]


def test_a_step_reads_all_weights_but_the_embedding_and_all_contexts(held):
    kv = 3 * TOKEN * 4 * 8  # layers, rows, context
    assert gpu_speed.decode_bytes(CONFIG, held, SIZE, "bfloat16") == 3 * LAYER + TABLE + NORM + kv


def test_a_tied_embedding_is_read_as_the_head():
    tied = dataclasses.replace(CONFIG, tied=True)
    held = gpu_speed.on_device(tied, make_mesh(tied, jax.devices()[:1]))
    kv = 3 * TOKEN * 4 * 8
    assert gpu_speed.decode_bytes(tied, held, SIZE, "bfloat16") == 3 * LAYER + TABLE + NORM + kv


def test_as_many_layers_are_taken_as_fit_beside_tables_matrices_and_copies():
    pages = TOKEN * 4 * (1 + 4 * 3 + 3)  # tokens of a page; page 0, three for each row, three for the prompt
    beside = 2 * TABLE + NORM + 3 * 2 * 16**2 + 3 * 1000
    two = (beside + 2 * (LAYER + pages)) / 0.9
    assert gpu_speed.layers_that_fit(CONFIG, SIZE, int(two) + 1) == 2
    assert gpu_speed.layers_that_fit(CONFIG, SIZE, int(two) - 1) == 1
    assert gpu_speed.layers_that_fit(CONFIG, SIZE, 1 << 30) == 3
    assert gpu_speed.layers_that_fit(CONFIG, SIZE, None) == 3


def test_a_device_that_holds_no_layer_is_refused():
    with pytest.raises(ValueError, match=r"the device has 0\.0 GiB for this process; allowed: at least 0\.0 for one"):
        gpu_speed.layers_that_fit(CONFIG, SIZE, 5000)


def test_weights_made_on_the_device_are_those_of_a_checkpoint_but_for_their_values(held):
    loaded = weights.random(CONFIG, make_mesh(CONFIG, jax.devices()[:1]), "bfloat16")
    assert held.outer.keys() == loaded.outer.keys() and held.layers.keys() == loaded.layers.keys()
    for made, other in ((held.outer, loaded.outer), (held.layers[2], loaded.layers[2])):
        for name, array in made.items():
            assert (array.shape, array.dtype) == (other[name].shape, other[name].dtype), name
            assert array.sharding.is_equivalent_to(other[name].sharding, array.ndim), name
    assert abs(float(held.layers[0]["w_down"].std()) / gpu_speed._SPREAD - 1) < 0.5


def test_the_real_sizes_are_the_goals():
    real = gpu_speed.REAL
    assert (real.model, real.prompt, real.rows, real.context) == ("llama3.1-8b", 2048, 32, 1024)
    assert PRESETS[real.model].num_layers == 32


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_small_sizes_run_on_the_cpu_and_are_not_judged(phase):
    found = gpu_speed.measure(phase, jax.devices()[0], SMALL, judged=False)
    assert found["checks"] == {} and found["layers"] == 2
    assert found["share"] == found["per_s"] / found["own_per_s"] > 0
    assert [len(values) for values in found["rounds"].values()] == [2 * SMALL.rounds, SMALL.rounds, SMALL.rounds]
