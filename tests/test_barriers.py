"""When pages and slots of an ended row come back."""

from pdjax import fleet, simulation
from pdjax.curves import Curves, Decode
from pdjax.fleet import Pool
from pdjax.messages import Role
from pdjax.schedulers import ChunkedColocated, Disaggregated

# A pass takes a second; KV is there at once.
SECOND = Curves((1.0, 0.0, 0.0), (Decode(0, 1.0, 0.0, 0.0),))


def test_an_ended_row_waits_for_no_pass_of_the_instance_that_computed_its_prompt():
    slow = Curves((10.0, 0.0, 0.0), (Decode(0, 1.0, 0.0, 0.0),))
    pools = [Pool(Role.PREFILL, 1, slow, 4096, 1), Pool(Role.DECODE, 1, SECOND, 4096, 1, max_rows=1)]
    requests = simulation.asks([(8, 6), (8, 2), (8, 2)], [0.0, 0.0, 0.0])
    run = simulation.simulate(fleet.build(pools), requests, Disaggregated(batch_tokens=1))
    # Computed at 10, 20 and 30 s; the slot is free at 15 s, in the middle of the second pass.
    assert [record.timeline.token_s[-1] for record in run.records] == [15.0, 21.0, 31.0]


def test_a_row_whose_end_was_known_gives_its_slot_to_the_next_pass():
    pools = [Pool(Role.MIXED, 1, SECOND, 4096, 1, max_rows=2)]
    requests = simulation.asks([(4, 3)] * 3, [0.0] * 3)
    run = simulation.simulate(fleet.build(pools), requests, ChunkedColocated(64))
    starts = sorted(record.timeline.prefill_start_s for record in run.records)
    first_end = min(record.timeline.token_s[-1] for record in run.records)
    assert starts[2] <= first_end + 1  # the pass that was issued before the end was seen, and no other
