"""Files of requests with flaws: each is refused with its line, or makes no difference; traces that are streamed."""

import itertools
import json
from pathlib import Path

import pytest

from pdjax import fleet, simulation, traces
from pdjax.curves import Curves, Decode
from pdjax.fleet import Pool
from pdjax.messages import Role
from pdjax.request import SLO
from pdjax.schedulers import Disaggregated
from pdjax.traces import Row, Stream, read_csv, read_mooncake
from pdjax.workload import parse

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
LENGTHS = "prompt_len,output_len"


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "trace"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def mooncake_line(time_ms, prompt, answer, **more):
    return json.dumps({"timestamp": time_ms, "input_length": prompt, "output_length": answer, **more}) + "\n"


def azure(folder: Path, *lines: str) -> Path:
    return written(folder, "\n".join([AZURE, *lines, ""]))


def rows_of(kind: str, path: Path) -> list[Row]:
    return read_mooncake(path) if kind == "mooncake" else read_csv(path, timed=kind == "azure")


FILES = {  # each two requests, of 3 and 4 tokens, and of 5 and 6
    "azure": f"{AZURE}\n0,3,4\n1,5,6\n",
    "lengths": f"{LENGTHS}\n3,4\n5,6\n",
    "mooncake": mooncake_line(0, 3, 4) + mooncake_line(1000, 5, 6),
}


# --- what makes no difference ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize(
    "change",
    [
        lambda text: "\ufeff" + text,
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace("\n", "\n\n"),
        lambda text: text.replace("\n", "\n  \n"),
        lambda text: "\n" + text,
        lambda text: text.rstrip(),
    ],
    ids=["BOM", "CRLF", "blank lines", "lines of spaces", "blank first line", "no end of line at the end"],
)
def test_how_lines_are_written_makes_no_difference(tmp_path, kind, change):
    plain = rows_of(kind, written(tmp_path, FILES[kind]))
    assert [(row.input_tokens, row.output_tokens) for row in plain] == [(3, 4), (5, 6)]
    assert rows_of(kind, written(tmp_path, change(FILES[kind]))) == plain


@pytest.mark.parametrize("header", [AZURE, '"TIMESTAMP", "ContextTokens",GeneratedTokens '])
def test_quotes_and_spaces_in_cells_make_no_difference(tmp_path, header):
    path = written(tmp_path, f'{header}\n"2023-11-16 18:15:46", 3 ,"4"\n')
    assert (read_csv(path, timed=True)[0].input_tokens, read_csv(path, timed=True)[0].output_tokens) == (3, 4)


def test_seconds_may_have_seven_decimals(tmp_path):
    early, late = read_csv(
        azure(tmp_path, "2023-11-16 18:15:46.6805900,1,1", "2023-11-16 18:15:46.9305907,1,1"), timed=True
    )
    assert late.time_s - early.time_s == pytest.approx(0.25, abs=2e-6)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-1,3,4", "trace:3: TIMESTAMP is '-1'; allowed: a number >= 0, or a date"),
        ("nan,3,4", "trace:3: TIMESTAMP is 'nan'; allowed"),
        ("inf,3,4", "trace:3: TIMESTAMP is 'inf'; allowed"),
        (",3,4", "trace:3: TIMESTAMP is ''; allowed"),
        ("0,nan,4", "trace:3: ContextTokens is 'nan'; allowed: a whole number >= 0"),
        ("0,,4", "trace:3: ContextTokens is ''; allowed"),
        ("0,3,-4", "trace:3: GeneratedTokens is '-4'; allowed"),
        ("0,3,4.5", "trace:3: GeneratedTokens is '4.5'; allowed"),
        ("0,3", "trace:3: 2 cells; allowed: 3, as in the header"),
        ("0,1,155,4", "trace:3: 4 cells; allowed: 3, as in the header"),
        ('0,3,"4', r"trace:3: not CSV \(unexpected end of data\); allowed"),
    ],
)
def test_a_flaw_of_a_csv_row_is_refused_with_its_line(tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        read_csv(azure(tmp_path, "0,1,1", line), timed=True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (mooncake_line(-1, 3, 4), "trace:2: timestamp is -1; allowed: a number >= 0"),
        (mooncake_line(float("nan"), 3, 4), "trace:2: timestamp is nan; allowed"),
        (mooncake_line(True, 3, 4), "trace:2: timestamp is True; allowed"),
        (mooncake_line(0, float("nan"), 4), "trace:2: input_length is nan; allowed"),
        (mooncake_line(0, True, 4), "trace:2: input_length is True; allowed"),
        (mooncake_line(0, 3, None), "trace:2: output_length is None; allowed"),
        (mooncake_line(0, 3, 4, hash_ids=[-1]), "trace:2: hash_ids is -1; allowed"),
        ('{"timestamp": 0, "input_length": 3}\n', "trace:2: keys are .*; allowed: output_length among them"),
        ('{"timestamp": 0,\n', "trace:2: not JSON"),
    ],
)
def test_a_flaw_of_a_mooncake_row_is_refused_with_its_line(tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        read_mooncake(written(tmp_path, mooncake_line(0, 1, 1) + line))


@pytest.mark.parametrize("text", ["", "\n\n", "\ufeff"])
@pytest.mark.parametrize("kind", ["azure", "lengths"])
def test_an_empty_csv_is_refused(tmp_path, kind, text):
    with pytest.raises(ValueError, match="trace is empty; allowed: a CSV file with a header"):
        rows_of(kind, written(tmp_path, text))


@pytest.mark.parametrize(("kind", "text"), [("azure", AZURE), ("lengths", LENGTHS), ("mooncake", "")])
def test_a_file_without_rows_is_no_workload(tmp_path, kind, text):
    with pytest.raises(ValueError, match=r"no usable row in .*trace \(it has none\); allowed"):
        parse(f"{kind}:{written(tmp_path, text)}", num_requests=1, vocab_size=9, max_model_len=99, rate=1.0)


def test_a_missing_column_is_named_with_the_line_of_the_header(tmp_path):
    path = written(tmp_path, "\nTIMESTAMP,ContextTokens\n0,3\n")
    with pytest.raises(
        ValueError, match=r"trace:2: has columns .*; allowed: one of them named output_len or Generated"
    ):
        read_csv(path, timed=True)


@pytest.mark.parametrize("kind", FILES)
def test_rows_without_an_answer_are_counted_in_the_note(tmp_path, kind):
    more = {"azure": "2,7,0\n", "lengths": "7,0\n", "mooncake": mooncake_line(2000, 7, 0)}
    path = written(tmp_path, FILES[kind] + more[kind])
    note = parse(f"{kind}:{path}", num_requests=2, vocab_size=9, max_model_len=99, rate=1.0).note
    assert "1 rows without prompt or answer skipped" in note


# --- streams --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["azure", "mooncake"])
def test_a_stream_gives_lengths_and_times_from_the_first_row(tmp_path, kind):
    stream = Stream(f"{kind}:{written(tmp_path, FILES[kind])}", speed=2.0)
    assert list(zip(stream.lengths, stream.arrivals_s, strict=True)) == [((3, 4), 0.0), ((5, 6), 0.5)]


def test_a_stream_skips_and_counts_rows_without_prompt_or_answer(tmp_path):
    stream = Stream(f"azure:{azure(tmp_path, '5,0,4', '6,3,4', '7,3,0', '8,5,6')}")
    assert list(zip(stream.lengths, stream.arrivals_s, strict=True)) == [((3, 4), 0.0), ((5, 6), 2.0)]
    assert stream.skipped == 2


def test_a_stream_refuses_rows_out_of_order_with_their_line(tmp_path):
    stream = Stream(f"azure:{azure(tmp_path, '5,3,4', '4,3,4')}")
    with pytest.raises(ValueError, match="trace:3: its time is 1 s before that of the row ahead of it; allowed"):
        list(stream.arrivals_s)


def test_a_stream_reads_no_further_than_it_is_asked(tmp_path):
    stream = Stream(f"azure:{azure(tmp_path, '0,3,4', '1,5,6', 'broken')}")
    assert list(itertools.islice(zip(stream.lengths, stream.arrivals_s, strict=True), 2)) == [((3, 4), 0), ((5, 6), 1)]


@pytest.mark.parametrize(
    ("kind", "speed", "message"),
    [
        ("lengths:x", 1.0, "kind is 'lengths:x'; allowed for a trace: azure:FILE, mooncake:FILE"),
        ("azure:", 1.0, "kind is 'azure:'; allowed"),
        ("azure:x", 0.0, r"speed is 0\.0; allowed: a number > 0"),
    ],
)
def test_a_stream_of_something_else_is_refused(kind, speed, message):
    with pytest.raises(ValueError, match=message):
        Stream(kind, speed)


def test_a_stream_is_served_in_virtual_time(tmp_path):
    """Prompts of 3 and 5 tokens take as many milliseconds, 100 ms apart; each step 1 ms."""
    latency = Curves((0.0, 1e-3, 0.0), (Decode(0, 1e-3, 0.0, 0.0),))
    pools = [Pool(role, 1, latency, 1000, 1) for role in (Role.PREFILL, Role.DECODE)]
    trace = traces.Stream(f"azure:{azure(tmp_path, '0,3,1', '0.1,5,1')}")
    requests = simulation.asks(trace.lengths, trace.arrivals_s, SLO(ttft_ms=4))
    report = simulation.simulate(fleet.build(pools), requests, Disaggregated())
    ttfts = [record.timeline.token_s[0] - record.timeline.arrival_s for record in report.records]
    assert ttfts == pytest.approx([3e-3, 5e-3])
