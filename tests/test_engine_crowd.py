"""A thousand requests from threads and event loops, read in every way and left in every way: nothing leaks, and Ctrl-C
in the middle ends the process."""

import asyncio
import collections
import json
import random
import signal
import string
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import pdjax
from tests.engines import GREEDY, WAIT_S, ids, settle, tokens

pytest_plugins = ["tests.shared_engines"]

THREADS, EACH, TASKS = 8, 60, 520


def tables(served):
    """How much every container of the engine's parts holds. Slots that rows have left are told to the instance with its
    next iteration: how many wait for it depends on which rows came last."""
    parts = {"engine": served, "cluster": served._cluster, "transport": served._cluster._transport}
    controller = served._controller
    parts |= {"controller": controller, "books": controller.books}
    for index, (lane, thread) in enumerate(zip(controller.books.instances, served._cluster._lanes, strict=True)):
        parts |= {f"lane {index}": lane, f"pool {index}": lane.pool, f"thread {index}": thread}
    kinds = dict, list, set, collections.deque
    return {
        f"{part}.{name}": len(value)
        for part, owner in parts.items()
        for name, value in vars(owner).items()
        if isinstance(value, kinds) and name != "_leaves"
    }


def ask_for(seed):
    draw = random.Random(seed)
    params = pdjax.SamplingParams(
        temperature=1.0,
        seed=seed,
        max_tokens=draw.randint(1, 8),
        ignore_eos=True,
        stop=tuple(string.ascii_letters) if seed % 3 else (),
        logprobs=seed % 5 == 0,
    )
    return ids(seed, draw.randint(1, 40)), params


@pytest.mark.slow
def test_a_thousand_requests_from_threads_and_an_event_loop_leave_nothing_behind(pulled):
    want = tokens(pulled.generate([ids(1, 9)], GREEDY))
    settle(pulled)
    before, alive = tables(pulled), set(threading.enumerate())
    ends = []

    def one(seed):
        prompt, params = ask_for(seed)
        way = seed % 6
        if way == 0:  # left early
            deltas = pulled.stream(prompt, params)
            next(deltas)
            deltas.close()
        elif way == 1:  # never read, not even kept
            pulled.submit(prompt, params, user_id="the same", deadline_s=0.02 if seed % 4 else None)
        elif way == 2:
            handle = pulled.submit(prompt, params)
            handle.abort()
            ends.append(handle.result(WAIT_S).finish_reason)
        else:
            assert list(pulled.stream(prompt, params))
            ends.append("read")

    async def another(seed, room):
        prompt, params = ask_for(seed)
        async with room:
            deltas = pulled.astream(prompt, params)
            if seed % 4 == 0:
                await anext(deltas)
                await deltas.aclose()
            elif seed % 4 == 1:
                ends.append((await pulled.submit(prompt, params)).finish_reason)
            else:
                assert [delta async for delta in deltas]
                ends.append("read")

    async def all_of_them():
        room = asyncio.Semaphore(100)
        await asyncio.gather(*(another(seed, room) for seed in range(1000, 1000 + TASKS)))

    with ThreadPoolExecutor(THREADS) as pool:
        jobs = [pool.submit(lambda k: [one(k * EACH + i) for i in range(EACH)], number) for number in range(THREADS)]
        asyncio.run(all_of_them())
        for job in jobs:
            job.result(WAIT_S)
    settle(pulled)
    assert len(ends) == 480 - 80 - 80 + TASKS * 3 // 4
    assert min(collections.Counter(ends)[end] for end in ("read", "stop", "length")) > 20
    assert tables(pulled) == before
    assert set(threading.enumerate()) <= alive
    assert tokens(pulled.generate([ids(1, 9)], GREEDY)) == want


INTERRUPTED = """
import asyncio, json, sys, threading, time
import pdjax
from tests.engines import engine, ids

PARAMS = pdjax.SamplingParams(temperature=1.0, max_tokens=100, ignore_eos=True, stop="never to be seen")
served, begun, seen = engine(stream_layers=0), threading.Event(), []


def follow(number):
    try:
        for i in range(60):
            if number % 2:
                next(served.stream(ids(i, 9), PARAMS))  # and drops it
            else:
                served.submit(ids(i, 9), PARAMS).result()
    except RuntimeError as error:
        seen.append(str(error))


async def ask():
    async def one(i):
        async for delta in served.astream(ids(i, 9), PARAMS):
            if not begun.is_set():
                begun.set()
                print("begun", flush=True)
    await asyncio.gather(*(one(i) for i in range(520)))


threads = [threading.Thread(target=follow, args=(number,)) for number in range(8)]
try:
    with served:
        for thread in threads:
            thread.start()
        asyncio.run(ask())
except KeyboardInterrupt:
    print("interrupted", flush=True)
for thread in threads:
    thread.join()
print(json.dumps({
    "threads": [thread.name for thread in threading.enumerate() if thread.name.startswith(("controller", "instance"))],
    "handles": len(served._handles),
    "seen": sorted(set(seen)),
}))
"""


@pytest.mark.slow
def test_ctrl_c_in_the_middle_of_a_thousand_requests_ends_the_process_within_5_s():
    root = Path(__file__).resolve().parents[1]
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        out, errors = process.communicate(timeout=WAIT_S)
        took = time.monotonic() - sent
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    interrupted, left = out.splitlines()
    assert interrupted == "interrupted"
    assert json.loads(left) == {"threads": [], "handles": 0, "seen": ["the engine is closed"]}
    assert took < 5, took
