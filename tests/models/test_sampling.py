"""Sampling on the device: what is kept is exact, what is drawn follows from seed and position only."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from pdjax.models.plan import sampling_words
from pdjax.models.sampling import cut, sample
from pdjax.models.sharding import TP
from pdjax.request import SamplingParams

V = 101
LOGITS = np.random.default_rng(0).standard_normal((6, V)).astype(np.float32) * 3


def options(*params: SamplingParams) -> np.ndarray:
    return np.stack([sampling_words(p) for p in params])


one = jax.jit(functools.partial(sample, vocab_size=V, tp=1))
kept = jax.jit(lambda logits, words: cut(logits, words)[1])


@functools.cache
def on_four():
    """`one` on four shards of the vocabulary."""
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), TP)
    P = PartitionSpec
    body = functools.partial(sample, vocab_size=V, tp=4)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P(TP), P(), P()), out_specs=P(), check_vma=False))


def draw(logits, params, positions):
    return np.asarray(one(np.asarray(logits).T, options(*params), np.asarray(positions, np.int32))[0])


def test_greedy_takes_the_lowest_of_the_most_likely_ids():
    logits = LOGITS.copy()
    logits[:, [7, 50]] = 40.0
    assert draw(logits, [SamplingParams(temperature=0.0)] * 6, range(6)).tolist() == [7] * 6


@pytest.mark.parametrize("k", [1, 2, 17, V, 10 * V])
def test_top_k_keeps_exactly_the_k_largest(k):
    got = np.asarray(kept(LOGITS, options(*[SamplingParams(top_k=k)] * 6)))
    bound = np.sort(LOGITS, axis=-1)[:, -min(k, V)]
    assert (got == (bound[:, None] <= LOGITS)).all()


@pytest.mark.parametrize("p", [0.01, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("k", [0, 20])
def test_top_p_keeps_the_smallest_set_that_reaches_p(p, k):
    got = np.asarray(kept(LOGITS, options(*[SamplingParams(top_p=p, top_k=k, temperature=0.7)] * 6)))
    for row, logits in zip(got, LOGITS.astype(np.float64) / 0.7, strict=True):
        order = np.argsort(-logits)[: k or V]
        share = np.exp(logits[order] - logits.max())
        size = 1 + int(np.searchsorted(np.cumsum(share / share.sum()), p))
        assert set(np.flatnonzero(row)) == set(order[:size].tolist())


def test_a_mixed_batch_gives_each_row_what_it_gets_alone():
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        SamplingParams(top_k=5, seed=2),
        SamplingParams(top_p=0.5, seed=3, temperature=1.7),
        SamplingParams(temperature=1e-6, seed=4),
        SamplingParams(top_k=3, top_p=0.9, seed=2**40 + 5),
    ]
    together = draw(LOGITS, params, range(10, 16))
    alone = [draw(LOGITS[i : i + 1], params[i : i + 1], [10 + i])[0] for i in range(6)]
    assert together.tolist() == alone
    assert together[0] == LOGITS[0].argmax() and together[4] == LOGITS[4].argmax()


def test_every_shard_count_draws_the_same_tokens():
    padded = np.concatenate([LOGITS, np.full((6, 3), -np.inf, np.float32)], axis=1)  # 104 = 4 * 26
    words = options(*[SamplingParams(seed=i, top_p=0.95, temperature=float(i)) for i in range(6)])
    at = np.arange(6, dtype=np.int32)
    assert np.asarray(on_four()(padded.T, words, at)[0]).tolist() == np.asarray(one(LOGITS.T, words, at)[0]).tolist()


def test_log_probabilities_are_those_of_the_whole_distribution_on_any_number_of_shards():
    padded = np.concatenate([LOGITS, np.full((6, 3), -np.inf, np.float32)], axis=1)
    wishes = [SamplingParams(seed=i, top_k=5, temperature=float(i), logprobs=i != 2) for i in range(6)]
    words, at = options(*wishes), np.arange(6, dtype=np.int32)
    tokens, scores = map(np.asarray, one(LOGITS.T, words, at))
    exact = LOGITS.astype(np.float64)
    want = exact[np.arange(6), tokens] - np.log(np.exp(exact).sum(axis=1))
    np.testing.assert_allclose(scores, np.where(np.arange(6) == 2, 0.0, want), atol=1e-5)
    np.testing.assert_allclose(np.asarray(on_four()(padded.T, words, at)[1]), scores, atol=1e-6)


def test_draws_follow_the_softmax():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05] + [1e-9] * (V - 4), np.float32))
    n = 2000
    tokens = draw(np.tile(logits, (n, 1)), [SamplingParams(seed=11)] * n, range(n))
    share = np.bincount(tokens, minlength=V)[:4] / n
    np.testing.assert_allclose(share, [0.5, 0.3, 0.15, 0.05], atol=0.04)  # 4 standard deviations


def test_seed_and_position_both_change_the_draw():
    flat = np.zeros((40, V), np.float32)
    by_position = draw(flat, [SamplingParams(seed=1)] * 40, range(40))
    by_seed = draw(flat, [SamplingParams(seed=i << 33) for i in range(40)], [3] * 40)
    assert len(set(by_position.tolist())) > 20 and len(set(by_seed.tolist())) > 20


@pytest.mark.parametrize("temperature", [1e-5, 1e9])
@pytest.mark.parametrize("top_p", [1e-300, 1e-38, 1e-9, 1.0])
def test_extreme_values_give_a_possible_token(temperature, top_p):
    params = SamplingParams(temperature=temperature, top_p=top_p, seed=1)
    logits = np.full((2, V), -np.inf, np.float32)
    logits[0, :3], logits[1, 5] = [3e38, -3e38, 1.0], -3e38
    tokens = draw(logits, [params] * 2, [0, 1])
    assert tokens[0] in (0, 1, 2) and tokens[1] == 5


def test_what_only_sampling_needs_is_in_a_branch_of_its_own():
    args = (jnp.zeros((V, 2)), options(*[SamplingParams()] * 2), jnp.zeros(2, jnp.int32))
    program = jax.make_jaxpr(functools.partial(sample, vocab_size=V, tp=1))(*args).jaxpr
    names = {equation.primitive.name for equation in program.eqns}
    assert "cond" in names
    assert not {"while", "scan", "exp", "random_bits", "random_wrap"} & names


@pytest.mark.parametrize("top_p", [1e-9, 1e-38, 1e-300])
def test_a_vanishing_top_p_keeps_the_most_likely_token(top_p):
    got = np.asarray(kept(LOGITS, options(*[SamplingParams(top_p=top_p)] * 6)))
    assert [list(np.flatnonzero(row)) for row in got] == [[int(row.argmax())] for row in np.asarray(LOGITS)]
