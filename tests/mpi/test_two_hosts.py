"""Hosts that are really apart: two network namespaces with a link of a known rate, and a job over both."""

import json
import re
import signal
import subprocess
import sys

import pytest

from pdjax.experiments import links
from tests.mpi.jobs import NEEDS_MPI, alone, ended

pytestmark = pytest.mark.slow
SCRIPT = str(links.SCRIPT)


@pytest.fixture(scope="module")
def hosts():
    if (why := links.missing("tcp_1g")) is not None:
        pytest.skip(why)


def script(*arguments):
    return subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


def namespaces():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=60).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith("pdjax-")]


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("--rate=fast", "error: rate is 'fast'; allowed: none, or like 1gbit"),
        ("--ranks=2", "error: ranks is '2'; allowed: two numbers like 2,1"),
        ("--speed=1", "error: argument '--speed=1'; allowed: --rate=, "),
        ("--", "error: there is no command; allowed: one behind --"),
    ],
)
def test_a_mistake_is_one_line(argument, line):
    done = script(argument)
    assert done.returncode == 2 and done.stderr.startswith(line) and done.stderr.count("\n") == 1


@NEEDS_MPI
def test_ranks_are_on_hosts_of_their_own_and_kv_keeps_to_the_rate(hosts):
    argv = ["-m", "pdjax.experiments.transfer", "--transfer_test", "--model=tiny", "--transfer=mpi"]
    job = ended(links.command("tcp_1g", argv))
    assert job.status == 0, job.out + job.err
    assert "transport: mpi, staged in host memory" in job.out
    speeds = re.findall(r"rank (\d) on (\w+) to rank (\d) on (\w+): .* ([\d.]+) GB/s", job.out)
    assert [speed[:4] for speed in speeds] == [("1", "hosta", "2", "hostb"), ("2", "hostb", "1", "hosta")]
    assert all(0 < float(speed[4]) <= 0.13 for speed in speeds)


@NEEDS_MPI
def test_nothing_is_left_when_a_job_is_stopped(hosts):
    before = namespaces()
    waits = "import time; print('here', flush=True); time.sleep(600)"
    with subprocess.Popen(
        [SCRIPT, "--", sys.executable, "-c", waits], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as job:
        assert job.stdout.readline() == "here\n" and len(namespaces()) >= len(before) + 2
        inside = subprocess.run(["ip", "netns", "pids", f"pdjax-a-{job.pid}"], capture_output=True, text=True).stdout
        job.send_signal(signal.SIGTERM)
        assert job.wait(30) == 143
    assert f"pdjax-a-{job.pid}" not in namespaces() and inside
    running = subprocess.run(["ps", "-o", "args=", "-p", ",".join(inside.split())], capture_output=True, text=True)
    assert "time.sleep(600)" not in running.stdout


@NEEDS_MPI
def test_the_launcher_measures_a_link_against_plain_mpi(hosts, tmp_path):
    job = alone(
        "-m", "pdjax.experiments.transfer", "--model=tiny", "--links=tcp_1g", "--prompts=40", "--repeats=1",
        "--prefill_chunk=32", "--stream_layers=1", f"--out={tmp_path}",
    )  # fmt: skip
    assert job.status == 0, job.out + job.err
    (link,) = json.loads((tmp_path / "summary.json").read_text())["links"]
    (whole,), (streamed,) = link["whole"], link["streamed"]
    assert whole["nbytes"] == streamed["nbytes"] == link["raw_bytes"] > 0
    assert 0 < whole["busy_s"] <= whole["arrival_s"]
    assert "TCP, 1 Gb/s" in job.out and "hidden" in job.out


def test_a_mistake_of_flags_is_one_line():
    job = alone("-m", "pdjax.experiments.transfer", "--links=wifi")
    assert job.status == 2 and job.err.startswith("error: links is 'wifi'; allowed: some of shared_memory")
    assert job.err.count("\n") == 1
