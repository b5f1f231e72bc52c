"""The programs of other platforms run on CPUs: pages as kernels want them, and kernels as plain operations, give the
tokens of a CPU's own form, and KV goes between pages of either kind."""

import dataclasses

import jax
import numpy as np
import pytest

from pdjax import SamplingParams
from pdjax.experiments import grid
from pdjax.messages import StartTransfer
from pdjax.models.attention import gpu, plain, tpu
from tests.engines import SHARED, STORIES, engine, poison, settle
from tests.paged import forced
from tests.replicas import Driver, prompt, small, table

LONG, SHORT = prompt(1, 29), prompt(2, 5)
TOKENS = 8
OTHERS = {
    "pages of kernels": tpu.backend(),  # which refuses float32
    "gpu kernels": gpu.backend(interpret=True, cudnn="left out"),
    "cudnn's call": gpu.backend(interpret=True),
}


def driver(**changes):
    return Driver(small(max_chunk=16, page_size=16, **changes))


@pytest.fixture(scope="module")
def alone():
    """What LONG and SHORT give on a CPU's own pages, and the KV of LONG."""
    one = driver()
    tokens = one.generate(LONG, TOKENS), one.generate(SHORT, TOKENS, request=1)
    one.prefill(2, LONG)
    return *tokens, one.instance.read_kv(table(one.instance, 2), len(LONG))


@pytest.mark.parametrize(
    "name",
    ["pages of kernels", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpu kernels", "cudnn's call"))],
)
def test_chunks_and_rows_beside_chunks_give_the_same_tokens_amid_poison(alone, name):
    with forced(lambda mesh: OTHERS[name]):
        one = driver()
        pages = range(1, one.instance.spec.num_pages)
        one.instance.fill_pages(pages, np.nan)
        for request in (0, 1):
            one.instance.fill_pages(table(one.instance, request), 1e4)
        out = {0: [one.prefill(0, SHORT)], 1: []}
        joins = (one.join(0, len(SHORT)),)
        for start in range(0, len(LONG), 12):
            rows, firsts, *_ = one.run(chunks=(one.part(1, LONG, start, 12),), joins=joins, decode=True)
            out[0].append(dict(rows)[0])
            joins = ()
        out[1].append(dict(firsts)[1])
        joins = (one.join(1, len(LONG)),)
        while len(out[1]) < TOKENS:
            for slot, token in one.run(joins=joins, decode=True).rows:
                out[slot].append(token)
            joins = ()
        assert out[1] == alone[0] and out[0][:TOKENS] == alone[1]
        assert not one.instance.read_kv((0,), 16).any()


@pytest.mark.slow
def test_tpu_kernels_give_the_same_first_tokens(alone):
    with forced(lambda mesh: tpu.backend(interpret=True)):
        assert driver().generate(LONG, 2) == alone[0][:2]


def test_kv_goes_from_a_cpus_own_pages_to_those_of_kernels_and_back(alone):
    """Devices 1 to 3 have a head each, in pages of another kind."""
    with forced(lambda mesh: tpu.backend() if mesh.devices.flat[0].id else plain.backend()):
        source, target = driver(), driver(devices=3, first_device=1)
        first = source.prefill(1, LONG)
        for there, here, request in ((source, target, 1), (target, source, 0)):
            pages = table(here.instance, 0)
            move = StartTransfer(9, 1, 0, 0, 1, table(there.instance, request), pages, len(LONG), "whole")
            for unit in there.instance.extract(move):
                kv = jax.device_put(unit.kv, here.instance.kv_shardings[unit.header.layer])
                here.instance.insert(dataclasses.replace(unit, kv=kv), pages)
            assert (here.instance.read_kv(pages, len(LONG)) == alone[2]).all()
        joins, out = (target.join(0, len(LONG), token=first),), [first]
        while len(out) < TOKENS:
            out.append(dict(target.run(joins=joins, decode=True).rows)[0])
            joins = ()
    assert out == alone[0]


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="needs checkpoints and references in ../shared/weights")
def test_an_engine_on_pages_of_kernels_gives_the_references_tokens():
    row = next(row for row in grid.cover(grid.rows(heads=8, layers=5)) if row.mode == "streamed")
    cases = grid.read_cases(SHARED / "ref" / "stories.json")
    fields = row.fields(256) | {"model": str(STORIES), "decode_max_batch": 5}
    with forced(lambda mesh: tpu.backend()), engine(**fields) as served:
        poison(served)
        params = SamplingParams(temperature=0, max_tokens=40)
        results = served.generate([list(case.prompt_ids) for case in cases.values()], params)
        assert [result.token_ids for result in results] == [case.token_ids[:40] for case in cases.values()]
        settle(served)
