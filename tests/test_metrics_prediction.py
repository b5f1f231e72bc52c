"""What was predicted against what came of it, by hand."""

import pytest

from pdjax.metrics import prediction
from pdjax.record import IterationRecord, Predicted, RequestRecord, Timeline, TransferRecord
from pdjax.request import SLO, State

NOTHING = {"count": 0, "mean_error": None, "max_error": None, "bias": None}


def one_pass(chunk_tokens, rows, predicted_s, seconds=1.0, steps=1):
    return IterationRecord(0, 1, chunk_tokens, rows, 5.0, 5.0 + seconds, steps=steps, predicted_s=predicted_s)


def record(predicted=None, **changes):
    """A request with a TTFT of 2 s and a TPOT of 500 ms."""
    marks = Timeline(1.0, token_s=[3.0, 3.5, 4.0])
    return RequestRecord("r", 5, (1, 2, 3), State.FINISHED, "length", SLO(), marks, predicted=predicted, **changes)


def test_errors_are_relative_to_what_it_took_and_the_bias_keeps_their_sign():
    got = prediction([], [one_pass(4, 0, 1.25), one_pass(4, 0, 0.5)], [])
    assert got["prefill"] == {"count": 2, "mean_error": 0.375, "max_error": 0.5, "bias": -0.125}


def test_passes_are_told_by_their_kind():
    got = prediction([], [one_pass(4, 0, 1.5), one_pass(0, 2, 1.25), one_pass(4, 2, 1.75)], [])
    assert [got[kind]["bias"] for kind in ("prefill", "decode", "mixed")] == [0.5, 0.25, 0.75]


def test_every_step_of_a_run_counts_with_their_mean():
    got = prediction([], [one_pass(0, 2, 1.5, seconds=3.0, steps=3), one_pass(0, 2, 1.0)], [])["decode"]
    assert (got["count"], got["bias"]) == (4, pytest.approx(0.375))


def test_streamed_transfers_are_left_out():
    moves = [TransferRecord("r", 0, 1, 9, 1.0, 3.0, streamed, predicted_s=1.0) for streamed in (False, True)]
    assert prediction([], [], moves)["transfer"] == {"count": 1, "mean_error": 0.5, "max_error": 0.5, "bias": -0.5}


def test_what_a_policy_expected_is_compared_with_ttft_and_tpot():
    got = prediction([record(Predicted(3000.0, 250.0)), record(Predicted(ttft_ms=2000.0)), record()], [], [])
    assert (got["ttft_ms"]["count"], got["ttft_ms"]["mean_error"]) == (2, 0.25)
    assert (got["tpot_ms"]["count"], got["tpot_ms"]["bias"]) == (1, -0.5)


def test_requests_that_were_placed_again_do_not_count():
    again = [record(Predicted(1.0, 1.0), preemptions=1), record(Predicted(1.0, 1.0), restarts=1)]
    assert prediction(again, [], [])["ttft_ms"] == NOTHING


def test_what_was_not_predicted_has_no_error():
    got = prediction([record()], [one_pass(0, 2, 0.0), one_pass(0, 2, 1.0, seconds=0.0)], [])
    assert set(got) == {"prefill", "decode", "mixed", "transfer", "ttft_ms", "tpot_ms"}
    assert all(each == NOTHING for each in got.values())
