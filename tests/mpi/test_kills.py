"""Ranks that are killed or stopped at any moment cost time, and no answer."""

import json

import pytest

from tests.mpi.jobs import NEEDS_MPI, alone

pytestmark = [NEEDS_MPI, pytest.mark.slow]


def test_no_kill_loses_a_request_or_changes_a_token(tmp_path):
    job = alone("-m", "pdjax.experiments.kill_soak", "--kills=6", f"--out={tmp_path}")
    assert job.status == 0, job.out + job.err
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["wrong"] == 0
    assert {kill["kill"]["stage"] for kill in summary["kills"]} == {
        "idle", "prefilling", "sending", "receiving", "decoding",
    }  # fmt: skip
    assert any(kill["kill"]["stop"] for kill in summary["kills"])
    assert sum(kill["restarted"] for kill in summary["kills"]) > 0
