"""Workloads become pairs of lengths; what leaves nothing to plan is refused."""

import pytest

from pdjax.planning.mix import SAMPLE, Mix, sample
from pdjax.request import SLO


def test_a_fixed_workload_is_its_lengths():
    pairs, _ = sample("fixed:20,5")
    assert set(pairs) == {(20, 5)} and len(pairs) == SAMPLE


def test_rows_of_a_file_that_no_request_can_have_are_left_out_and_counted(tmp_path):
    (tmp_path / "lengths.csv").write_text("prompt_len,output_len\n10,4\n0,3\n7,0\n90,20\n30,6\n")
    pairs, note = sample(f"lengths:{tmp_path}/lengths.csv", max_model_len=100)
    assert pairs == ((10, 4), (30, 6)) and "2 of 5 rows" in note


def test_an_azure_trace_is_read_without_its_times(tmp_path):
    (tmp_path / "a.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,12,3\n")
    assert sample(f"azure:{tmp_path}/a.csv")[0] == ((12, 3),)


def test_text_workloads_and_files_without_a_usable_row_are_refused(tmp_path):
    (tmp_path / "none.csv").write_text("prompt_len,output_len\n0,4\n")
    with pytest.raises(ValueError, match="without a row"):
        sample(f"lengths:{tmp_path}/none.csv")
    with pytest.raises(ValueError, match="allowed for a plan: fixed"):
        sample("chat")


def test_means_are_those_of_requests_and_of_their_decode_steps():
    mix = Mix(((10, 3), (30, 1)), SLO(ttft_ms=100, tpot_ms=20))
    assert (mix.prompt_tokens, mix.steps, mix.longest) == (20, 1.0, 31)
    assert mix.context_tokens == 12  # the second never decodes; the first steps at 11.. on average 12 tokens


def test_a_mix_draws_the_same_lengths_for_every_rate():
    mix = Mix(((10, 3), (30, 2), (5, 9)), SLO(ttft_ms=100), seed=3)
    assert mix.draw(50)[:20] == mix.draw(50)[:20] and set(mix.draw(50)) == set(mix.lengths)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("slo", {"slo": SLO(e2e_ms=100)}),
        ("attainment", {"attainment": 1.0}),
        ("nothing to decode", {"lengths": ((5, 1),)}),
        ("lengths is empty", {"lengths": ()}),
    ],
)
def test_what_leaves_nothing_to_plan_is_refused_by_name(field, change):
    with pytest.raises(ValueError, match=field):
        Mix(**({"lengths": ((10, 3),), "slo": SLO(ttft_ms=100)} | change))
