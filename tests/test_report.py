"""The files that a run leaves: what is in them, and that their times agree."""

import dataclasses
import json

import pytest

from pdjax import report
from pdjax.messages import Role
from pdjax.record import FlipRecord, IterationRecord, MoveRecord, RequestRecord, Timeline, TransferRecord
from pdjax.report import Report
from pdjax.request import SLO, State
from pdjax.testing import spec


def record(name, arrival, *token_s, state=State.FINISHED, **timeline):
    return RequestRecord(
        request_id=name,
        prompt_tokens=5,
        token_ids=tuple(range(len(token_s))),
        state=state,
        finish_reason="length",
        slo=SLO(ttft_ms=2000),
        timeline=Timeline(arrival, token_s=list(token_s), **timeline),
        prefill_instance=0,
        decode_instance=1,
        reason="shortest queue",
    )


RUN = Report(
    records=[
        record("a", 100.0, 101.0, 102.0, prefill_start_s=100.25, transfer_busy_s=0.5),
        record("b", 101.0, 104.0, 104.5),
        record("c", 103.0, state=State.REJECTED),
    ],
    iterations=[
        IterationRecord(0, 0, 128, 0, 100.25, 101.0, ("a",), host_gap_s=0.25),
        IterationRecord(0, 1, 32, 0, 101.0, 104.0, ("b",)),
        IterationRecord(1, 0, 0, 1, 101.5, 102.0),
        IterationRecord(1, 1, 16, 2, 104.0, 104.5, ("b",)),
    ],
    transfers=[TransferRecord("a", 0, 1, 4096, 100.5, 101.25)],
    duration_s=4.5,
    specs=(spec(0, Role.PREFILL), spec(1, Role.DECODE, devices=2)),
    revisions=(
        MoveRecord("b", 0, 1, 104.0, "too slow here"),
        FlipRecord(1, Role.DECODE, Role.PREFILL, 100.5, 102.5, "few answers"),
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "deep" / "out"
    report.write(path, {"runs": {"one": RUN.summary()}}, {"one": RUN, "two": RUN})
    return path


def slices(pid=0, **match):
    events = report.chrome_trace({"one": RUN, "two": RUN})["traceEvents"]
    return [event for event in events if event["pid"] == pid and match.items() <= event.items()]


def test_the_summary_counts_the_devices_of_all_instances():
    assert RUN.summary()["devices"] == 3


def test_the_summary_is_written_as_given(folder):
    assert json.loads((folder / "summary.json").read_text()) == {"runs": {"one": RUN.summary()}}


def test_every_request_of_every_run_has_a_line(folder):
    lines = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert [(line["run"], line["request_id"]) for line in lines] == [
        (run, name) for run in ("one", "two") for name in "abc"
    ]
    assert [line["slo_met"] for line in lines[:3]] == [True, False, False]


def test_a_line_has_tokens_placement_and_reason():
    line = report.request_line(RUN.records[0], 100.0, RUN.specs)
    assert line["token_ids"] == [0, 1]
    assert line["placement"] == {"prefill": 0, "decode": 1, "reason": "shortest queue"}


def test_times_in_a_line_count_from_the_first_arrival():
    timeline = report.request_line(RUN.records[0], 100.0, RUN.specs)["timeline"]
    assert (timeline["arrival_s"], timeline["prefill_start_s"], timeline["token_s"]) == (0.0, 0.25, [1.0, 2.0])
    assert timeline["prefill_end_s"] is None
    assert timeline["transfer_busy_s"] == 0.5  # a duration stays what it is


def test_a_request_without_tokens_has_a_line_without_latencies():
    line = report.request_line(RUN.records[2], 100.0, RUN.specs)
    assert line["state"] == "rejected"
    assert line["ttft_ms"] is line["parts_ms"] is None


def test_a_trace_has_a_process_per_run_and_a_track_per_instance():
    assert [event["args"]["name"] for event in slices(1, name="process_name")] == ["two"]
    assert [event["args"]["name"] for event in slices(name="thread_name")] == [
        "instance 0 (prefill)",
        "instance 1 (decode)",
    ]


def test_a_slice_says_what_the_iteration_computed_and_for_whom():
    assert [event["name"] for event in slices(ph="X")] == ["prefill 128", "prefill 32", "decode x1", "mixed 16 x2"]
    assert slices(name="prefill 32")[0]["args"]["requests"] == ["b"]


def test_a_slice_lasts_from_start_to_finish_in_microseconds():
    first = slices(ph="X", tid=0)[0]
    assert (first["ts"], first["dur"]) == pytest.approx((0.25e6, 0.75e6))


def test_a_transfer_is_an_asynchronous_slice_with_its_request_and_bytes():
    begin, end = slices(cat="transfer")
    assert (begin["ph"], begin["ts"], begin["args"]) == ("b", pytest.approx(0.5e6), {"request": "a", "bytes": 4096})
    assert (end["ph"], end["ts"], end["id"]) == ("e", pytest.approx(1.25e6), begin["id"])


def test_the_trace_file_is_json(folder):
    assert json.loads((folder / "timeline.json").read_text())["displayTimeUnit"] == "ms"


def test_pictures_are_written(folder):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    assert {path.name for path in folder.glob("*.png")} == {"latency.png", "timeline.png"}


def test_warmup_requests_are_left_out_with_their_time():
    rest = RUN.without(1)
    assert [kept.request_id for kept in rest.records] == ["b", "c"]
    assert rest.duration_s == 3.5
    assert rest.iterations == RUN.iterations[1:]
    assert rest.transfers == []


def test_no_warmup_leaves_everything():
    assert RUN.without(0) == RUN


def test_a_run_of_warmup_only_is_refused():
    with pytest.raises(ValueError, match="warmup_requests is 3; allowed: fewer than the 3 requests"):
        RUN.without(3)


def test_a_second_report_replaces_the_first(tmp_path):
    report.write(tmp_path, {}, {"one": RUN})
    report.write(tmp_path, {}, {"one": dataclasses.replace(RUN, records=RUN.records[:1])})
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 1


def test_moves_and_flips_are_counted_told_and_marked_in_the_trace():
    summary = RUN.summary()
    assert summary["moves"] == 1
    assert summary["flips"] == [
        {"instance": 1, "from": "decode", "to": "prefill", "seconds": 2.0, "reason": "few answers"}
    ]
    move, flip = slices(ph="i")
    assert (move["name"], move["tid"], move["ts"], move["args"]["request"]) == ("move to 1", 0, 4e6, "b")
    assert (flip["name"], flip["tid"], flip["ts"]) == ("flip decode to prefill", 1, 2.5e6)
    assert flip["args"] == {"reason": "few answers", "seconds": 2.0}


def test_revisions_before_the_first_measured_request_do_not_count():
    rest = RUN.without(2)
    assert rest.flips == [] and len(rest.moves) == 1


def test_a_run_of_no_duration_has_a_summary():
    assert Report([], [], [], 0.0, ()).summary()["throughput_rps"] == 0
