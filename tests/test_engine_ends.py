"""Requests that are given up, and engines that break or are closed: what goes wrong reaches those it concerns, nobody
else, and leaves no page behind."""

import threading

import pytest

import pdjax
from pdjax.schedulers import Disaggregated
from tests.engines import GREEDY, WAIT_S, engine, first_token_of, ids, sampled, settle, tokens, usable, wire

pytest_plugins = ["tests.shared_engines"]
pytestmark = pytest.mark.usefixtures("everything_ends")


# --- aborts ---------------------------------------------------------------------------------------------------------


LONG = pdjax.SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


def test_an_abort_keeps_what_there_is(apart):
    handle = apart.submit(ids(12, 9), LONG)
    first = next(iter(handle)).token_ids  # leaving the loop here aborts
    result = handle.result(WAIT_S)
    assert result.finish_reason == "abort" and 0 < len(result.token_ids) < 200
    assert result.token_ids[: len(first)] == first


@pytest.mark.parametrize("read", [0, 1, 3])
def test_a_stream_left_early_is_aborted_and_its_pages_come_back(apart, read):
    deltas = apart.stream(ids(13, 9), LONG)
    for _ in range(read):
        next(deltas)
    (handle,) = apart._handles.values()
    deltas.close()
    assert handle.result(WAIT_S).finish_reason == "abort"
    settle(apart)


def test_ctrl_c_while_waiting_aborts_the_request(pulled):
    wire(pulled).hold()
    handle = pulled.submit(ids(13, 9), GREEDY)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(handle._ended.threads, "wait_for", _interrupt)
        handle.result(WAIT_S)
    assert handle.result(WAIT_S).finish_reason == "abort"
    wire(pulled).release()


def _interrupt(*arguments):
    raise KeyboardInterrupt


def test_a_request_aborted_in_the_middle_of_its_transfer_disturbs_no_other(pulled, colocated):
    prompts = [ids(seed, 20) for seed in range(6)]
    wire(pulled).hold()
    handles = [pulled.submit(prompt, GREEDY) for prompt in prompts[:2]]
    victim = handles[0]
    for handle in handles:
        first_token_of(handle)
    victim.abort()
    assert victim.result(WAIT_S).finish_reason == "abort"
    assert pulled.free_pages != usable(pulled)  # the other one's, and maybe the victim's until both sides are done
    wire(pulled).release()
    handles += [pulled.submit(prompt, GREEDY) for prompt in prompts[2:]]
    assert tokens(handle.result(WAIT_S) for handle in handles[1:]) == tokens(colocated.generate(prompts[1:], GREEDY))


def test_a_slow_reader_delays_nobody_and_misses_nothing(apart):
    unread = apart.submit(ids(14, 9), GREEDY)
    results = apart.generate([ids(seed, 9) for seed in range(8)], GREEDY)
    assert all(result.finish_reason == "length" for result in results)
    assert len([token for delta in unread for token in delta.token_ids]) == 12


# --- losses ---------------------------------------------------------------------------------------------------------


def test_a_transfer_that_fails_once_costs_a_restart_and_no_token(apart, colocated, monkeypatch):
    from pdjax.transfer import device_put

    move, left = device_put.move, [1]

    def breaking(*arguments):
        if left[0]:
            left[0] -= 1
            raise OSError("the wire broke")
        return move(*arguments)

    monkeypatch.setattr(device_put, "move", breaking)
    (result,) = apart.generate([ids(16, 40)], sampled(7))
    assert result.record.restarts == 1
    assert tokens([result]) == tokens(colocated.generate([ids(16, 40)], sampled(7)))


def test_transfers_that_always_fail_end_the_request_with_the_reason_and_no_other(apart, monkeypatch):
    def breaking(*arguments):
        raise OSError("the wire broke")

    with monkeypatch.context() as patch:
        patch.setattr("pdjax.transfer.device_put.move", breaking)
        (result,) = apart.generate([ids(17, 9)], GREEDY)
    assert result.finish_reason == "error" and "OSError: the wire broke" in result.placement.reason
    assert apart.generate([ids(17, 9)], GREEDY)[0].finish_reason == "length"


def test_an_exception_of_an_instance_reaches_the_waiter():
    with engine() as served:

        def burst(*arguments):
            raise MemoryError("no room")

        served._cluster._lanes[0].instance.run = burst
        handle = served.submit(ids(18, 9), GREEDY)
        with pytest.raises(RuntimeError, match="MemoryError: no room"):
            handle.result(WAIT_S)


class Bursts(Disaggregated):
    """Fails at the second placement."""

    def __init__(self):
        super().__init__()
        self.placed = 0

    def place(self, ask, cluster):
        self.placed += 1
        if self.placed > 1:
            raise KeyError("no such pool")
        return super().place(ask, cluster)


def test_an_exception_in_the_policy_reaches_every_waiter_and_the_next_submit():
    with engine(scheduler=Bursts()) as served:
        wire(served).hold()
        first = served.submit(ids(1, 9), GREEDY)
        first_token_of(first)
        second = served.submit(ids(2, 9), GREEDY)
        broke = "the engine broke: KeyError: 'no such pool'"
        for wait in (
            lambda: first.result(WAIT_S),
            lambda: second.result(WAIT_S),
            lambda: list(second),
            lambda: served.submit(ids(3, 9), GREEDY),
            lambda: served.generate([ids(3, 9)], GREEDY),
            lambda: served.wait_idle(),
        ):
            with pytest.raises(RuntimeError, match=broke) as caught:
                wait()
            assert isinstance(caught.value.__cause__, KeyError)


# --- ending ---------------------------------------------------------------------------------------------------------


def threads(served):
    return [served._thread, *served._cluster._lanes]


def test_close_fails_what_is_live_joins_its_threads_and_may_come_twice():
    served = engine()
    wire(served).hold()
    handle = served.submit(ids(19, 9), GREEDY)
    first_token_of(handle)
    seen = []
    waiter = threading.Thread(target=lambda: seen.append(_error(handle.result)))
    waiter.start()
    served.close()
    served.close()
    waiter.join(WAIT_S)
    assert not [thread.name for thread in threads(served) if thread.is_alive()]
    for error in (seen[0], _error(lambda: list(handle)), _error(lambda: served.submit("x")), _error(served.wait_idle)):
        assert isinstance(error, RuntimeError) and str(error) == "the engine is closed"
    handle.abort()


def _error(call):
    try:
        call()
    except Exception as error:
        return error
    return None


def test_the_context_manager_closes_also_after_an_exception():
    with pytest.raises(ZeroDivisionError), engine() as served:
        raise ZeroDivisionError
    assert not [thread.name for thread in threads(served) if thread.is_alive()]
    with pytest.raises(RuntimeError, match="the engine is closed"):
        served.generate("hello")


def test_an_idle_engine_that_was_closed_is_idle():
    served = engine()
    served.close()
    assert served.wait_idle(0)
