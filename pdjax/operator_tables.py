"""Reads tables of measured operators. Enter: a folder of CSV files as LLMServingSim publishes them, and how many layers
the model has. Leaves: `pdjax.operators.Operators`. Called by launchers, the planner and users.

Two layouts are known: `gpu` (its profiler for GPUs, version 1: attention of mixed batches) and `tpu` (its TPU profile:
prefill and decode apart).
"""

import csv
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pdjax.operators import Operators, Table

ONCE = ("embedding", "final_layernorm")  # of a pass; what else works on tokens is there in every layer
TWICE = ("layernorm",)  # in a layer, before attention and before the MLP, measured under one name
HEAD = ("lm_head", "sampler")  # for tokens that are sampled from only


def gpu(folder: Path, layers: int, **more: Any) -> Operators:
    """dense.csv, per_sequence.csv and attention.csv, in microseconds.

    Prompt parts and contexts of attention lie on two grids; sizes that only the other has are interpolated.

    Args:
        folder: holds the files.
        layers: of the model; the tables have one.
        more: further fields of `Operators`.

    Raises:
        ValueError: a file, a column or a needed size is missing, or a cell is no number >= 0.
    """
    dense = _by_name(folder / "dense.csv", "layer", "tokens", "time_us", 1e-6)
    heads = _by_name(folder / "per_sequence.csv", "layer", "sequences", "time_us", 1e-6)
    prefill: _Lines = {}  # chunk -> prior -> seconds
    decode: _Lines = {}  # rows -> context -> seconds
    mixed: dict[tuple[int, int], _Lines] = {}  # chunk, rows -> prior -> context -> seconds
    columns = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    path = folder / "attention.csv"
    for _, (chunk, prior, rows, context), seconds in _cells(path, None, columns, "time_us", layers * 1e-6):
        if not rows:
            prefill.setdefault(chunk, {})[prior] = seconds
        elif not chunk:
            decode.setdefault(rows, {})[context] = seconds
        else:
            mixed.setdefault((chunk, rows), {}).setdefault(prior, {})[context] = seconds
    chunks, priors = _sizes(prefill), _sizes(itertools.chain.from_iterable(prefill.values()))
    batches, contexts = _sizes(decode), _sizes(itertools.chain.from_iterable(decode.values()))
    beside = [rows for rows in batches if all((chunk, rows) in mixed for chunk in chunks)]
    if len(chunks) < 2 or len(beside) < 2:
        raise ValueError(f"{path}: prompt parts are {chunks}, rows beside all of them {beside}; allowed: two of each")
    both = [[_both(mixed[chunk, rows], priors, contexts) for rows in beside] for chunk in chunks]
    return Operators(
        tokens=_total(dense, lambda name: 1 if name in ONCE else layers * (2 if name in TWICE else 1)),
        sequences=_total(heads, lambda name: 1),
        prefill=_table([chunks, priors], [_resampled(prefill[chunk], priors) for chunk in chunks]),
        decode=_table([batches, contexts], [_resampled(decode[rows], contexts) for rows in batches]),
        mixed=_table([chunks, priors, beside, contexts], np.swapaxes(both, 1, 2)),
        **more,
    )


def tpu(folder: Path, layers: int, **more: Any) -> Operators:
    """layers.csv and attention.csv, in nanoseconds. Arguments and errors as `gpu`.

    The compiler fuses and reorders: `q_proj` is all of QKV, `act_fn` nothing of its own, and below the first size of
    `up_proj` its work is in `down_proj` (or `gate_proj`), so what is missing there counts as nothing. Only sums over a
    layer mean something at such sizes (`operators_of`). Attention was measured up to 2048 tokens in all; beyond, what
    more context costs grows with the prompt part or the rows.
    """
    named = operators_of(folder)
    prefill: _Lines = {}
    decode: _Lines = {}
    columns = ("prefill_chunk_size", "kv_cache_size", "batch_size")
    for _, (chunk, context, rows), seconds in _cells(folder / "attention.csv", None, columns, "mean_ns", layers * 1e-9):
        lines, size = (prefill, chunk) if chunk else (decode, rows)
        lines.setdefault(size, {})[context] = seconds
    heads = {name: named.pop(name) for name in HEAD if name in named}
    return Operators(
        tokens=_total(named, lambda name: 1 if name in ONCE else layers),
        sequences=_total(heads, lambda name: 1),
        prefill=_grown(prefill),
        decode=_grown(decode),
        **more,
    )


_Line = dict[int, float]  # size -> seconds
_Lines = dict[int, _Line]


def operators_of(folder: Path) -> dict[str, dict[int, float]]:
    """Seconds of each operator of one layer by tokens, as `tpu` finds them in layers.csv; errors as `gpu`."""
    return _by_name(folder / "layers.csv", "layer_name", "input", "latency(ns)", 1e-9)


# --- files ----------------------------------------------------------------------------------------------------------


def _by_name(path: Path, name: str, size: str, time: str, unit: float) -> dict[str, _Line]:
    found: dict[str, _Line] = {}
    for label, (tokens,), seconds in _cells(path, name, (size,), time, unit):
        found.setdefault(label, {})[tokens] = seconds
    return found


def _cells(
    path: Path, name: str | None, columns: Sequence[str], time: str, unit: float
) -> list[tuple[str, tuple[int, ...], float]]:
    """Name, sizes and seconds of every line."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            if missing := {*columns, time, *([name] if name else [])} - set(reader.fieldnames or ()):
                raise ValueError(f"{path}: columns {sorted(missing)} are missing; allowed: a table with them")
            found = []
            for line in reader:
                sizes = tuple(int(_number(path, reader.line_num, column, line[column])) for column in columns)
                seconds = _number(path, reader.line_num, time, line[time]) * unit
                found.append((line[name] if name else "", sizes, seconds))
    except OSError as error:
        raise ValueError(f"cannot read {str(path)!r} ({error.strerror}); allowed: a readable file") from None
    if not found:
        raise ValueError(f"{path} has no line; allowed: a table of measured operators")
    return found


def _number(path: Path, line: int, column: str, cell: str | None) -> float:
    try:
        value = float(cell or "")
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{path}:{line}: {column} is {cell!r}; allowed: a number >= 0")
    return value


# --- grids ----------------------------------------------------------------------------------------------------------


def _sizes(found: Iterable[int]) -> list[int]:
    return sorted(set(found))


def _table(axes: Sequence[Sequence[int]], seconds: Any) -> Table:
    return Table(tuple(map(tuple, axes)), np.asarray(seconds, float))


def _total(named: Mapping[str, _Line], count: Callable[[str], int]) -> Table:
    """Of all operators, each so many times, at every size that one of them has; one that was not measured at a size
    between others of its own is interpolated, and outside of them counts as nothing."""
    sizes = _sizes(itertools.chain.from_iterable(named.values()))
    total = np.zeros(len(sizes))
    for name, line in named.items():
        own = _sizes(line)
        total += count(name) * np.interp(sizes, own, [line[size] for size in own], left=0.0, right=0.0)
    return _table([sizes], total)


def _resampled(line: _Line, at: Sequence[int]) -> np.ndarray:
    """Straight between what was measured; below it as the two smallest say, above it as the largest."""
    sizes = _sizes(line)
    seconds = np.array([line[size] for size in sizes])
    found = np.interp(at, sizes, seconds)
    if len(sizes) > 1:
        slope = (seconds[1] - seconds[0]) / (sizes[1] - sizes[0])
        below = np.asarray(at) < sizes[0]
        found[below] = np.maximum(seconds[0] + slope * (np.asarray(at)[below] - sizes[0]), 0.0)
    return found


def _both(lines: _Lines, priors: Sequence[int], contexts: Sequence[int]) -> np.ndarray:
    """Of one prompt part beside so many rows: [priors, contexts]."""
    over = {prior: _resampled(line, contexts) for prior, line in lines.items()}
    return np.stack(
        [
            _resampled({prior: float(line[column]) for prior, line in over.items()}, priors)
            for column in range(len(contexts))
        ],
        axis=1,
    )


def _grown(lines: _Lines) -> Table:
    """A full grid of lines that end early: beyond its end a line grows as the one before it does, times how much larger
    its own size is."""
    outer, inner = _sizes(lines), _sizes(size for line in lines.values() for size in line)
    made = np.empty((len(outer), len(inner)))
    for row, size in enumerate(outer):
        line = lines[size]
        for column, context in enumerate(inner):
            if context in line:
                made[row, column] = line[context]
            elif not row or not column:
                raise ValueError(f"attention of {size} tokens or rows is missing at context {context}; allowed: all")
            else:
                more = made[row - 1, column] - made[row - 1, column - 1]
                made[row, column] = made[row, column - 1] + more * size / outer[row - 1]
    return _table([outer, inner], made)
