"""The profile launcher: a small model is measured whole, and an engine takes what it writes."""

import json

import pytest
from absl import flags as absl_flags

import pdjax
from pdjax import profile
from pdjax.config import EngineConfig
from pdjax.experiments import profile as launcher
from pdjax.messages import Role
from pdjax.testing import World, spec
from tests.worlds import ask

SMALL = {"model": "tiny", "decode_max_batch": 1, "max_model_len": 64, "page_size": 16, "compilation_cache": ""}


@pytest.fixture
def flagged():
    """Sets flags of the launcher for a test."""
    if not absl_flags.FLAGS.is_parsed():
        absl_flags.FLAGS(["profile"])
    saved = {name: absl_flags.FLAGS[name].value for name in ("kv_prompts", "kv_repeats", "out")}
    yield absl_flags.FLAGS
    for name, value in saved.items():
        setattr(absl_flags.FLAGS, name, value)


@pytest.mark.parametrize("text", ["", "0", "8,x", "60"])
def test_prompts_that_cannot_be_asked_for_are_refused(flagged, text):
    flagged.kv_prompts = text.split(",")
    with pytest.raises(ValueError, match=r"kv_prompts is .*; allowed: token counts of at most 55"):
        launcher.lengths(64)


@pytest.mark.parametrize("streams", [False, True])
def test_the_policy_moves_kv_whole_or_streamed_as_it_is_told(streams):
    policy = launcher.Apart()
    policy.streams = streams
    world = World([spec(0, Role.PREFILL), spec(1, Role.DECODE)], policy)
    world.add(ask(0, 20, 5))
    collected = world.run()
    assert [(move.src, move.dst, move.streamed) for move in collected.transfers] == [(0, 1, streams)]


@pytest.mark.slow
def test_a_profile_is_measured_written_and_taken_by_an_engine(flagged, tmp_path, capsys):
    flagged.kv_prompts, flagged.kv_repeats, flagged.out = ["8", "40"], 1, str(tmp_path)
    policy = launcher.Apart()
    launcher.run(EngineConfig(scheduler=policy, prefill_chunk=32, decode_chunk=32, warmup=False, **SMALL), policy)
    assert "saturating length" in capsys.readouterr().out
    assert (tmp_path / "profile.png").stat().st_size > 10_000
    known = profile.load(str(tmp_path / "profile.json"))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["kinds"][0]["fitted"]["decode"]["count"] == len(known.kinds[0].points[1].samples)
    assert {sample.streamed for sample in known.transfers[0].samples} == {True, False}
    config = EngineConfig(prefill_chunk=32, profile=str(tmp_path / "profile.json"), correct=False, **SMALL)
    with pdjax.Engine(config) as engine:
        assert engine.warmup().samples == ((), ())  # nothing is measured again
        assert engine.capacity(pdjax.SLO(ttft_ms=1e4))
        models = {lane.latency for lane in engine._controller.books.instances}
        assert models == {known.latency(engine.specs[0], "device_put")}
        assert engine.generate("a", pdjax.SamplingParams(max_tokens=3))
