"""Eighty CPU devices, which the largest row of test_references needs, and strict rank promotion."""

import jax

jax.config.update("jax_num_cpu_devices", 80)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items):
    """Fast tests first: who breaks something learns it soon."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
