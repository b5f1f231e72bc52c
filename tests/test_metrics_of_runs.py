"""Metrics of whole runs of a simulated cluster: what they say is what a user saw and what the instances did."""

import pytest

from pdjax import metrics
from pdjax.request import State
from pdjax.testing import Collector, World
from tests.worlds import POLICIES, ask, crowd, policy, specs

APART = ("pull", "stream", "2p2d", "own")  # every prompt is computed elsewhere


class Stamps(Collector):
    """Keeps when each token was handed out."""

    def __init__(self):
        super().__init__()
        self.times = {}

    def token(self, request, token, time_s, logprob):
        self.times.setdefault(request.id, []).append(time_s)
        return super().token(request, token, time_s, logprob)


def run(name, *requests, **changes):
    stamps = Stamps()
    w = World(specs(name, **changes), policy(name), sink=stamps)
    w.add(*requests)
    w.run()
    return stamps


def summarize(collected):
    records = list(collected.records.values())
    return metrics.summarize(records, devices=2, duration_s=1.0, iterations=collected.iterations)


@pytest.mark.parametrize("name", POLICIES)
def test_a_request_has_one_ttft_and_it_is_when_its_user_got_the_first_token(name):
    requests = crowd(seed=6, count=15)
    got = run(name, *requests, num_pages=33)  # some are preempted, and their prompts computed again
    for request in requests:
        record = got.records[request.id]
        assert metrics.ttft_ms(record) == pytest.approx(1e3 * (got.times[request.id][0] - request.arrival_s))
        assert record.timeline.token_s == got.times[request.id]
        assert sum(metrics.parts(record).values()) == pytest.approx(metrics.e2e_ms(record))


@pytest.mark.parametrize("name", POLICIES)
def test_every_prompt_token_is_computed_once_or_transferred_and_both_are_told(name):
    requests = crowd(seed=6, count=15)
    summary = summarize(run(name, *requests, num_pages=257))  # none is preempted
    assert summary["computed_prompt_tokens"] == summary["prompt_tokens"] == sum(len(r.prompt_ids) for r in requests)
    sources = summary["prompt_tokens_by_source"]
    assert sum(sources.values()) == summary["prompt_tokens"]
    if name in APART:  # but for answers of one token, which need no decode instance
        assert sources["transferred"] == sum(len(r.prompt_ids) for r in requests if r.sampling.max_tokens > 1)
    if name in ("colocated", "chunked"):
        assert sources["transferred"] == 0


def test_the_number_of_prefill_passes_is_the_number_of_chunks():
    summary = summarize(run("pull", ask(0, prompt=40, tokens=5)))
    assert summary["iterations"] == {"prefill": 3, "decode": 4, "mixed": 0}  # chunks of 16 tokens


def test_what_is_computed_again_after_a_preemption_is_counted():
    got = run("colocated", *crowd(seed=4, count=30), num_pages=26)
    summary = summarize(got)
    assert summary["preempted"] == sum(record.preemptions for record in got.records.values()) > 0
    assert summary["computed_prompt_tokens"] > summary["prompt_tokens"]
    assert {record.state for record in got.records.values()} == {State.FINISHED}
