"""A server's log and its GPU's operator table enter; what the simulator makes of the same requests stands beside it."""

import json

import numpy as np
import pytest

from pdjax.experiments.papers import engine_replay
from pdjax.experiments.papers.outcome import Setup
from pdjax.experiments.papers.served import Served, read_columns, read_requests

LINE = {
    "input_toks": 4, "output_toks": 3, "queued_ts": 100.0, "scheduled_ts": 100.0, "first_token_ts": 100.5,
    "last_token_ts": 101.5,
}  # fmt: skip


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def data(tmp_path):
    """A machine on which every pass takes 1 s, and a server whose log says that it took 1.25 s. Two rows at most."""
    bench, profile = (tmp_path / engine_replay.MODEL.format(kind) for kind in ("bench", "profile"))
    requests = [
        LINE | {"queued_ts": at, "scheduled_ts": at, "first_token_ts": at + 1.25, "last_token_ts": at + 3.75}
        for at in (7.0, 7.5, 20.0)
    ]
    write(bench / "requests.jsonl", "\n".join(map(json.dumps, requests)))
    write(bench / "meta.json", json.dumps({"engine_kwargs": {"max_num_seqs": 2, "max_num_batched_tokens": 64}}))
    memory = {"npu_mem": {"mem_size": 24, "mem_util": 0.9}}
    write(bench / "config.json", json.dumps({"nodes": [{"instances": [memory]}]}))
    write(bench / "timeseries.csv", "t,running,waiting\n1.0,2,1\n5.0,1,0\n")
    write(profile / "dense.csv", "layer,tokens,time_us\nembedding,1,1000000\nembedding,512,1000000\n")
    write(profile / "per_sequence.csv", "layer,sequences,time_us\nlm_head,1,0\nlm_head,2,0\n")
    shapes = [(c, p, n, k) for c in (0, 1, 64) for p in (0, 64) for n in (0, 1, 2) for k in (1, 64) if c or n]
    lines = "\n".join(f"{c},{p},{n},{k},0" for c, p, n, k in shapes)
    write(profile / "attention.csv", f"prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n{lines}\n")
    return tmp_path


def run(data):
    said = []
    outcome = engine_replay.run(Setup(data, True, 0, said.append))
    return outcome, {row.what: row for row in outcome.rows}, said


def test_the_requests_are_served_again_with_the_tables_times(data):
    outcome, rows, said = run(data)
    assert (rows["TPOT mean"].published, rows["TPOT mean"].ours) == pytest.approx((1250, 1000))
    assert (rows["TTFT P50"].published, rows["TTFT P50"].ours) == pytest.approx((1250, 1000))
    # Two passes are on their way when the second one arrives at 0.5 s: its own starts at 2 s.
    assert (rows["TTFT mean"].published, rows["TTFT mean"].ours) == pytest.approx((1250, (1000 + 2500 + 1000) / 3))
    assert (rows["most requests waiting"].published, rows["most requests waiting"].ours) == (0, 1)
    assert rows["output tokens per second"].ours == pytest.approx(9 / 16)
    assert rows["TTFT P50"].reached is False and rows["TTFT P99"].reached is None
    assert outcome.summary["engine_replay_tpot_mean_error"] == pytest.approx(-0.2)
    assert said == ["3 requests, 2 rows, passes of 64 tokens, KV of 42266 tokens"]


def test_a_picture_is_drawn(data, tmp_path):
    pytest.importorskip("matplotlib")
    outcome, _, _ = run(data)
    outcome.plot(tmp_path / "replay.png")
    assert (tmp_path / "replay.png").stat().st_size > 10_000


def test_settings_that_are_missing_are_named(data):
    bench = data / engine_replay.MODEL.format("bench")
    write(bench / "meta.json", json.dumps({"engine_kwargs": {"max_num_seqs": 2}}))
    with pytest.raises(ValueError, match=r"meta.json: engine_kwargs.max_num_batched_tokens is None; allowed: .* > 0"):
        run(data)


def test_a_log_is_in_the_order_of_queueing_and_counts_from_its_first_request(tmp_path):
    later = LINE | {"queued_ts": 100.25, "scheduled_ts": 100.375}
    path = write(tmp_path / "log", "\ufeff" + json.dumps(later) + "\n\n" + json.dumps(LINE))
    assert read_requests(path) == [Served((4, 3), 0.0, 0.0, 0.5, 1.5), Served((4, 3), 0.25, 0.375, 0.5, 1.5)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "log:2 is no JSON"),
        ("[1]", "log:2 is '\\[1\\]'; allowed: an object"),
        (json.dumps(LINE | {"output_toks": 0}), "log:2: input_toks, output_toks are"),
        (json.dumps(LINE | {"input_toks": 1.5}), "log:2: input_toks, output_toks are"),
        (json.dumps(LINE | {"queued_ts": None}), "log:2: queued_ts is None; allowed: a number"),
        (json.dumps(LINE | {"queued_ts": "nan"}), "log:2: queued_ts is 'nan'"),
        (json.dumps({"input_toks": 1}), "log:2: output_toks is None"),
        (json.dumps(LINE | {"last_token_ts": 100.25}), "log:2: times are"),
    ],
)
def test_a_bad_line_of_a_log_is_named(tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        read_requests(write(tmp_path / "log", json.dumps(LINE) + "\n" + line))


def test_a_log_without_requests_and_one_that_is_not_there_are_told(tmp_path):
    with pytest.raises(ValueError, match="has no line"):
        read_requests(write(tmp_path / "log", "\n"))
    with pytest.raises(ValueError, match="cannot read"):
        read_requests(tmp_path / "none")


def test_columns_of_a_table_are_numbers(tmp_path):
    path = write(tmp_path / "table", "a,b\n1,2\n3,x\n")
    assert read_columns(path, ("a",)) == [(1.0,), (3.0,)]
    with pytest.raises(ValueError, match="table:3: b is 'x'"):
        read_columns(path, ("b",))
    with pytest.raises(ValueError, match=r"\['c'\] are missing"):
        read_columns(path, ("c",))


def test_who_waits_and_who_runs_is_counted_from_the_marks():
    served = [Served((4, 3), 0.0, 0.0, 1.0, 2.0), Served((4, 3), 0.5, 2.0, 3.0, 4.0)]
    times = np.array([0.25, 1.0, 2.5, 5.0])
    assert Served.waiting(served, times).tolist() == [0, 1, 0, 0]
    assert Served.running(served, times).tolist() == [1, 1, 1, 0]
