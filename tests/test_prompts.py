"""What a request's `slo` means at the front door."""

import pytest

from pdjax.prompts import limits_of
from pdjax.request import SLO, SLOClass

CLASSES = (SLOClass("fast", SLO(ttft_ms=1), "slow"), SLOClass("slow", SLO(ttft_ms=9)))


def test_limits_are_taken_as_they_are_and_belong_to_no_class():
    assert limits_of(SLO(tpot_ms=3), CLASSES) == (SLO(tpot_ms=3), "", ())
    assert limits_of(None, CLASSES) == (SLO(), "", ())


def test_a_class_brings_its_limits_and_those_it_may_be_degraded_to():
    assert limits_of("fast", CLASSES) == (SLO(ttft_ms=1), "fast", (CLASSES[1],))
    assert limits_of("slow", CLASSES) == (SLO(ttft_ms=9), "slow", ())


def test_what_is_neither_is_refused():
    with pytest.raises(ValueError, match=r"slo is 'best'; allowed: a pdjax.SLO, None, or a class: fast, slow"):
        limits_of("best", CLASSES)
    with pytest.raises(ValueError, match=r"slo is 500; allowed: a pdjax.SLO, None, or the name of a class"):
        limits_of(500, CLASSES)
