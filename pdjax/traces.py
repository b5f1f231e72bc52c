"""Files of requests: a path enters, rows of lengths or prompts leave. Called by `pdjax.workload`.

Length files are CSV with a header, or JSON lines; the columns of a few public traces are known by name. A timestamp is
a number of seconds or a date and time (Mooncake: milliseconds); only differences matter, so epoch and zero-based ones
give the same replay.
"""

import contextlib
import csv
import dataclasses
import datetime
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
    """Rows of a CSV file, in the order of the file.

    Raises:
        ValueError: no such file, it is not CSV in UTF-8, a column is missing, or a cell is not what its column says.
    """
    with _open(path) as file:
        reader = csv.DictReader(file)
        columns = [name.strip() for name in reader.fieldnames or ()]
        reader.fieldnames = columns
        inputs, outputs = _column(path, columns, INPUT_COLUMNS), _column(path, columns, OUTPUT_COLUMNS)
        times = _column(path, columns, TIME_COLUMNS) if timed else None
        return [
            Row(
                _count(row[inputs], inputs, f"{path}:{reader.line_num}"),
                _count(row[outputs], outputs, f"{path}:{reader.line_num}"),
                _seconds(row[times], times, f"{path}:{reader.line_num}") if times else None,
            )
            for row in reader
        ]


def read_mooncake(path: Path) -> list[Row]:
    """Rows of a Mooncake trace: JSON lines with timestamp (ms), input_length, output_length, hash_ids.

    Raises:
        ValueError: no such file, or a line that lacks a key or has a value of another kind.
    """
    rows = []
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
        rows.append(
            Row(
                input_tokens,
                _count(_get(line, "output_length", where), "output_length", where),
                _seconds(_get(line, "timestamp", where), "timestamp", where) / 1e3,
                blocks,
            )
        )
    return rows


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
    except csv.Error as error:
        raise ValueError(f"workload: {str(path)!r} is not CSV ({error}); allowed: a CSV file with a header") from None


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


def _column(path: Path, columns: list[str], allowed: tuple[str, ...]) -> str:
    for name in allowed:
        if name in columns:
            return name
    raise ValueError(f"workload: {path} has columns {columns}; allowed: one of them named {' or '.join(allowed)}")


def _get(line: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in line:
        raise ValueError(f"workload: {where}: keys are {sorted(line)}; allowed: {key} among them")
    return line[key]


def _count(value: Any, field: str, where: str) -> int:
    try:
        count = int(value)
        if count < 0 or count != float(value):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"workload: {where}: {field} is {short(value)}; allowed: a whole number >= 0") from None
    return count


def _seconds(value: Any, field: str, where: str) -> float:
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    except (TypeError, ValueError):
        seconds = _timestamp(value)
    if not math.isfinite(seconds):
        raise ValueError(f"workload: {where}: {field} is {short(value)}; allowed: a number, or a date and time")
    return seconds


def _timestamp(value: Any) -> float:
    """Seconds of a date and time, UTC if it names no zone; NaN if it is none."""
    try:
        moment = datetime.datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return math.nan
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
