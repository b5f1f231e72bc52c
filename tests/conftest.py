"""Eighty CPU devices, which the largest row of test_references needs, strict rank promotion, and XLA's results kept
between runs: compiling is most of what the tests do."""

import os

import jax

jax.config.update("jax_num_cpu_devices", 80)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
    """In pytest's cache folder, for the processes that tests start too; `pytest --cache-clear` forgets them."""
    folder = str(config.cache.mkdir("xla"))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"


def pytest_collection_modifyitems(items):
    """Fast tests first: who breaks something learns it soon."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
