"""The measurement of the controller's decisions, small: what is timed, with how many requests there."""

import pytest

from pdjax.experiments.decision_times import decisions
from pdjax.schedulers import SCHEDULERS


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("room", [1.0, 0.25])
def test_passes_and_every_tenth_an_arrival_are_timed_with_the_requests_there(name, room):
    timed = decisions(SCHEDULERS[name](None), instances=4, live=30, events=40, room=room)
    assert (timed.live, len(timed.passes)) == (30, 40)
    assert 3 <= len(timed.arrivals) <= 5
    assert min(timed.passes) > 0
