"""replay_events on a log of a simulated run: one line that all is equal, or runs side by side."""

import dataclasses
import json
import random
import subprocess
import sys

import pytest

from pdjax import eventlog, rerun
from pdjax.eventlog import EventLog, Header
from pdjax.experiments import replay_events
from pdjax.latency import LatencyModel
from pdjax.messages import Role
from pdjax.request import SLO, Request, SamplingParams, SLOClass
from pdjax.schedulers import SCHEDULERS, Disaggregated
from pdjax.schedulers.admission import guarded
from pdjax.simulated import Timing
from pdjax.testing import Collector, World, spec
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


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    """A log of two classes, of which some are degraded and some rejected, while `dynamic` changes a role."""
    file = tmp_path_factory.mktemp("busy") / "events.jsonl"
    sizes = {"num_pages": 400, "max_rows": 8}
    instances = [spec(index, Role.PREFILL if index < 2 else Role.DECODE, **sizes) for index in range(3)]
    model = LatencyModel((0.01, 0.001, 0.0, 0.002, 0.0, 0.0))
    log = EventLog(file, Collector())
    log.begin(Header("dynamic", 1, tuple(instances), (model,) * 3, 60.0, admission=True))
    policy = guarded(SCHEDULERS["dynamic"](1), admission=True, drop_late=False)
    w = World(instances, policy, model, machine=lambda _: Timing(), sink=log)
    inner, handle = w.controller, w.controller.handle
    inner.handle = lambda event, now: log.handle(_Plain(handle), event, now)
    chat, batch = SLO(ttft_ms=60.0, tpot_ms=40.0), SLO(e2e_ms=60_000.0)
    laxer = (SLOClass("batch", batch),)
    draw, at_s = random.Random(0), 0.0
    for number in range(120):
        of = {"slo": chat, "slo_class": "chat"} if number % 2 else {"slo": batch, "slo_class": "batch"}
        of["laxer"] = laxer if number % 4 == 1 else ()
        prompt, tokens = tuple(range(draw.randint(8, 16))), draw.randint(20, 40)
        w.add(Request(number, prompt, SamplingParams(max_tokens=tokens), arrival_s=at_s, **of))
        at_s += draw.expovariate(20)
    while w.step():
        pass
    log.close()
    return eventlog.read(file)


def test_classes_admission_and_flips_are_replayed_and_simulated_as_recorded(busy):
    runs = replay_events.compare(busy, "dynamic")
    assert replay_events.check(busy)[1]
    assert list(runs) == ["dynamic + admission, recorded", "dynamic + admission, simulated"]
    recorded, simulated = (run.summary() for run in runs.values())
    assert recorded["flips"] and recorded["degraded"] and recorded["rejected"]
    seconds = {"seconds": pytest.approx(recorded["flips"][0]["seconds"])}
    assert simulated["flips"] == [recorded["flips"][0] | seconds]
    for name in ("degraded", "rejected", "slo_attainment", "by_class"):
        assert simulated[name] == recorded[name]
    assert simulated["ttft_ms"] == pytest.approx(recorded["ttft_ms"])


def test_another_policy_has_the_admission_that_was_recorded_unless_it_is_told_otherwise(busy):
    runs = replay_events.compare(busy, "disaggregated")
    assert list(runs)[2] == "disaggregated + admission, simulated"
    assert {record.slo_class for record in runs["disaggregated + admission, simulated"].records} == {"chat", "batch"}
    free = replay_events.compare(busy, "dynamic", admission=False)["dynamic, simulated"]
    assert not free.summary()["rejected"]


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
