"""How many instances should decode, by hand: a step takes 10 ms and 2 ms a row."""

import math

import pytest

from pdjax.messages import Role
from pdjax.schedulers import Flip, sliders
from pdjax.testing import spec
from pdjax.traffic import Traffic
from tests.views import Ask, Cluster, View, views


def traffic(rate, output=11, arrivals=100):
    return Traffic(arrivals=arrivals, prompt_tokens=10, output_tokens=output, _gap_s=1 / rate, _last_s=100.0)


VIEW = View(spec(0, Role.DECODE))


def test_rows_follow_from_the_tokens_per_second_and_the_step():
    # 250 tokens/s: rows = 250 * (0.010 + 0.002 * rows) = 5
    assert sliders.rows_of(25, traffic(25), *sliders.line(VIEW, traffic(25))) == pytest.approx(5)


def test_more_tokens_than_steps_can_make_are_ever_more_rows():
    assert sliders.rows_of(50, traffic(50), *sliders.line(VIEW, traffic(50))) == math.inf


def test_the_fewest_instances_whose_rows_have_slots_are_wanted():
    # 30 requests/s: 7.5 rows on one, over 90 % of 8 slots; 2.14 on each of two.
    assert sliders.wanted(VIEW, 4, traffic(25), 0.0, math.inf) == 1
    assert sliders.wanted(VIEW, 4, traffic(30), 0.0, math.inf) == 2


def test_the_fewest_instances_whose_steps_keep_the_limit_are_wanted():
    # 5 rows on one: 20 ms; 1.67 on each of two: 14 ms.
    assert sliders.wanted(VIEW, 4, traffic(25), 0.0, 0.022) == 2
    assert sliders.wanted(VIEW, 4, traffic(25), 0.0, 0.023) == 1


def test_one_instance_is_left_to_prefill():
    assert sliders.wanted(VIEW, 4, traffic(500), 0.0, math.inf) == 3


def pool(*roles, rate=30, now=0.0, **changes):
    return Cluster(views(*roles), now=now, traffic=traffic(rate, **changes))


TWO_P = (Role.PREFILL, Role.PREFILL, Role.DECODE)


def test_a_role_changes_when_another_number_has_been_wanted_long_enough():
    roles, cluster = sliders.Roles(), pool(*TWO_P)
    cluster.instances[0].prefills = [Ask()]
    assert roles.flip(cluster, math.inf) == []
    cluster.now = sliders.HOLD_S - sliders.LOOK_S
    assert roles.flip(cluster, math.inf) == []
    cluster.now = sliders.HOLD_S
    (flip,) = roles.flip(cluster, math.inf)
    assert isinstance(flip, Flip) and (flip.instance, flip.role) == (1, Role.DECODE)
    assert flip.reason == "2 of 3 instances should decode 30.00 requests/s of 10 + 11 tokens"


def test_a_number_that_is_wanted_for_a_moment_changes_nothing():
    roles, cluster = sliders.Roles(), pool(*TWO_P)
    roles.flip(cluster, math.inf)
    cluster.now, cluster.traffic = 4.0, traffic(1)
    assert roles.flip(cluster, math.inf) == []  # one decodes, and one is wanted
    cluster.now, cluster.traffic = 6.0, traffic(30)
    assert roles.flip(cluster, math.inf) == []


def test_the_decode_instance_with_the_fewest_rows_goes_back():
    roles, cluster = sliders.Roles(), pool(Role.PREFILL, Role.DECODE, Role.DECODE, rate=1)
    cluster.instances[1].rows = 2
    roles.flip(cluster, math.inf)
    cluster.now = sliders.HOLD_S
    assert [(flip.instance, flip.role) for flip in roles.flip(cluster, math.inf)] == [(2, Role.PREFILL)]


def test_one_role_changes_at_a_time():
    roles, cluster = sliders.Roles(), pool(*TWO_P)
    roles.flip(cluster, math.inf)
    cluster.now, cluster.instances[2].next_role = sliders.HOLD_S, Role.PREFILL
    assert roles.flip(cluster, math.inf) == []


@pytest.mark.parametrize("few", [{"arrivals": 4}, {"output": 0}])
def test_nothing_changes_before_anything_is_known(few):
    roles, cluster = sliders.Roles(), pool(*TWO_P, **few)
    roles.flip(cluster, math.inf)
    cluster.now = sliders.HOLD_S
    assert roles.flip(cluster, math.inf) == []
