"""Requests: which options are refused, and which steps a request's life may take."""

import itertools
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.request import SLO, TRANSITIONS, Request, SamplingParams, State, advance

NAN, INF = float("nan"), float("inf")
ENDS = {State.FINISHED, State.REJECTED, State.ABORTED, State.FAILED}


@pytest.mark.parametrize(
    "name, values, allowed",
    [
        ("max_tokens", (0, -1, 1.0, True, "5", None), "a whole number >= 1"),
        ("top_k", (-1, 0.5, False, None), "a whole number >= 0"),
        ("seed", (-1, 1.5, True, "7"), "a whole number >= 0"),
        ("temperature", (-0.1, NAN, INF, -INF, "hot", None, True), "a finite number >= 0"),
        ("top_p", (0, 0.0, -1, 1.0001, NAN, INF, None, True), "a number in (0, 1]"),
    ],
)
def test_sampling_out_of_range_is_refused_by_name(name, values, allowed):
    for value in values:
        with pytest.raises(ValueError, match=re.escape(f"{name} is {value!r}; allowed: {allowed}")):
            SamplingParams(**{name: value})


def test_the_edges_of_sampling_are_allowed():
    SamplingParams(max_tokens=1, temperature=0, top_k=0, top_p=1, seed=0)
    SamplingParams(temperature=1e-9, top_p=1e-9, seed=None)


def test_stop_token_ids_become_a_tuple():
    assert SamplingParams(stop_token_ids=[2, 3]).stop_token_ids == (2, 3)


def test_a_single_stop_text_is_a_tuple_of_one():
    assert SamplingParams(stop="User:").stop == SamplingParams(stop=["User:"]).stop == ("User:",)
    assert SamplingParams().stop == ()


@pytest.mark.parametrize("bad", ["", ["a", ""], [1], None, 5])
def test_an_empty_stop_text_or_none_at_all_is_refused(bad):
    with pytest.raises(ValueError, match=re.escape(f"stop is {bad!r}; allowed: a text, or a sequence of texts")):
        SamplingParams(stop=bad)


@pytest.mark.parametrize("name", ["logprobs", "ignore_eos"])
def test_a_switch_is_true_or_false(name):
    with pytest.raises(ValueError, match=f"{name} is 1; allowed: True, False"):
        SamplingParams(**{name: 1})


@pytest.mark.parametrize("name", ["ttft_ms", "tpot_ms", "itl_p99_ms", "e2e_ms"])
def test_a_limit_is_a_positive_time_or_none(name):
    for value in (0, -5, NAN, math.inf, "fast", True):
        with pytest.raises(
            ValueError, match=re.escape(f"{name} is {value!r}; allowed: a finite number of milliseconds")
        ):
            SLO(**{name: value})
    assert getattr(SLO(**{name: 0.5}), name) == 0.5 and getattr(SLO(), name) is None


def test_total_tokens_is_prompt_and_output():
    assert Request(0, (1, 2, 3), SamplingParams(max_tokens=4)).total_tokens == 7


def test_advance_allows_exactly_what_the_table_lists():
    assert set(TRANSITIONS) == set(State)
    for old, new in itertools.product(State, repeat=2):
        if new in TRANSITIONS[old]:
            assert advance(old, new) is new
        else:
            with pytest.raises(RuntimeError, match=f"illegal request transition {old.value} -> {new.value}"):
                advance(old, new)


def test_the_terminal_states_are_the_four_ends():
    assert {state for state in State if state.terminal} == ENDS


def test_every_live_state_can_be_aborted_and_can_fail():
    for state in set(State) - ENDS:
        assert {State.ABORTED, State.FAILED} <= TRANSITIONS[state]


def test_only_a_request_that_never_ran_is_rejected():
    assert [state for state in State if State.REJECTED in TRANSITIONS[state]] == [State.WAITING]


def test_a_request_that_lost_its_kv_waits_again_before_it_runs():
    for state in (State.PREEMPTED, State.RESTARTING):
        assert TRANSITIONS[state] - ENDS == {State.WAITING}


@settings(derandomize=True, deadline=None)
@given(st.lists(st.sampled_from(State), max_size=40))
def test_any_order_of_events_reaches_at_most_one_end(wanted):
    state, ends = State.WAITING, 0
    for new in wanted:
        try:
            state = advance(state, new)
        except RuntimeError:
            continue
        ends += state.terminal
    assert ends == state.terminal
