"""Published latencies: what a name says is what the source's formula gives, by hand."""

import pytest

from pdjax import fleet, published
from pdjax.latency import Load
from pdjax.messages import Role


def seconds(name, load):
    entry = published.get(name)
    spec = fleet.build([entry.pool(Role.MIXED)]).specs[0]
    return entry.latency.iteration_s(spec, load)


def test_a_name_that_is_not_known_is_told_the_names_there_are():
    with pytest.raises(ValueError, match=r"'opt-7b'; allowed: opt-13b-a100-80g-distserve-tp1-pp1, "):
        published.get("opt-7b")


def test_every_name_is_that_of_its_entry_and_makes_instances():
    for name in published.names():
        entry = published.get(name)
        assert entry.name == name
        assert name.startswith(f"{entry.model}-{entry.hardware}-{entry.engine}-tp{entry.devices // entry.pp}-")
        assert fleet.build([entry.pool(Role.PREFILL, 2)]).devices == 2 * entry.devices
        assert hash(entry.latency) == hash(published.get(name).latency)


def test_opt_prefill_is_the_sources_formula_and_its_overheads():
    # 14.743 + 35.112 + 0.642, and 1 for the stage, 2 for the pass, 0.0512 for the tokens
    assert seconds("opt-13b-a100-80g-distserve-tp2-pp1", Load(((512, 0),))) == pytest.approx(53.548e-3, abs=1e-6)
    # Two stages: each adds 2.
    assert seconds("opt-13b-a100-80g-distserve-tp2-pp2", Load(((512, 0),))) == pytest.approx(56.548e-3, abs=1e-6)
    # Lengths are squared one by one.
    one, two = (
        seconds("opt-13b-a100-80g-distserve-tp2-pp1", Load(chunks)) for chunks in (((512, 0),), ((256, 0),) * 2)
    )
    assert one - two == pytest.approx(2.449573e-9 * 2 * 256 * 256)


def test_opt_decode_has_other_constants_from_95_rows_on():
    name = "opt-13b-a100-80g-distserve-tp1-pp1"
    # 19.9347 + 0.6269357 * 47 + 0.03850698 * 94 + 2 + 0.1 * 47
    assert seconds(name, Load((), 94, 47_000, 47_000)) == pytest.approx(59.7203e-3, abs=1e-7)
    # 7.166189 + 0.5798 * 47 + 0.158311 * 95 + 2 + 0.1 * 47
    assert seconds(name, Load((), 95, 47_000, 47_000)) == pytest.approx(56.1563e-3, abs=1e-7)


def test_a_step_of_a_pipeline_is_that_of_one_of_its_groups():
    alone = seconds("opt-66b-a100-80g-distserve-tp2-pp1", Load((), 60, 30_000, 30_000))
    assert seconds("opt-66b-a100-80g-distserve-tp2-pp2", Load((), 120, 60_000, 60_000)) == pytest.approx(alone)


def test_h200_is_the_fit_of_the_published_table():
    name = "llama3.1-8b-fp8-h200-vllm-tp1-pp1"
    # Measured: 63.2 ms of a prompt of 3151 tokens, 22.1 ms of 145 rows with 434 565 tokens.
    assert seconds(name, Load(((3151, 0),))) == pytest.approx(67.896e-3, abs=1e-6)
    assert seconds(name, Load((), 145, 434_565, 434_565)) == pytest.approx(21.164e-3, abs=1e-6)


def test_splitwise_passes_are_those_measured():
    a100, h100, capped = (
        f"llama2-70b-{hardware}-splitwise-tp8-pp1" for hardware in ("a100-80g", "h100", "h100-capped")
    )
    assert seconds(a100, Load(((2048, 0),))) == pytest.approx(282.71e-3)
    assert seconds(a100, Load((), 64, 40_000, 40_000)) == pytest.approx(71.61e-3)
    assert seconds(h100, Load(((1536, 0),))) == pytest.approx((77.68e-3 + 134.42e-3) / 2)
    assert seconds(capped, Load(((512, 0),))) == pytest.approx(1.3 * 53.86e-3)
    assert seconds(capped, Load((), 2, 99, 99)) == seconds(h100, Load((), 2, 99, 99)) == pytest.approx(30.26e-3)


def test_steps_of_splitwises_simulator_hardly_know_their_rows():
    name = "bloom-176b-h100-splitwise-sim-tp8-pp1"
    one, many = (seconds(name, Load((), rows, 99, 99)) for rows in (1, 64))
    assert 1.0 < many / one < 1.01


def test_opt_kv_is_that_of_the_papers_example():
    assert published.KV_BYTES["opt-66b"] * 512 == pytest.approx(1.13 * 2**30, rel=0.01)  # section 3.3: 1.13 GB
