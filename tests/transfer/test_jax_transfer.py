"""The transport by `jax.experimental.transfer`: values arrive, offers are compared, what the library would wait for
without end is given up."""

import dataclasses
import itertools
import queue
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from pdjax.models.config import ModelConfig
from pdjax.models.sharding import make_mesh
from pdjax.transfer import jax_transfer
from pdjax.transfer.base import Unit, UnitHeader
from pdjax.transfer.jax_transfer import JaxTransfer, Source, take
from pdjax.transfer.shards import SPEC, split_of

WAIT_S = 20
# (kv heads, query heads per kv head, source tp, destination tp): equal, cut, joined, replicated
PAIRS = [(4, 2, 1, 1), (2, 4, 2, 4), (3, 3, 1, 3), (4, 2, 4, 1), (6, 1, 2, 3), (1, 8, 4, 4)]


def sides(kv_heads, group, src_tp, dst_tp):
    config = ModelConfig(8, 8, 8, 1, kv_heads * group, kv_heads, 4)
    devices = jax.devices()
    return [NamedSharding(make_mesh(config, part), SPEC) for part in (devices[:src_tp], devices[8 - dst_tp : 8])]


def unit(place, kv_heads, key=1, start=0, tokens=16, dtype=np.float32):
    kv = np.random.default_rng(start).standard_normal((2, 2, tokens, kv_heads, 4)).astype(dtype)
    return Unit(UnitHeader(key, 0, 2, start, tokens, kv.shape, str(kv.dtype)), jax.device_put(kv, place))


@pytest.fixture
def opened():
    """`opened(places, **)`: a transport, and a transfer 0 -> 1 with its units and errors."""
    made = []

    def make(places, **limits):
        transport = JaxTransfer([[place] * 2 for place in places], **limits)
        made.append(transport)
        units, errors = queue.Queue(), queue.Queue()
        transport.start(1, 0, 1, units.put, errors.put)
        return transport, units, errors

    yield make
    for transport in made:
        transport.close()


@pytest.mark.parametrize("pair", PAIRS)
def test_every_shard_holds_the_values_of_its_heads(opened, pair):
    places = sides(*pair)
    transport, units, errors = opened(places)
    for start in (0, 16):
        sent = unit(places[0], pair[0], start=start)
        transport.send(sent)
        got = units.get(timeout=WAIT_S)
        assert got.header == sent.header and got.kv.sharding == places[1]
        for shard in got.kv.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(sent.kv)[shard.index])
    assert errors.empty()


def test_bfloat16_arrives_bit_for_bit(opened):
    places = sides(2, 4, 2, 4)
    transport, units, _ = opened(places)
    sent = unit(places[0], 2, dtype=jnp.bfloat16)
    transport.send(sent)
    got = units.get(timeout=WAIT_S)
    np.testing.assert_array_equal(np.asarray(got.kv).view(np.uint16), np.asarray(sent.kv).view(np.uint16))


@pytest.mark.parametrize("lie", ["dtype", "shape", "start"])
def test_an_offer_of_something_else_is_refused_before_a_byte_is_pulled(lie):
    src, dst = sides(2, 1, 1, 1)
    sent = unit(src, 2)
    offer = Source(jax.devices()[0]).offer(sent, src, split_of(dst))
    # Of equal size, all of them: the library would bring wrong values and say nothing.
    others = {"dtype": {"dtype": "int32"}, "shape": {"shape": (2, 2, 16, 4, 2)}, "start": {"start": 16}}
    expected = dataclasses.replace(sent.header, **others[lie])
    with pytest.raises(ValueError, match=f"the offer is .*{lie}.*allowed: "):
        take(None, offer, expected, split_of(src), dst)


def test_a_pull_that_hangs_fails_its_transfer_and_no_other(opened, monkeypatch, caplog):
    places = sides(2, 1, 1, 1)
    real, numbers = Source.offer, itertools.count()

    def offer(self, sent, src, dst):
        told = real(self, sent, src, dst)  # a number that nobody has registered: the library waits without end
        return dataclasses.replace(told, number=999_999) if next(numbers) == 0 else told

    monkeypatch.setattr(Source, "offer", offer)
    transport, _, errors = opened(places, timeout_s=0.1)
    units, none = queue.Queue(), queue.Queue()
    transport.start(2, 0, 1, units.put, none.put)
    transport.send(unit(places[0], 2))
    transport.send(unit(places[0], 2, key=2))
    assert errors.get(timeout=WAIT_S) == "TimeoutError: a unit did not move within 0.1 s"
    assert units.get(timeout=WAIT_S).header.key == 2 and none.empty()
    assert "transfer-0-1 hangs in a unit of transfer 1" in caplog.text


def test_a_link_that_failed_is_replaced(opened, monkeypatch):
    places = sides(2, 1, 1, 1)
    transport, units, errors = opened(places)
    transport.send(unit(places[0], 2))
    units.get(timeout=WAIT_S)
    first = transport._workers[0, 1].link
    transport._workers[0, 1].link._connection._poison_connection()  # as when the peer dies
    transport.send(unit(places[0], 2, start=16))
    assert errors.get(timeout=WAIT_S), "said in other words by each moment at which it is noticed"
    transport.start(2, 0, 1, units.put, errors.put)
    transport.send(unit(places[0], 2, key=2))
    assert units.get(timeout=WAIT_S).header.key == 2
    assert transport._workers[0, 1].link is not first


def test_a_jax_that_cannot_do_it_is_refused_at_the_start(monkeypatch):
    places = [[place] for place in sides(2, 1, 1, 1)]

    def missing(*_):
        raise ImportError("no module named transfer")

    monkeypatch.setattr(jax_transfer, "Source", missing)
    with pytest.raises(ValueError, match=r"transfer is 'jax_transfer'.*no module named transfer; allowed: device_put"):
        JaxTransfer(places)
    hangs = threading.Event()
    monkeypatch.setattr(jax_transfer, "Source", lambda *_: hangs.wait(WAIT_S))
    monkeypatch.setattr(jax_transfer, "PROBE_S", 0.05)
    with pytest.raises(ValueError, match=r"did not come back within 0\.05 s"):
        JaxTransfer(places)
    hangs.set()
