"""Arrivals, aborts, failed transfers, lost instances and revisions in any order: all end once, tokens right."""

import dataclasses
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.messages import Abort, Role, StartTransfer, TransferFailed
from pdjax.request import SLO, SLOClass, State
from pdjax.schedulers import ChunkedColocated, Disaggregated, Dynamic, Splitwise
from pdjax.schedulers.admission import guarded
from pdjax.testing import World, fake_tokens, spec
from tests.revisers import Restless
from tests.worlds import POLICIES, crowd, policy, specs


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(POLICIES)),
    seed=st.integers(0, 10_000),
    pages=st.sampled_from([25, 32, 65]),
    aborts=st.dictionaries(st.integers(0, 14), st.floats(0, 1.5), max_size=6),
    failures=st.sets(st.integers(1, 30), max_size=4),
    lost=st.dictionaries(st.integers(0, 3), st.floats(0, 1.5), max_size=3),
)
def test_every_request_ends_once_with_the_right_tokens_and_every_page_comes_back(
    name, seed, pages, aborts, failures, lost
):
    w = World(specs(name, num_pages=pages), policy(name))
    check(w, crowd(seed, count=15), aborts, failures, lost)


def check(w, requests, aborts, failures, lost, ends=frozenset()):
    """Serves the requests among aborts (request -> time), transfers that fail (by key) and lost instances; all but the
    last may be lost."""
    w.add(*requests)
    for number, at_s in aborts.items():
        w.cluster.post(Abort(number), at_s)
    submit = w.cluster.submit

    def wrapped(command):
        if isinstance(command, StartTransfer) and command.key in failures:
            w.cluster.post(TransferFailed(command.key, "injected"))
        else:
            submit(command)

    w.cluster.submit = wrapped
    instances = len(w.cluster.specs)
    for instance, at_s in [item for item in lost.items() if item[0] < instances][: instances - 1]:
        w.cluster.lose(instance, "injected", at_s)
    w.run()
    for request in requests:
        record, want = w.collected.records[request.id], fake_tokens(request)
        assert record.state in {State.FINISHED, State.ABORTED, *ends}
        assert record.token_ids == (want if record.state is State.FINISHED else want[: len(record.token_ids)])
        assert list(record.token_ids) == w.collected.tokens.get(request.id, [])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    roles=st.lists(st.sampled_from(list(Role)), min_size=2, max_size=4),
    seed=st.integers(0, 10_000),
    rate=st.sampled_from([0.05, 0.3, 0.9]),
    pages=st.sampled_from([25, 32, 65]),
    aborts=st.dictionaries(st.integers(0, 14), st.floats(0, 1.5), max_size=4),
    failures=st.sets(st.integers(1, 30), max_size=3),
    lost=st.dictionaries(st.integers(0, 3), st.floats(0, 1.5), max_size=2),
)
def test_moves_flips_and_drops_at_any_time_change_no_token(roles, seed, rate, pages, aborts, failures, lost):
    if Role.MIXED not in roles and len(set(roles)) == 1:
        roles[0] = Role.MIXED
    w = World([spec(index, role, num_pages=pages) for index, role in enumerate(roles)], Restless(seed, rate))
    check(w, crowd(seed, count=15), aborts, failures, lost, {State.REJECTED})
    changed = {flip.instance: flip.after for flip in w.collected.flips}
    for lane in w.controller.books.instances:
        assert lane.role is changed.get(lane.spec.index, lane.spec.role)
        assert not lane.alive or (lane.next_role is None) == (lane.spec.index not in w.controller.books.flips)
    records = w.collected.records.values()
    assert sum(len(record.moves) for record in records) == len(w.collected.moves)


APART, MIXED = [Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE], [Role.MIXED]
GUARDED = {
    "chunked": (ChunkedColocated, MIXED),
    "disaggregated": (lambda: Disaggregated(8), APART),
    "splitwise": (lambda: Splitwise(8, queue_tokens=1), APART),
    "dynamic": (lambda: Dynamic(8), APART),
    "dynamic, disaggregated": (lambda: Dynamic(8, decode_chunk=0), APART),
    "dynamic, colocated": (lambda: Dynamic(mixed=True), MIXED),
}


def limits(draw):
    """Some limits, from those that nobody can keep to those that everybody does."""
    base_ms = {"ttft_ms": 40, "tpot_ms": 6, "itl_p99_ms": 10, "e2e_ms": 150}
    return SLO(**{name: draw.choice([None, None, ms * 10 ** draw.uniform(-1, 2)]) for name, ms in base_ms.items()})


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(GUARDED)),
    seed=st.integers(0, 10_000),
    rows=st.sampled_from([1, 2, 8]),
    pages=st.sampled_from([25, 65]),
    admission=st.sampled_from([True, True, False]),
    drop_late=st.booleans(),
    hurry=st.sampled_from([0, 0.2, 1]),
    failures=st.sets(st.integers(1, 30), max_size=2),
)
def test_with_limits_every_request_ends_as_well_or_is_rejected(
    name, seed, rows, pages, admission, drop_late, hurry, failures
):
    make, roles = GUARDED[name]
    draw = random.Random(seed)
    requests = [
        dataclasses.replace(
            request,
            arrival_s=request.arrival_s * hurry,
            slo=limits(draw),
            laxer=(SLOClass("laxer", limits(draw)),) * draw.randint(0, 1),
        )
        for request in crowd(seed, count=20)
    ]
    instances = [spec(index, role, num_pages=pages, max_rows=rows) for index, role in enumerate(roles)]
    w = World(instances, guarded(make(), admission=admission, drop_late=drop_late))
    check(w, requests, {}, failures, {}, {State.REJECTED})
