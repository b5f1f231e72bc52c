"""Targets by text: what is read, what is refused, and what is said where a compiler is missing."""

import pytest
from jax.experimental import topologies

from pdjax.aot import targets


@pytest.mark.parametrize(
    ("text", "chip", "count", "hardware"),
    [
        ("tpu:v5e:2x4", "v5e", 8, "tpu-v5e"),
        ("tpu:v5p:2x2x2", "v5p", 8, "tpu-v5p"),
        ("tpu:v6e:1x1", "v6e", 1, "tpu-v6e"),
        ("gpu:h100", "h100", 8, "h100"),
        ("gpu:a100:2", "a100", 2, "a100-80g"),
    ],
)
def test_a_target_is_a_number_of_chips_with_their_datasheet(text, chip, count, hardware):
    target = targets.parse(text)
    assert (target.chip, target.count, target.hardware.name) == (chip, count, hardware)
    assert target.platform == text[:3] and target.text == text


@pytest.mark.parametrize(
    "text", ["", "tpu", "tpu:v5e", "tpu:v5e:2", "tpu:v5p:2x4", "tpu:v5e:2x0", "gpu:h100:2x2", "gpu:h1000", "cpu:h100:1"]
)
def test_what_is_no_target_is_told_what_is(text):
    with pytest.raises(ValueError, match=r"^target is '.*'; allowed: tpu:v5e:2x2, .*, gpu:a100, gpu:h100, gpu:h200"):
        targets.parse(text)


@pytest.mark.parametrize(("text", "extra"), [("tpu:v5e:2x4", "aot-tpu"), ("gpu:h100:2", "aot-gpu")])
def test_a_missing_compiler_is_told_with_the_line_that_installs_it(text, extra, monkeypatch):
    def missing(*arguments, **options):
        raise NotImplementedError("topology not implemented")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    with pytest.raises(targets.Missing, match=rf"pip install -e '\.\[{extra}\]' \(topology not implemented\)"):
        targets.parse(text).devices()


def test_a_gpu_is_described_by_its_own_numbers(monkeypatch):
    asked = []

    def described(name, **options):
        asked.append((name, options))
        return topologies.TopologyDescription(["a device"] * 2)

    monkeypatch.setattr(topologies, "get_topology_desc", described)
    assert targets.parse("gpu:h200:2").devices() == ["a device"] * 2
    name, options = asked[0]
    assert (name, options["platform"], options["topology"]) == ("h200", "cuda", "1x1x2")
    words = options["target_config"].split()
    for field, value in (
        ("core_count:", "132"),
        ("shared_memory_per_core:", "233472"),
        ("shared_memory_per_block_optin:", "232448"),
        ("memory_bandwidth:", "4800000000000"),
        ("major:", "9"),
    ):
        assert words[words.index(field) + 1] == value
