"""Long runs with all that wears a server out: the last answers are as right as the first, and nothing is left."""

import random

import pytest

from pdjax import compiles
from pdjax.messages import Abort, Role, StartTransfer
from pdjax.request import State
from pdjax.testing import World, fake_tokens, spec
from tests.engines import WAIT_S, First, engine, ids, sampled, settle, tokens
from tests.worlds import POLICIES, ask, crowd, policy, specs

pytest_plugins = ["tests.shared_engines"]

STAGES = (State.WAITING, State.PREFILLING, State.MIGRATING, State.DECODING)


def tables(w: World) -> list:
    """What the controller remembers of requests."""
    books = w.controller.books
    kept = [books.live, books.queue, books.held, books.transfers]
    for lane in books.instances:
        kept += [lane.prefills, lane.batch, lane.in_flight]
    return [len(table) for table in kept]


@pytest.mark.parametrize("name", ["chunked", "pull", "dynamic_stream"])
def test_after_300_requests_and_aborts_at_every_stage_the_last_answers_are_right_and_nothing_is_left(name):
    w, empty = World(specs(name), policy(name)), tables(World(specs(name), policy(name)))
    requests = crowd(seed=11, count=300)
    w.add(*requests)
    stages = [stage for stage in STAGES if name != "chunked" or stage is not State.MIGRATING]
    wanted, hit = {number: stages[number // 3 % len(stages)] for number in range(0, 299, 3)}, set()
    while w.step():
        live = w.controller.books.live
        for number in wanted.keys() & live.keys():
            if wanted[number] is live[number].state:
                hit.add(wanted.pop(number))
                w.cluster.post(Abort(number))
    w.run()  # nothing happens; it checks that everything has ended and all is free
    assert hit == set(stages)
    assert tables(w) == empty
    for request in requests:
        record, want = w.collected.records[request.id], fake_tokens(request)
        assert record.token_ids == (want if record.state is State.FINISHED else want[: len(record.token_ids)])
    assert w.collected.records[299].state is State.FINISHED


@pytest.mark.parametrize("name", POLICIES)
def test_pages_for_40_percent_of_the_demand_preempt_and_change_no_token(name):
    """Every row wants 15 pages, an instance has 8 rows: 120, of which there are 48."""
    small = [spec(index, role, num_pages=49, max_model_len=60) for index, role in enumerate(POLICIES[name][2])]
    w = World(small, policy(name))
    requests = [ask(number, prompt=20, tokens=40) for number in range(40)]
    w.add(*requests)
    records = w.run().records
    assert sum(record.preemptions for record in records.values()) > 0
    assert {r.id: records[r.id].token_ids for r in requests} == {r.id: fake_tokens(r) for r in requests}


@pytest.mark.parametrize("name", ["pull", "stream", "dynamic", "dynamic_stream"])
def test_no_transfer_of_a_preempted_request_moves_less_than_its_context(name):
    w = World(specs(name, num_pages=26), policy(name))
    requests = crowd(seed=12, count=30)
    w.add(*requests)
    submit, moved = w.cluster.submit, []

    def watched(command):
        if isinstance(command, StartTransfer):
            live, size = w.controller.books.live[command.request], w.controller.books.instances[0].spec.page_size
            assert command.tokens >= len(live.request.prompt_ids) > 0
            assert len(command.dst_pages) * size >= command.tokens
            assert command.mode == "stream" or len(command.src_pages) * size >= command.tokens
            moved.append(live.preemptions)
        submit(command)

    w.cluster.submit = watched
    w.run()
    assert any(moved), "no transfer of a request that was preempted before"


@pytest.mark.parametrize("name", ["pull", "stream"])
def test_an_engine_that_was_idle_for_longer_than_any_timeout_serves_the_next_request(name):
    w = World(specs(name), policy(name), transfer_timeout_s=2.0)
    w.add(ask(0), ask(1, at_s=10_000.0))
    records = w.run().records
    assert [records[i].token_ids for i in (0, 1)] == [fake_tokens(ask(i)) for i in (0, 1)]
    assert records[1].restarts == 0


def test_after_many_aborts_as_many_rows_fit_as_at_the_start():
    w = World([spec(0, Role.PREFILL), spec(1, Role.DECODE)], policy("pull"))
    requests = crowd(seed=13, count=200)
    w.add(*requests)
    for number in range(0, 200, 3):
        w.cluster.post(Abort(number), 0.3)
    while w.step():
        pass
    later = w.cluster.now() + 1
    w.add(*(ask(1000 + i, tokens=40, at_s=later) for i in range(8)))
    deepest = 0
    while w.step():
        deepest = max(deepest, len(w.controller.books.instances[1].batch))
    assert deepest == w.controller.books.instances[1].spec.max_rows == 8


# --- on devices -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_engine_gives_300_right_answers_through_aborts_at_every_stage_and_compiles_nothing(streamed, colocated):
    draw = random.Random(17)
    prompts = [ids(seed, draw.randint(1, 100)) for seed in range(300)]
    each = [sampled(seed, max_tokens=draw.randint(1, 16), temperature=seed % 2) for seed in range(300)]
    want = tokens(colocated.generate(prompts, each))
    controller, handle = streamed._controller, streamed._controller.handle
    wanted, hit = {}, set()

    def watched(event, now):
        """Aborts a chosen request when it is first seen in its state."""
        commands = handle(event, now)
        live = controller.books.live
        for number in wanted.keys() & live.keys():
            if wanted[number] is live[number].state:
                hit.add(wanted.pop(number))
                streamed._cluster.post(Abort(number))
        return commands

    before = compiles.compiled()[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller, "handle", watched)
        first = streamed.submit([1], sampled(1, max_tokens=1)).request.id + 1  # requests are numbered in turn
        wanted |= {first + number: STAGES[number // 3 % 4] for number in range(0, 299, 3)}
        handles = [streamed.submit(prompt, params) for prompt, params in zip(prompts, each, strict=True)]
        got = [one.result(WAIT_S) for one in handles]
    settle(streamed)
    assert compiles.compiled()[0] == before
    assert hit == set(STAGES)
    finished = [result.finish_reason != "abort" for result in got]
    assert 200 <= sum(finished) < 300 and finished[-1]
    for result, tokens_of, done in zip(got, want, finished, strict=True):
        assert result.token_ids == (tokens_of if done else tokens_of[: len(result.token_ids)])


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", [First(), "disaggregated"], ids=["colocated", "disaggregated"])
def test_an_engine_with_pages_for_40_percent_of_the_demand_changes_no_token(scheduler, colocated):
    """Four rows of 6 pages each want 24; there are 9."""
    prompts, params = [ids(seed, 40) for seed in range(12)], sampled(1, max_tokens=50)
    with engine(scheduler=scheduler, max_model_len=96, decode_num_pages=10, prefill_num_pages=10) as scarce:
        results = scarce.generate(prompts, params)
        settle(scarce)
    assert sum(result.record.preemptions for result in results) > 0
    assert tokens(results) == tokens(colocated.generate(prompts, params))
