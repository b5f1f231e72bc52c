"""Reads GGUF files: header to a table of metadata and tensors, tensors by rows; called by `models.source`.

The `gguf` package turns quantised blocks into numbers. The header is read here: the package maps the whole file and
takes seconds to index a vocabulary.
"""

import math
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import gguf
import numpy as np

from pdjax.models.checkpoints.base import BFLOAT16, Files
from pdjax.models.checkpoints.safetensors import pointer_text

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_PLAIN = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": BFLOAT16}
_QUANTISED = ("Q8_0", "Q4_0", "Q4_1")

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FREQS = "rope_freqs.weight"


class Tensor(NamedTuple):
    """One tensor: its type's name, shape [out, in] or [out], and first byte in the file."""

    kind: str
    shape: tuple[int, ...]
    start: int


class Header(NamedTuple):
    """What stands before the data. `tensors` have the names of the file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def read_header(path: Path) -> Header:
    """Metadata and tensor table of a file.

    Raises:
        ValueError: not a GGUF file, a version or tensor type that is not read, or truncated.
    """
    with open(path, "rb") as f:
        if f.read(4) != _MAGIC:
            raise ValueError(
                f"model is {str(path)!r}, not a GGUF file{pointer_text(path)}; allowed: a GGUF file or a folder"
            )
        try:
            return _header(path, f)
        except (struct.error, UnicodeDecodeError, KeyError):
            raise ValueError(f"{path}: truncated or broken in its header") from None


def hf_name(name: str) -> str:
    """The Hugging Face name of a tensor; unknown names stay as they are, and so are reported as leftover."""
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        return f"model.layers.{layer}.{_LAYER[part]}.{suffix}" if part in _LAYER else name
    return f"{_OUTER[stem]}.{suffix}" if stem in _OUTER else name


class GgufReader:
    """A `TensorReader` over one GGUF file; quantised tensors are read as float32."""

    def __init__(self, header: Header):
        self._path = str(header.path)
        self._tensors = {hf_name(name): tensor for name, tensor in header.tensors.items() if name != ROPE_FREQS}
        arch = header.metadata.get("general.architecture")
        heads = header.metadata.get(f"{arch}.attention.head_count")
        kv_heads = header.metadata.get(f"{arch}.attention.head_count_kv", heads)
        # Only the llama architecture has q and k in the order of neighbouring rotary pairs.
        self._heads = {"q_proj": heads, "k_proj": kv_heads} if arch == "llama" else {}
        self._files = Files([header.path])

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, name: str, rows: slice) -> np.ndarray[Any, Any]:
        first, stop, _ = rows.indices(self.shape(name)[0])
        heads = self._heads.get(name.split(".")[-2]) if name.startswith("model.layers.") else None
        if not heads:
            return self._rows(name, first, stop)
        # Row 2i+j of a head in the file is row j*(H/2)+i in Hugging Face's order, so whole heads are read.
        size = self.shape(name)[0] // heads
        low, high = first // size, -(-stop // size)
        data = self._rows(name, low * size, high * size)
        pairs = data.reshape(high - low, size // 2, 2, *data.shape[1:])
        return pairs.swapaxes(1, 2).reshape(data.shape)[first - low * size : stop - low * size]

    def file(self, name: str) -> str:
        return self._path

    def close(self) -> None:
        self._files.close()

    def _rows(self, name: str, first: int, stop: int) -> np.ndarray[Any, Any]:
        kind, shape, start = self._tensors[name]
        row = _bytes(kind, shape) // shape[0]
        data = self._files.read(self._path, start + first * row, (stop - first) * row, name)
        if kind in _PLAIN:
            return np.frombuffer(data, _PLAIN[kind]).reshape(stop - first, *shape[1:])
        # As one long row: the package works through rows in small groups, which is slow for many short ones.
        blocks = np.frombuffer(data, np.uint8).reshape(1, -1)
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]).reshape(stop - first, *shape[1:])


def _header(path: Path, f: BinaryIO) -> Header:
    version = _scalar(f, "I")
    if version not in _VERSIONS:
        raise ValueError(f"{path}: GGUF version {version} (or not little-endian); allowed: {_VERSIONS}")
    count, pairs = _scalar(f, "Q"), _scalar(f, "Q")
    metadata = {}
    for _ in range(pairs):
        key = _text(f)
        metadata[key] = _value(f, _scalar(f, "I"))
    entries = []
    for _ in range(count):
        name = _text(f)
        # The file has the fastest axis first.
        shape = tuple(_scalar(f, "Q") for _ in range(_scalar(f, "I")))[::-1]
        entries.append((name, _kind(path, name, _scalar(f, "I")), shape, _scalar(f, "Q")))
    align = metadata.get("general.alignment", 32)
    data = -(-f.tell() // align) * align
    tensors, size = {}, os.path.getsize(path)
    for name, kind, shape, offset in entries:
        end = data + offset + _bytes(kind, shape)
        if end > size:
            raise ValueError(f"{path}: truncated: tensor {name!r} ends at byte {end}, the file has {size} bytes")
        tensors[name] = Tensor(kind, shape, data + offset)
    return Header(path, metadata, tensors)


def _kind(path: Path, name: str, number: int) -> str:
    known = {member.value: member.name for member in gguf.GGMLQuantizationType}
    kind = known.get(number, str(number))
    if kind not in _PLAIN and kind not in _QUANTISED:
        raise ValueError(f"{path}: tensor {name!r} has type {kind}; allowed: {', '.join([*_PLAIN, *_QUANTISED])}")
    return kind


def _bytes(kind: str, shape: tuple[int, ...]) -> int:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return math.prod(shape) // block * size


def _scalar(f: BinaryIO, code: str) -> Any:
    code = f"<{code}"
    return struct.unpack(code, f.read(struct.calcsize(code)))[0]


def _text(f: BinaryIO) -> str:
    size = _scalar(f, "Q")
    data = f.read(size)
    if len(data) < size:
        raise struct.error
    return data.decode()


def _value(f: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _text(f)
    if kind != _ARRAY:
        return _scalar(f, _SCALARS[kind])
    kind, count = _scalar(f, "I"), _scalar(f, "Q")
    if kind in (_STRING, _ARRAY):
        return [_value(f, kind) for _ in range(count)]
    code = f"<{count}{_SCALARS[kind]}"
    return list(struct.unpack(code, f.read(struct.calcsize(code))))
