"""A log of events: what is written, that a fresh controller decides alike, and what another policy makes of it."""

import dataclasses
import json
import math
import os

import pytest

from pdjax import codec, eventlog, rerun
from pdjax.eventlog import EventLog, Header
from pdjax.latency import LatencyModel
from pdjax.messages import Abort, Arrival, Cut, Iteration, Role, RunStarted, Tick
from pdjax.request import SLO, SamplingParams, State
from pdjax.schedulers import SCHEDULERS, Colocated, Disaggregated, Traits
from pdjax.schedulers.base import traits_of
from pdjax.simulated import Timing
from pdjax.testing import Collector, FakeMachine, World, spec
from tests.revisers import Turncoat
from tests.worlds import POLICIES, RoundRobin, ask, crowd, policy, specs

EMPTY = Header("colocated", None, (spec(0, Role.MIXED),), (LatencyModel(),), 60.0)


class Stops(Collector):
    """Says that a text ends with the third token of every third request."""

    def token(self, request, token, time_s, logprob):
        super().token(request, token, time_s, logprob)
        return request.id % 3 == 0 and len(self.tokens[request.id]) == 3


class Written:
    """A controller that writes down what it is told."""

    def __init__(self, controller, log):
        self.controller, self.log = controller, log

    def __getattr__(self, name):
        return getattr(self.controller, name)

    def handle(self, event, now):
        return self.log.handle(self.controller, event, now)


def play(path, instances, scheduler, *requests, name="disaggregated", aborts=(), max_queue=0, max_steps=1):
    """Serves requests in a simulated cluster with a log; returns what the sink was told."""
    told = Stops()
    models = (LatencyModel(),) * len(instances)
    header = Header(
        name, getattr(scheduler, "_stream_from", None), tuple(instances), models, 60.0, max_queue, max_steps
    )
    log = EventLog(path, told)
    log.begin(header)
    machine = FakeMachine if max_steps == 1 else lambda spec: Timing()
    w = World(instances, scheduler, sink=log, max_queue=max_queue, machine=machine, max_steps=max_steps)
    w.controller = Written(w.controller, log)
    w.add(*requests)
    for number, at_s in aborts:
        w.cluster.post(Abort(number), at_s)
    w.run()
    log.close()
    return told


@pytest.fixture
def logged(tmp_path):
    """A log with stops, aborts, preemptions and a rejection, and what the sink was told."""
    path = tmp_path / "events.jsonl"
    requests = crowd(seed=4, count=20)
    aborts = [(request.id, request.arrival_s + 0.02) for request in requests[1:4]]
    told = play(path, specs("stream", num_pages=33), Disaggregated(1), *requests, aborts=aborts, max_queue=4)
    return eventlog.read(path), told


def change(log, number, **fields):
    """The log with another entry number `number`."""
    entries = list(log.entries)
    entries[number] = dataclasses.replace(entries[number], **fields)
    return dataclasses.replace(log, entries=tuple(entries))


# --- the file -------------------------------------------------------------------------------------------------------


def test_a_line_has_the_time_the_event_and_the_commands_that_followed(tmp_path):
    play(tmp_path / "log", specs("pull"), Disaggregated(), ask(0, prompt=2, tokens=1))
    header, arrival, done = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert header["scheduler"] == "disaggregated" and len(header["specs"]) == 2
    assert arrival["event"]["Arrival"]["request"]["prompt_ids"] == [0, 3]
    (command,) = arrival["commands"]
    assert command["Iteration"]["chunks"][0]["tokens"] == [0, 3]
    assert done["time_s"] == pytest.approx(0.007, rel=0.01)
    assert done["done"] == [[0, "finished", 1]]


def test_what_was_written_is_read(logged):
    log, told = logged
    ended = {request: (state, tokens) for entry in log.entries for request, state, tokens in entry.done}
    assert ended == {n: (record.state, len(record.token_ids)) for n, record in told.records.items()}
    assert {state for state, _ in ended.values()} == {State.FINISHED, State.ABORTED, State.REJECTED}
    assert sum(len(entry.ends) for entry in log.entries) > 0


def test_every_line_is_there_at_once_and_an_unfinished_last_one_is_ignored(tmp_path):
    path = tmp_path / "log"
    log = EventLog(path, Collector())
    log.begin(EMPTY)
    log.begin(EMPTY)
    log.handle(World(specs("pull"), Disaggregated()).controller, Tick(), 1.5)
    assert eventlog.read(path).entries[0].time_s == 1.5
    path.write_text(path.read_text() + '{"time_s": 2.0, "ev')
    assert len(eventlog.read(path).entries) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "allowed: an events.jsonl of version 1"),
        ('{"version": 2}\n', "allowed: an events.jsonl of version 1"),
        ("{}\n", "log:1: ValueError: Header is {}; allowed: the fields"),
        ("[1\n", "log:1: JSONDecodeError"),
        ("HEADER\n{}\n", "log:2: ValueError: Entry is {}; allowed: the fields"),
        (
            'HEADER\n{"time_s": null, "event": {"Tick": {}}}\n',
            "log:2: ValueError: Entry.time_s is None; allowed: a num",
        ),
        (
            'HEADER\n{"time_s": NaN, "event": {"Tick": {}}}\n',
            "log:2: ValueError: Entry.time_s is nan; allowed: a number",
        ),
        (f'HEADER\n{{"time_s": {10**400}, "event": {{"Tick": {{}}}}}}\n', "log:2: ValueError: Entry.time_s is 1000"),
        (
            'HEADER\n{"time_s": 1, "event": {"Tick": {}}, "done": [[[], "failed", 0]]}\n',
            "Entry.done is []; allowed: of",
        ),
        ('HEADER\n{"time_s": 1, "event": {"Tick": {}}, "done": [[0, [], 0]]}\n', "Entry.done is []; allowed: one of"),
        (
            'HEADER\n{"time_s": 1, "event": {"RunStarted": {"instance": 0, "number": 0, "ends": [NaN]}}}\n',
            "ends is nan",
        ),
        ("HEADER\n" + "[" * 100_000 + "\n", "log:2: RecursionError"),
        ('HEADER\n{"time_s": 1, "event": {"Nap": {}}}\n', "log:2: ValueError: message is {'Nap': {}}; allowed: one of"),
    ],
)
def test_a_broken_log_is_refused_by_its_line(tmp_path, text, message):
    log = EventLog(tmp_path / "log", Collector())
    log.begin(EMPTY)
    log.close()
    (tmp_path / "log").write_text(text.replace("HEADER\n", (tmp_path / "log").read_text()))
    with pytest.raises(ValueError) as caught:
        eventlog.read(tmp_path / "log")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"transfer_timeout_s": math.nan}, "Header.transfer_timeout_s is nan; allowed: a number > 0"),
        ({"transfer_timeout_s": 0.0}, "Header.transfer_timeout_s is 0.0; allowed: a number > 0"),
        ({"max_steps": 0}, "Header.max_steps is 0; allowed: a number >= 1"),
        ({"latency": ()}, "Header.latency length is 0; allowed"),
        ({"latency": (LatencyModel(transfer_bytes_per_s=0.0),)}, "transfer_bytes_per_s is 0.0; allowed: a number > 0"),
        ({"latency": (LatencyModel((0, 0, math.nan, 0, 0, 0)),)}, "Header.latency[0].iteration is nan; allowed"),
        ({"page_size": 0}, "Header.specs[0].page_size is 0; allowed: a number >= 1"),
        ({"num_pages": 1}, "Header.specs[0].num_pages is 1; allowed: a number >= 2"),
        ({"num_pages": 10**400}, "Header.specs[0].num_pages is 1000"),
        ({"max_chunk": 0}, "Header.specs[0].max_chunk is 0; allowed: a number >= 1"),
        ({"chunk_buckets": (16, 8)}, "Header.specs[0].chunk_buckets is (16, 8); allowed: ascending"),
        ({"row_buckets": (0, 8)}, "Header.specs[0].row_buckets is (0, 8); allowed: ascending"),
    ],
)
def test_a_header_that_no_controller_can_be_made_from_is_refused(tmp_path, fields, message):
    own = {field.name for field in dataclasses.fields(Header)}
    changes = fields if fields.keys() <= own else {"specs": (spec(0, Role.MIXED, **fields),)}
    (tmp_path / "log").write_text(json.dumps(codec.encode(dataclasses.replace(EMPTY, **changes))) + "\n")
    with pytest.raises(ValueError) as caught:
        eventlog.read(tmp_path / "log")
    assert "log:1: ValueError: " in str(caught.value) and message in str(caught.value)


def test_a_log_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "log").write_bytes(b"\xff\xfe\x81")
    with pytest.raises(ValueError, match=r"log is .*log', which is not UTF-8 text; allowed: an events.jsonl"):
        eventlog.read(tmp_path / "log")


@pytest.mark.parametrize(
    "name", ["/dev/null", "/dev/full", "pipe", "a\0b", "/proc/no/log", ".", "~nobody-of-this-name/log"]
)
def test_a_log_goes_to_a_regular_file_only(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(ValueError, match=r"event_log is .* \(.*\); allowed: a file that can be written"):
        eventlog.check_path(name)


def test_checking_a_path_leaves_what_is_in_the_file(tmp_path):
    (tmp_path / "log").write_text("kept")
    eventlog.check_path(tmp_path / "log")
    assert (tmp_path / "log").read_text() == "kept"


def test_a_log_that_is_not_there_or_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"log is .*, which cannot be read"):
        eventlog.read(tmp_path / "none")
    with pytest.raises(ValueError, match=r"event_log is .*; allowed: a file that can be written"):
        EventLog(tmp_path, Collector())


# --- the same policy again ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_a_fresh_controller_gives_the_same_commands(tmp_path, name):
    play(tmp_path / "log", specs(name, num_pages=33), policy(name), *crowd(seed=2, count=15), name="own")
    log = eventlog.read(tmp_path / "log")
    replayed = rerun.replay(log, policy(name))
    assert (replayed.difference, replayed.events) == ("", len(log.entries))
    assert replayed.commands == sum(len(entry.commands) for entry in log.entries) > 50


@pytest.mark.parametrize("name", ["colocated", "stream"])
def test_a_simulation_of_many_steps_at_once_is_replayed_exactly(tmp_path, name):
    told = play(
        tmp_path / "log", specs(name, num_pages=33), policy(name), *crowd(seed=2, count=15), name="own", max_steps=64
    )
    log = eventlog.read(tmp_path / "log")
    assert any(isinstance(command, Cut) for entry in log.entries for command in entry.commands)
    assert any(isinstance(entry.event, RunStarted) for entry in log.entries)
    replayed = rerun.replay(log, policy(name))
    assert (replayed.difference, replayed.events) == ("", len(log.entries))
    assert replayed.report.records == [told.records[number] for number in sorted(told.records)]


def test_stops_aborts_rejections_and_preemptions_are_replayed_exactly(logged):
    log, told = logged
    replayed = rerun.replay(log)
    assert replayed.difference == ""
    assert replayed.report.records == [told.records[number] for number in sorted(told.records)]
    assert replayed.report.iterations == told.iterations


def test_the_first_difference_is_named(logged):
    log, _ = logged
    number = next(n for n, entry in enumerate(log.entries) if isinstance(next(iter(entry.commands), None), Iteration))
    other = dataclasses.replace(log.entries[number].commands[0], instance=7)
    replayed = rerun.replay(change(log, number, commands=(other, *log.entries[number].commands[1:])))
    assert replayed.events == number
    assert replayed.difference.startswith(f"event {number} (")
    assert replayed.difference.endswith("recorded: Iteration(instance=7, ...)")


@pytest.mark.parametrize("commands", [0, 2])
def test_a_command_too_few_or_too_many_is_a_difference(logged, commands):
    log, _ = logged
    number = next(n for n, entry in enumerate(log.entries) if len(entry.commands) == 1)
    replayed = rerun.replay(change(log, number, commands=log.entries[number].commands * commands))
    assert replayed.events == number and "None" in replayed.difference


def test_a_policy_that_raised_raises_again(tmp_path):
    class Odd(Colocated):
        def place(self, ask, cluster):
            raise KeyError("lost")

    with pytest.raises(KeyError):
        play(tmp_path / "log", specs("colocated"), Odd(), ask(0))
    log = eventlog.read(tmp_path / "log")
    assert log.entries[-1].raised == "KeyError: 'lost'"
    assert rerun.replay(log, Odd()).difference == ""
    assert "raises nothing; recorded: KeyError" in rerun.replay(log, Colocated()).difference


def test_a_policy_of_the_users_own_must_be_given(tmp_path):
    play(tmp_path / "log", specs("own"), RoundRobin(), ask(0), name="RoundRobin")
    log = eventlog.read(tmp_path / "log")
    with pytest.raises(
        ValueError, match="scheduler of the log is 'RoundRobin'; allowed without the policy itself: coloc"
    ):
        rerun.replay(log)
    assert rerun.replay(log, RoundRobin()).difference == ""


# --- another policy -------------------------------------------------------------------------------------------------


def test_the_workload_of_a_log_has_its_arrivals_prompts_and_the_lengths_of_its_answers(logged):
    log, told = logged
    asked = {entry.event.request.id: entry.event.request for entry in log.entries if isinstance(entry.event, Arrival)}
    first = min(request.arrival_s for request in asked.values())
    requests = rerun.workload_of(log)
    assert [request.id for request in requests] == [request.id for request in asked.values()]
    for request in requests:
        before, record = asked[request.id], told.records[request.id]
        assert request.arrival_s == before.arrival_s - first
        assert request.prompt_ids == before.prompt_ids
        assert not request.stop_ids
        if record.state is State.FINISHED:
            assert request.sampling.max_tokens == len(record.token_ids)
        if record.state is State.REJECTED:
            assert request.sampling.max_tokens == before.sampling.max_tokens


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("recorded", ["stream", "colocated"])
def test_every_policy_serves_the_workload_of_any_log(tmp_path, recorded, name):
    instances = specs(recorded)
    if recorded == "stream":  # as engines build them
        instances = [dataclasses.replace(instances[0], max_rows=0), dataclasses.replace(instances[1], max_chunk=0)]
    play(tmp_path / "log", instances, policy(recorded), *crowd(seed=2, count=10), name="own")
    log = eventlog.read(tmp_path / "log")
    requests = rerun.workload_of(log)
    report = rerun.simulate(requests, log.header, SCHEDULERS[name](None))
    assert {record.state for record in report.records} == {State.FINISHED}
    got = {record.request_id: len(record.token_ids) for record in report.records}
    assert got == {str(request.id): request.sampling.max_tokens for request in requests}
    assert report.summary(slo=SLO(ttft_ms=1e6))["slo_attainment"] == 1


HEADER = Header(
    "disaggregated",
    1,
    (
        spec(0, Role.PREFILL, max_rows=0, max_chunk=64, chunk_buckets=(32, 64)),
        spec(1, Role.DECODE, max_rows=4, max_chunk=0, row_buckets=(2, 4)),
    ),
    (LatencyModel((0.01, 0.1, 0.2, 0, 0, 0)), LatencyModel((0.02, 0, 0, 0.3, 0.4, 0.5))),
    60.0,
)


def test_instances_that_must_do_both_get_limits_and_coefficients_of_both():
    instances, models = rerun.instances_for(HEADER, Traits(colocated=True))
    for instance in instances:
        assert (instance.role, instance.max_rows, instance.max_chunk) == (Role.MIXED, 4, 64)
        assert (instance.chunk_buckets, instance.row_buckets) == ((32, 64), (2, 4))
    assert {model.iteration for model in models} == {(0.02, 0.1, 0.2, 0.3, 0.4, 0.5)}


def test_instances_that_fit_the_policy_stay_as_they_are():
    assert rerun.instances_for(HEADER, traits_of(Disaggregated())) == (HEADER.specs, HEADER.latency)


def test_mixed_instances_are_split_into_both_roles():
    mixed = dataclasses.replace(
        HEADER, specs=tuple(spec(n, Role.MIXED) for n in range(3)), latency=(LatencyModel(),) * 3
    )
    roles = [instance.role for instance in rerun.instances_for(mixed, traits_of(Disaggregated()))[0]]
    assert roles == [Role.PREFILL, Role.DECODE, Role.DECODE]


@pytest.mark.parametrize(
    ("instances", "traits", "message"),
    [
        ((spec(0, Role.MIXED),), Traits(), "the log has 1 instance; allowed with a policy of two roles: 2 or more"),
        (
            (HEADER.specs[0], dataclasses.replace(HEADER.specs[1], devices=2)),
            Traits(colocated=True),
            "instances of 1 and 2 devices .* allowed .*: equal ones",
        ),
        ((HEADER.specs[0],), Traits(colocated=True), "no instance of the log has max_rows"),
    ],
)
def test_instances_that_cannot_serve_a_policy_are_refused(instances, traits, message):
    header = dataclasses.replace(HEADER, specs=instances, latency=HEADER.latency[: len(instances)])
    with pytest.raises(ValueError, match=message):
        rerun.instances_for(header, traits)


def test_stop_texts_of_a_recorded_answer_do_not_stop_the_simulated_one(tmp_path):
    request = dataclasses.replace(ask(0, tokens=9), sampling=SamplingParams(max_tokens=9, seed=0, stop=("x",)))
    play(tmp_path / "log", specs("stream"), Disaggregated(1), request)
    (again,) = rerun.workload_of(eventlog.read(tmp_path / "log"))
    assert (again.sampling.stop, again.sampling.max_tokens) == ((), 3)


def test_a_policy_that_revises_is_replayed_with_its_moves_and_flips(tmp_path):
    path = tmp_path / "events.jsonl"
    told = play(path, [spec(0, Role.PREFILL), spec(1, Role.DECODE)], Turncoat(), *crowd(seed=4, count=20), name="own")
    replayed = rerun.replay(eventlog.read(path), Turncoat())
    assert replayed.difference == ""
    assert (replayed.report.moves, replayed.report.flips) == (told.moves, told.flips)
    assert told.moves and told.flips
    other = rerun.simulate(rerun.workload_of(eventlog.read(path)), eventlog.read(path).header, Turncoat())
    assert other.moves and other.flips
