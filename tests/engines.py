"""Engines for tests: small, quick to build, and poisoned so that a row read where nothing was written is seen.
Imported as `tests.engines`."""

import contextlib
import dataclasses
import math
import random
from pathlib import Path
from unittest import mock

import pdjax
from pdjax import build
from pdjax.pages import PagePool
from pdjax.schedulers import Colocated, Place
from pdjax.transfer.device_put import DevicePut

SHARED = Path(__file__).parents[2] / "shared" / "weights"
STORIES = SHARED / "stories260k-hf"
WAIT_S = 120  # how long a test waits for what must come; programs may be compiled meanwhile
LIMITS = {
    "model": "tiny",
    "dtype": "float32",
    "prefill_chunk": 32,
    "prefill_max_batch": 2,
    "decode_max_batch": 4,
    "page_size": 16,
    "max_model_len": 256,
    "compilation_cache": "",
    "warmup": False,
}
GREEDY = pdjax.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def engine(**changes) -> pdjax.Engine:
    """Unless it warms up, it compiles what is used when it is used, and one size of pass per kind. See `wire`."""
    config = pdjax.EngineConfig(**(LIMITS | changes))
    sizes = contextlib.nullcontext() if config.warmup else mock.patch("pdjax.home.specs_of", one_size)
    with sizes, mock.patch("pdjax.build.DevicePut", Wire):
        return pdjax.Engine(config)


def wire(engine: pdjax.Engine) -> "Wire":
    """Its transport, which can be made to keep what it is to move."""
    return engine._cluster._transport


def usable(engine: pdjax.Engine) -> tuple[int, ...]:
    """What `free_pages` must be when nothing is live."""
    return tuple(spec.usable_pages for spec in engine.specs)


def settle(engine: pdjax.Engine) -> None:
    """Every request ends, and every page comes back."""
    assert engine.wait_idle(WAIT_S), "never idle"
    assert engine.free_pages == usable(engine)


def poison(engine: pdjax.Engine) -> None:
    """NaN in every free page; 1e4 in a page when it is given out: rows of an earlier owner. Page 0 stays zero."""
    for lane, thread in zip(engine._controller.books.instances, engine._cluster._lanes, strict=True):
        lane._pool = lane.batch._pool = _Poisoned(lane.spec, thread)


def ids(seed, length):
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(length)]


def sampled(seed=None, **changes):
    return pdjax.SamplingParams(**({"temperature": 1.0, "max_tokens": 12, "ignore_eos": True, "seed": seed} | changes))


def first_token_of(handle):
    """Waits for it without reading, since leaving a half-read stream aborts it."""
    with handle._lock:
        assert handle._grown.threads.wait_for(lambda: handle._tokens, WAIT_S)


def tokens(results):
    return [result.token_ids for result in results]


class Wire(DevicePut):
    """Counts transfers; between `hold` and `release` nothing moves."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.started = 0
        self._kept = None

    def start(self, *arguments, **callbacks) -> None:
        self.started += 1
        super().start(*arguments, **callbacks)

    def send(self, unit) -> None:
        kept = self._kept
        super().send(unit) if kept is None else kept.append(unit)

    def hold(self) -> None:
        self._kept = []

    def release(self) -> None:
        """In the order in which they were offered. Not while units are being offered."""
        kept, self._kept = self._kept, None
        for unit in kept:
            super().send(unit)


class _Poisoned(PagePool):
    def __init__(self, spec, thread) -> None:
        super().__init__(spec)
        self._thread = thread
        self._fill(range(1, spec.num_pages), math.nan)

    def take(self, owner, count):
        taken = super().take(owner, count)
        self._fill(taken or (), 1e4)
        return taken

    def release(self, owner):
        pages = super().release(owner)
        self._fill(pages, math.nan)
        return pages

    def _fill(self, pages, value) -> None:
        if pages:  # on the lane, in order with the passes and inserts around it
            self._thread.put(lambda lane: lane.instance.fill_pages(pages, value))


def one_size(*arguments):
    """`specs_of` with one size of pass per kind: less is compiled."""
    return tuple(
        dataclasses.replace(
            spec,
            chunk_buckets=(spec.max_chunk,) if spec.max_chunk else (),
            row_buckets=(spec.max_rows,) if spec.max_rows else (),
        )
        for spec in build.specs_of(*arguments)
    )


class First(Colocated):
    """Everything on instance 0: nothing is compiled twice."""

    def place(self, ask, cluster):
        return Place(0, 0, "whole", "the first")
