"""Compiles every program of an instance before it serves, and measures them. Enters: an instance without traffic.
Leaves: an instance that compiles nothing any more, and samples for a latency model. Called by `Instance.warmup`.

Programs are compiled in parallel threads, which jit's cache then finds, and after that called once each through the
very paths that serve: only a real call fills the fast path of jit.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from pdjax.catalogue import Program
from pdjax.latency import Probe, Sample
from pdjax.probes import held

if TYPE_CHECKING:
    from pdjax.instance import Instance

Progress = Callable[[int, int, str], None]  # done, total, what

_COMPILERS = 2  # threads: more gain nothing, tracing holds the interpreter
_CONTEXT = 256  # tokens before a chunk, or of a row, in the samples that have a context
_ROUNDS = 3  # in which a list of passes is measured
_APART = 0.618  # of a list, between the places at which one instance and the next begin: none begins near another
_SHORT_S = 0.1  # passes shorter than this are timed three times, others once, in a brief measurement
_called: set[tuple[Any, ...]] = set()  # programs that jit has seen called
_measured: dict[tuple[Any, ...], list[float]] = {}  # (kind of pass, probe) -> seconds of each


def warm_up(
    instance: "Instance", progress: Progress | None = None, probes: Sequence[Probe] | None = None
) -> list[Sample]:
    """Compiles, calls and times; pages and slots are left as they are.

    Args:
        probes: passes to measure; None: a few of each size. The others are called once without.

    Returns:
        What was measured, in this order.
    """
    report = progress or (lambda done, total, what: None)
    wanted, rounds = (_brief(instance), 1) if probes is None else (probes, _ROUNDS)
    pairs, pool = instance.buckets.pairs, ThreadPoolExecutor(_COMPILERS)
    try:
        jobs = [(program.name, pool.submit(_compile, program)) for program in instance.programs()]
        total = len(jobs) + len(pairs) + rounds * len(wanted)
        for done, (name, job) in enumerate(jobs):
            report(done, total, name)
            job.result()
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupted warm-up does not go on compiling
    instance.rehearse_transfers()
    for done, (T, B) in enumerate(pairs, start=len(jobs)):
        report(done, total, f"call {T}+{B}")
        _call(instance, Probe(((T, 0),) if T else (), (1,) * B))
    # One round after the other: a disturbance hits few of the times that a median is made of. Instances of a host that
    # measure at the same time begin at different places: as in serving, a pass runs beside all sorts of others.
    at = int(_APART * instance.spec.index % 1 * len(wanted))
    order = [*wanted[at:], *wanted[:at]]
    for number in range(rounds):
        for done, probe in enumerate(order, start=len(jobs) + len(pairs) + number * len(wanted)):
            report(done, total, f"measure {probe.chunks or ''} {len(probe.contexts) or ''}".strip())
            _time(instance, probe, number, again=rounds == 1)
    report(total, total, "ready")
    return [Sample(probe, float(np.median(_measured[instance.kind_of(probe), probe]))) for probe in wanted]


def _compile(program: Program) -> None:
    program.fn.lower(*program.args).compile()


def _brief(instance: "Instance") -> list[Probe]:
    """Every pass at its full size; decode steps and the smallest and largest chunks without and with a context,
    chunks in between without, mixed passes with one; and the largest batch with one long row, which tells what the
    others of its block wait for."""
    room, chunks = instance.spec.max_model_len, instance.buckets.chunks
    probes = []
    for T, B in instance.buckets.pairs:
        both = not T or (not B and T in (chunks[0], chunks[-1]))
        for context in (0, _CONTEXT) if both else (_CONTEXT,) if B else (0,):
            prior = min(context, room - T)
            probes.append(Probe(((T, prior),) if T else (), (held(instance.spec, context),) * B))
    if instance.buckets.rows and (B := instance.buckets.rows[-1]) > 1:
        probes.append(Probe((), (held(instance.spec, _CONTEXT), *(held(instance.spec, 0),) * (B - 1))))
    return probes


def _call(instance: "Instance", probe: Probe) -> None:
    """The first call of a program fills jit's fast path and is slower."""
    program = instance.program_of(probe)
    if program not in _called:
        instance.rehearse(probe).wait()
        _called.add(program)


def _time(instance: "Instance", probe: Probe, number: int, again: bool) -> None:
    """Times a pass in round `number`, three times if it is short and `again` is true. Whoever asks first measures for
    all replicas of the kind, also those of later engines."""
    times = _measured.setdefault((instance.kind_of(probe), probe), [])
    # With other processes each must run as many, whatever its clock says.
    while len(times) <= number or (again and len(times) < 3 and (times[0] < _SHORT_S or not instance.alone)):
        began = time.perf_counter()
        instance.rehearse(probe).wait()
        times.append(time.perf_counter() - began)
