"""Times of KV transfers: what is made of a request's marks, of plain sends, and how links are reached."""

import dataclasses

import pytest
from rich.console import Console

from pdjax.config import EngineConfig
from pdjax.experiments import kv_times, links, transfer_tables, wire
from pdjax.record import RequestRecord, Timeline
from pdjax.request import SLO, State


def record(second_s, restarts=0, nbytes=1000):
    """Prefilled from 1.0 to 3.0; the second token at `second_s`, then one each 0.5 s; the KV took 2 s, 1.5 on wires."""
    line = Timeline(0.0, 1.0, 3.0, 4.0, 6.0, nbytes, transfer_busy_s=1.5)
    line.token_s = [3.0, *(second_s + 0.5 * step for step in range(kv_times.STEPS))]
    ids = tuple(range(1 + kv_times.STEPS))
    return RequestRecord("0", 10, ids, State.FINISHED, "length", SLO(), line, restarts=restarts)


WHOLE = kv_times.Point(2048, 4000, prefill_s=8.0, busy_s=8.0, arrival_s=10.0, visible_s=9.0, step_s=0.5)


def outcome(name="tcp_1g", **changes):
    streamed = dataclasses.replace(WHOLE, visible_s=1.0)
    return {
        "link": name,
        "rate": "2000kbit",
        "raw_bytes": 4000,
        "raw_s": [4.0, 90.0, 3.0],
        "whole": [dataclasses.asdict(WHOLE)],
        "streamed": [dataclasses.asdict(streamed)],
        "hidden": [None],
    } | changes


def shown(table):
    console = Console(width=100)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_visible_is_the_wait_for_the_second_token_beyond_a_step():
    point = kv_times.summary([record(6.0)])
    assert point == kv_times.Point(10, 1000, prefill_s=2.0, busy_s=1.5, arrival_s=2.0, visible_s=2.5, step_s=0.5)


def test_a_point_has_medians():
    assert kv_times.summary([record(9.0), record(5.0), record(6.0)]).visible_s == 2.5


@pytest.mark.parametrize("broken", [record(6.0, restarts=1), record(6.0, nbytes=0)])
def test_a_request_that_was_disturbed_is_no_measurement(broken):
    with pytest.raises(RuntimeError, match="disturbed"):
        kv_times.summary([record(6.0), broken])


@pytest.mark.parametrize(("tokens", "part"), [(2048, 0.25 * 0.1), (512, 0.1), (100, 0.1), (513, 0.1 / 513)])
def test_the_last_part_is_the_last_group_of_the_last_chunk(tokens, part):
    assert kv_times.last_part(tokens, chunk=512, layers_last=3, num_layers=30) == pytest.approx(part)


def test_hidden_compares_with_what_could_be_hidden():
    streamed = dataclasses.replace(WHOLE, visible_s=1.0)
    assert kv_times.hidden(WHOLE, streamed, 0.125) == 1 - 1.0 / (9.0 - 0.125 * 8.0)
    assert kv_times.hidden(dataclasses.replace(WHOLE, visible_s=0.5), streamed, 0.125) is None


def test_shares_are_of_the_median_of_plain_sends():
    text = shown(transfer_tables.bandwidth([outcome()]))
    rows = [line.replace("│", " ").split() for line in text.splitlines()]
    assert [row[-1] for row in rows if "raw" in row and "MB" not in row] == ["1.00"]
    assert [row[-1] for row in rows if row[:1] == ["wire"] or "wire" in row] == ["0.50"]
    assert [row[-1] for row in rows if "arrival" in row] == ["0.40"]


def test_the_balanced_link_shows_its_rate_and_undefined_is_a_dash():
    text = shown(transfer_tables.visible([outcome("balanced")]))
    assert "(2 Mb/s)" in text and "9000" in text and "1000" in text
    assert "- │" in text


def test_the_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    transfer_tables.picture([outcome(), outcome("shared_memory")], tmp_path / "transfer.png")
    assert (tmp_path / "transfer.png").stat().st_size > 1000


def test_a_balanced_link_takes_as_long_as_the_prefill():
    assert links.balanced_rate(94_000_000, 5.0) == "150400kbit"


def test_links_of_two_hosts_have_a_rate():
    assert links.command("tcp_1g", ["-m", "x"])[:3] == [str(links.SCRIPT), "--rate=1gbit", "--"]
    assert "--rate=7kbit" in links.command("balanced", ["-m", "x"], "7kbit")
    assert links.command("tcp_1g", ["-m", "x"])[-2:] == ["-m", "x"]


def test_shared_memory_needs_no_second_host(monkeypatch):
    monkeypatch.setattr(links, "SCRIPT", links.SCRIPT.with_name("no_such_script"))
    assert links.missing("shared_memory") is None and "no_such_script" in links.missing("tcp_1g")


@pytest.mark.parametrize(
    ("transfer", "kind", "said", "proof", "words"),
    [
        ("mpi", "cpu", (False, "x says 0"), None, "staged in host memory, where"),
        ("mpi", "gpu", (False, "x says 0"), None, "staged in host memory: x says 0"),
        ("mpi", "gpu", (True, "x says 1"), "other bytes", "staged in host memory: x says 1, but the self-test failed"),
        ("mpi", "gpu", (True, "x says 1"), None, "device pointers: x says 1"),
        ("jax_transfer", "gpu", (True, "x says 1"), None, "jax_transfer"),
    ],
)
def test_the_road_is_told_with_its_reason(transfer, kind, said, proof, words):
    assert words in wire.road(EngineConfig(transfer=transfer), kind, said, proof)
