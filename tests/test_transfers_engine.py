"""Real instances, real transports, meshes that cut the heads differently: what arrives is what was computed."""

import pytest

from tests.engines import GREEDY, engine, ids, settle, tokens

pytest_plugins = ["tests.shared_engines"]
PROMPTS = [ids(seed, length) for seed, length in enumerate((1, 15, 16, 17, 33, 100, 200))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"transfer": "jax_transfer", "stream_layers": 0, "prefill_tp": 2},
        {"transfer": "device_put", "stream_layers": 1, "prefill_tp": 2},
    ],
)
def test_kv_is_bitwise_equal_on_both_sides_and_tokens_are_those_of_one_instance(colocated, changes):
    expected = tokens(colocated.generate(PROMPTS, GREEDY))
    with engine(verify_kv=True, **changes) as made:
        results = made.generate(PROMPTS, GREEDY)
        assert tokens(results) == expected
        assert not any(result.record.restarts for result in results)
        assert all(result.record.timeline.transfer_bytes for result in results)
        settle(made)
