"""Engines that tests share, since building one costs seconds. A module with `pytest_plugins = ["tests.shared_engines"]`
has these fixtures."""

import pytest

from tests.engines import First, engine, settle


@pytest.fixture(scope="session")
def colocated():
    """Uses one instance: what all others are compared with."""
    with engine(scheduler=First()) as made:
        yield made


@pytest.fixture(scope="session")
def pulled():
    with engine(stream_layers=0) as made:
        yield made


@pytest.fixture(scope="session")
def streamed():
    """Warm, with all its buckets."""
    with engine(stream_layers=1, decode_max_batch=2, warmup=True) as made:
        yield made


@pytest.fixture(params=["pulled", "streamed"])
def apart(request):
    """Both ways from one mesh to another."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def everything_ends(request):
    """After the test, nothing is live on the engines that are shared, and all their pages are free."""
    yield
    for name in {"colocated", "pulled", "streamed"} & set(request.fixturenames):
        settle(request.getfixturevalue(name))
