"""The KV of whole transfers, read from the pages of one instance. Enters: iterations as they are dispatched, transfers
as they start. Leaves: units. Called by a lane's thread, for its instance.

A pass updates the pages in place, so whatever reads them waits for the passes issued before. When the last chunk of a
prompt is done and its transfer starts, the next pass runs already, and the KV would wait for its end (a chunk of 256
tokens took 1200 ms on one core, reading as many tokens 25 ms). So a prompt that will leave is read right behind its
last chunk, in front of the next pass. That the transfer starts at once is likely and not certain: what is not asked
for when the controller has seen the end of the pass and issues another is dropped, and read again if it comes to that.
"""

import dataclasses
from collections.abc import Callable, Iterator

from pdjax.messages import Chunk, InstanceSpec, Iteration, StartTransfer
from pdjax.transfer.base import Unit

Extract = Callable[[StartTransfer], Iterator[Unit]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Read:
    number: int  # of the iteration
    transfer: StartTransfer  # as far as it is known beforehand
    units: list[Unit]


class Extracts:
    """Units of whole transfers from one instance; `extract` dispatches the reading of one."""

    def __init__(self, spec: InstanceSpec, extract: Extract) -> None:
        self._spec, self._extract = spec, extract
        self._read: dict[int, _Read] = {}  # by request

    def dispatched(self, iteration: Iteration) -> None:
        """Reads the prompts that end in the iteration and leave."""
        told = iteration.number - self._spec.max_in_flight  # the controller has seen the end of this one
        self._read = {request: read for request, read in self._read.items() if read.number > told}
        for chunk in iteration.chunks:
            if self._leaves(chunk):
                transfer = _foreseen(iteration.instance, chunk)
                self._read[chunk.request] = _Read(iteration.number, transfer, list(self._extract(transfer)))

    def units(self, transfer: StartTransfer) -> Iterator[Unit]:
        """The units of a transfer that starts."""
        read = self._read.pop(transfer.request, None)
        if read is None or _what(read.transfer) != _what(transfer):
            yield from self._extract(transfer)
            return
        for unit in read.units:
            yield dataclasses.replace(unit, header=dataclasses.replace(unit.header, key=transfer.key))

    def _leaves(self, chunk: Chunk) -> bool:
        """Its row will live elsewhere, and nothing of it streams."""
        elsewhere = chunk.slot == self._spec.max_rows
        return chunk.last and elsewhere and chunk.stream is None and chunk.sampling.max_tokens > 1


def _foreseen(instance: int, chunk: Chunk) -> StartTransfer:
    tokens = chunk.start + len(chunk.tokens)
    return StartTransfer(-1, chunk.request, 0, instance, -1, chunk.pages, (), tokens, "whole")


def _what(transfer: StartTransfer) -> tuple[int, tuple[int, ...], int]:
    return transfer.request, transfer.src_pages, transfer.tokens
