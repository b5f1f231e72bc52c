"""The check of a GPU without one: its parts lose each other nothing, and all of them run in small on the CPU."""

import glob
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdjax.experiments import gpu_check, gpu_wires
from pdjax.experiments.gpu_goals import GOALS, judge
from tests.mpi.jobs import NEEDS_MPI, alone

SCRIPT = Path(__file__).resolve().parents[2] / "experiments" / "gpu_check.sh"
SMALL = ("-m", "pdjax.experiments.gpu_check", "--platform=cpu", "--small")


def part(error=None, **checks):
    return {"seconds": 1.0, "error": error, "checks": checks}


def run_within(code, limit_s=60):
    return gpu_check.run_within([sys.executable, "-c", code], limit_s, os.environ)


def test_all_parts_together_take_less_than_eight_minutes():
    assert sum(gpu_check.PARTS.values()) < 8 * 60
    assert all(gpu_check.PARTS[name] > gpu_check.JOB_S for name in gpu_wires.JOBS)


def test_a_goal_is_reached_at_its_bar_and_never_by_nan():
    assert judge("decode_of_bandwidth", 0.8)["ok"] and not judge("decode_of_bandwidth", 0.79)["ok"]
    assert judge("kv_error_float32", 1e-3)["ok"] and not judge("kv_error_float32", 2e-3)["ok"]
    assert not any(judge(goal, float("nan"))["ok"] for goal in GOALS)


def test_a_failed_part_and_a_missed_goal_are_both_told():
    slow = judge("prefill_of_peak", 0.5)
    found = gpu_check.failures({"servers": part("status 1: broken"), "prefill": part(share=slow), "copies": part()})
    assert found == ["servers: status 1: broken", "share: 0.5, >= 0.6"]


def test_a_check_that_was_cut_off_says_what_it_did_not_come_to():
    found = gpu_check.summary_of({"device": part()}, ["device", "copies"], {"commit": None})
    assert not found["ok"] and found["failures"] == [] and found["left"] == ["copies"]
    whole = gpu_check.summary_of({"device": part()}, ["device"], {"commit": None})
    assert whole["ok"] and whole["left"] == []


def test_nothing_is_told_where_all_is_well():
    assert gpu_check.failures({"prefill": part(share=judge("prefill_of_peak", 0.7)), "copies": part()}) == []


def test_a_part_that_raises_tells_what():
    ended = run_within("import sys; sys.stderr.write('noise\\n'); raise KeyError('gone')")
    assert ended.error == "status 1: KeyError: 'gone'" and "noise" in ended.said


def test_a_part_that_hangs_is_ended_at_its_limit():
    ended = run_within("import threading; threading.Event().wait()", 0.5)
    assert ended.error == "not done within 0.5 s" and ended.seconds < 5


def test_of_a_part_that_was_late_the_last_words_are_told():
    assert gpu_check.late_words(18, "") == "not done within 18 s"
    said = "ValueError: no such server\nI wait\n"
    assert gpu_check.late_words(18, said) == "not done within 18 s; it said last: ValueError: no such server"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("noise\njax.errors.JaxRuntimeError: UNIMPLEMENTED: no\n", "jax.errors.JaxRuntimeError: UNIMPLEMENTED: no"),
        ("error: parts has 'x'\n-----\nmpirun has exited\n-----\n", "error: parts has 'x'"),
        ("it only ended\n\n", "it only ended"),
        ("", "it said nothing"),
    ],
)
def test_the_line_that_says_what_was_wrong_is_found_in_the_noise(text, line):
    assert gpu_check.last_line(text) == line


def test_a_part_sees_the_cpu_beside_the_gpu_and_keeps_the_users_flags():
    found = gpu_check.environment({"XLA_FLAGS": "--mine=1", "HOME": "/"}, "gpu")
    assert found["JAX_PLATFORMS"] == "cuda,cpu" and found["HOME"] == "/"
    assert found["XLA_FLAGS"].split() == ["--mine=1", "--xla_force_host_platform_device_count=4"]
    own = "--xla_force_host_platform_device_count=2"
    assert gpu_check.environment({"XLA_FLAGS": own}, "cpu")["XLA_FLAGS"] == own


def test_every_part_that_ran_has_a_line():
    ways = [{"bytes_per_s": 2e9}]
    crossed = part() | {"road": "staged", "transfers": ways}
    assert gpu_check.words("mpi_host", crossed) == "mpi_host: 1 s; staged: 2.00 GB/s"
    assert gpu_check.words("servers", part("it broke")) == "servers: failed after 1 s: it broke"


@pytest.mark.skipif(bool(glob.glob("/dev/nvidia[0-9]*")), reason="there is a GPU here")
def test_the_script_installs_nothing_where_there_is_no_gpu():
    without = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    done = subprocess.run([SCRIPT], env=without, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: there is no NVIDIA GPU here")


def test_the_script_says_when_an_interpreter_does_not_run():
    done = subprocess.run([SCRIPT], env=os.environ | {"PYTHON": "/nowhere"}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: /nowhere does not run")


def test_an_unknown_part_is_one_line():
    done = alone(*SMALL, "--parts=decode,steering")
    assert done.status == 2
    assert done.said == ["error: parts has 'steering'; allowed: some of " + ", ".join(gpu_check.PARTS)]


@pytest.mark.slow
def test_a_dry_run_keeps_what_its_parts_found_and_the_versions(tmp_path):
    done = alone(*SMALL, "--parts=device,copies", f"--out={tmp_path}")
    assert done.status == 0, done.out + done.err
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["ok"] and not summary["left"] and list(summary["parts"]) == ["device", "copies"]
    assert summary["parts"]["device"]["platform"] == "cpu"
    assert summary["provenance"]["packages"]["jax"] and summary["provenance"]["flags"]["small"]
    for rates in summary["parts"]["copies"]["bytes_per_s"].values():
        assert min(rates.values()) > 0


@pytest.mark.slow
@NEEDS_MPI
def test_two_ranks_cross_and_say_why_not_by_device_pointers(tmp_path):
    done = alone(*SMALL, "--parts=mpi_pointers", f"--out={tmp_path}")
    assert done.status == 0, done.out + done.err
    found = json.loads((tmp_path / "summary.json").read_text())["parts"]["mpi_pointers"]
    assert found["pointers"] is False and "staged in host memory" in found["road"]
    assert [(way["from"], way["to"]) for way in found["transfers"]] == [(1, 2), (2, 1)]
    assert all(way["bytes_per_s"] > 0 for way in found["transfers"])
