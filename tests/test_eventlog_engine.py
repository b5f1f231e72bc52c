"""The log of a real engine: what its threads made of a run is replayed without them, command by command."""

import string

import pytest

import pdjax
from pdjax import eventlog, rerun
from tests.engines import GREEDY, engine, ids, sampled, settle


@pytest.mark.slow
def test_a_run_of_an_engine_is_replayed_exactly(tmp_path):
    path = tmp_path / "events.jsonl"
    with engine(event_log=str(path)) as served:
        handles = [
            served.submit(ids(n, 5 + 9 * n), sampled(seed=n, stop=tuple(string.ascii_letters))) for n in range(6)
        ]
        handles[4].abort()
        results = [handle.result() for handle in handles]
        served.generate([ids(7, 40)], GREEDY)
        settle(served)
        assert [at.pages for at in served.capacity(pdjax.SLO())] == [spec.usable_pages for spec in served.specs]
        assert served.queued_prompt_tokens == 0
    log = eventlog.read(path)
    replayed = rerun.replay(log)
    assert (replayed.difference, replayed.events) == ("", len(log.entries))
    assert [record.token_ids for record in replayed.report.records[:6]] == [result.token_ids for result in results]
    assert any(entry.ends for entry in log.entries), "no text ended with a stop"
    assert rerun.simulate(rerun.workload_of(log), log.header, pdjax.schedulers.Colocated()).records
