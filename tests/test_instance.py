"""One instance: passes of every kind give a prompt's own tokens, KV moves between instances, nothing is disturbed."""

import dataclasses

import jax
import numpy as np
import pytest

from pdjax.compiles import compiled
from pdjax.latency import Probe
from pdjax.messages import Iteration, StartTransfer
from pdjax.request import SamplingParams
from tests.replicas import SHARED, Driver, prompt, references, small, stories, table

STEP = Iteration(0, 0, decode=True)
LONG, SHORT = prompt(1, 29), prompt(2, 5)


@pytest.fixture(scope="module")
def alone():
    """What LONG and SHORT give when each runs alone, in one chunk: 12 tokens."""
    driver = Driver(small(max_chunk=32))
    return {len(text): driver.generate(text, 12) for text in (LONG, SHORT)}


def transfer(source, request, target_request, tokens, target=None):
    pages = table(target or source, target_request)
    return StartTransfer(9, request, 0, 0, 1, table(source, request), pages, tokens, "whole")


def moved(units, target):
    """The units on the target's mesh, as a transport leaves them there."""
    return [
        dataclasses.replace(unit, kv=jax.device_put(unit.kv, target.kv_shardings[unit.header.layer])) for unit in units
    ]


@pytest.mark.parametrize(("chunk", "page_size"), [(7, 1), (16, 7), (5, 64)])
def test_chunks_and_pages_of_any_size_give_the_same_tokens(alone, chunk, page_size):
    driver = Driver(small(max_chunk=16, page_size=page_size), chunk=chunk)
    assert driver.generate(LONG, 12) == alone[29]


def test_a_prompt_prefilled_beside_a_decoding_row_disturbs_neither(alone):
    driver = Driver(small(max_chunk=16))
    out = {0: [driver.prefill(0, SHORT)], 1: []}
    joins = (driver.join(0, len(SHORT)),)
    for start in range(0, len(LONG), 10):
        rows, firsts, _ = driver.run(chunks=(driver.part(1, LONG, start, 10),), joins=joins, decode=True)
        out[0].append(dict(rows)[0])
        joins = ()
    out[1].append(dict(firsts)[1])
    joins = (driver.join(1, len(LONG)),)
    while len(out[1]) < 12:
        rows = driver.run(joins=joins, decode=True).rows
        joins = ()
        for slot, token in rows:
            out[slot].append(token)
    assert out[0][:12] == alone[5] and out[1] == alone[29]


def test_prompts_packed_into_one_pass_give_their_own_tokens(alone):
    driver = Driver(small(max_chunk=32))
    driver.run(chunks=(driver.part(0, LONG, 0, 11),))
    firsts = driver.run(chunks=(driver.part(0, LONG, 11, 18), driver.part(1, SHORT, 0, 5))).firsts
    assert dict(firsts) == {0: alone[29][0], 1: alone[5][0]}


def test_the_next_step_can_be_issued_before_the_last_ones_tokens_are_read(alone):
    driver = Driver(small())
    first = driver.prefill(0, SHORT)
    issue = driver.instance.run
    iteration = dataclasses.replace(STEP, joins=(driver.join(0, len(SHORT)),))
    pending = [issue(iteration, driver.units.append)]
    pending += [issue(STEP, driver.units.append) for _ in range(10)]
    assert [first] + [dict(p.wait()[0])[0] for p in pending] == alone[5]


def test_rows_grow_page_by_page_leave_and_come_back_by_token(alone):
    driver = Driver(small(page_size=7))
    first = driver.prefill(0, SHORT)
    pages, start = table(driver.instance, 0), len(SHORT)
    join = dataclasses.replace(driver.join(0, start), pages=pages[:1])
    out = [first]
    for step in range(6):
        grows = ((0, pages[(start + step) // 7]),) if (start + step) % 7 == 0 else ()
        rows = driver.run(joins=(join,) if step == 0 else (), grows=grows, decode=True).rows
        out.append(dict(rows)[0])
    assert driver.run(leaves=(0,), decode=True).rows == ()
    join = driver.join(0, start + 6, token=out[-1])
    for step in range(5):
        rows = driver.run(joins=(join,) if step == 0 else (), decode=True).rows
        out.append(dict(rows)[0])
    assert out == alone[5]


def test_sampled_tokens_do_not_depend_on_chunks_or_company(alone):
    sampling = SamplingParams(temperature=1.0, top_p=0.95, top_k=40, seed=5)
    one = Driver(small(max_chunk=32), sampling=sampling).generate(LONG, 8)
    driver = Driver(small(max_chunk=16, page_size=7), chunk=9, sampling=sampling)
    joins = (dataclasses.replace(driver.join(1, 5, token=3), sampling=SamplingParams(temperature=0.0)),)
    driver.run(joins=joins, decode=True)
    assert driver.generate(LONG, 8) == one != alone[29][:8]


@pytest.mark.parametrize(
    ("devices", "page_size", "chunk"),
    [(2, 7, 16), *(pytest.param(*row, marks=pytest.mark.slow) for row in ((6, 16, 5), (1, 64, 32)))],
)
def test_kv_moved_to_another_mesh_and_page_size_continues_the_text(alone, devices, page_size, chunk):
    source = Driver(small(max_chunk=chunk), chunk=chunk)
    target = Driver(small(devices=devices, first_device=1, page_size=page_size, max_chunk=32))
    out = [source.prefill(1, LONG)]
    for unit in moved(source.instance.extract(transfer(source.instance, 1, 0, len(LONG))), target.instance):
        target.instance.insert(unit, table(target.instance, 0))
    joins = (target.join(0, len(LONG), token=out[0]),)
    for _ in range(11):
        rows = target.run(joins=joins, decode=True).rows
        joins = ()
        out.append(dict(rows)[0])
    assert out == alone[29]
    sent = source.instance.read_kv(table(source.instance, 1), len(LONG))
    assert (target.instance.read_kv(table(target.instance, 0), len(LONG)) == sent).all()


def test_streamed_units_hold_bit_for_bit_what_is_in_the_pages():
    driver = Driver(small(max_chunk=32, stream_layers=2), chunk=16)
    driver.run(chunks=(driver.part(0, LONG, 0, 16, stream=4),))
    driver.run(chunks=(driver.part(1, SHORT, 0, 5, stream=5), driver.part(0, LONG, 16, 13, stream=4)))
    for key, request, tokens in ((4, 0, 29), (5, 1, 5)):
        want = driver.instance.read_kv(table(driver.instance, request), tokens)
        got = np.full_like(want, np.nan)
        for unit in driver.units:
            head = unit.header
            if head.key == key:
                assert head.shape == unit.kv.shape and head.dtype == str(unit.kv.dtype)
                part = np.asarray(unit.kv)[:, :, : head.tokens]
                got[head.layer : head.layer + head.layers, :, head.start : head.start + head.tokens] = part
        np.testing.assert_array_equal(got, want)


def test_stale_rows_and_foreign_pages_are_never_seen(alone):
    driver = Driver(small(page_size=7, max_chunk=16))
    mine = table(driver.instance, 2)
    others = [page for page in range(1, driver.instance.spec.num_pages) if page not in mine]
    driver.instance.fill_pages(others, np.nan)
    driver.instance.fill_pages(mine, 1e4)
    request = dataclasses.replace(driver.part(2, SHORT, 0, 5), slot=0)
    firsts = driver.run(chunks=(request,)).firsts
    out = [dict(firsts)[2]]
    joins = (dataclasses.replace(driver.join(0, 5), pages=mine),)
    for _ in range(11):
        rows = driver.run(joins=joins, decode=True).rows
        joins = ()
        out.append(dict(rows)[0])
    assert out == alone[5]
    assert not driver.instance.read_kv((0,), 7).any()


@pytest.fixture(scope="module")
def warm():
    """A warm streaming instance, what warm-up measured, and its progress reports."""
    reports = []
    instance = small(max_chunk=16, stream_layers=2)
    instance.fill_pages(range(1, instance.spec.num_pages), 3.0)
    samples = instance.warmup(lambda *report: reports.append(report))
    return instance, samples, reports


def test_nothing_compiles_after_warm_up(warm):
    driver = Driver(warm[0])
    before, _ = compiled()
    driver.generate(LONG, 4)
    chunks = (driver.part(0, SHORT, 0, 5, 1), driver.part(2, SHORT, 0, 5, 2))
    driver.run(chunks=chunks, joins=(driver.join(1, 5, 3),), decode=True)
    for unit in moved([*driver.units, *driver.instance.extract(transfer(warm[0], 0, 1, 29))], warm[0]):
        driver.instance.insert(unit, table(warm[0], 1))
    assert compiled()[0] == before


def test_warm_up_reports_every_step_and_measures_every_pass(warm):
    instance, samples, reports = warm
    done, total, _ = zip(*reports, strict=True)
    assert list(done) == list(range(total[0] + 1)) and set(total) == {total[0]}
    probes = [sample.probe for sample in samples]
    sizes = {(sum(n for n, _ in probe.chunks), len(probe.contexts)) for probe in probes}
    assert sizes == set(instance.buckets.pairs)
    assert all(sample.seconds > 0 for sample in samples)


def test_warm_up_and_rehearsals_change_no_page_and_no_slot():
    driver = Driver(small())
    first = driver.prefill(0, SHORT)
    before = driver.instance.read_kv(range(driver.instance.spec.num_pages), 10**6)
    driver.instance.rehearse(Probe(((16, 8),), (13, 27))).wait()
    driver.instance.rehearse_transfers()
    after = driver.instance.read_kv(range(driver.instance.spec.num_pages), 10**6)
    assert (before == after).all()
    inserts = driver.instance._insert_s
    assert inserts and all(0 < seconds < 60 for seconds in inserts.values()), "inserts were not measured"
    rows = driver.run(joins=(driver.join(0, 5),), decode=True).rows
    assert first is not None and dict(rows)[0] == Driver(small()).generate(SHORT, 2)[1]


@pytest.mark.parametrize("devices", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_every_program_updates_the_pages_it_takes_in_place(devices):
    instance = small(devices=devices, max_rows=2 if devices == 1 else 1, num_pages=200)  # far more than the weights
    pool = 200 * 16 * instance.spec.kv_bytes_per_token // devices
    seen = set()
    for program in instance.programs():
        name, args = program.name, program.args
        pages = [leaf for leaf in jax.tree.leaves(args) if leaf.ndim == 4 and len(leaf) == instance.spec.num_pages]
        kind = program.kind
        writes = pages if kind in ("group", "insert") else []
        memory = program.fn.lower(*args).compile().memory_analysis()
        aliased = memory.alias_size_in_bytes
        assert memory.temp_size_in_bytes <= 0.05 * pool, name
        slots = 4 * args[1].size if kind == "head" else 0
        assert aliased == sum(leaf.addressable_shards[0].data.nbytes for leaf in writes) + slots, name
        seen.add(kind)
    assert seen == {"embed", "group", "head", "insert", "extract", "slice"}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
def test_the_pages_stay_where_they_are_for_100_steps(rows):
    driver = Driver(small(max_rows=rows, max_model_len=128))
    stage = driver.instance._stages[0]
    for i in range(rows):
        driver.prefill(i, SHORT)

    def pointers():
        return [array.unsafe_buffer_pointer() for cache in stage.pool.values() for array in cache]

    before = pointers()
    driver.run(joins=tuple(driver.join(i, len(SHORT)) for i in range(rows)), decode=True)
    for _ in range(99):
        driver.run(decode=True)
    assert pointers() == before


def test_an_instance_without_rows_or_without_chunks_has_no_programs_for_them():
    names = [program.name for program in small(max_rows=0).programs()]
    assert names and not any("insert" in name or "+2" in name for name in names)
    names = [program.name for program in small(max_chunk=0).programs()]
    assert names and not any("extract" in name or "16+" in name for name in names)


STORIES = [(1, 16, 7, "dragon"), (4, 7, 64, "lily")]
MORE = [(1, 1, 64, "once"), (1, 64, 64, "cat"), (2, 16, 64, "dragon"), (2, 64, 7, "lily"), (4, 1, 7, "cat"),
        (8, 16, 64, "once"), (8, 7, 7, "bos_only"), (8, 64, 64, "dragon")]  # fmt: skip


@pytest.mark.parametrize(
    ("devices", "page_size", "chunk", "case"), [*STORIES, *(pytest.param(*row, marks=pytest.mark.slow) for row in MORE)]
)
def test_stories_are_told_word_for_word(devices, page_size, chunk, case):
    if not SHARED.is_dir():
        pytest.skip("no ../shared/weights beside the repository")
    want = references()[case]
    driver = Driver(stories(devices=devices, page_size=page_size, max_chunk=chunk, max_rows=1, max_chunks=1))
    ids = want["generated_ids"]
    assert driver.generate(want["prompt_ids"], len(ids)) == ids
