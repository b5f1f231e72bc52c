"""Latency profiles: what a file keeps, whom it refuses, and the numbers that follow."""

import dataclasses
import json

import pytest

from pdjax import profile
from pdjax.config import EngineConfig
from pdjax.latency import LatencyModel, Probe, Sample
from pdjax.messages import Role
from pdjax.models.config import ModelConfig
from pdjax.profile import Estimate, Moved, Points, Profile, Transfers
from pdjax.record import IterationRecord, RequestRecord, Timeline
from pdjax.request import SLO, State
from pdjax.testing import spec

MODEL = ModelConfig(100, 16, 32, 2, 2, 1, 8)
TRUTH = LatencyModel(iteration=(0.01, 0.001, 0, 0.002, 0, 1e-5))
SPEC = dataclasses.replace(
    spec(0, Role.PREFILL), max_chunk=64, max_rows=4, chunk_buckets=(32, 64), row_buckets=(1, 2, 4)
)


def sample(probe, factor=1.0):
    return Sample(probe, factor * TRUTH.iteration_s(SPEC, probe.load(SPEC)))


PROBES = [Probe(((T, prior),)) for T in (32, 64) for prior in (0, 100)]
PROBES += [Probe((), (context,) * B) for B in (1, 2, 4) for context in (1, 100)]
PROBES += [Probe(((64, 0),), (1,) * 4), Probe((), (1, 100))]
KIND = profile.kind_of(SPEC, map(sample, PROBES), [("others", [sample(Probe(((40, 0),)), 2.0)])])
TRANSFERS = Transfers("mpi", 0.5, 100.0, 48, (Moved(64, 300, False, 3.5, 9.0),), reporting=0.25)
PROFILE = Profile(profile.VERSION, "tiny", MODEL, "float32", "abacus", (KIND,), (TRANSFERS,))


@pytest.fixture
def path(tmp_path):
    profile.save(PROFILE, tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


def models(path, specs=(SPEC,), model=MODEL, dtype="float32", hardware="abacus", transport="mpi"):
    return profile.models_for(path, specs, model, dtype, hardware, transport)


def test_a_file_gives_back_the_profile(path):
    assert profile.load(path) == PROFILE


def test_an_estimate_keeps_its_mark_and_is_told_when_it_is_read(tmp_path, caplog):
    mark = Estimate("tpu:v9:1x1", "tpu", "by guessing")
    profile.save(dataclasses.replace(PROFILE, estimate=mark), tmp_path / "guess.json")
    assert profile.load(str(tmp_path / "guess.json")).estimate == mark
    told = "the profile of tiny on abacus, an estimate for tpu:v9:1x1 that nobody has measured (by guessing)"
    assert told in caplog.text and PROFILE.origin == "the profile of tiny on abacus"


def test_a_kind_has_a_fitted_model_and_errors_of_what_it_was_and_was_not_fitted_to():
    assert {points.name: len(points.samples) for points in KIND.points} == {"prefill": 4, "decode": 7, "mixed": 1}
    assert max(points.max_error for points in KIND.points) < 1e-6
    (other,) = KIND.held_out  # takes twice as long as it should
    assert (other.name, other.mean_error, other.max_error) == ("others", pytest.approx(0.5), pytest.approx(0.5))


def test_errors_are_relative_to_what_was_measured():
    samples = [sample(PROBES[0], 0.5), sample(PROBES[2], 2.0)]
    assert profile.points(SPEC, TRUTH, "some", samples) == Points("some", 0.75, 1.0, tuple(samples))


def test_thresholds_are_those_of_the_model():
    # 32 / 42 = 0.76 tokens a ms, 64 / 74 = 0.86; beside 4 rows there is one size only.
    assert (KIND.saturating_tokens, KIND.token_budget) == (64, 64)


def test_a_prompt_and_a_decode_step_take_what_the_model_says():
    assert PROFILE.prefill_s(64) == pytest.approx(0.074)
    assert PROFILE.decode_s(3, 50) == pytest.approx(0.01 + 4 * 0.002 + 4 * 50 * 1e-5)


def test_instances_get_the_fitted_model_with_the_transfers_of_their_transport(path):
    small = dataclasses.replace(SPEC, index=1, role=Role.DECODE, max_chunk=0, chunk_buckets=(), num_pages=9)
    expected = dataclasses.replace(KIND.latency, transfer_alpha_s=0.5, transfer_bytes_per_s=100.0, reporting=0.25)
    assert models(path, (SPEC, small)) == (expected, expected)


def test_colocated_instances_need_no_transfers(path):
    mixed = dataclasses.replace(SPEC, role=Role.MIXED)
    assert models(path, (mixed,), transport="device_put")[0].iteration == KIND.latency.iteration


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hardware": "sundial"}, "is of hardware 'abacus'; allowed: 'sundial'"),
        ({"dtype": "bfloat16"}, "is of dtype 'float32'; allowed: 'bfloat16'"),
        ({"model": dataclasses.replace(MODEL, num_layers=3)}, r"num_layers is 2 \(tiny\); allowed: 3"),
        ({"transport": "device_put"}, "has no transfers by 'device_put'; allowed: mpi"),
        ({"specs": (dataclasses.replace(SPEC, page_size=4096),)}, "has no instance like tp 1, pp 1, page_size 4096"),
        ({"specs": (dataclasses.replace(SPEC, row_buckets=(1, 2, 4, 8)),)}, "has no instance like"),
    ],
)
def test_what_was_not_measured_is_refused_with_the_file_and_the_difference(path, change, message):
    with pytest.raises(ValueError, match=f"profile is '{path}', which .*{message}"):
        models(path, **change)


def test_a_model_with_another_context_limit_is_the_same(path):
    assert models(path, model=dataclasses.replace(MODEL, max_position=7, eos_ids=(3,)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "which is no profile"),
        ("[]", "version is None; allowed: 1"),
        ('{"version": 7}', "version is 7; allowed: 1"),
        ('{"version": 1}', "which is no profile: Profile is .*; allowed: the fields"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path, text, message):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        profile.load(str(tmp_path / "x.json"))


def test_a_missing_file_is_refused():
    for ask in (profile.load, lambda path: profile.stream_from(path, "device_put")):
        with pytest.raises(ValueError, match=r"^profile is '/nowhere', which cannot be read: [^']*'/nowhere'$"):
            ask("/nowhere")
    with pytest.raises(ValueError, match=r"which cannot be read: .*embedded null"):
        profile.load("\0")


def test_a_field_of_the_wrong_type_is_named(path, tmp_path):
    data = json.loads((tmp_path / "profile.json").read_text())
    data["kinds"][0]["token_budget"] = "many"
    (tmp_path / "profile.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"Profile.kinds.token_budget is 'many'"):
        profile.load(path)


def test_the_configuration_streams_from_where_the_profile_says(path):
    config = EngineConfig(profile=path, transfer="mpi")
    assert config.stream_from == 48
    assert dataclasses.replace(config, stream_layers=0).stream_from is None
    assert EngineConfig().stream_from == 1


def moves(*lines):
    """Samples of prompts of 100 and 200 tokens: (tokens, second token whole, streamed)."""
    for tokens, whole_s, streamed_s in lines:
        yield Moved(tokens, 10 * tokens, False, 1 + tokens / 100, whole_s)
        yield Moved(tokens, 10 * tokens, True, 0.1, streamed_s)


@pytest.mark.parametrize(
    ("whole", "expected"),
    [
        ((5.1, 7.0), 148),  # 0.9 s slower at 100 tokens, 1 s faster at 200: 100 + 900 / 19
        ((7.0, 7.0), 1),  # always faster
        ((5.0, 5.0), None),  # never
        ((5.0, 5.1), None),  # from more tokens on than a request may have
    ],
)
def test_streaming_pays_from_where_the_second_token_is_there_earlier(whole, expected):
    made = profile.transfers_of("mpi", [*moves((100, whole[0], 6.0), (200, whole[1], 6.0))], max_model_len=1000)
    assert made.stream_from == expected
    assert (made.alpha_s, made.bytes_per_s) == (pytest.approx(1.0), pytest.approx(1000.0))


def test_how_late_the_controller_hears_of_passes_behind_which_another_follows():
    def one(instance, started_s, finished_s, *requests):
        return IterationRecord(instance, 1, 8, 0, started_s, finished_s, requests)

    passes = [
        one(0, 0.0, 1.0, "a", "long"),
        one(0, 1.0, 2.0, "b", "long"),
        one(0, 2.0, 3.0, "c"),
        one(0, 3.5, 4.0, "d"),  # nothing follows c at once, nor d
        one(1, 0.0, 3.5, "e"),
    ]
    first_s = {"a": 1.25, "long": 2.5, "b": 2.25, "c": 3.75, "d": 4.75, "e": 9.0}
    records = [
        RequestRecord(name, 8, (1, 2), State.FINISHED, "length", SLO(), Timeline(0.0, token_s=[at_s, at_s + 1.0]))
        for name, at_s in first_s.items()
    ]
    assert profile.reporting_s(records, reversed(passes)) == 0.25  # the median of a, long and b
    assert profile.reporting_s(records[4:], passes) == 0.0


def test_a_streamed_prompt_takes_longer_by_its_passes_and_its_tokens():
    def moved(tokens, chunks, streamed):
        longer = 0.5 * chunks + 0.001 * tokens if streamed else 0.0
        return Moved(tokens, 10 * tokens, streamed, 1.0, 9.0, 2.0 + longer, chunks)

    samples = [moved(tokens, chunks, way) for way in (False, True) for tokens, chunks in ((64, 1), (256, 1), (512, 2))]
    assert profile.transfers_of("mpi", samples, 1000).streaming == pytest.approx((0.5, 0.001))
    faster = [dataclasses.replace(one, prefill_s=1.0) if one.streamed else one for one in samples]
    assert profile.transfers_of("mpi", faster, 1000).streaming == (0.0, 0.0)
    assert profile.transfers_of("mpi", [*moves((100, 6.0, 6.0), (200, 6.0, 6.0))], 1000).streaming == (0.0, 0.0)
