"""Plans of toy devices: what they say, and that it follows from what was played."""

import dataclasses
import shlex

import pytest

import pdjax
from pdjax.planning import planner, reasons, search, stock
from pdjax.request import SLO
from tests.planning import toys


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Few requests: plans of toys need not be exact."""
    monkeypatch.setattr(search, "JUDGED", {"prefill": 30, "decode": 15, "both": 15})
    monkeypatch.setattr(search, "JUDGED_CLUSTER", 20)
    monkeypatch.setattr(search, "JUDGED_BEST", 40)
    monkeypatch.setattr(search, "RUNS_CLUSTER", 4)
    monkeypatch.setattr(search, "SLIDERS", ())


def plan(stocks, slo, rate=None, workload="fixed:100,6", **options):
    return planner.plan("toy", stocks, workload, slo, rate, workers=1, **options)


# A prompt takes 100 ms and a step 10: rows that stand still for a prompt miss a limit of 15 ms, and keep one of 500.
SLOW_PROMPTS = {"prefill_ms": 100.0, "token_ms": 0.0}


def test_a_tight_tpot_limit_wants_prompts_elsewhere():
    found = plan([toys.stock(devices=2, **SLOW_PROMPTS)], SLO(ttft_ms=1000, tpot_ms=15))
    assert found.disaggregate == "yes" and found.best.policy in ("disaggregated", "dynamic")
    assert found.best.goodput == max(one.goodput for one in found.candidates)
    assert "Disaggregate" in found.why


@pytest.mark.slow
def test_a_tight_ttft_and_a_lax_tpot_limit_want_all_devices_to_prefill():
    found = plan([toys.stock(devices=2, **SLOW_PROMPTS)], SLO(ttft_ms=250, tpot_ms=500))
    assert found.disaggregate == "no" and found.best.policy != "disaggregated"
    assert "Do not disaggregate" in found.why


@pytest.mark.slow
def test_a_split_that_is_asked_about_is_played():
    found = plan([toys.stock(devices=4, **SLOW_PROMPTS)], SLO(ttft_ms=1000, tpot_ms=15), compare=[(1, 3)])
    assert [(one.prefill, one.decode) for one in found.splits] == [(1, 3), (2, 2), (3, 1)]
    assert found.splits[0].goodput is not None


def test_limits_that_nobody_keeps_are_said_with_numbers():
    found = plan([toys.stock()], SLO(ttft_ms=5, tpot_ms=2))
    assert (found.best, found.command, found.disaggregate) == (None, (), "")
    assert "alone takes 20 ms" in found.why and "one row takes 10.1 ms" in found.why


@pytest.mark.slow
def test_plans_are_the_same_every_time():
    one, two = (plan([toys.stock(devices=2)], SLO(ttft_ms=200, tpot_ms=30)) for _ in range(2))
    assert one == two


@pytest.mark.slow
def test_progress_ends_where_it_is_complete():
    told = []
    plan([toys.stock()], SLO(ttft_ms=200, tpot_ms=30), progress=lambda *now: told.append(now))
    assert told[-1][0] == told[-1][1] and [done for done, _, _ in told] == list(range(1, len(told) + 1))


def test_a_split_that_cannot_be_is_said_to_be_none():
    found = plan([toys.stock(devices=2)], SLO(ttft_ms=5, tpot_ms=2), compare=[(4, 12)])
    assert any("4:12 is not shown" in line for line in found.caveats)


@pytest.mark.parametrize(
    ("field", "change"),
    [("rate", {"rate": 0.0}), ("by", {"by": "watt"}), ("workers", {"workers": -1}), ("workload", {"workload": "chat"})],
)
def test_mistakes_are_named(field, change):
    asked = {"model": "toy", "hardware": [toys.stock()], "workload": "fixed:9,3", "slo": SLO(ttft_ms=9)} | change
    with pytest.raises(ValueError, match=field):
        pdjax.plan(**asked)


@pytest.mark.slow
def test_cheap_devices_decode_where_dollars_count():
    """Both kinds step alike, one prefills ten times as fast and costs four times as much."""
    fast = toys.stock("fast", devices=2, price=4.0, prefill_ms=20.0, token_ms=0.0)
    cheap = toys.stock("cheap", devices=4, price=1.0, prefill_ms=200.0, token_ms=0.0)
    found = plan([fast, cheap], SLO(ttft_ms=300, tpot_ms=16), by="dollar")
    split = next(one for one in found.candidates if one.policy == "disaggregated")
    assert set(split.devices) == {"fast", "cheap"}
    assert split.per_dollar == pytest.approx(3600 * split.goodput / split.price_per_hour)


@pytest.mark.slow
def test_a_rate_is_served_with_as_little_as_possible():
    found = plan([toys.stock(devices=8)], SLO(ttft_ms=200, tpot_ms=30), rate=20.0)
    assert found.best.goodput >= 20.0 and sum(found.best.devices.values()) < 8


# --- stocks and words -------------------------------------------------------------------------------------------------


def test_published_models_come_as_measured_and_others_as_rooflines():
    (opt,) = stock.stocks("opt-66b", "a100-80g:32")
    assert opt.source("prefill", 4, 1).kv_tokens == 78496 and opt.source("prefill", 1, 1) is None
    (vllm,) = stock.stocks("opt-66b/vllm", "a100-80g:32")
    assert vllm.source("prefill", 4, 1).latency != opt.source("prefill", 4, 1).latency
    (llama,) = stock.stocks("llama2-7b", "l40:4", node_bytes_per_s=8e9)
    assert llama.source("decode", 2, 1).devices == 2 and "roofline" in llama.known_by
    assert llama.nic_bytes_per_s == 1e9


@pytest.mark.parametrize(
    ("model", "devices", "said"),
    [
        ("gpt-9", "a100-80g:8", "model is 'gpt-9'"),
        ("opt-13b", "l40:8", "hardware is 'l40'"),
        ("llama2-7b", "a100-80g", "NAME:DEVICES"),
        ("llama2-7b", "a100-80g:0", "NAME:DEVICES"),
        ("llama2-7b", "a100-80g:2,a100-80g:2", "each name once"),
        ("llama2-7b", "z80:2", "hardware is 'z80'"),
    ],
)
def test_unknown_names_are_refused(model, devices, said):
    with pytest.raises(ValueError, match=said):
        stock.stocks(model, devices)


def candidate(policy, goodput, bottleneck="TTFT: queueing"):
    devices = {"toy": 4}
    return planner.Candidate(
        policy,
        f"4 {policy}",
        (4,),
        devices,
        goodput,
        "",
        goodput / 4,
        900 * goodput,
        4.0,
        bottleneck,
        goodput,
        300,
        True,
    )


def test_a_difference_that_runs_cannot_tell_is_no_reason_to_disaggregate():
    apart, together = candidate("disaggregated", 10.3), candidate("colocated", 10.0)
    verdict, why = reasons.why([apart, together], {}, None, "device", "")
    assert verdict == "either" and "stay colocated" in why


def test_more_than_the_rate_that_is_asked_for_is_worth_nothing():
    apart, together = candidate("disaggregated", 20.0), candidate("colocated_chunked", 10.0)
    assert reasons.why([apart, together], {}, 8.0, "device", "")[0] == "either"
    assert reasons.why([apart, together], {}, None, "device", "")[0] == "yes"


def test_the_balance_of_both_phases_is_told():
    instances = {"prefill": {"TP1 toy": 9.0}, "decode": {"TP1 toy": 3.0}}
    assert "balanced at 1:3" in reasons.why([candidate("colocated", 1.0)], instances, None, "device", "")[1]


def test_a_plan_is_plain_data():
    found = planner.Plan((candidate("colocated", 1.0),), (), {}, "no", "why", ("mpirun",), ())
    assert found.summary()["candidates"][0]["policy"] == "colocated"
    assert shlex.join(found.command) == "mpirun" and dataclasses.is_dataclass(found)
