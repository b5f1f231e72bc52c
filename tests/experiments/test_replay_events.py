"""replay_events on a log of a simulated run: one line that all is equal, or runs side by side."""

import dataclasses
import json
import subprocess
import sys

import pytest

from pdjax import eventlog, rerun
from pdjax.eventlog import EventLog, Header
from pdjax.experiments import replay_events
from pdjax.latency import LatencyModel
from pdjax.schedulers import Disaggregated
from pdjax.testing import Collector, World
from tests.worlds import crowd, specs


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A log of ten requests, served by the policy that it names."""
    file = tmp_path_factory.mktemp("log") / "events.jsonl"
    instances, log = specs("stream"), EventLog(file, Collector())
    log.begin(Header("disaggregated", 1, tuple(instances), (LatencyModel(),) * 2, 60.0))
    w = World(instances, Disaggregated(1), sink=log)
    inner, handle = w.controller, w.controller.handle
    inner.handle = lambda event, now: log.handle(_Plain(handle), event, now)
    # Without stops: one is seen a step late, which a length that is known in advance is not.
    w.add(*(dataclasses.replace(request, stop_ids=frozenset()) for request in crowd(seed=1, count=10)))
    w.run()
    log.close()
    return file


class _Plain:
    def __init__(self, handle):
        self.handle = handle


def test_an_equal_replay_is_one_line(path):
    log = eventlog.read(path)
    commands = sum(len(entry.commands) for entry in log.entries)
    assert replay_events.check(log) == (f"{len(log.entries)} events, {commands} commands equal", True)


def test_another_policy_stands_beside_the_recorded_one(path):
    runs = replay_events.compare(eventlog.read(path), "colocated")
    assert list(runs) == ["disaggregated, recorded", "disaggregated, simulated", "colocated, simulated"]
    assert {len(run.records) for run in runs.values()} == {10}
    assert not runs["colocated, simulated"].transfers


def test_the_simulation_of_a_simulated_run_ends_at_the_same_time(path):
    """Tokens are computed in one and counted in the other; what is asked, where and when is the same."""
    log = eventlog.read(path)
    recorded, again = rerun.replay(log).report, replay_events.compare(log, "disaggregated")["disaggregated, simulated"]
    assert again.duration_s == pytest.approx(recorded.duration_s)
    for simulated, record in zip(again.records, recorded.records, strict=True):
        assert simulated.timeline.token_s == pytest.approx([t - recorded.start_s for t in record.timeline.token_s])


def test_an_unknown_policy_is_refused(path):
    with pytest.raises(ValueError, match="scheduler is 'fifo'; allowed: colocated"):
        replay_events.compare(eventlog.read(path), "fifo")


def launch(*arguments):
    command = [sys.executable, "-m", "pdjax.experiments.replay_events", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_the_launcher_prints_and_writes_what_it_found(path, tmp_path):
    same = launch(f"--log={path}")
    assert same.returncode == 0 and same.stdout.endswith("commands equal\n")
    both = launch(f"--log={path}", "--scheduler=dynamic", f"--out={tmp_path}")
    assert both.returncode == 0
    runs = json.loads((tmp_path / "summary.json").read_text())["runs"]
    assert [run["completed"] for run in runs] == [10, 10, 10]


@pytest.mark.slow
def test_a_replay_that_differs_ends_with_status_1_and_the_first_difference(path, tmp_path):
    changed = tmp_path / "changed.jsonl"
    changed.write_text(path.read_text().replace('"tokens":[0', '"tokens":[1', 1))
    done = launch(f"--log={changed}")
    assert done.returncode == 1
    assert "commands equal; then event " in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--log=/no/such",)])
def test_a_mistake_ends_with_one_line_and_status_2(arguments):
    done = launch(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: log is ") and len(done.stderr.splitlines()) == 1
