"""Rows that move and instances that flip on real meshes change no token: pages are full of NaN and of other rows."""

import pytest

from pdjax import SLO
from pdjax.workload import Item, Workload
from tests.engines import engine, ids, poison, sampled, settle
from tests.revisers import Turncoat

pytest_plugins = ["tests.shared_engines"]
ASKED = [(ids(seed, length), sampled(seed, max_tokens=40)) for seed, length in enumerate((1, 15, 16, 33, 50))]
ROOM = {"decode_num_pages": 40, "decode_max_batch": 8}  # slots for all rows: a flip waits for those that wait for one


@pytest.mark.slow
@pytest.mark.parametrize("stream_layers", [0, 1])
def test_wandering_rows_and_flips_change_no_token(colocated, stream_layers):
    want = colocated.generate(*map(list, zip(*ASKED, strict=True)))
    with engine(stream_layers=stream_layers, scheduler=Turncoat(), **ROOM, verify_kv=True) as wandering:
        poison(wandering)
        items = tuple(Item(0.0, prompt, params, SLO(), "") for prompt, params in ASKED)
        report = wandering.replay(Workload(items, ""))
        settle(wandering)
    assert [record.token_ids for record in report.records] == [result.token_ids for result in want]
    assert min(len(record.moves) for record in report.records) >= 5
    assert len(report.flips) >= 4
    assert report.summary()["moves"] == sum(len(record.moves) for record in report.records)
