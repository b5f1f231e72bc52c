"""Files of requests: a path enters, rows of lengths or prompts leave. Called by `pdjax.workload`, and for long traces
by users who simulate (`Stream`).

Length files are CSV with a header, or JSON lines; the columns of a few public traces are known by name. A timestamp is
a number of seconds or a date and time (Mooncake: milliseconds); only differences matter, so epoch and zero-based ones
give the same replay. What is wrong with a row is said with its line; rows that cannot be served (no prompt, no answer)
are read, and skipped and counted by who plays them.
"""

import contextlib
import csv
import dataclasses
import datetime
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from reprlib import repr as short  # a bad value may be as long as its file
from typing import Any, TextIO

# Column names of: our own length files, the Azure traces, BurstGPT.
INPUT_COLUMNS = ("prompt_len", "ContextTokens", "Request tokens")
OUTPUT_COLUMNS = ("output_len", "GeneratedTokens", "Response tokens")
TIME_COLUMNS = ("TIMESTAMP", "Timestamp")

MOONCAKE_BLOCK = 512
"""Tokens that one entry of `hash_ids` stands for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One request of a length file. `blocks`: ids of its prompt's 512-token blocks; equal ids mean equal tokens."""

    input_tokens: int
    output_tokens: int
    time_s: float | None = None
    blocks: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One request of a prompts file: text, chat messages or token ids."""

    prompt: str | list[dict[str, str]] | list[int]
    max_tokens: int | None
    id: str | None


def read_csv(path: Path, *, timed: bool) -> list[Row]:
    """Rows of a CSV file, in the order of the file. Blank lines are no rows.

    Raises:
        ValueError: no such file, it is not CSV in UTF-8, it is empty, a column is missing, or a cell is not what its
            column says; with its line, but where the file is not text.
    """
    return [row for _, row in _csv_rows(path, timed=timed)]


def read_mooncake(path: Path) -> list[Row]:
    """Rows of a Mooncake trace: JSON lines with timestamp (ms), input_length, output_length, hash_ids.

    Raises:
        ValueError: no such file, or a line that lacks a key or has a value of another kind.
    """
    return [row for _, row in _mooncake_rows(path)]


class Stream:
    """A trace of any length for `pdjax.simulation`: its file is read while its requests arrive.

        trace = traces.Stream("azure:AzureLLMInferenceTrace_conv.csv")
        report = simulate(fleet, asks(trace.lengths, trace.arrivals_s, slo), policy)

    Rows without a prompt or an answer are skipped. Each of the two iterators can be read once, both side by side.

    Args:
        kind: azure:FILE or mooncake:FILE, as of a workload.
        speed: how many times as quickly as in the trace requests come.

    Attributes:
        lengths: (tokens of the prompt, tokens of the answer) of each request.
        arrivals_s: when each comes, the first at 0.
        skipped: rows that were skipped up to now.

    Raises:
        ValueError: another kind or speed. While it is read: as `read_csv` and `read_mooncake`, and at a row that comes
            before the one ahead of it, with its line.
    """

    def __init__(self, kind: str, speed: float = 1.0) -> None:
        name, _, file = kind.partition(":")
        if name not in ("azure", "mooncake") or not file:
            raise ValueError(f"kind is {kind!r}; allowed for a trace: azure:FILE, mooncake:FILE")
        if not 0 < speed < math.inf:
            raise ValueError(f"speed is {speed!r}; allowed: a number > 0")
        self.skipped = 0
        path = Path(file)
        rows = _mooncake_rows(path) if name == "mooncake" else _csv_rows(path, timed=True)
        one, other = itertools.tee(self._usable(rows))  # read side by side, they hold no more than a row
        self.lengths: Iterator[tuple[int, int]] = ((row.input_tokens, row.output_tokens) for _, row in one)
        self.arrivals_s: Iterator[float] = (time_s / speed for time_s, _ in other)

    def _usable(self, rows: Iterator[tuple[str, Row]]) -> Iterator[tuple[float, Row]]:
        first_s, last_s = None, -math.inf
        for where, row in rows:
            time_s = row.time_s or 0.0
            if time_s < last_s:
                raise ValueError(
                    f"workload: {where}: its time is {last_s - time_s:g} s before that of the row ahead of it; allowed "
                    "where rows are streamed: rows in order of time"
                )
            last_s = time_s
            if not row.input_tokens or not row.output_tokens:
                self.skipped += 1
                continue
            first_s = time_s if first_s is None else first_s
            yield time_s - first_s, row


def _csv_rows(path: Path, *, timed: bool) -> Iterator[tuple[str, Row]]:
    """(place, row) one by one."""
    with _open(path) as file:
        reader = csv.reader(file, skipinitialspace=True, strict=True)
        try:
            header = next((cells for cells in reader if any(map(str.strip, cells))), None)
            if header is None:
                raise ValueError(f"workload: {path} is empty; allowed: a CSV file with a header")
            columns = [name.strip() for name in header]
            where = f"{path}:{reader.line_num}"
            inputs, outputs = _column(where, columns, INPUT_COLUMNS), _column(where, columns, OUTPUT_COLUMNS)
            times = _column(where, columns, TIME_COLUMNS) if timed else None
            for cells in reader:
                if not any(map(str.strip, cells)):
                    continue
                where = f"{path}:{reader.line_num}"
                if len(cells) != len(columns):
                    raise ValueError(
                        f"workload: {where}: {len(cells)} cells; allowed: {len(columns)}, as in the header"
                    )
                yield (
                    where,
                    Row(
                        _count(cells[inputs], columns[inputs], where),
                        _count(cells[outputs], columns[outputs], where),
                        None if times is None else _seconds(cells[times], columns[times], where),
                    ),
                )
        except csv.Error as error:
            raise ValueError(
                f"workload: {path}:{reader.line_num}: not CSV ({error}); allowed: a CSV file with a header"
            ) from None


def _mooncake_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """(place, row) one by one."""
    for where, line in _json_lines(path):
        input_tokens = _count(_get(line, "input_length", where), "input_length", where)
        ids = line.get("hash_ids", [])
        if not isinstance(ids, list):
            raise ValueError(f"workload: {where}: hash_ids is {short(ids)}; allowed: a list of whole numbers >= 0")
        blocks = tuple(_count(value, "hash_ids", where) for value in ids)
        if blocks and len(blocks) * MOONCAKE_BLOCK < input_tokens:
            raise ValueError(
                f"workload: {where}: hash_ids has {len(blocks)} entries; allowed: one for each {MOONCAKE_BLOCK} of "
                f"{input_tokens} tokens"
            )
        output_tokens = _count(_get(line, "output_length", where), "output_length", where)
        time_s = _seconds(_get(line, "timestamp", where), "timestamp", where) / 1e3
        yield where, Row(input_tokens, output_tokens, time_s, blocks)


def read_prompts(path: Path) -> list[Prompt]:
    """Lines of a prompts file: one of "prompt" (text), "messages" or "token_ids", and if wanted "max_tokens", "id".

    Raises:
        ValueError: no such file, no line, or a line that is not like that.
    """
    kinds = ("prompt", "messages", "token_ids")
    prompts = []
    for where, line in _json_lines(path):
        unknown = set(line) - {*kinds, "max_tokens", "id"}
        given = [kind for kind in kinds if kind in line]
        if len(given) != 1 or unknown:
            raise ValueError(
                f"workload: {where}: keys are {sorted(line)}; allowed: one of {', '.join(kinds)}, and max_tokens, id"
            )
        if not isinstance(line[given[0]], str if given[0] == "prompt" else list):
            raise ValueError(
                f"workload: {where}: {given[0]} is {short(line[given[0]])}; allowed: text or list, as it is named"
            )
        limit = line.get("max_tokens")
        prompts.append(
            Prompt(
                line[given[0]],
                None if limit is None else _count(limit, "max_tokens", where),
                None if line.get("id") is None else str(line["id"]),
            )
        )
    if not prompts:
        raise ValueError(f"workload: {path} has no line; allowed: a file with at least one prompt")
    return prompts


@contextlib.contextmanager
def _open(path: Path) -> Iterator[TextIO]:
    """The open file; what turns out to be unreadable in it while it is read names it too."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            yield file
    except OSError as error:
        raise ValueError(f"workload: cannot read {str(path)!r} ({error.strerror}); allowed: a readable file") from None
    except UnicodeDecodeError:
        raise ValueError(f"workload: {str(path)!r} is not UTF-8 text; allowed: a text file in UTF-8") from None


def _json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place, object) of every line that is not blank."""
    with _open(path) as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            where = f"{path}:{number}"
            try:
                line = json.loads(text)
            except (ValueError, RecursionError) as error:  # of numbers with thousands of digits, of deep nesting
                raise ValueError(f"workload: {where}: not JSON ({error}); allowed: one JSON object a line") from None
            if not isinstance(line, dict):
                raise ValueError(f"workload: {where}: {short(line)}; allowed: one JSON object a line")
            yield where, line


def _column(where: str, columns: list[str], allowed: tuple[str, ...]) -> int:
    """Its place among the columns."""
    for name in allowed:
        if name in columns:
            return columns.index(name)
    raise ValueError(f"workload: {where}: has columns {columns}; allowed: one of them named {' or '.join(allowed)}")


def _get(line: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in line:
        raise ValueError(f"workload: {where}: keys are {sorted(line)}; allowed: {key} among them")
    return line[key]


def _count(value: Any, field: str, where: str) -> int:
    try:
        count = int(value)
        if isinstance(value, bool) or count < 0 or count != float(value):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"workload: {where}: {field} is {short(value)}; allowed: a whole number >= 0") from None
    return count


def _seconds(value: Any, field: str, where: str) -> float:
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
        seconds = seconds if seconds >= 0 else math.nan
    except OverflowError:
        seconds = math.inf
    except (TypeError, ValueError):
        seconds = _timestamp(value)
    if not math.isfinite(seconds):
        raise ValueError(f"workload: {where}: {field} is {short(value)}; allowed: a number >= 0, or a date and time")
    return seconds


def _timestamp(value: Any) -> float:
    """Seconds of a date and time, UTC if it names no zone; NaN if it is none."""
    try:
        moment = datetime.datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return math.nan
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
