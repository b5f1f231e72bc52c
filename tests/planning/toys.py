"""Instances that one can compute by hand."""

from pdjax.curves import Curves, Decode
from pdjax.fleet import Pool
from pdjax.messages import Role
from pdjax.planning.clusters import Shape
from pdjax.planning.stock import Stock


def curves(prefill_ms=10.0, token_ms=0.1, step_ms=10.0, row_ms=0.1):
    """A pass of n prompt tokens takes `prefill_ms` + n * `token_ms`, a step of n rows `step_ms` + n * `row_ms`."""
    return Curves((prefill_ms / 1e3, token_ms / 1e3, 0.0), (Decode(0, step_ms / 1e3, 0.0, row_ms / 1e3),))


def pool(role=Role.MIXED, count=1, latency=None, kv_tokens=20_000, **options):
    return Pool(role, count, latency or curves(), kv_tokens=kv_tokens, kv_bytes_per_token=1000, **options)


def stock(name="toy", devices=2, sizes=((1, 1),), price=1.0, node_devices=8, nic=1e12, **times):
    """Devices whose instances are TP times as fast."""

    def source(role, tp, pp):
        if (tp, pp) not in sizes:
            return None
        base = {"prefill_ms": 10.0, "token_ms": 0.1, "step_ms": 10.0, "row_ms": 0.1} | times
        latency = curves(**{part: ms / tp for part, ms in base.items()})
        return pool(role, latency=latency, devices=tp * pp, pp=pp, max_model_len=4096)

    return Stock(name, devices, source, 1e12, nic, price, node_devices)


def shape(of=None, tp=1, pp=1):
    of = of or stock(sizes=((tp, pp),), devices=16)
    return Shape(of, tp, pp, of.source(Role.MIXED, tp, pp))
