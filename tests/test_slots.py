"""The table of rows that policies see, on a cluster whose every step can be followed."""

import dataclasses
import math

import pytest

from pdjax.messages import Role
from pdjax.request import SLO
from pdjax.testing import World, spec
from tests.worlds import ask, policy, specs


def tables(w):
    """(rows here, rows on their way) of every instance after each event, by number; checks each against its lane."""
    while w.step():
        for lane in w.controller.books.instances:
            table = lane.table
            rows = {row.ask.id: row for row in lane.running}
            here = [live.id for live, is_here in zip(table.asks, table.here, strict=True) if is_here]
            assert sorted(here) == sorted(rows)
            assert len(table.asks) == lane.rows + lane.incoming
            for at, live in enumerate(table.asks):
                if live.id in rows:
                    assert (table.issued[at], table.first_s[at]) == (rows[live.id].issued, rows[live.id].first_s)
            yield lane.spec.index, table


@pytest.mark.parametrize("name", ["colocated", "stream", "dynamic_stream"])
def test_it_has_the_rows_here_as_they_are_one_by_one_and_those_on_their_way(name):
    w = World(specs(name), policy(name))
    w.add(*(ask(number, prompt=9, tokens=6, at_s=0.01 * number) for number in range(12)))
    most = max(len(table.asks) for _, table in tables(w))
    assert most > 1
    assert all(not lane.table.asks for lane in w.controller.books.instances)


def test_a_row_that_starts_over_is_not_here_before_the_first_token_of_its_new_stay():
    w = World(specs("colocated", num_pages=9), policy("colocated"))
    w.add(*(ask(number, prompt=9, tokens=20) for number in range(8)))
    for _ in tables(w):  # they are compared with the rows one by one
        pass
    assert any(record.preemptions for record in w.collected.records.values())


def test_limits_are_in_seconds_and_infinite_where_there_are_none():
    w = World([spec(0, Role.MIXED)], policy("colocated"))
    limited = dataclasses.replace(ask(0, tokens=9, at_s=1.0), slo=SLO(tpot_ms=30, itl_p99_ms=50, e2e_ms=2000))
    w.add(limited, ask(1, tokens=9, at_s=1.0))
    table = next(table for _, table in tables(w) if len(table.asks) == 2)
    at = {live.id: row for row, live in enumerate(table.asks)}
    found = {number: (table.tpot_s[row], table.pass_s[row], table.end_s[row]) for number, row in at.items()}
    assert found == {0: (0.03, 0.05, 3.0), 1: (math.inf,) * 3}
