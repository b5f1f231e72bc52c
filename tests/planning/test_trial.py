"""Goodputs of clusters that one can compute by hand."""

import math

import pytest

from pdjax.messages import Role
from pdjax.planning import bounds, trial
from pdjax.planning.mix import Mix
from pdjax.planning.trial import Task
from pdjax.request import SLO
from tests.planning.toys import curves, pool

MIX = Mix(((100, 11),), SLO(ttft_ms=50, tpot_ms=20))


def task(policy="disaggregated", phase="prefill", pools=None, mix=MIX, judged=100, guess=10.0, **options):
    role = {"prefill": Role.PREFILL, "decode": Role.DECODE, "both": Role.MIXED}[phase]
    return Task(policy, pools or (pool(role, max_chunk=100),), mix, phase, guess, judged, **options)


@pytest.mark.slow
def test_a_prefill_instance_carries_what_its_queue_can_wait_for():
    """A prompt takes 20 ms, and the limit leaves 30 to the queue. Of an M/D/1 queue at utilisation 0.497 just 10 % wait
    for longer than 1.5 times the service."""
    found = trial.find(task(judged=3000))
    assert found.rate == pytest.approx(0.497 / 0.020, rel=0.1)
    assert found.reason == "TTFT: queueing"


def test_a_decode_instance_carries_nearly_its_bound():
    most = bounds.decode_rate(pool(), MIX)
    found = trial.find(task(phase="decode", pools=(pool(Role.DECODE),), guess=0.9 * most))
    assert 0.8 * most < found.rate < 1.1 * most
    assert found.reason == "TPOT: decode steps"


def test_memory_that_is_full_is_told_from_slow_steps():
    small = pool(Role.DECODE, kv_tokens=1200)
    most = bounds.decode_rate(small, MIX)
    assert trial.play(task(phase="decode", pools=(small,)), 1.5 * most).reason == "KV memory"


def test_a_slow_link_is_named():
    slow = curves()
    slow = type(slow)(slow.prefill, slow.decode, bytes_per_s=100 * 1000 / 0.4)  # a prompt's KV takes 0.4 s
    pools = pool(Role.PREFILL, latency=slow), pool(Role.DECODE)
    assert trial.play(task(phase="both", pools=pools), 2.0).reason == "link"


def test_a_rate_that_is_served_misses_nothing_and_names_nothing():
    run = trial.play(task(), 0.5)
    assert run.trial.attainment == 1.0 and run.reason == ""


def test_a_hopeless_run_ends_when_its_outcome_is_certain():
    """Of 100 requests 10 may miss: the eleventh that is late ends it."""
    run = trial.play(task(), 500.0)
    assert run.trial.attainment < 0.9 and sum(not met for met in run.trial.met) == 11


def test_limits_that_no_rate_keeps_give_no_goodput():
    found = trial.find(task(mix=Mix(MIX.lengths, SLO(ttft_ms=15)), judged=20, max_runs=3))
    assert (found.rate, found.bound, found.reason) == (0.0, "at most", "TTFT: the prefill itself")


def test_the_same_task_gives_the_same_goodput():
    assert trial.find(task(judged=30)) == trial.find(task(judged=30))


def test_rows_that_a_run_begins_with_are_those_of_the_long_run():
    """10 requests/s of 10 steps, each as long as it takes with so many rows: x = 100 * (10 + 0.1 x) ms."""
    rows = trial._running([pool(Role.DECODE)], MIX, 10.0)
    assert len(rows) == pytest.approx(1.0 / (1 - 0.01), abs=1)
    many = trial._running([pool(Role.DECODE)], MIX, 400.0)
    assert all(prompt + answer == 111 and answer >= 2 for prompt, answer in many)
    assert math.isclose(sum(answer for _, answer in many) / len(many), 6.5, rel_tol=0.15)
