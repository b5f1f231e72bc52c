"""EngineConfig refuses what no engine could be built from, naming field, value and what is allowed."""

import dataclasses
import re

import pytest

from pdjax.config import DTYPES, TRANSFERS, EngineConfig, class_chain
from pdjax.request import SLO, SLOClass

AT_LEAST_ONE = (
    "prefill_instances",
    "decode_instances",
    "prefill_pp",
    "decode_pp",
    "prefill_tp",
    "decode_tp",
    "prefill_ranks",
    "decode_ranks",
    "prefill_max_batch",
    "decode_max_batch",
    "page_size",
)
ZERO_IS_AUTOMATIC = (
    "prefill_chunk",
    "decode_chunk",
    "prefill_num_pages",
    "decode_num_pages",
    "max_model_len",
    "stream_layers",
    "devices_per_rank",
    "max_queue",
    "seed",
)


def refused(value, allowed, **fields):
    (name,) = fields
    with pytest.raises(ValueError, match=re.escape(f"{name} is {value!r}; allowed: {allowed}")):
        EngineConfig(**fields)


def test_the_defaults_are_allowed():
    EngineConfig()


@pytest.mark.parametrize("name", AT_LEAST_ONE)
@pytest.mark.parametrize("value", [0, -1, 1.0, "2", True, None])
def test_counts_are_whole_numbers_from_one(name, value):
    refused(value, "a whole number >= 1", **{name: value})
    assert getattr(EngineConfig(**{name: 1}), name) == 1


@pytest.mark.parametrize("name", ZERO_IS_AUTOMATIC)
@pytest.mark.parametrize("value", [-1, 0.5, "0", False, None])
def test_sizes_with_an_automatic_value_are_whole_numbers_from_zero(name, value):
    refused(value, "a whole number >= 0", **{name: value})
    assert getattr(EngineConfig(**{name: 0}), name) == 0


@pytest.mark.parametrize("value", ["float16", "int8", "", None])
def test_dtype_is_one_of_the_named(value):
    refused(value, ", ".join(DTYPES), dtype=value)
    assert {EngineConfig(dtype=name).dtype for name in DTYPES} == set(DTYPES)


def test_transfer_is_one_of_the_named():
    refused("carrier pigeon", ", ".join(TRANSFERS), transfer="carrier pigeon")
    assert {EngineConfig(transfer=name).transfer for name in TRANSFERS} == set(TRANSFERS)


@pytest.mark.parametrize("value", [0, -1.5, float("nan")])
def test_a_transfer_gets_some_time(value):
    refused(value, "seconds > 0", transfer_timeout_s=value)


def test_every_whole_number_is_checked():
    numbers = {field.name for field in dataclasses.fields(EngineConfig) if field.type in (int, "int")}
    assert numbers == {*AT_LEAST_ONE, *ZERO_IS_AUTOMATIC}


def test_fields_are_given_by_name_and_never_change():
    with pytest.raises(TypeError):
        EngineConfig("tiny")
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().seed = 1


def kind(name, degrade_to="", **limits):
    return SLOClass(name, SLO(**limits), degrade_to)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ([kind("a")], "slo_classes is [SLOClass(name='a'"),
        ((kind("a"), "b"), "allowed: a tuple of pdjax.SLOClass"),
        ((kind("a"), kind("a")), "slo_classes has the name 'a'; allowed: texts, not empty, each of one class"),
        ((kind(""),), "slo_classes has the name ''"),
        ((SLOClass("a", 500),), "slo_classes: slo of 'a' is 500; allowed: a pdjax.SLO"),
        ((SLOClass("a", SLO(), None),), "slo_classes: degrade_to of 'a' is None; allowed: the name of another class"),
        ((SLOClass("a", SLO(), ["b"]),), "slo_classes: degrade_to of 'a' is ['b']"),
        ((kind("a", "b"),), "degrade_to leads from 'a' to 'b'; allowed: names of other classes, and no way back"),
        ((kind("a", "a"),), "degrade_to leads from 'a' to 'a'"),
        ((kind("a", "b"), kind("b", "c"), kind("c", "b")), "degrade_to leads from 'a' to 'b'"),
    ],
)
def test_classes_have_names_of_their_own_and_lead_somewhere(classes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        EngineConfig(slo_classes=classes)


def test_a_class_may_be_degraded_along_its_chain():
    fast, slow, any_time = kind("fast", "slow", ttft_ms=1), kind("slow", "any", ttft_ms=9), kind("any")
    classes = EngineConfig(slo_classes=(any_time, fast, slow)).slo_classes
    assert class_chain(classes, "fast") == (fast, slow, any_time)
    assert class_chain(classes, "any") == (any_time,)
    with pytest.raises(ValueError, match=re.escape("slo is 'free'; allowed: a pdjax.SLO, None, or a class: any, fast")):
        class_chain(classes, "free")
