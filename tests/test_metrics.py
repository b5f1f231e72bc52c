"""Every metric against a timeline that one can compute by hand."""

import pytest

from pdjax import metrics
from pdjax.record import IterationRecord, RequestRecord, Timeline
from pdjax.request import SLO, State

NO_LIMITS = SLO()


def record(
    tokens=(10.0, 10.5, 11.5),
    *,
    arrival=0.0,
    state=State.FINISHED,
    slo=NO_LIMITS,
    preemptions=0,
    slo_class="",
    degraded_from="",
    **marks,
) -> RequestRecord:
    """A request whose token i was handed out at tokens[i]."""
    return RequestRecord(
        request_id="r",
        prompt_tokens=7,
        token_ids=tuple(range(len(tokens))),
        state=state,
        finish_reason="length",
        slo=slo,
        timeline=Timeline(arrival_s=arrival, token_s=list(tokens), **marks),
        preemptions=preemptions,
        slo_class=slo_class,
        degraded_from=degraded_from,
    )


# Queue 1 s, prefill 2, hand-out 0.5, transfer 3 (of which 1 was hidden by prefill), wait 4, then steps of 1 s.
DISAGGREGATED = record(
    (103.5, 111.5, 112.5),
    arrival=100.0,
    prefill_start_s=101.0,
    prefill_end_s=103.0,
    transfer_start_s=102.0,
    transfer_end_s=106.5,
    transfer_bytes=1000,
    transfer_busy_s=4.0,
    transfer_hidden_s=1.0,
    decode_start_s=110.5,
)


def summarize(*records, duration_s=10.0, **options):
    return metrics.summarize(records, devices=2, duration_s=duration_s, **options)


def test_ttft_counts_from_arrival_to_the_first_token_a_user_sees():
    assert metrics.ttft_ms(DISAGGREGATED) == 3500


def test_tpot_is_the_time_after_the_first_token_over_the_tokens_after_it():
    assert metrics.tpot_ms(record()) == 750


def test_itl_is_every_gap():
    assert metrics.itl_ms(record()) == [500, 1000]


def test_e2e_counts_from_arrival_to_the_last_token():
    assert metrics.e2e_ms(DISAGGREGATED) == 12500


def test_a_one_token_answer_has_no_tpot_and_no_itl():
    one = record((3.0,))
    assert metrics.tpot_ms(one) is None
    assert metrics.itl_ms(one) == []
    assert metrics.e2e_ms(one) == metrics.ttft_ms(one) == 3000


@pytest.mark.parametrize("case", [DISAGGREGATED, record(), record((1.0, 1.0))])
def test_tpot_is_e2e_less_ttft_over_the_tokens_after_the_first(case):
    after = len(case.token_ids) - 1
    assert metrics.tpot_ms(case) == pytest.approx((metrics.e2e_ms(case) - metrics.ttft_ms(case)) / after)
    assert metrics.ttft_ms(case) <= metrics.e2e_ms(case)


def test_the_longest_gap_of_each_request_is_spread():
    assert summarize(record(), record((1.0, 1.2)))["max_itl_ms"] == pytest.approx(metrics.spread([1000.0, 200.0]))


def test_one_token_answers_are_left_out_of_tpot():
    summary = summarize(record((1.0,)), record())
    assert summary["tpot_ms"]["mean"] == 750
    assert summary["completed"] == 2


def test_a_request_without_tokens_has_no_latency():
    none = record((), state=State.REJECTED)
    assert metrics.ttft_ms(none) is metrics.tpot_ms(none) is metrics.e2e_ms(none) is None


def test_parts_are_reported_apart():
    assert metrics.parts(DISAGGREGATED) == {
        "queue": 1000,
        "prefill": 2000,
        "first_token": 500,
        "transfer": 3000,
        "decode_wait": 4000,
        "decode": 2000,
    }


@pytest.mark.parametrize(
    "case",
    [
        DISAGGREGATED,
        record(prefill_start_s=1.0, prefill_end_s=9.0, decode_start_s=10.2),  # colocated
        record((2.0,), prefill_start_s=1.0, prefill_end_s=1.5),  # ended with its first token
        record(prefill_start_s=1.0, prefill_end_s=9.0, transfer_start_s=2.0, transfer_end_s=8.0),  # all hidden
        record((1.0, 9.0), prefill_start_s=5.0, prefill_end_s=6.0, decode_start_s=7.0),  # restarted
        record((1.0, 2.0), prefill_start_s=0.2, prefill_end_s=0.5, transfer_end_s=3.0),  # mark behind the end
    ],
)
def test_parts_add_up_to_e2e(case):
    parts = metrics.parts(case)
    assert sum(parts.values()) == pytest.approx(metrics.e2e_ms(case))
    assert min(parts.values()) >= 0


def test_the_parts_up_to_the_first_token_add_up_to_ttft():
    parts = metrics.parts(DISAGGREGATED)
    assert parts["queue"] + parts["prefill"] + parts["first_token"] == metrics.ttft_ms(DISAGGREGATED)


def test_transfer_hidden_by_prefill_is_not_a_part():
    hidden = record(prefill_start_s=1.0, prefill_end_s=9.0, transfer_start_s=2.0, transfer_end_s=9.5)
    assert metrics.parts(hidden)["transfer"] == 0


def test_parts_of_a_request_without_tokens_are_refused():
    with pytest.raises(ValueError, match="record 'r' has no token"):
        metrics.parts(record((), state=State.FAILED))


def test_a_limit_is_kept_at_its_value_and_missed_above():
    assert metrics.met(record(), SLO(tpot_ms=750))
    assert not metrics.met(record(), SLO(tpot_ms=749.9))


def test_an_slo_is_met_only_when_all_limits_hold():
    slo = SLO(ttft_ms=20_000, tpot_ms=1, e2e_ms=20_000)
    assert metrics.kept(record(), slo) == {"ttft_ms": True, "tpot_ms": False, "e2e_ms": True}
    assert not metrics.met(record(), slo)


def test_the_itl_limit_judges_the_gaps_near_the_largest():
    # rank 0.99 * (2 - 1): 500 + 0.99 * 500 ms
    assert metrics.met(record(), SLO(itl_p99_ms=995.01))
    assert not metrics.met(record(), SLO(itl_p99_ms=994.99))


def test_a_record_is_judged_by_its_own_slo_unless_told_otherwise():
    strict = record(slo=SLO(ttft_ms=1))
    assert not metrics.met(strict)
    assert metrics.met(strict, SLO(ttft_ms=20_000))


def test_a_one_token_answer_is_not_judged_by_tpot():
    assert metrics.met(record((1.0,)), SLO(tpot_ms=0.001, itl_p99_ms=0.001))


def test_a_missing_metric_never_meets_its_limit():
    assert not metrics.met(record(()), SLO(ttft_ms=1e9))
    assert not metrics.met(record(()), SLO(tpot_ms=1e9))


@pytest.mark.parametrize("state", [State.FAILED, State.ABORTED, State.REJECTED])
def test_only_a_finished_request_meets_its_slo(state):
    assert not metrics.met(record(state=state), SLO())
    assert metrics.kept(record(state=state), SLO(ttft_ms=1e9)) == {"ttft_ms": False}


def test_percentiles_are_linear_between_ranks():
    # 5 values: rank of p50 is 2, of p90 3.6, of p95 3.8, of p99 3.96
    assert metrics.spread([50, 10, 20, 30, 40]) == pytest.approx(
        {"mean": 30, "p50": 30, "p90": 46, "p95": 48, "p99": 49.6, "max": 50}
    )


def test_a_spread_of_nothing_has_the_same_keys():
    assert metrics.spread([]) == dict.fromkeys(metrics.spread([1.0]))


def test_tpots_of_two_requests_stay_apart():
    summary = summarize(record((1.0, 1.001)), record((1.0, 1.003)))
    assert summary["tpot_ms"]["mean"] == pytest.approx(2)
    assert summary["tpot_ms"]["max"] == pytest.approx(3)


def test_unfinished_requests_are_counted_and_stay_out_of_latencies():
    slow = (900.0, 990.0)
    summary = summarize(
        record(),
        record(slow, state=State.FAILED),
        record(slow, state=State.ABORTED),
        record((), state=State.REJECTED),
    )
    assert [summary[key] for key in ("num_requests", "completed", "failed", "aborted", "rejected")] == [4, 1, 1, 1, 1]
    assert summary["ttft_ms"]["max"] == 10_000
    assert summary["itl_ms"]["max"] == 1000
    assert summary["output_tokens"] == 3
    assert summary["slo_attainment"] == 0.25


def test_goodput_counts_what_met_and_throughput_what_completed():
    summary = summarize(record(), record((1.0, 1.1)), duration_s=4.0, slo=SLO(ttft_ms=2000))
    assert summary["throughput_rps"] == 0.5
    assert summary["goodput_rps"] == 0.25
    assert summary["output_tokens_per_s"] == 1.25
    assert summary["slo_attainment"] == 0.5


@pytest.mark.parametrize(("target", "attained"), [(0.5, True), (0.51, False)])
def test_a_run_attains_a_target_that_its_share_reaches(target, attained):
    summary = summarize(record(), record((1.0, 1.1)), slo=SLO(ttft_ms=2000), attainment=target)
    assert (summary["slo_attainment"], summary["attainment_target"], summary["attained"]) == (0.5, target, attained)


def test_seven_of_a_hundred_attain_seven_percent():  # 0.07 * 100 is more than 7 in floating point
    records = [record(state=State.FINISHED if n < 7 else State.FAILED) for n in range(100)]
    assert summarize(*records, attainment=0.07)["attained"]


def test_a_run_without_requests_attains_nothing():
    assert not summarize()["attained"]


@pytest.mark.parametrize("attainment", [0.0, 1.1, float("nan")])
def test_an_attainment_out_of_range_is_refused(attainment):
    with pytest.raises(ValueError, match=f"attainment is {attainment}; allowed: a number in"):
        summarize(record(), attainment=attainment)


def test_each_limit_has_its_own_share():
    summary = summarize(record(), record((1.0, 1.1)), slo=SLO(ttft_ms=2000, tpot_ms=1000))
    assert summary["slo_kept"] == {"ttft_ms": 0.5, "tpot_ms": 1.0, "itl_p99_ms": None, "e2e_ms": None}


def test_kv_transfer_reports_bytes_time_share_and_overlap():
    moved = summarize(DISAGGREGATED, record())["kv_transfer"]
    assert (moved["count"], moved["bytes"]) == (1, 1000)
    assert moved["ms"]["mean"] == 4000
    assert moved["share_of_e2e"] == pytest.approx(4000 / 12500)
    assert moved["overlap"] == 0.25


def test_transferred_prompt_tokens_do_not_count_as_computed_where_they_are_decoded():
    summary = summarize(DISAGGREGATED, record(), record(state=State.FAILED))
    assert summary["prompt_tokens_by_source"] == {"computed": 7, "transferred": 7}
    assert sum(summary["prompt_tokens_by_source"].values()) == summary["prompt_tokens"]


def test_computed_prompt_tokens_are_those_of_all_passes():
    passes = [IterationRecord(0, n, tokens, 0, 0.0, 1.0) for n, tokens in enumerate((7, 0, 9))]
    assert summarize(record(), iterations=passes)["computed_prompt_tokens"] == 16


def test_stages_spread_the_parts_of_each_request():
    stages = summarize(DISAGGREGATED)["stages_ms"]
    assert tuple(stages) == metrics.PARTS
    assert {name: stage["p50"] for name, stage in stages.items()} == metrics.parts(DISAGGREGATED)


def test_host_gap_and_preemptions_are_summed_up():
    gaps = [IterationRecord(0, n, 0, 1, 0.0, 1.0, host_gap_s=1e-3 * n) for n in range(3)]
    summary = summarize(record(preemptions=2), record(preemptions=1), iterations=gaps)
    assert summary["host_gap_ms"]["max"] == pytest.approx(2)
    assert summary["preempted"] == 3


def test_iterations_are_counted_by_what_they_computed():
    passes = [IterationRecord(0, n, *work, 0.0, 1.0) for n, work in enumerate([(9, 0), (9, 0), (0, 3), (9, 3)])]
    assert summarize(record(), iterations=passes)["iterations"] == {"prefill": 2, "decode": 1, "mixed": 1}


def test_a_run_of_several_steps_counts_as_so_many_decode_iterations():
    passes = [IterationRecord(0, 9, 0, 3, 0.0, 1.0, steps=10), IterationRecord(0, 10, 0, 3, 1.0, 1.1)]
    assert summarize(record(), iterations=passes)["iterations"] == {"prefill": 0, "decode": 11, "mixed": 0}


def test_summary_keys_do_not_depend_on_values():
    def keys(value):
        return {key: keys(inner) for key, inner in value.items()} if isinstance(value, dict) else None

    assert keys(summarize()) == keys(summarize(DISAGGREGATED, record((), state=State.FAILED)))


def test_targets_are_checked_on_percentiles_of_the_run():
    summary = summarize(record((0.4, 0.45)), record((0.4, 0.48)), targets=metrics.preset_targets("interactive"))
    ttft, tpot, e2e = summary["targets"]
    assert ttft == {"target": "ttft_ms p95 <= 500", "value": pytest.approx(400), "ok": True}
    assert (tpot["value"], tpot["ok"]) == (pytest.approx(78.5), False)
    assert (e2e["target"], e2e["ok"]) == ("e2e_ms p99 <= 5000", True)


def test_a_target_without_values_is_missed():
    assert not any(check["ok"] for check in summarize(targets=metrics.preset_targets("interactive"))["targets"])


def test_a_preset_gives_the_limits_of_each_request():
    assert metrics.preset_slo("interactive") == SLO(ttft_ms=500, tpot_ms=50, e2e_ms=5000)


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="slo is 'fast'; allowed: interactive"):
        metrics.preset_targets("fast")


def test_a_run_of_no_time_is_refused():
    with pytest.raises(ValueError, match=r"duration_s is 0\.0; allowed"):
        summarize(record(), duration_s=0.0)


def test_classes_are_counted_under_the_name_that_was_asked_for_and_judged_by_the_limits_that_were_kept():
    summary = summarize(
        record(slo=SLO(ttft_ms=1e5), slo_class="chat"),
        record(slo=SLO(ttft_ms=1), slo_class="chat"),
        record(slo=SLO(ttft_ms=1e5), slo_class="batch", degraded_from="chat"),
        record((), state=State.REJECTED, slo=SLO(ttft_ms=1), slo_class="chat"),
        record(slo=SLO(ttft_ms=1e5), slo_class="batch"),
    )
    chat = {"num_requests": 4, "completed": 3, "rejected": 1, "degraded": 1, "slo_attainment": 0.5}
    assert summary["by_class"]["chat"].items() >= chat.items()
    assert summary["by_class"]["chat"]["admitted_attainment"] == 2 / 3
    assert summary["by_class"]["chat"]["slo_kept"]["ttft_ms"] == 0.5
    assert summary["by_class"]["batch"]["num_requests"] == 1
    assert (summary["admitted"], summary["degraded"], summary["admitted_attainment"]) == (4, 1, 0.75)


def test_without_classes_and_rejections_the_admitted_are_all():
    summary = summarize(record())
    assert (summary["by_class"], summary["admitted"], summary["degraded"]) == ({}, 1, 0)
    assert summary["admitted_attainment"] == summary["slo_attainment"]
