"""The closed forms of a large cluster, by hand; small clusters that do what these say; and the page."""

import dataclasses

import pytest

from pdjax.curves import Curves, Decode
from pdjax.experiments import scale_forms, scale_measured, scale_page
from pdjax.experiments.scale_forms import Assumptions, Split
from pdjax.experiments.scale_measured import Costs
from pdjax.published import Published

# A prompt of 100 tokens takes 0.1 s, a step 10 ms and 1 ms for every row: 10 rows take 20 ms.
LATENCY = Curves((0.0, 1e-3, 0.0), (Decode(0, 10e-3, 0.0, 1e-3),))
INSTANCE = Published("own", LATENCY, 10_000, 1000, 1, 1, "a100-80g", "own", "own")
ASSUMED = Assumptions(INSTANCE, 8, prompt=100, answer=51, tpot_ms=20.0, nic_bytes_per_s=1e6, oversubscription=2.0)


def costs(instances: int, pass_s: float) -> Costs:
    return Costs(instances, 0, {"arrivals": 0.0, "passes": pass_s, "transfers": 0.0})


def by_name(assumed: Assumptions, split: Split, busy_s: float = 0.0) -> dict[str, float]:
    return {each.name: each.rps for each in scale_forms.resources(assumed, split, lambda rps: rps * busy_s)}


def test_each_resource_serves_what_its_form_says() -> None:
    found = by_name(ASSUMED, Split(3, 5), busy_s=0.1)
    assert found["prefill: computing"] == pytest.approx(3 / 0.1)
    assert found["decode: steps within TPOT"] == pytest.approx(5 * 10 / (50 * 0.020))
    rows = 10_000 // 125  # of KV, each in the middle of its answer
    assert found["decode: KV memory"] == pytest.approx(5 * rows / (50 * (0.010 + 0.001 * rows)))
    assert found["links out of prefill"] == pytest.approx(3 * 1e6 / 100e3)
    assert found["links into decode"] == pytest.approx(5 * 1e6 / 100e3)
    assert found["switches between them"] == pytest.approx(8 / 2 * 1e6 / 2 / 100e3)
    assert found["prefill: KV memory"] == pytest.approx(3 * 100 / (0.1 + 0.1))
    assert found["one controller"] == pytest.approx(10)


def test_what_is_used_up_first_comes_first() -> None:
    found = scale_forms.resources(ASSUMED, Split(3, 5), lambda rps: rps / 7)
    assert [each.rps for each in found] == sorted(each.rps for each in found)
    assert found[0].name == "one controller"


def test_the_split_computes_as_many_prompts_as_it_finishes_answers() -> None:
    assert scale_forms.split_of(ASSUMED) == Split(4, 4)  # both do 10 requests/s
    slow = dataclasses.replace(ASSUMED, answer=151)  # 3 times the steps
    assert scale_forms.split_of(slow) == Split(2, 6)


def test_rows_follow_the_rate_by_littles_law() -> None:
    assert ASSUMED.rows_at(10.0) == pytest.approx(10)  # 10 requests/s, each 50 steps of 20 ms
    assert scale_forms.steps_per_s(ASSUMED, Split(4, 4), 40.0) == pytest.approx(4 / 0.020)


def test_an_instance_with_less_than_a_row_stands_still_meanwhile() -> None:
    steps = scale_forms.steps_per_s(ASSUMED, Split(4, 4), 0.4)  # 0.1 requests/s each, 50 steps a request
    assert steps == pytest.approx(0.4 * 50)


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tpot_ms is 5; allowed: at least 11.0"):
        dataclasses.replace(ASSUMED, tpot_ms=5.0).rows_by_tpot()
    with pytest.raises(ValueError, match=r"tokens; allowed: the KV of an instance, 10000"):
        dataclasses.replace(ASSUMED, prompt=9_950).rows_by_memory()


def test_costs_lie_between_measured_ones_and_beyond_them_on_a_line() -> None:
    measured = [costs(8, 1.0), costs(16, 2.0), costs(32, 4.0)]
    found = [scale_measured.cost_at(measured, size).mean_s for size in (4, 8, 12, 32, 64)]
    assert found == pytest.approx([1.0, 1.0, 1.5, 4.0, 8.0])


def test_beyond_what_was_measured_nothing_gets_cheaper() -> None:
    assert scale_measured.cost_at([costs(8, 3.0), costs(16, 1.0)], 64).mean_s == 1.0


def test_controllers_with_fewer_instances_decide_faster() -> None:
    """40 requests/s are 40 passes of prompts and 200 steps in a second; a decision takes 1 ms an instance."""
    measured = [costs(1, 1e-3), costs(8, 8e-3)]
    assert scale_measured.busy_s(ASSUMED, Split(4, 4), measured[1], 40.0) == pytest.approx(240 * 8e-3)
    assert scale_measured.controllers(ASSUMED, Split(4, 4), measured, 40.0) == 2  # 120 * 4 ms each


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"nic_bytes_per_s": 1e9, "tpot_ms": 30.0}, "prefill: computing"),
        ({"nic_bytes_per_s": 0.5e6, "tpot_ms": 40.0}, "links out of prefill"),
        ({"nic_bytes_per_s": 1e9, "tpot_ms": 12.5, "answer": 401}, "decode: steps within TPOT"),
    ],
)
def test_a_small_cluster_serves_what_the_form_of_its_scarcest_resource_says(changes: dict, first: str) -> None:
    found = scale_measured.check("", dataclasses.replace(ASSUMED, **changes), Split(1, 2), seed=0)
    assert found.first == first
    assert abs(found.difference) < 0.08


def test_the_page_has_every_resource_and_where_it_comes_from() -> None:
    measured = (costs(8, 1e-3), costs(16, 2e-3))
    used = scale_forms.resources(ASSUMED, Split(4, 4), lambda rps: rps)
    check = scale_measured.Check("as assumed", Split(4, 4), "prefill: computing", 40.0, 38.0, 0.5, 1000.0)
    found = scale_page.Found(ASSUMED, 6000, Split(4, 4), tuple(used), measured, measured[1], (check,), 2000.0)
    text = scale_page.page(found, {"commit": "abc", "flags": {"seed": 3}})
    assert all(f"| {each.name} |" in text for each in used)
    assert "| -5.0% | 0.50 |" in text and "- commit: abc" in text and "- flags: seed 3" in text
    assert scale_page.summary(found)["first"] == "one controller"
    assert scale_page.table(found).row_count == len(used)


def test_a_live_request_keeps_at_least_its_prompt() -> None:
    kept = scale_measured.bytes_per_live_request(dataclasses.replace(ASSUMED, nic_bytes_per_s=1e9), seed=0)
    assert 100 * 8 < kept < 100_000
