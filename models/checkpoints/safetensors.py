"""Reads Hugging Face safetensors: a folder with one file or with shards and an index; called by `models.source`.

A file is 8 bytes of header length, a JSON header (tensor -> dtype, shape, byte range) and the data. Everything the
headers say is checked against the files when they are opened, before any parameter exists.
"""

import json
import logging
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pdjax.models.checkpoints.base import BFLOAT16, Files

_log = logging.getLogger("pdjax")

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": BFLOAT16, "F64": np.dtype("<f8")}
_MAX_HEADER = 100_000_000  # the format's own limit


class _Tensor(NamedTuple):
    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int  # byte in the file


class SafetensorsReader:
    """A `TensorReader` over the safetensors files of a folder.

    Raises:
        ValueError: no weights that can be read (only .bin, a Git-LFS pointer, an adapter), a shard that is missing, a
            shard and its index that disagree, a broken or truncated file.
    """

    def __init__(self, folder: Path):
        index = folder / INDEX
        if index.exists():
            self._tensors = _indexed(folder, index)
        elif (folder / SINGLE).exists():
            self._tensors = _header(folder / SINGLE)
        else:
            raise ValueError(_no_weights(folder))
        if any((folder / name).exists() for name in ("pytorch_model.bin", "pytorch_model.bin.index.json")):
            _log.info("%s: safetensors are read, pytorch_model.bin is not", folder)
        if "embed_tokens.weight" in self._tensors:  # saved from the base model: names without the prefix
            self._tensors = {k if k.startswith("lm_head.") else f"model.{k}": v for k, v in self._tensors.items()}
        self._files = Files(sorted({Path(tensor.path) for tensor in self._tensors.values()}))

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, name: str, rows: slice) -> np.ndarray[Any, Any]:
        path, dtype, shape, start = self._tensors[name]
        first, stop, _ = rows.indices(shape[0])
        row = math.prod(shape[1:]) * dtype.itemsize
        data = self._files.read(path, start + first * row, (stop - first) * row, name)
        return np.frombuffer(data, dtype).reshape(stop - first, *shape[1:])

    def file(self, name: str) -> str:
        return self._tensors[name].path

    def close(self) -> None:
        self._files.close()


def _indexed(folder: Path, index: Path) -> dict[str, _Tensor]:
    """The tensors that an index lists, each from the file that it says; files it does not list are not opened."""
    try:
        places: dict[str, str] = json.loads(index.read_text())["weight_map"]
        by_file: dict[str, list[str]] = {}
        for name, file in places.items():
            by_file.setdefault(file, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: not a weight index: {pointer_text(index) or error!r}") from None
    tensors: dict[str, _Tensor] = {}
    for file, names in sorted(by_file.items()):
        if Path(file).name != file:
            raise ValueError(f"{index}: file {file!r}; allowed: names of files in the same folder")
        if not (folder / file).exists():
            raise ValueError(f"{folder / file}: missing; {INDEX} says that it holds {len(names)} tensors, {names[0]!r}")
        header = _header(folder / file)
        for name in names:
            if name not in header:
                raise ValueError(f"{folder / file}: tensor {name!r} is missing; {INDEX} says that it is in this file")
            tensors[name] = header[name]
        skipped = sorted(set(header) - set(names))
        if skipped:
            _log.info("%s: %d tensors are not in the index and skipped: %s", folder / file, len(skipped), skipped[0])
    return tensors


def _header(path: Path) -> dict[str, _Tensor]:
    size = os.path.getsize(path)
    with open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise ValueError(f"{path}: not a safetensors file, or truncated in its header{pointer_text(path)}")
        try:
            entries = json.loads(f.read(length))
        except (ValueError, RecursionError):
            raise ValueError(f"{path}: not a safetensors file: its header is not JSON") from None
    if not isinstance(entries, dict):
        raise ValueError(f"{path}: not a safetensors file: its header is no JSON object")
    tensors = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        try:
            kind, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            numbers = (*shape, start, stop)
            if not isinstance(kind, str) or not all(isinstance(n, int) and n >= 0 for n in numbers):
                raise ValueError(numbers)
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{path}: tensor {name!r} has a broken header entry") from None
        if kind not in _DTYPES:
            raise ValueError(f"{path}: tensor {name!r} has dtype {kind}; allowed: {', '.join(_DTYPES)}")
        dtype = _DTYPES[kind]
        if stop - start != math.prod(shape) * dtype.itemsize or start < 0:
            raise ValueError(f"{path}: tensor {name!r} has {stop - start} bytes, not those of {list(shape)} {kind}")
        if 8 + length + stop > size:
            raise ValueError(
                f"{path}: truncated: tensor {name!r} ends at byte {8 + length + stop}, the file has {size} bytes"
            )
        tensors[name] = _Tensor(str(path), dtype, shape, 8 + length + start)
    return tensors


def pointer_text(path: Path) -> str:
    """A remark for messages if the file is a Git-LFS pointer, else ""."""
    with open(path, "rb") as f:
        head = f.read(64)
    return (
        ": it is a Git-LFS pointer; fetch the file itself (git lfs pull)"
        if head.startswith(b"version https://git-lfs")
        else ""
    )


def _no_weights(folder: Path) -> str:
    files = {path.name for path in folder.iterdir()}
    if any(name.startswith("pytorch_model") and name.endswith((".bin", ".bin.index.json")) for name in files):
        return (
            f"{folder}: holds only pytorch_model.bin, which is a pickle and never loaded; convert it with "
            "safetensors.torch.save_file, or save the model with safe_serialization=True"
        )
    if any(name.startswith("adapter_model.") for name in files):
        return f"{folder}: holds only an adapter (LoRA); merge it into its base model first"
    return f"{folder}: no weights; allowed: {INDEX} or {SINGLE}"
