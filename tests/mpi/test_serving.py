"""Engines over ranks answer as one process does, and say which ranks did what."""

import json

import pytest

from tests.engines import SHARED, STORIES
from tests.mpi.jobs import NEEDS_MPI, alone, run

pytestmark = [NEEDS_MPI, pytest.mark.slow]
MODEL = str(STORIES) if SHARED.exists() else "tiny"


def test_answers_equal_those_of_one_process_streamed_and_pulled(tmp_path):
    rows = "1x2r2-1x1r1"
    job = alone(
        "-m", "pdjax.experiments.ranks_check", f"--model={MODEL}", f"--rows={rows}", "--requests=4", "--longest=70",
        "--max_tokens=12", f"--out={tmp_path}",
    )  # fmt: skip
    assert job.status == 0, job.out + job.err
    outcomes = json.loads((tmp_path / "summary.json").read_text())["rows"]
    assert [outcome["row"] for outcome in outcomes] == rows.split(",")
    for outcome in outcomes:
        for mode in ("streamed", "pulled"):
            assert outcome[mode]["equal"] == outcome[mode]["of"] == outcome[mode]["moved"] == 4
    assert outcomes[0]["streamed"]["prefill_ranks"] == [[1, 2]]
    assert outcomes[0]["streamed"]["decode_ranks"] == [[3]]


def test_the_launcher_serves_on_ranks_and_names_them(tmp_path):
    job = run(
        3, "-m", "pdjax.experiments.serve", "--transfer=mpi", "--scheduler=disaggregated", "--model=tiny",
        "--workload=uniform:20-60,8-8", "--num_requests=4", "--rate=inf", "--max_model_len=128", "--decode_max_batch=2",
        "--prefill_max_batch=1", "--pin", f"--out={tmp_path}",
    )  # fmt: skip
    assert job.status == 0, job.err
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    for line in lines:
        assert (line["placement"]["prefill_ranks"], line["placement"]["decode_ranks"]) == ([1], [2])
    (entry,) = json.loads((tmp_path / "summary.json").read_text())["runs"]
    assert entry["completed"] == 4 and entry["compiles_while_serving"] == 0
    assert entry["kv_transfer"]["count"] == 4


def test_rows_that_wander_between_ranks_and_flips_change_no_token():
    job = run(3, "-m", "tests.mpi.revisions_job", MODEL)
    assert job.status == 0, job.out + job.err
    said = json.loads(job.out.splitlines()[-1])
    assert (said["equal"], said["idle"]) == (3, True)
    assert said["moves"] >= 9 and said["flips"] >= 2
