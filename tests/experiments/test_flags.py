"""Flags become one configuration, one workload and one SLO; mistakes keep the flag's name."""

import dataclasses

import pytest
from absl import flags as absl_flags
from absl.testing import flagsaver

from pdjax import build, provenance
from pdjax.config import EngineConfig
from pdjax.experiments import flags
from pdjax.messages import Role
from pdjax.models import source
from pdjax.request import SLO, SLOClass
from pdjax.schedulers.base import traits_of


@pytest.fixture(autouse=True)
def parsed():
    """Flags at their defaults; what a test sets is undone."""
    with flagsaver.flagsaver():
        absl_flags.FLAGS.unparse_flags()
        absl_flags.FLAGS(["test", "--scheduler=disaggregated"])
        yield


def set_flags(*arguments):
    absl_flags.FLAGS(["test", *arguments])


def workload(**limits):
    return flags.build_workload(**({"vocab_size": 100, "max_model_len": 100} | limits))


def test_without_flags_the_configuration_is_the_default_one():
    assert flags.build_config() == EngineConfig()


def test_every_field_of_the_configuration_that_a_user_tunes_has_a_flag():
    fixed = {"transfer_timeout_s", "warmup", "compilation_cache", "event_log"}  # serve has --log_events
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    assert names - fixed <= set(flags.given())


def test_flags_set_the_fields_they_are_named_for():
    set_flags("--model=tiny", "--dtype=float32", "--decode_tp=2", "--stream_layers=3", "--seed=5")
    config = flags.build_config(scheduler="dynamic")
    assert config == EngineConfig(
        model="tiny", dtype="float32", decode_tp=2, stream_layers=3, seed=5, scheduler="dynamic"
    )


def test_both_sides_may_have_meshes_of_their_own_and_both_are_told():
    set_flags("--model=tiny", "--prefill_tp=1", "--decode_tp=2")
    config = flags.build_config()
    model = source.resolve("tiny").config
    built = build.specs_of(config, model, traits_of(build.scheduler_of(config)))
    assert [(spec.role, spec.devices) for spec in built] == [(Role.PREFILL, 1), (Role.DECODE, 2)]
    told = provenance.collect(flags.given())["flags"]
    assert (told["prefill_tp"], told["decode_tp"]) == (1, 2)


@pytest.mark.parametrize(
    "argument", ["--decode_tp=0", "--dtype=int8", "--rate=fast", "--slo=none", "--num_requests=-1"]
)
def test_a_value_outside_its_range_is_refused_by_the_flag(argument):
    name = argument[2:].split("=")[0]
    with pytest.raises(absl_flags.IllegalFlagValueError, match=name):
        set_flags(argument)


def test_the_default_workload_is_chat_at_two_a_second():
    made = workload()
    assert made.note == "chat: 10 requests, poisson arrivals, 2/s"
    assert made.items[0].sampling.max_tokens == 48
    assert made.items[0].sampling.temperature == 0


def test_a_closed_loop_and_a_trace_set_their_own_pace(tmp_path):
    set_flags("--arrival=closed:3")
    assert workload().clients == 3
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,1,1\n7,1,1\n")
    set_flags(f"--workload=azure:{tmp_path}/trace.csv", "--arrival=trace", "--num_requests=0")
    assert [item.arrival_s for item in workload().items] == [0.0, 7.0]


def test_workload_flags_reach_the_workload():
    set_flags("--workload=fixed:3,4", "--num_requests=2", "--rate=inf", "--temperature=0.5", "--max_tokens=9")
    made = workload()
    assert [(len(item.prompt), item.arrival_s) for item in made.items] == [(3, 0.0), (3, 0.0)]
    assert made.items[0].sampling.max_tokens == 4
    assert made.items[0].sampling.temperature == 0.5


def test_the_context_limits_the_workload():
    set_flags("--workload=fixed:60,60", "--num_requests=1")
    with pytest.raises(ValueError, match="workload has lengths '60,60'; allowed: at most 100"):
        workload()


def test_the_preset_gives_the_limits_and_own_flags_replace_them():
    assert flags.build_slo() == SLO(ttft_ms=500, tpot_ms=50, e2e_ms=5000)
    set_flags("--tpot_slo_ms=80")
    assert flags.build_slo() == SLO(ttft_ms=500, tpot_ms=80, e2e_ms=5000)
    assert workload().items[0].slo == flags.build_slo()


def test_targets_are_those_of_the_preset():
    assert [target.percentile for target in flags.build_targets()] == [95, 95, 99]


def test_the_attainment_is_ninety_percent_unless_told_otherwise():
    assert flags.ATTAINMENT.value == 0.9
    with pytest.raises(absl_flags.IllegalFlagValueError, match="attainment"):
        set_flags("--attainment=0")


def test_a_limit_of_zero_is_refused_by_name():
    set_flags("--ttft_slo_ms=0")
    with pytest.raises(ValueError, match=r"ttft_ms is 0\.0; allowed"):
        flags.build_slo()


def test_classes_of_the_flag_are_those_of_the_engine_and_of_the_requests_in_turn():
    set_flags("--slo_classes=chat:ttft=500,tpot=50>batch;batch:e2e=60000", "--admission", "--workload=fixed:3,4")
    chat, batch = SLOClass("chat", SLO(500, 50), "batch"), SLOClass("batch", SLO(e2e_ms=60000))
    config = flags.build_config()
    assert (config.slo_classes, config.admission, config.drop_late) == ((chat, batch), True, False)
    items = workload().items
    assert [item.slo_class for item in items[:3]] == ["chat", "batch", "chat"]
    assert items[1].slo == batch.slo


@pytest.mark.parametrize("text", ["chat:ttft", "chat:ttft=soon", "chat:speed=3", "chat:ttft=-1"])
def test_classes_that_are_no_classes_are_refused(text):
    set_flags(f"--slo_classes={text}")
    with pytest.raises(ValueError, match=r"slo_classes has .*; allowed: NAME:LIMIT=MS"):
        flags.build_config()


@pytest.mark.parametrize("flag", ["--rate=2", "--arrival=uniform", "--num_requests=5", "--ttft_slo_ms=9"])
def test_a_launcher_that_chooses_requests_refuses_flags_that_say_them(flag):
    set_flags(flag)
    with pytest.raises(ValueError, match=r"is .*; allowed with this launcher: none, .*itself, but for workload"):
        flags.refuse_requests("workload")


def test_a_flag_that_a_launcher_uses_is_not_refused():
    set_flags("--workload=fixed:3,4")
    flags.refuse_requests("workload")
