"""What every checkpoint reader offers to `models.weights`, whatever its files look like.

Files are read by byte ranges and not memory-mapped: pages of a mapped file count as the memory of the process, and a
load is meant to need little more than the weights that stay.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class TensorReader(Protocol):
    """Tensors of one checkpoint, by Hugging Face name (`model.layers.0.self_attn.q_proj.weight`) and layout."""

    def names(self) -> set[str]:
        """All tensors there are."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """[out, in] of a matrix, [out] of a vector."""
        ...

    def read(self, name: str, rows: slice) -> np.ndarray[Any, Any]:
        """Rows `start:stop` of the first axis, in the file's float type, or float32 where it is quantised.

        Raises:
            ValueError: the file cannot be read there; the message names file and tensor.
        """
        ...

    def file(self, name: str) -> str:
        """Path of the file that holds the tensor, for messages."""
        ...

    def close(self) -> None:
        """Closes the files; further reads fail."""
        ...


class Files:
    """Open files read by byte ranges."""

    def __init__(self, paths: Sequence[Path]):
        self._fds = {str(path): os.open(path, os.O_RDONLY) for path in paths}

    def read(self, path: str, start: int, size: int, name: str) -> bytearray:
        """`size` bytes at `start`; ValueError naming file and tensor if the file ends before."""
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            got = os.preadv(self._fds[path], [view[done:]], start + done)
            if not got:
                raise ValueError(f"{path}: truncated: tensor {name!r} ends at byte {start + size}")
            done += got
        return data

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
