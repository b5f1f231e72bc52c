"""From a configuration to instances: which there are, how large, and what is refused. Nothing is loaded here."""

import dataclasses
import re

import jax
import pytest

from pdjax.build import devices_for, scheduler_of, specs_of
from pdjax.config import EngineConfig
from pdjax.messages import Role
from pdjax.models.presets import PRESETS
from pdjax.schedulers import SCHEDULERS, Colocated, Disaggregated, Dynamic, Traits
from pdjax.schedulers.base import traits_of
from tests.worlds import RoundRobin

TINY = PRESETS["tiny"]
SMALL = {
    "model": "tiny",
    "dtype": "float32",
    "prefill_chunk": 64,
    "decode_max_batch": 4,
    "page_size": 16,
    "max_model_len": 256,
}


def specs(scheduler="disaggregated", model=TINY, **changes):
    config = EngineConfig(**(SMALL | {"scheduler": scheduler} | changes))
    return specs_of(config, model, traits_of(scheduler_of(config)))


def refused(message, call, **changes):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(**changes)


# --- policies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_name_gives_a_policy_that_builds(name):
    assert specs(name)


def test_the_names_are_those_of_the_policies():
    kinds = {name: type(scheduler_of(EngineConfig(scheduler=name))) for name in ("disaggregated", "dynamic")}
    assert kinds == {"disaggregated": Disaggregated, "dynamic": Dynamic}


def test_a_policy_object_is_taken_as_it_is():
    own = RoundRobin()
    assert scheduler_of(EngineConfig(scheduler=own)) is own


def test_an_unknown_policy_is_refused_with_the_names_that_are_known():
    refused(
        "scheduler is 'fifo'; allowed: colocated, colocated_chunked, disaggregated, splitwise, dynamic",
        specs,
        scheduler="fifo",
    )


@pytest.mark.parametrize("missing", ["place", "hand_off", "iterate"])
def test_an_object_without_one_of_the_methods_is_refused(missing):
    other = type("Half", (), {name: lambda self: None for name in ("place", "hand_off", "iterate") if name != missing})
    refused(f"without {missing}(); allowed:", specs, scheduler=other())


def test_traits_of_another_kind_are_refused():
    class Odd(RoundRobin):
        traits = "all of them"

    refused("Odd.traits is 'all of them'; allowed: a pdjax.schedulers.Traits", specs, scheduler=Odd())


# --- which instances ------------------------------------------------------------------------------------------------


def test_disaggregated_instances_do_one_thing():
    prefill, decode = specs("disaggregated")
    assert (prefill.role, prefill.max_chunk, prefill.max_rows) == (Role.PREFILL, 64, 0)
    assert (decode.role, decode.max_chunk, decode.max_rows) == (Role.DECODE, 0, 4)


def test_dynamic_instances_can_do_all_and_move_rows():
    prefill, decode = specs("dynamic")
    assert (prefill.max_chunk, prefill.max_rows, prefill.moves) == (64, 4, True)
    assert (decode.max_chunk, decode.max_rows, decode.moves) == (32, 4, True)


def test_a_policy_that_says_nothing_gets_instances_that_can_do_all():
    assert [(spec.max_chunk, spec.max_rows) for spec in specs(RoundRobin())] == [(64, 4), (32, 4)]


def test_instances_are_numbered_prefill_first():
    made = specs(prefill_instances=2, decode_instances=3, prefill_tp=2)
    assert [spec.index for spec in made] == [0, 1, 2, 3, 4]
    assert [spec.role for spec in made] == [Role.PREFILL] * 2 + [Role.DECODE] * 3
    assert [spec.devices for spec in made] == [2, 2, 1, 1, 1]


@pytest.mark.parametrize(
    ("prefill", "decode", "count"), [((1, 1), (1, 1), 2), ((1, 2), (1, 2), 2), ((1, 4), (2, 2), 4), ((3, 2), (1, 2), 4)]
)
def test_colocated_instances_use_the_devices_of_both_pools(prefill, decode, count):
    (prefill_instances, prefill_tp), (decode_instances, decode_tp) = prefill, decode
    made = specs(
        "colocated",
        prefill_instances=prefill_instances,
        prefill_tp=prefill_tp,
        decode_instances=decode_instances,
        decode_tp=decode_tp,
    )
    assert [(spec.role, spec.devices) for spec in made] == [(Role.MIXED, decode_tp)] * count
    assert {(spec.max_chunk, spec.max_rows) for spec in made} == {(64, 4)}


def test_colocated_devices_that_do_not_divide_are_refused():
    refused(
        "decode_pp * decode_tp is 1 * 2; allowed: a divisor of the 3 devices of both pools",
        specs,
        scheduler="colocated",
        decode_tp=2,
    )


def test_an_instance_has_tp_devices_for_each_of_its_stages():
    made = specs(prefill_pp=2, prefill_tp=4, decode_tp=2)
    assert [(spec.pp, spec.devices, spec.max_in_flight) for spec in made] == [(2, 8, 3), (1, 2, 2)]


def test_colocated_instances_have_the_stages_of_decode_instances():
    made = specs("colocated", prefill_pp=1, prefill_tp=4, decode_pp=2)
    assert [(spec.pp, spec.devices) for spec in made] == [(2, 2)] * 3


# --- how large ------------------------------------------------------------------------------------------------------


def test_without_a_limit_a_request_has_the_models_context():
    assert {spec.max_model_len for spec in specs(max_model_len=0)} == {TINY.max_position}


def test_a_very_long_context_is_not_the_default():
    assert {spec.max_model_len for spec in specs(model=PRESETS["llama3.1-8b"], max_model_len=0)} == {8192}


def test_the_pages_that_are_given_limit_the_default_length():
    assert {spec.max_model_len for spec in specs(max_model_len=0, decode_num_pages=9)} == {8 * 16}


def test_by_default_every_row_has_pages_for_a_whole_request():
    _, decode = specs()
    assert decode.usable_pages == 4 * 256 // 16


def test_by_default_the_prefill_side_has_pages_for_two_batches():
    prefill, _ = specs(prefill_max_batch=3)
    assert prefill.usable_pages == 2 * 3 * 256 // 16


def test_by_default_there_are_pages_for_the_longest_request():
    _, decode = specs(model=dataclasses.replace(TINY, max_position=8192), max_model_len=8192, decode_max_batch=1)
    assert decode.usable_pages == 8192 // 16


def test_a_chunk_is_never_longer_than_a_request():
    assert specs(prefill_chunk=1000)[0].max_chunk == 256


def test_the_kv_of_a_token_is_counted_in_the_dtype_it_has():
    layers, both, heads, dim, bytes_each = 2, 2, 4, 16, 4  # on CPU, KV is float32 whatever the weights are
    assert {spec.kv_bytes_per_token for spec in specs(dtype="bfloat16")} == {layers * both * heads * dim * bytes_each}


def test_programs_have_sizes_up_to_the_limits():
    prefill, decode = specs()
    assert prefill.chunk_buckets[-1] == 64 and prefill.row_buckets == ()
    assert decode.row_buckets == (1, 2, 4) and decode.chunk_buckets == ()


# --- what cannot be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_tp_that_does_not_divide_the_heads_is_refused_by_its_name(side):
    refused(f"{side}_tp is 3; allowed: a divisor of the 8 query heads, one of [1, 2, 4, 8]", specs, **{f"{side}_tp": 3})


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_more_stages_than_layers_are_refused_by_their_name(side):
    refused(f"{side}_pp is 3; allowed: 1 to 2, the layers of the model", specs, **{f"{side}_pp": 3})


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_pages_too_few_for_one_request_are_refused_by_their_name(side):
    field = f"{side}_num_pages"
    refused(f"{field} is 16; allowed: at least 17 for one request of max_model_len = 256", specs, **{field: 16})
    assert specs(**{field: 17})


def test_a_length_beyond_the_context_is_refused():
    refused("max_model_len is 1025; allowed: at most 1024, the model's context", specs, max_model_len=1025)


def test_more_devices_than_there_are_are_refused():
    have = len(jax.devices())
    assert devices_for(have) == jax.devices()
    with pytest.raises(ValueError, match=rf"the instances need {have + 1} devices; there are {have} of platform"):
        devices_for(have + 1)


def test_colocated_traits_are_those_of_the_policy():
    assert traits_of(Colocated()) == Traits(colocated=True, steady=True)
