"""What came of requests on a real server or in simulation, in one form. A server's log enters; latencies and queue
lengths over time leave. Called by `engine_replay`, which makes the same of a simulated run."""

import csv
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """Lengths of prompt and answer, and seconds of the run: its arrival, its first pass, its first and last token."""

    lengths: tuple[int, int]
    arrival_s: float
    started_s: float
    first_s: float
    last_s: float

    @staticmethod
    def ttfts_ms(served: Sequence["Served"]) -> list[float]:
        return [1e3 * (one.first_s - one.arrival_s) for one in served]

    @staticmethod
    def tpots_ms(served: Sequence["Served"]) -> list[float]:
        """Of those with two tokens or more."""
        return [1e3 * (one.last_s - one.first_s) / (one.lengths[1] - 1) for one in served if one.lengths[1] > 1]

    @staticmethod
    def e2es_ms(served: Sequence["Served"]) -> list[float]:
        return [1e3 * (one.last_s - one.arrival_s) for one in served]

    @staticmethod
    def waiting(served: Sequence["Served"], at_s: np.ndarray) -> np.ndarray:
        """How many had arrived and not started, at each of these times."""
        return _before([one.arrival_s for one in served], at_s) - _before([one.started_s for one in served], at_s)

    @staticmethod
    def running(served: Sequence["Served"], at_s: np.ndarray) -> np.ndarray:
        """How many had started and not ended."""
        return _before([one.started_s for one in served], at_s) - _before([one.last_s for one in served], at_s)


def _before(marks: list[float], at_s: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.sort(marks), at_s, side="right")


def read_requests(path: Path) -> list[Served]:
    """Requests of a server's log in the order in which it queued them; times count from the first.

    Each line has input_toks, output_toks, and queued_ts, scheduled_ts, first_token_ts, last_token_ts in seconds of one
    clock. A request arrives when it is queued.

    Raises:
        ValueError: the file cannot be read or has no line; a line is no JSON object, lacks a key, has no token, or its
            times are no numbers or not in this order.
    """
    found = []
    for number, text in enumerate(_text(path).splitlines(), 1):
        if not text.strip():
            continue
        where = f"{path}:{number}"
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{where} is no JSON ({error}); allowed: an object per line") from None
        if not isinstance(line, dict):
            raise ValueError(f"{where} is {text[:40]!r}; allowed: an object per line")
        lengths = tuple(_number(where, line, name) for name in ("input_toks", "output_toks"))
        marks = [_number(where, line, f"{name}_ts") for name in ("queued", "scheduled", "first_token", "last_token")]
        if any(length < 1 or length % 1 for length in lengths):
            raise ValueError(f"{where}: input_toks, output_toks are {lengths}; allowed: whole numbers >= 1")
        if sorted(marks) != marks:
            raise ValueError(f"{where}: times are {marks}; allowed: queued, scheduled, first and last token in order")
        found.append(Served((int(lengths[0]), int(lengths[1])), *marks))
    if not found:
        raise ValueError(f"{path} has no line; allowed: a request per line")
    start_s = min(one.arrival_s for one in found)
    found.sort(key=lambda one: one.arrival_s)
    return [
        Served(one.lengths, *(mark - start_s for mark in (one.arrival_s, one.started_s, one.first_s, one.last_s)))
        for one in found
    ]


def read_columns(path: Path, columns: Sequence[str]) -> list[tuple[float, ...]]:
    """These columns of a CSV file, a tuple for each line.

    Raises:
        ValueError: the file cannot be read, a column is missing, or a cell is no number.
    """
    reader = csv.DictReader(_text(path).splitlines())
    if missing := set(columns) - set(reader.fieldnames or ()):
        raise ValueError(f"{path}: columns {sorted(missing)} are missing; allowed: a table with them")
    return [tuple(_number(f"{path}:{reader.line_num}", line, name) for name in columns) for line in reader]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"cannot read {str(path)!r} ({error.strerror}); allowed: a readable file") from None


def _number(where: str, line: dict[str, object], name: str) -> float:
    value = line.get(name)
    try:
        number = float(value) if isinstance(value, int | float | str) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where}: {name} is {value!r}; allowed: a number")
    return number
