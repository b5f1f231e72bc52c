"""Sarathi-Serve's and SplitFuse's reproduction: how passes are filled, and what counts as kept."""

import numpy as np
import pytest

from pdjax.experiments.papers import sarathi, sarathi_systems
from pdjax.experiments.papers.sarathi_systems import PREFILL_FIRST, Rule, Times, Workload, stall_free
from pdjax.record import RequestRecord, Timeline
from pdjax.request import SLO, State


def _passes(rule):
    """(prompt tokens, rows) of each pass, of a prompt that comes while another request decodes."""
    report = sarathi_systems.play(rule, [(100, 40), (3000, 2)], [0.0, 0.5])
    return [(one.chunk_tokens, one.rows) for one in report.iterations if one.started_s > 0.4 and one.chunk_tokens]


def test_prefill_first_lets_rows_wait_for_the_whole_prompt():
    assert _passes(PREFILL_FIRST) == [(3000, 0)]


def test_hybrid_passes_take_rows_beside_whole_prompts():
    assert _passes(Rule("hybrid only")) == [(3000, 1)]


def test_chunks_alone_take_turns_with_decode_steps():
    assert _passes(Rule("chunked only", 1024)) == [(1024, 0), (1024, 0), (952, 0)]
    report = sarathi_systems.play(Rule("chunked only", 1024), [(100, 40), (3000, 2)], [0.0, 0.5])
    kinds = "".join("p" if one.chunk_tokens else "d" for one in report.iterations)
    assert "pdpdpd" in kinds


def test_stall_free_passes_are_filled_to_the_token():
    assert _passes(stall_free(1024)) == [(1023, 1), (1023, 1), (954, 1)]


def test_passes_are_as_long_as_the_budget_while_prompts_wait():
    # The first prompt fills the passes that are issued before the others have come.
    assert set(sarathi.composed([(700, 2), (300, 5), (500, 9), (40, 3)], 256)) == {256}


def test_chunks_cost_a_constant_each():
    row = sarathi._overheads()[0]
    # 4 x 13.14 + 0.2423 x 2047 + 0.31 against 13.14 + the same, ms
    assert row.ours == pytest.approx((52.57 + 496.03 + 0.31) / (13.14 + 496.03 + 0.31), rel=1e-3)


@pytest.mark.parametrize(("tbt_s", "delay_s", "ok"), [(0.19, 1.9, True), (0.21, 1.9, False), (0.19, 2.1, False)])
def test_a_load_is_kept_by_the_gaps_between_tokens_and_without_a_queue_that_grows(tbt_s, delay_s, ok):
    assert Times(1.0, tbt_s, delay_s).keeps(0.2) is ok


def test_capacity_is_the_highest_rate_that_is_kept(monkeypatch):
    monkeypatch.setattr(sarathi_systems, "times", lambda rule, lengths, rate, seed: Times(1.0, 0.1 * rate, 0.0))
    assert sarathi_systems.capacity(PREFILL_FIRST, [], 0.3, 1.0, 0) == pytest.approx(3.0, rel=0.06)


@pytest.mark.parametrize(
    ("prompt", "token_s", "ok"), [(1024, (2.0, 2.25), True), (1000, (2.0, 2.25), False), (1024, (2.0, 2.26), False)]
)
def test_a_request_keeps_its_service_level_by_the_length_of_its_prompt(prompt, token_s, ok):
    timeline = Timeline(0.0, token_s=list(token_s))
    record = RequestRecord("0", prompt, (0, 0), State.FINISHED, "length", SLO(), timeline)
    assert sarathi.kept(record) is ok


def test_lengths_have_the_published_medians():
    lengths = Workload("", (1730, 415), (0.9, 0.5), 8192).lengths(20000, 0)
    assert np.median(lengths, axis=0) == pytest.approx([1730, 415], rel=0.03)
