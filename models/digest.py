"""Tells two models apart without reading all of them. Enters: a `Source`. Leaves: a text. For `pdjax.mpi.facts`."""

import contextlib
import hashlib
from pathlib import Path

from pdjax.models.source import Source

_FILE_BYTES = 1 << 16  # of each end of a file


def digest(source: Source) -> str:
    """16 hexadecimal digits over the config and samples of the weights: the first, the middle and the last row of every
    tensor, so that 100 GB take no longer than 1 GB. Of orbax folders, sizes and both ends of every file.

    Raises:
        ValueError: the checkpoint is broken.
    """
    state = hashlib.blake2b(repr(source.config).encode(), digest_size=8)
    if source.orbax_folder is not None:
        for file in sorted(path for path in source.orbax_folder.rglob("*") if path.is_file()):
            state.update(f"{file.relative_to(source.orbax_folder)} {file.stat().st_size}".encode())
            state.update(_ends(file))
        return state.hexdigest()
    reader = source.tensors()
    if reader is not None:
        with contextlib.closing(reader):
            for name in sorted(reader.names()):
                rows = reader.shape(name)[0]
                state.update(f"{name} {reader.shape(name)}".encode())
                for row in sorted({0, rows // 2, rows - 1}):
                    state.update(reader.read(name, slice(row, row + 1)).tobytes())
    return state.hexdigest()


def _ends(path: Path) -> bytes:
    with path.open("rb") as file:
        head = file.read(_FILE_BYTES)
        file.seek(max(file.tell(), path.stat().st_size - _FILE_BYTES))
        return head + file.read(_FILE_BYTES)
