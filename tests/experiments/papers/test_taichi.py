"""TaiChi's reproduction: what a mode is made of, interference by hand, and searches over sliders."""

import numpy as np
import pytest

from pdjax.experiments.papers import taichi, taichi_interference, taichi_systems
from pdjax.experiments.papers.taichi_systems import Bench, System
from pdjax.messages import Role
from pdjax.record import IterationRecord, RequestRecord, Timeline
from pdjax.report import Report
from pdjax.request import SLO, State
from pdjax.schedulers import Flip, Move
from tests.views import Ask, Cluster, View, views


def test_sliders_say_which_instances_there_are():
    roles = [spec.role for spec in System("dynamic", prefill=3, chunk=256).fleet().specs]
    assert roles == [Role.PREFILL] * 3 + [Role.DECODE] * 5
    assert {spec.role for spec in System("aggregated", chunk=256).fleet().specs} == {Role.MIXED}


def test_lengths_have_the_published_means():
    means = np.mean(taichi_systems.lengths(20000, 0), axis=0)
    assert means == pytest.approx([taichi_systems.PROMPT, taichi_systems.ANSWER], rel=0.02)


def test_roles_stay_as_the_sliders_were_found(monkeypatch):
    move = Move(Ask(), 1, "")
    monkeypatch.setattr(taichi_systems.Dynamic, "revise", lambda self, cluster: [Flip(0, Role.DECODE, ""), move])
    assert taichi_systems.Hybrid().revise(Cluster(views(Role.PREFILL, Role.DECODE))) == [move]


def test_without_knowing_lengths_a_prompt_goes_to_the_shortest_queue():
    cluster = Cluster([View(instance.spec, [Ask(7, 20)]) for instance in views(Role.PREFILL, Role.DECODE)])
    cluster.instances[1].prefills = [Ask(7, 19)]
    place = taichi_systems.Unaware().place(Ask(context_tokens=10), cluster)
    assert (place.prefill, place.decode) == (1, 1)


def _iteration(number, tokens, rows, end_s, steps=1):
    return IterationRecord(0, number, tokens, rows, end_s - 0.1, end_s, steps=steps)


def _request(*token_s):
    timeline = Timeline(0.0, token_s=list(token_s))
    return RequestRecord("0", 5, (0,) * len(token_s), State.FINISHED, "length", SLO(), timeline, decode_instance=0)


def test_intensity_is_the_prompt_tokens_beside_which_a_request_decoded():
    passes = [_iteration(1, 50, 1, 1.0), _iteration(2, 30, 2, 1.2), _iteration(4, 0, 3, 1.4, 2), _iteration(5, 9, 3, 2)]
    spec = System("aggregated", chunk=256).fleet().specs[0]
    found = taichi_interference.met(Report([_request(1.0, 1.2, 1.3, 1.4)], passes, [], 2.0, (spec,)))
    assert found == pytest.approx(np.array([[30 / 3, (2 + 2 * 3) / 3, 400 / 3]]))


def test_a_line_explains_what_lies_on_it():
    values = np.array([(0, 5, 40), (100, 1, 60), (200, 9, 80)], float)
    (constant, slope), r2 = taichi_interference.line(values, 0)
    assert (constant, slope, r2) == pytest.approx((40.0, 0.2, 1.0))


def test_the_best_slider_is_found_with_its_goodput(monkeypatch):
    goodput = {System("aggregated", chunk=256): 3.0, System("aggregated", chunk=512): 2.0}

    def play(self, system, rate, slo):
        return taichi_systems.Played(np.full(10, 1.0 if rate <= goodput[system] else 9.0), np.zeros(10), 0.0)

    monkeypatch.setattr(Bench, "play", play)
    system, rate = Bench(10, 0).best(tuple(goodput), SLO(ttft_ms=5.0), guess=1.0)
    assert system.chunk == 256
    assert rate == pytest.approx(3.0, rel=0.06)


def test_a_run_of_each_mode_serves_everybody():
    for system in (System("aggregated", chunk=512), System("disaggregated", 4), System("dynamic", 4, 256)):
        run = Bench(12, 0).play(system, 2.0, SLO(ttft_ms=6e3, tpot_ms=100))
        assert run.met(SLO(ttft_ms=60e3, tpot_ms=500)) == (True,) * 12


def _found(aggregated, disaggregated, dynamic):
    goodput = {"aggregated": aggregated, "disaggregated": disaggregated, "dynamic": dynamic}
    best = dict.fromkeys(goodput, System("aggregated", chunk=256))
    return taichi.Found(taichi.REGIMES[2], best, goodput, dict.fromkeys(goodput, 0.9))


def test_orders_are_told_in_words():
    row = taichi._order("", _found(2.0, 1.0, 3.0), "disaggregated", "aggregated")
    assert (row.published, row.ours, row.reached) == (
        "disaggregated > aggregated",
        "aggregated > disaggregated",
        False,
    )


@pytest.mark.parametrize(("dynamic", "ours", "reached"), [(2.2, ">= 1.09", True), (2.1, "1.05", False)])
def test_the_gain_is_over_the_better_pure_mode(dynamic, ours, reached):
    row = taichi._gain(_found(2.0, 1.0, dynamic))
    assert (row.ours, row.reached) == (ours, reached)
