"""The grid of placements: its rows, the cover, and the verdict on answers."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from pdjax import EngineConfig
from pdjax.experiments import grid, grid_check

CASE = grid.Case((5, 6), (1, 2, 3), (0.5, 1e-5, 0.5), -1.0)
(ROW, *_) = grid.rows(1, 1)


def pairs(rows):
    return {pair for row in rows for pair in itertools.combinations(enumerate(dataclasses.astuple(row)), 2)}


def test_the_full_grid_has_every_setting_that_the_model_allows():
    rows = grid.rows(heads=8, layers=5)
    assert len({*rows}) == len(rows) == 4 * 4 * (4 * 8 * 8 + 8)  # pages, chunks; colocated pools are alike
    assert {row.decode_tp for row in rows} == {1, 2, 4, 8} and {row.decode_pp for row in rows} == {1, 5}
    assert {row.prefill_tp for row in grid.rows(heads=9, layers=4)} == {1, 3}
    assert {row.prefill_pp for row in grid.rows(heads=9, layers=4)} == {1}


def test_the_cover_is_small_and_has_every_pair_of_settings():
    rows = grid.rows(heads=8, layers=5)
    chosen = grid.cover(rows)
    assert pairs(chosen) == pairs(rows) and len(chosen) < 30


def test_a_sample_follows_the_seed():
    rows = grid.rows(heads=8, layers=5)
    assert grid.sample(rows, 9, seed=1) == grid.sample(rows, 9, seed=1) != grid.sample(rows, 9, seed=2)
    assert grid.sample(rows[:3], 9, seed=1) == rows[:3]


@pytest.mark.parametrize("row", grid.cover(grid.rows(heads=8, layers=5)), ids=lambda row: row.name)
def test_every_row_is_a_configuration(row):
    assert EngineConfig(**row.fields(256)).devices == row.devices


def outcome(tokens, logprob=-1.0):
    return grid.compare(ROW, {"case": CASE}, [(tokens, (logprob,))], max_tokens=3)


def test_equal_answers_are_ok():
    assert outcome((1, 2, 3)).ok and outcome((1, 2, 3)).splits == ()


def test_a_split_is_where_the_first_token_differs_with_the_gap_of_the_reference():
    assert outcome((1, 2, 9)).splits == (grid.Split("case", 2, 3, 9, 0.5),) and not outcome((1, 2, 9)).ok


def test_a_split_at_a_near_tie_is_counted_but_no_error():
    near = outcome((1, 9, 9))
    assert near.ok and grid_check.summary([near])["near_ties"] == 1


@pytest.mark.parametrize("tokens", [(1, 2), (1, 2, 3, 4)])
def test_an_answer_that_ends_early_or_late_differs(tokens):
    assert not outcome(tokens).ok


def test_first_log_probabilities_that_are_off_are_an_error():
    assert outcome((1, 2, 3), -1.0005).ok and not outcome((1, 2, 3), -1.002).ok


def test_a_row_that_could_not_be_served_is_not_ok():
    assert not grid.Outcome(ROW, 0.0, error="RuntimeError: broken").ok


def stored(folder, **changes):
    case = {"name": "a", "prompt_ids": [5, 6], "generated_ids": [1, 2], "top2_gap": [0.5, 0.25]} | changes
    path = folder / "runs.json"
    path.write_text(json.dumps({"cases": [case]}))
    return path


def test_the_first_log_probability_is_that_of_the_stored_logits(tmp_path):
    path = stored(tmp_path)
    np.savez(tmp_path / "runs.npz", **{"a.first_logits": np.log([0.25, 0.5, 0.25])})
    assert grid.read_cases(path) == {"a": grid.Case((5, 6), (1, 2), (0.5, 0.25), pytest.approx(np.log(0.5)))}


def test_references_that_cannot_be_read_are_refused(tmp_path):
    for text in ("{", "[]", '{"cases": [{}]}', "[" * 100_000):
        (tmp_path / "runs.json").write_text(text)
        with pytest.raises(ValueError, match=r"references is .*runs.json.*cannot be read"):
            grid.read_cases(tmp_path / "runs.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [(None, "has no case; allowed: at least one"), ({"generated_ids": []}, "case a has an empty list")],
)
def test_references_without_anything_to_compare_are_refused(tmp_path, changes, message):
    path = stored(tmp_path, **(changes or {}))
    if changes is None:
        path.write_text('{"cases": []}')
    with pytest.raises(ValueError, match=f"references is .*runs.json.*{message}"):
        grid.read_cases(path)


def test_an_engine_that_breaks_is_the_outcome_of_its_row(monkeypatch):
    def broken(config, devices):
        raise RuntimeError("no")

    monkeypatch.setattr("pdjax.Engine", broken)
    got = grid_check.serve(ROW, "tiny", {"case": CASE}, 3, devices=[0, 1])
    assert not got.ok and got.error == "RuntimeError: no"


def test_the_decode_pool_has_the_last_devices(monkeypatch):
    row, seen = dataclasses.replace(ROW, mode="pulled", prefill_tp=2, decode_tp=4), []

    def engine(config, devices):
        seen.append(devices)
        raise RuntimeError("enough")

    monkeypatch.setattr("pdjax.Engine", engine)
    grid_check.serve(row, "tiny", {"case": CASE}, 3, devices=list(range(12)))
    assert seen == [[0, 1, 8, 9, 10, 11]]
