"""Compiles every program of an instance before it serves, and measures them. Enters: an instance without traffic.
Leaves: an instance that compiles nothing any more, and (load, seconds) samples for a latency model. Called by
`Instance.warmup`.

Programs are compiled in parallel threads, which jit's cache then finds, and after that called once each through the
very paths that serve: only a real call fills the fast path of jit.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from pdjax.latency import Load

if TYPE_CHECKING:
    from pdjax.instance import Instance

Progress = Callable[[int, int, str], None]  # done, total, what

_COMPILERS = 2  # threads: more gain nothing, tracing holds the interpreter
_CONTEXT = 256  # tokens before a chunk, or of a row, in the samples that have a context
_SHORT_S = 0.1  # passes shorter than this are timed three times, others once
_called: set[tuple[Any, ...]] = set()  # programs that jit has seen called
_measured: dict[tuple[Any, ...], float] = {}  # (kind of pass, load) -> seconds


def warm_up(instance: "Instance", progress: Progress | None = None) -> list[tuple[Load, float]]:
    """Compiles, calls and times; pages and slots are left as they are. Returns samples for `pdjax.latency.fit`."""
    report = progress or (lambda done, total, what: None)
    loads = _loads(instance)
    pool = ThreadPoolExecutor(_COMPILERS)
    try:
        jobs = [(name, pool.submit(_compile, fn, args)) for name, fn, args in instance.programs()]
        total = len(jobs) + len(loads)
        for done, (name, job) in enumerate(jobs):
            report(done, total, name)
            job.result()
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupted warm-up does not go on compiling
    instance.rehearse_transfers()
    samples = []
    for done, load in enumerate(loads, start=len(jobs)):
        report(done, total, f"measure {load.chunks or ''} {load.rows or ''}".strip())
        samples.append((load, _seconds(instance, load)))
    report(total, total, "ready")
    return samples


def _compile(fn: Any, args: tuple[Any, ...]) -> None:
    fn.lower(*args).compile()


def _loads(instance: "Instance") -> list[Load]:
    """Every pass at its full size; decode steps and the smallest and largest chunks without and with a context,
    chunks in between without, mixed passes with one."""
    room, chunks = instance.spec.max_model_len, instance.buckets.chunks
    loads = []
    for T, B in instance.buckets.pairs:
        both = not T or (not B and T in (chunks[0], chunks[-1]))
        for context in (0, _CONTEXT) if both else (_CONTEXT,) if B else (0,):
            prior, held = min(context, room - T), min(context + 1, room)
            loads.append(Load(((T, prior),) if T else (), B, B * held, B * held))
    return loads


def _seconds(instance: "Instance", load: Load) -> float:
    """Seconds of a pass; whoever asks first measures for all replicas of the kind, also those of later engines."""
    program, kind = instance.program_of(load), instance.kind_of(load)
    if program not in _called:
        instance.rehearse(load).wait()  # the first call fills jit's fast path and is slower
        _called.add(program)
    if (kind, load) not in _measured:
        times: list[float] = []
        # With other processes each must run as many, whatever its clock says.
        while not times or (len(times) < 3 and (times[0] < _SHORT_S or not instance.alone)):
            began = time.perf_counter()
            instance.rehearse(load).wait()
            times.append(time.perf_counter() - began)
        _measured[kind, load] = float(np.median(times))
    return _measured[kind, load]
