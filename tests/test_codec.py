"""Every message survives the way through JSON; what is no message is refused."""

import dataclasses
import json
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax import codec
from pdjax.codec import encode
from pdjax.eventlog import Header
from pdjax.latency import LatencyModel
from pdjax.messages import Abort, Command, Event, InstanceSpec, Iteration, Role, StartTransfer, Tick
from pdjax.request import SLO, Request, SamplingParams
from pdjax.testing import spec

MESSAGES = typing.get_args(Event) + typing.get_args(Command) + (Header,)

# Classes that refuse values outside their ranges.
st.register_type_strategy(
    SamplingParams,
    st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 99),
        temperature=st.floats(0, 9),
        top_p=st.floats(0.01, 1),
        seed=st.none() | st.integers(0, 2**31),
        stop=st.lists(st.text(min_size=1), max_size=2).map(tuple),
        logprobs=st.booleans(),
    ),
)
st.register_type_strategy(SLO, st.builds(SLO, ttft_ms=st.none() | st.floats(0.1, 1e6), e2e_ms=st.just(5)))


def through_json(value):
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@settings(max_examples=10, derandomize=True, deadline=None)
@given(data=st.data())
def test_every_message_comes_back_equal(kind, data):
    message = data.draw(st.from_type(kind).filter(lambda message: "nan" not in repr(message)))  # it equals nothing
    assert codec.decode(kind, through_json(codec.encode(message))) == message


@given(st.floats(allow_nan=False))
@settings(derandomize=True, deadline=None)
def test_floats_survive_exactly(seconds):
    request = Request(0, (1,), SamplingParams(), arrival_s=seconds)
    assert codec.decode(Request, through_json(codec.encode(request))).arrival_s == seconds


def test_fields_with_their_default_are_left_out():
    assert codec.encode(Iteration(1, 2, decode=True)) == {"instance": 1, "number": 2, "decode": True}


def test_a_field_that_an_old_log_does_not_have_gets_its_default():
    assert codec.decode(Iteration, {"instance": 1, "number": 2}) == Iteration(1, 2)


def test_enums_and_sets_are_plain_and_sorted():
    assert codec.encode(spec(0, Role.DECODE))["role"] == "decode"
    assert codec.encode(Request(0, (1,), SamplingParams(), frozenset({9, 3})))["stop_ids"] == [3, 9]


def test_a_tag_tells_which_class_it_was():
    assert codec.decode_tagged(Event, through_json(codec.encode_tagged(Abort(3)))) == Abort(3)
    assert codec.encode_tagged(Tick()) == {"Tick": {}}


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        (Abort, {"request": "3"}, "Abort.request is '3'; allowed: of type int"),
        (Abort, {"request": True}, "Abort.request is True; allowed: of type int"),
        (Abort, {}, "Abort is {}; allowed: the fields request, with request"),
        (Abort, {"request": 3, "more": 1}, "allowed: the fields request"),
        (Abort, 3, "Abort is 3; allowed: the fields"),
        (Iteration, {"instance": 0, "number": 1, "leaves": 5}, "Iteration.leaves is 5; allowed: a list"),
        (Iteration, {"instance": 0, "number": 1, "grows": [[1, 2, 3]]}, r"grows is \[1, 2, 3\]; allowed: a list of 2"),
        (
            LatencyModel,
            {"transfer_alpha_s": 10**400},
            r"transfer_alpha_s is 10+\.\.\.0+; allowed: a number that a float",
        ),
        (InstanceSpec, encode(spec(0, Role.DECODE)) | {"role": []}, r"InstanceSpec.role is \[\]; allowed: one of"),
        (StartTransfer, {"key": 1}, "allowed: the fields attempt, dst"),
    ],
)
def test_what_is_no_message_is_refused_by_its_field(kind, data, message):
    with pytest.raises(ValueError, match=message):
        codec.decode(kind, data)


@pytest.mark.parametrize("data", [{}, {"Tick": {}, "Abort": {}}, {"Nothing": {}}, [], None])
def test_an_unknown_message_is_refused(data):
    with pytest.raises(ValueError, match=r"message is .*; allowed: one of Arrival, Abort"):
        codec.decode_tagged(Event, data)


def test_a_value_of_another_kind_has_no_json():
    @dataclasses.dataclass
    class Odd:
        value: object

    with pytest.raises(TypeError, match="a list has no JSON here"):
        codec.encode(Odd([1]))
