"""Mooncake: the Conductor's choices and the rules by which requests are turned away, on traces of a few rows."""

import json

import pytest

from pdjax.experiments.papers import mooncake
from pdjax.experiments.papers import mooncake_node as node
from pdjax.experiments.papers.mooncake_rejection import RULES, turned
from pdjax.experiments.papers.mooncake_scheduling import POLICIES, Conductor, expected_s, scheduled
from pdjax.experiments.papers.outcome import Setup
from pdjax.traces import Row

LONG = tuple(range(40))
PROMPT = Row(40 * 512, 1, 0.0, LONG)


def prefill_s(tokens, prior=0):
    return node.flops(tokens, prior) / (node.MFU * node.A800_FLOPS)


def routed(policy, *rows, instances=2):
    conductor = Conductor(policy, instances, 1000)
    return [conductor.route(row, row.time_s) for row in rows]


def test_load_balancing_takes_the_instance_that_is_free_first():
    short = Row(512, 1, 0.0, (99,))
    assert [option.instance for option in routed("load balancing", PROMPT, short, short)] == [0, 1, 1]


def test_a_cache_aware_policy_goes_back_to_where_the_prefix_is():
    again = Row(41 * 512, 1, 100.0, (*LONG, 77))
    first, second = routed("local cache-aware", Row(512, 1, 0.0, (5,)), PROMPT)
    assert (first.instance, second.instance) == (0, 1)
    *_, third = routed("local cache-aware", Row(512, 1, 0.0, (5,)), PROMPT, again)
    assert (third.instance, third.reused, third.fetched) == (1, 40, 0)
    assert third.ttft_s == pytest.approx(prefill_s(512, 40 * 512))


def test_it_computes_elsewhere_what_it_would_wait_for_longer():
    *_, last = routed("local cache-aware", PROMPT, Row(200 * 512, 1, 0.0, tuple(range(200))), PROMPT)
    assert (last.instance, last.reused) == (1, 0)


def test_a_global_policy_fetches_the_prefix_where_that_is_quicker():
    *_, last = routed("global cache-aware", PROMPT, PROMPT)
    assert (last.instance, last.reused, last.fetched) == (1, 40, 40)
    fetch_s = 40 * 512 * node.KV_BYTES_PER_TOKEN / node.NIC_BYTES_PER_S
    assert last.work_s == pytest.approx(fetch_s + prefill_s(1, 40 * 512 - 1))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_controller_serves_in_the_time_that_the_conductor_expects(policy):
    rows = [Row(512 * (1 + number % 7), 1, 0.1 * number, tuple(range(1 + number % 7))) for number in range(30)]
    found = scheduled(rows, policy, seed=3)
    assert found.ttft_s == pytest.approx(found.expected_s, rel=0.01)
    assert found.expected_s == expected_s(rows, policy, mfu=node.MFU, seed=3)


@pytest.mark.parametrize(("rule", "early", "late"), [("each stage", 0, 2), ("early", 1, 1), ("predicted", 2, 0)])
def test_the_earlier_a_rule_looks_at_decode_the_fewer_prompts_are_computed_in_vain(rule, early, late):
    """Prompts of 60 000 tokens take 13 s; two rows of them make steps of 84 ms, three of 105. Three come at once, each
    to a prefill instance of its own, and one when two of them decode."""
    rows = [Row(60_000, 1000, time_s) for time_s in (0.0, 0.0, 0.0, 20.0)]
    found = turned(rows, rule, speed=1.0, prefillers=3, decoders=1)
    assert (found.early, found.late, found.rejected) == (early, late, 2)


@pytest.mark.parametrize("rule", RULES)
def test_a_prompt_that_would_wait_too_long_is_turned_away_when_it_comes(rule):
    """Each takes 13 s: the third would have its first token after 40."""
    rows = [Row(60_000, 1, 0.0)] * 3
    found = turned(rows, rule, speed=1.0, prefillers=1, decoders=1)
    assert (found.early, found.late, found.kept) == (1, 0, 2)


@pytest.mark.slow
def test_all_of_it_is_computed_and_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "mooncake").mkdir()
    lines = [{"timestamp": 500 * n, "input_length": 1024, "output_length": 3, "hash_ids": [0, n]} for n in range(20)]
    path = tmp_path / "mooncake" / "conversation_trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    said = []
    outcome = mooncake.run(Setup(tmp_path, True, 0, said.append))
    hit = next(row for row in outcome.rows if row.what == "hit rate, LRU, any number of blocks")
    assert hit.ours == pytest.approx(19 / 40)
    reuse = [row for row in outcome.rows if row.what.startswith("reuse of 8192")]
    assert [row.reached for row in reuse] == [True, True]
    assert json.dumps(outcome.summary) and said
    outcome.plot(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
