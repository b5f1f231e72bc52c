"""Workloads played on a small engine: who is asked when, what is shown meanwhile, and what is written down."""

import dataclasses
import threading
import time

import pytest

import pdjax
from pdjax.workload import Item, Workload
from tests.engines import engine, settle, wire

PARAMS = pdjax.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def served():
    with engine() as made:
        yield made
        settle(made)


def items(*arrivals, prompt="ask ", params=PARAMS):
    return tuple(
        Item(at_s, f"{prompt}{number}", params, pdjax.SLO(ttft_ms=1000 + number), f"r{number}")
        for number, at_s in enumerate(arrivals)
    )


def play(served, workload, **callbacks):
    report = served.replay(workload, **callbacks)
    settle(served)
    return report


def test_records_are_in_the_order_of_the_items(served):
    report = play(served, Workload(items(*[0.0] * 7), "all at once"))
    assert [record.request_id for record in report.records] == [f"r{number}" for number in range(7)]
    assert [record.slo.ttft_ms for record in report.records] == [1000 + number for number in range(7)]
    assert {len(record.token_ids) for record in report.records} == {6}
    assert report.specs == served.specs


def test_no_request_arrives_before_its_time(served):
    started = time.perf_counter()  # the engine's clock too
    report = play(served, Workload(items(0.0, 0.05, 0.2), "open"))
    arrivals = [record.timeline.arrival_s - started for record in report.records]
    assert all(came >= wanted - 1e-3 for came, wanted in zip(arrivals, (0.0, 0.05, 0.2), strict=True))
    first, last = report.records[0].timeline.arrival_s, report.records[2].timeline.finished_s
    assert report.duration_s == last - first


def test_a_closed_loop_never_has_more_in_flight_than_clients(served):
    report = play(served, Workload(items(*[0.0] * 9), "closed", clients=2))
    marks = [record.timeline for record in report.records]
    for mark in marks:
        live = [other for other in marks if other.arrival_s <= mark.arrival_s < other.finished_s]
        assert len(live) <= 2


def test_the_text_that_is_shown_is_the_text_of_the_results(served):
    shown, threads = ["", "", ""], set()

    def on_text(index, text):
        shown[index] += text
        threads.add(threading.get_ident())

    report = play(served, Workload(items(0.0, 0.0, 0.0), "shown"), on_text=on_text)
    tokenizer = served._source.tokenizer_or_none
    assert shown == [tokenizer.decode(record.token_ids) for record in report.records]
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_progress_counts_to_the_end(served):
    seen = []
    play(served, Workload(items(0.0, 0.0, 0.0), "counted"), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_every_prompt_token_is_computed_once_and_on_the_prefill_side(served):
    report = play(served, Workload(items(*[0.0] * 5, prompt="a prompt of more than one page " * 3), "long"))
    computed = {index: 0 for index in range(len(served.specs))}
    for iteration in report.iterations:
        computed[iteration.instance] += iteration.chunk_tokens
    assert computed == {0: sum(record.prompt_tokens for record in report.records), 1: 0}


def test_every_transfer_is_written_down_with_its_payload(served):
    report = play(served, Workload(items(0.0, 0.0), "moved"))
    per_token = served.specs[0].kv_bytes_per_token
    assert {(move.request_id, move.src, move.dst, move.nbytes) for move in report.transfers} == {
        (record.request_id, 0, 1, record.prompt_tokens * per_token) for record in report.records
    }


def test_what_an_earlier_replay_did_is_not_written_down_again(served):
    play(served, Workload(items(0.0, 0.0), "first"))
    report = play(served, Workload(items(0.0), "second"))
    assert {name for iteration in report.iterations for name in iteration.requests} == {"r0"}


def test_a_refused_item_is_named_and_nothing_is_started(served):
    bad = Item(0.0, "", PARAMS, pdjax.SLO(), "bad")
    with pytest.raises(ValueError, match="workload item 1: prompt is empty; allowed:"):
        served.replay(Workload((*items(0.0), bad), "bad"))
    assert not served._handles


def test_an_engine_that_breaks_ends_a_replay_with_the_reason():
    with engine() as broken:

        def burst(*arguments):
            raise MemoryError("no room")

        broken._cluster._lanes[0].instance.run = burst
        with pytest.raises(RuntimeError, match="MemoryError: no room"):
            broken.replay(Workload(items(*[0.0] * 5), "closed", clients=2))


# --- a replay that ends early ---------------------------------------------------------------------------------------

LONG = dataclasses.replace(PARAMS, max_tokens=200)


def ended_early(served):
    """Nothing is live, and the threads of the replay are gone."""
    settle(served)
    return not served._handles and "answers" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_what_would_end_the_process_ends_a_replay(served, error):
    def on_text(index, text):
        raise error

    with pytest.raises(error):
        served.replay(Workload(items(0.0, 3600.0), "shown"), on_text)
    assert ended_early(served)


@pytest.mark.parametrize("clients", [None, 1])
def test_an_error_while_text_is_shown_reaches_the_caller_and_is_counted(served, clients):
    seen = []

    def on_text(index, text):
        raise OSError("no terminal")

    waits = items(0.0, 3600.0 if clients is None else 0.0, params=LONG)
    with pytest.raises(OSError, match="no terminal"):
        served.replay(Workload(waits, "shown", clients), on_text, lambda *counts: seen.append(counts))
    assert seen == [(1, 2)] and ended_early(served)


def test_an_error_while_progress_is_shown_reaches_the_caller(served):
    def progress(done, total):
        raise OSError("no terminal")

    with pytest.raises(OSError, match="no terminal"):
        served.replay(Workload(items(0.0, 0.0, 3600.0), "counted"), progress=progress)
    assert ended_early(served)


@pytest.mark.parametrize("clients", [None, 2])
def test_ctrl_c_ends_every_request_of_a_replay(served, clients, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("pdjax.replay._Run.records", interrupted)
    wire(served).hold()
    with pytest.raises(KeyboardInterrupt):
        served.replay(Workload(items(0.0, 0.0, params=LONG), "interrupted", clients))
    wire(served).release()
    assert ended_early(served)


def test_an_engine_plays_one_workload_at_a_time(served):
    def again(index, text):
        served.replay(Workload(items(0.0), "second"))

    with pytest.raises(RuntimeError, match="plays another workload; it takes one at a time"):
        served.replay(Workload(items(0.0), "first"), on_text=again)
    assert ended_early(served)
