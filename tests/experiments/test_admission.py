"""The launcher's check of rejections, and its course in virtual time."""

import pytest

from pdjax.eventlog import Header
from pdjax.experiments import admission
from pdjax.messages import Role
from pdjax.request import SLO, Request, SamplingParams
from pdjax.testing import spec
from tests.views import SIMPLE

HEADER = Header("colocated", None, (spec(0, Role.MIXED),), (SIMPLE,), 60.0, admission=True)


def request(number, at_s, **limits):
    """16 prompt tokens take 26 ms; 2 tokens of answer, one step of 12 ms."""
    return Request(number, (1,) * 16, SamplingParams(max_tokens=2, seed=0), slo=SLO(**limits), arrival_s=at_s)


def test_a_rejection_was_right_if_the_request_would_have_missed():
    before, late = request(0, 0.0, ttft_ms=1000), request(1, 0.0, ttft_ms=50)
    assert admission.was_right(1, [before, late], {1: 0.0}, HEADER)  # behind a prompt and its step it takes 64


def test_a_rejection_was_wrong_if_it_would_have_been_kept_and_broken_nobody():
    before, early = request(0, 0.0, ttft_ms=1000), request(1, 0.0, ttft_ms=70)  # 26 + 12 + 26
    assert not admission.was_right(1, [before, early], {1: 0.0}, HEADER)


def test_a_rejection_was_right_if_another_would_have_missed():
    other = request(1, 0.01, ttft_ms=60)  # 16 + 26 ms alone, 26 ms more behind a second prompt
    assert admission.was_right(0, [request(0, 0.0), request(2, 0.0), other], {0: 0.01}, HEADER)


def test_who_came_after_the_rejection_is_not_there():
    later = request(1, 0.01, ttft_ms=30)
    assert not admission.was_right(0, [request(0, 0.0, ttft_ms=30), later], {0: 0.0}, HEADER)


def test_others_stay_rejected():
    asked = [request(number, 0.0, ttft_ms=30) for number in range(3)]
    rejected = {0: 0.0, 1: 0.0, 2: 0.0}
    assert not any(admission.was_right(number, asked, rejected, HEADER) for number in rejected)


def test_times_are_numbers_with_commas():
    assert admission.times_of(["0.5", "1"]) == (0.5, 1.0)


@pytest.mark.parametrize("text", ["inf", "1,1", "1,1.0", "0", "nan", "x", ""])
def test_times_that_cannot_be_played_are_refused(text):
    with pytest.raises(ValueError, match=f"times is '{text}'; allowed: finite numbers > 0 with commas, each once"):
        admission.times_of(text.split(","))
