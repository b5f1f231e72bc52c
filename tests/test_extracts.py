"""KV that is read behind the pass that completes it: when, for whom, and what becomes of it. No threads."""

import numpy as np
import pytest

from pdjax.extracts import Extracts
from pdjax.messages import Chunk, Iteration, Role, StartTransfer
from pdjax.request import SamplingParams
from pdjax.testing import spec
from pdjax.transfer.base import Unit, UnitHeader

SPEC = spec(0, Role.PREFILL)
PAGES = (3, 4)


class Reading:
    """Extracts of an instance that only counts what it is asked for."""

    def __init__(self):
        self.asked = []
        self.extracts = Extracts(SPEC, self.extract)

    def extract(self, transfer):
        self.asked.append((transfer.request, transfer.src_pages, transfer.tokens))
        kv = np.zeros((1, 2, transfer.tokens, 1, 1))
        yield Unit(UnitHeader(transfer.key, 0, 1, 0, transfer.tokens, kv.shape, "float64"), kv)

    def passes(self, number, **changes):
        fields = {"slot": SPEC.max_rows, "last": True, "stream": None, "sampling": SamplingParams(), "start": 2}
        chunk = Chunk(request=7, tokens=(1, 2, 3), pages=PAGES, **(fields | changes))
        self.extracts.dispatched(Iteration(0, number, (chunk,)))

    def start(self, key=9, request=7, pages=PAGES, tokens=5):
        transfer = StartTransfer(key, request, 0, 0, 1, pages, (8, 9), tokens, "whole")
        return list(self.extracts.units(transfer))


def test_a_prompt_that_leaves_is_read_with_its_last_chunk_and_not_again():
    reading = Reading()
    reading.passes(1)
    assert reading.asked == [(7, PAGES, 5)]
    (unit,) = reading.start(key=9)
    assert unit.header.key == 9 and unit.header.tokens == 5
    assert len(reading.asked) == 1


@pytest.mark.parametrize(
    "changes", [{"last": False}, {"slot": 0}, {"stream": 4}, {"sampling": SamplingParams(max_tokens=1)}]
)
def test_what_does_not_end_or_stays_or_streams_is_not_read_ahead(changes):
    reading = Reading()
    reading.passes(1, **changes)
    assert reading.asked == []


@pytest.mark.parametrize("other", [{"request": 8}, {"pages": (4, 3)}, {"tokens": 4}])
def test_a_transfer_of_something_else_is_read_from_the_pages(other):
    reading = Reading()
    reading.passes(1)
    reading.start(**other)
    assert len(reading.asked) == 2


def test_what_was_read_is_dropped_once_the_controller_has_seen_the_pass_and_issues_another():
    for behind, asked in ((1, 1), (2, 2)):
        reading = Reading()
        reading.passes(1)
        for number in range(2, 2 + behind):
            reading.extracts.dispatched(Iteration(0, number))
        reading.start()
        assert len(reading.asked) == asked
    assert SPEC.max_in_flight == 2


def test_units_are_given_out_once():
    reading = Reading()
    reading.passes(1)
    reading.start(key=9)
    reading.start(key=10)
    assert len(reading.asked) == 2
