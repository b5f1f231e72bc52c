"""Any order of arrivals, aborts, failed transfers and lost instances: every request ends once, tokens right."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.messages import Abort, StartTransfer, TransferFailed
from pdjax.request import State
from pdjax.testing import World, fake_tokens
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
    requests = crowd(seed, count=15)
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
        assert record.state in (State.FINISHED, State.ABORTED)
        assert record.token_ids == (want if record.state is State.FINISHED else want[: len(record.token_ids)])
        assert list(record.token_ids) == w.collected.tokens.get(request.id, [])
