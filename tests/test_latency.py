"""The latency model: hand-computed predictions, and fitting that finds what made the samples."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.latency import LatencyModel, Load, Probe, attended, bucket, features, fit, saturating_tokens
from pdjax.messages import InstanceSpec, Role

SPEC = InstanceSpec(
    index=0,
    role=Role.MIXED,
    devices=1,
    max_rows=8,
    max_chunk=64,
    max_chunks=4,
    page_size=16,
    num_pages=64,
    max_model_len=512,
    kv_bytes_per_token=1024,
    chunk_buckets=(16, 32, 64),
    row_buckets=(1, 4, 8),
)
EXACT = dataclasses.replace(SPEC, chunk_buckets=(), row_buckets=())


def loads(count, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        chunks = tuple((int(rng.integers(1, 64)), int(rng.integers(0, 400))) for _ in range(rng.integers(0, 3)))
        contexts = rng.integers(1, 500, size=rng.integers(0, 9))
        if chunks or len(contexts):
            yield Load(chunks, len(contexts), int(contexts.sum()), attended(contexts.tolist(), 8))


def test_features_are_those_of_padded_programs():
    load = Load(chunks=((10, 0), (7, 100)), rows=3, context_tokens=90, attended_tokens=150)
    # Beside a chunk, rows have the largest size, and chunks have one of the few sizes that rows ride with.
    # All eight rows of the program attend, each for as long as the three do on average.
    assert features(SPEC, load) == (64, 10 * 5 + 7 * 103.5, 8, 90, 150 * 8 / 3)
    assert features(SPEC, Load(((10, 0), (7, 100)))) == (32, 10 * 5 + 7 * 103.5, 0, 0, 0)
    assert features(SPEC, Load((), 3, 90, 150)) == (0, 0, 4, 90, 150 * 4 / 3)
    assert features(EXACT, load) == (17, 10 * 5 + 7 * 103.5, 3, 90, 150)


def test_prompt_tokens_attend_in_whole_blocks_to_whole_pages():
    spec = dataclasses.replace(SPEC, query_block=32)  # and pages of 16
    # 40 tokens behind 20: a block up to token 52, in 4 pages, and one up to token 60, in 4 pages. 5 tokens: one page.
    assert features(spec, Load(((40, 20), (5, 0))))[1] == 32 * 16 * (4 + 4 + 1)
    # A pass of 16 tokens has blocks of 16.
    assert features(spec, Load(((10, 20),)))[1] == 16 * 16 * 2


def test_rows_that_fill_the_last_block_attend_as_well():
    spec = dataclasses.replace(SPEC, row_buckets=(1, 4, 16), row_block=8)
    assert features(spec, Load((), 9, 90, 90))[4] == 160  # two blocks of 8 in a program of 16
    assert features(spec, Load((), 3, 90, 90))[4] == 120  # a program of 4
    assert features(dataclasses.replace(spec, row_block=0), Load((), 9, 90, 90))[4] == 160


def test_a_probe_counts_rows_as_long_as_the_longest_of_their_block():
    probe = Probe(((5, 2),), (1, 7, 3))
    assert probe.load(dataclasses.replace(SPEC, row_block=2)) == Load(((5, 2),), 3, 11, 17)
    assert probe.load(SPEC) == Load(((5, 2),), 3, 11, 21)


SHAPED = LatencyModel(iteration=(1, 2, 0, 4, 5, 6), shapes=((0, 4, 100.0), (16, 0, 200.0)))


def test_a_measured_size_has_a_constant_of_its_own():
    assert SHAPED.iteration_s(SPEC, Load((), 3, 7, 9)) == 100 + 5 * 7 + 6 * 9 * 4 / 3
    assert SHAPED.iteration_s(SPEC, Load(((12, 0),))) == 200
    assert SHAPED.iteration_s(SPEC, Load(((17, 0),))) == 1 + 2 * 32
    assert SHAPED.iteration_s(SPEC, Load((), 5, 7, 8)) == 1 + 4 * 8 + 5 * 7 + 6 * 8 * 8 / 5


def test_several_steps_take_what_each_takes_alone_to_the_last_bit():
    spec = dataclasses.replace(SPEC, row_block=2)
    model = LatencyModel((1e-3, 1e-4, 1e-7, 2e-3, 1.1e-6, 1.3e-6), scale=(1, 1.07, 1), shapes=((0, 4, 0.0123),))
    for rows in (1, 3, 7):
        steps = model.steps_s(spec, Load((), rows, 31 * rows, 37 * rows), 50)
        alone = [model.iteration_s(spec, Load((), rows, (31 + n) * rows, (37 + n) * rows)) for n in range(50)]
        assert steps.tolist() == alone


def test_an_iteration_is_a_constant_and_the_weighted_features():
    model = LatencyModel(iteration=(1, 2, 3, 4, 5, 6))
    load = Load(((2, 3),), rows=2, context_tokens=7, attended_tokens=8)
    assert model.iteration_s(EXACT, load) == 1 + 2 * 2 + 3 * 8 + 4 * 2 + 5 * 7 + 6 * 8


def test_an_empty_iteration_takes_no_time():
    assert LatencyModel().iteration_s(SPEC, Load()) == 0


def test_a_prefill_is_the_sum_of_its_chunks():
    model = LatencyModel()
    chunks = [Load(((64, 10),)), Load(((64, 74),)), Load(((22, 138),))]
    assert model.prefill_s(SPEC, 150, prior=10) == pytest.approx(sum(model.iteration_s(SPEC, c) for c in chunks))
    assert model.prefill_s(SPEC, 0) == 0


def test_a_decode_step_is_an_iteration_without_chunks():
    model = LatencyModel()
    assert model.decode_s(SPEC, 3, 90, 50) == model.iteration_s(SPEC, Load((), 3, 90, 50))


def test_a_transfer_is_a_latency_and_a_bandwidth():
    assert LatencyModel(transfer_alpha_s=0.5, transfer_bytes_per_s=100).transfer_s(300) == 3.5


# Tokens per second of the three sizes: 16 / (8 + 16), 32 / (8 + 32), 64 / (8 + 64) = 0.67, 0.80, 0.89.
FLAT = LatencyModel(iteration=(8, 1, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("constant", "tokens"),
    [
        (0.5, 16),  # 0.97, 0.98, 0.99
        (1.5, 32),  # 0.91, 0.955, 0.977: 0.93 of the best, 0.98 of it
        (8, 64),
    ],
)
def test_the_saturating_length_is_the_shortest_within_five_percent_of_the_best_throughput(constant, tokens):
    assert saturating_tokens(LatencyModel(iteration=(constant, 1, 0, 0, 0, 0)), SPEC) == tokens


def test_attention_that_makes_long_passes_slower_shortens_the_saturating_length():
    # 16 / (8 + 128), 32 / (8 + 512), 64 / (8 + 2048) = 0.118, 0.062, 0.031
    assert saturating_tokens(LatencyModel(iteration=(8, 0, 1, 0, 0, 0)), SPEC) == 16


def test_beside_rows_the_saturating_length_is_one_of_the_sizes_that_rows_ride_with():
    assert saturating_tokens(LatencyModel(iteration=(0.5, 1, 0, 0, 0, 0)), SPEC, beside_rows=True) == 64


def test_without_sizes_of_passes_powers_of_two_and_the_largest_chunk_are_looked_at():
    spec = dataclasses.replace(EXACT, max_chunk=48)
    assert saturating_tokens(FLAT, spec) == 48  # 32 / 40 = 0.80 against 48 / 56 = 0.857
    assert saturating_tokens(LatencyModel(iteration=(0.1, 1, 0, 0, 0, 0)), spec) == 2  # 2 / 2.1 = 0.952 of 0.998


def test_an_instance_without_prompts_has_no_saturating_length():
    assert saturating_tokens(FLAT, dataclasses.replace(SPEC, max_chunk=0, chunk_buckets=())) == 0


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 100), unique=True), st.integers(0, 120))
def test_bucket_is_the_smallest_that_holds_the_size(sizes, size):
    got = bucket(sorted(sizes), size)
    fitting = [b for b in sizes if b >= size]
    assert got == (0 if size == 0 else min(fitting, default=size))


def test_fit_finds_the_coefficients_that_made_the_samples():
    truth = LatencyModel(iteration=(4e-3, 5e-4, 2e-7, 1e-3, 3e-6, 1e-7))
    fitted = fit(SPEC, [(load, truth.iteration_s(SPEC, load)) for load in loads(200)])
    assert fitted.iteration == pytest.approx(truth.iteration, rel=1e-4)


def test_fit_finds_sizes_that_cost_more_than_the_line_says():
    truth = dataclasses.replace(LatencyModel((4e-3, 5e-4, 2e-7, 1e-3, 3e-6, 1e-7)), shapes=((0, 4, 0.05), (32, 0, 0.5)))
    samples = [(load, truth.iteration_s(SPEC, load)) for load in loads(200)]
    fitted = fit(SPEC, samples)
    assert [fitted.iteration_s(SPEC, load) for load, _ in samples] == pytest.approx([s for _, s in samples], rel=1e-4)
    assert fitted.shapes == tuple(sorted(fitted.shapes))


def test_fit_under_noise_predicts_other_loads_within_the_noise():
    truth = LatencyModel(iteration=(4e-3, 5e-4, 2e-7, 1e-3, 3e-6, 1e-7))
    noise = np.random.default_rng(1).uniform(0.9, 1.1, size=400)
    fitted = fit(SPEC, [(load, truth.iteration_s(SPEC, load) * f) for load, f in zip(loads(400), noise, strict=False)])
    for load in loads(50, seed=2):
        assert fitted.iteration_s(SPEC, load) == pytest.approx(truth.iteration_s(SPEC, load), rel=0.1)


def test_fit_gives_no_negative_coefficient_and_keeps_the_transfer_constants():
    base = LatencyModel(transfer_alpha_s=7.0, transfer_bytes_per_s=8.0)
    shrinking = [(Load((), rows, 10 * rows, 10 * rows), 1.0 / rows) for rows in range(1, 9)]
    fitted = fit(SPEC, shrinking, base)
    assert min(fitted.iteration) >= 0
    assert (fitted.transfer_alpha_s, fitted.transfer_bytes_per_s) == (7.0, 8.0)


def test_fit_of_passes_that_grow_faster_than_their_contexts_leaves_nothing_for_their_sizes():
    # By relative error, a: (8 a / 8, 40 a / 64) nearest to (1, 1). A disturbed pass of a quick model looks like this.
    fitted = fit(SPEC, [(Load((), 1, 8, 8), 8.0), (Load((), 1, 40, 40), 64.0)])
    assert fitted.shapes == ((0, 1, 0.0),)
    assert fitted.iteration_s(SPEC, Load((), 1, 8, 8)) == pytest.approx(8 * (1 + 5 / 8) / (1 + 25 / 64))


def test_fit_without_samples_is_refused():
    with pytest.raises(ValueError, match="samples is empty; allowed: at least one"):
        fit(SPEC, [])
