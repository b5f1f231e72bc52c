"""How KV moves at one device: which jobs are run, what they share, and rates where there is no GPU."""

import jax

from pdjax.experiments import gpu_wires


def test_ranks_share_the_first_device_and_take_only_the_memory_they_need():
    environ = {"CUDA_VISIBLE_DEVICES": "3,4"}
    gpu_wires.share_device(environ)
    assert environ == {"CUDA_VISIBLE_DEVICES": "3", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    other = {}
    gpu_wires.share_device(other)
    assert other["CUDA_VISIBLE_DEVICES"] == "0"


def test_a_unit_is_that_of_a_layer_group_of_llama():
    assert gpu_wires.SHAPE == (3, 2, 256, 8, 128)


def test_transfer_servers_bring_every_unit():
    found = gpu_wires.servers(jax.devices()[0])
    assert found["bytes"] == 32 * 3 * 2 * 256 * 8 * 128 * 2
    assert found["bytes_per_s"] == found["bytes"] / found["moving_s"] > 0
