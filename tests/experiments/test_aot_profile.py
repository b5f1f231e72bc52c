"""A profile that nobody has measured: written with its mark, taken by the simulator and the planner, and compared with
measured operators."""

import dataclasses
import json
import types

import jax
import numpy as np
import pytest
from absl import flags as absl_flags
from rich.console import Console

from pdjax import metrics, profile, provenance
from pdjax.aot import compiled
from pdjax.config import EngineConfig
from pdjax.experiments import aot_profile, predictions
from pdjax.hardware import Hardware
from pdjax.latency import LatencyModel
from pdjax.messages import Role
from pdjax.models.presets import PRESETS
from pdjax.operators import Operators, Table
from pdjax.planning import planner
from pdjax.request import SLO
from pdjax.testing import spec

CONFIG = EngineConfig(model="tiny", dtype="bfloat16", max_model_len=256, prefill_chunk=64, decode_max_batch=2)
ABACUS = Hardware("abacus", 1e12, 1e12, 1e7, 1e11, 1e11, 1e10, 1.0, 1.0)


class Target:
    """Two chips that are the CPU's devices."""

    text, platform, chip, topology, hardware = "cpu:abacus:2", "tpu", "abacus", "2", ABACUS

    def devices(self):
        return jax.devices()[:2]


@pytest.fixture
def written(tmp_path, monkeypatch):
    """The folder with a profile whose programs take 1 ms each."""
    if not absl_flags.FLAGS.is_parsed():
        absl_flags.FLAGS(["aot"])
    monkeypatch.setattr(compiled, "compile", lambda program: types.SimpleNamespace(error=None, seconds=1e-3))
    console = Console(width=200)
    aot_profile.run(CONFIG, PRESETS["tiny"], Target(), str(tmp_path), console, "")
    return tmp_path


def test_an_estimate_is_marked_where_it_is_written_read_and_told(written, caplog):
    path = str(written / "profile.json")
    known = profile.load(path)
    assert known.estimate.target == "cpu:abacus:2" and "compiler's own estimate" in known.estimate.how
    assert "estimate for cpu:abacus:2 that nobody has measured" in caplog.text
    assert provenance.collect({"profile": path})["estimate"] == dataclasses.asdict(known.estimate)
    assert json.loads((written / "summary.json").read_text())["estimate"]["target"] == "cpu:abacus:2"


def test_an_estimate_has_the_pages_that_memory_has_room_for(written):
    (kind,) = profile.load(str(written / "profile.json")).kinds
    weights = 2 * (2 * 64 * ((8 + 4) * 2 * 16 + 3 * 172) + 512 * 64)  # bytes of bfloat16
    tokens = (0.9 * 1e7 - weights) / (2 * 2 * 4 * 16 * 2)
    assert kind.spec.num_pages == 1 + int(tokens) // 64 and kind.spec.max_rows and kind.spec.max_chunk


def test_the_simulator_serves_by_an_estimate(written):
    config = dataclasses.replace(CONFIG, profile=str(written / "profile.json"))
    virtual = predictions.profiled(config, PRESETS["tiny"])
    run = predictions.simulate("disaggregated", SLO(), 1.0, num_requests=3, kind="fixed:60,5", virtual=virtual)
    assert all(len(record.token_ids) == 5 for record in run.records)
    assert {one.kv_bytes_per_token for one in run.specs} == {2 * 2 * 4 * 16 * 2}  # 16 bits, as on the target
    # Embedding, two layers and head take 1 ms each.
    assert metrics.ttft_ms(run.records[0]) == pytest.approx(4.0, rel=0.1)


def test_a_plan_by_an_estimate_says_so(written):
    slo = SLO(ttft_ms=1e-3, tpot_ms=1e-3)
    found = planner.plan("tiny", "tpu-v6e:1", "fixed:60,5", slo, profile=str(written / "profile.json"), workers=1)
    assert any("an estimate for cpu:abacus:2 that nobody has measured" in line for line in found.caveats)


def test_a_program_that_does_not_compile_is_named(monkeypatch):
    monkeypatch.setattr(compiled, "compile", lambda program: types.SimpleNamespace(error="too large", seconds=None))
    with pytest.raises(ValueError, match=r"embed .* does not compile: too large"):
        aot_profile.run(CONFIG, PRESETS["tiny"], Target(), "", Console(), "")


def test_errors_are_those_of_layers_attention_and_passes_by_phase():
    one = dataclasses.replace(
        spec(0, Role.MIXED), max_chunk=64, max_rows=2, max_model_len=100, chunk_buckets=(64,), row_buckets=(2,)
    )

    def flat(*axes, seconds):
        return Table(axes, np.full([len(axis) for axis in axes], seconds))

    measured = Operators(
        tokens=flat((1, 100), seconds=3.0),
        sequences=flat((1, 10), seconds=1.0),
        prefill=flat((1, 100), (0, 100), seconds=4.0),
        decode=flat((1, 10), (1, 100), seconds=1.0),
    )
    passes = types.SimpleNamespace(spec=one, dense_s=lambda load: 2.0, attention_s=lambda load: 1.0)
    model = LatencyModel((6.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    lines = list(aot_profile.compare(passes, model, measured))
    assert [(line.phase, line.size, line.context) for line in lines] == [("prefill", 64, 0), ("decode", 2, 64)]
    assert [lines[0].error(part) for part in aot_profile.PARTS] == pytest.approx([2 / 4 - 1, 1 / 4 - 1, 6 / 8 - 1])
    found = aot_profile.errors(lines)
    assert found["decode"]["passes"] == {"mean": pytest.approx(0.2), "max": pytest.approx(0.2)}
