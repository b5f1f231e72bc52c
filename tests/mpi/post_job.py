"""Run by `mpirun -n 6 --with-ft ulfm` (see test_post_mpirun): six ranks with posts and nothing else. Rank 0 gives the
others tasks, measures, and prints one line of JSON. Ranks 3 to 5 are killed, leave, and are stopped."""

import json
import os
import queue
import signal
import sys
import threading
import time
import types

import numpy as np
from mpi4py import MPI

from pdjax.mpi import ends
from pdjax.mpi.mpi_post import MpiPost

PEER_TIMEOUT_S = 2.0
COUNT, NBYTES = 64, 1 << 20
WAIT_S = 20
TAG = 40_000  # above what MPI promises


class Rank:
    """A post, and what it said, for the main thread."""

    def __init__(self):
        world = MPI.COMM_WORLD
        world.Set_errhandler(MPI.ERRORS_RETURN)
        control, self.data = world.Dup(), world.Dup()
        for comm in (control, self.data):
            comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank = world.rank
        self.pids = world.allgather(os.getpid())
        self.buffers = [np.full(NBYTES, (self.rank * 64 + index) % 251, np.uint8) for index in range(COUNT)]
        self.raw_s = [self.raw() for _ in range(5)]
        self.news, self.dones = queue.SimpleQueue(), queue.SimpleQueue()
        self.post = MpiPost(control, self.data, survives=True, peer_timeout_s=PEER_TIMEOUT_S)
        world.Barrier()
        self.post.start(self.heard, self.lost)

    def raw(self):
        """Seconds of the same bytes from rank 1 to rank 2 by the main threads."""
        MPI.COMM_WORLD.Barrier()
        start = time.perf_counter()
        if self.rank == 1:
            MPI.Request.Waitall([self.data.Isend([b, MPI.BYTE], 2, i) for i, b in enumerate(self.buffers)])
        elif self.rank == 2:
            MPI.Request.Waitall([self.data.Irecv([b, MPI.BYTE], 1, i) for i, b in enumerate(self.buffers)])
        return time.perf_counter() - start

    def heard(self, source, message):
        name, _, rest = message.partition(b" ")
        if name == b"echo":
            self.post.tell(source, b"back " + rest)
        else:
            self.news.put((name.decode(), source, rest, time.perf_counter()))

    def lost(self, rank, why):
        if rank == 0:
            ends.leave(1)
        self.news.put(("lost", rank, why, time.perf_counter()))

    def next(self, name):
        found = self.news.get(timeout=WAIT_S)
        assert found[0] == name, found
        return found

    def move(self, call, peer, count=COUNT):
        """Ships or fetches `count` buffers, and waits. Seconds, and the errors."""
        start = time.perf_counter()
        for index in range(count):
            call(peer, TAG + index, self.buffers[index], self.dones.put)
        errors = [self.dones.get(timeout=WAIT_S) for _ in range(count)]
        return time.perf_counter() - start, [error for error in errors if error is not None]


def idle_share(seconds):
    start = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - start) / seconds


def matmuls(seconds):
    """How many products of 512 x 512 one thread does in that time."""
    square, count, end = np.ones((512, 512), np.float32), 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        square @ square
        count += 1
    return count


def python_loops(seconds):
    count, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        count += 1
    return count


BUSY = {"matmul": matmuls, "python": python_loops}


def serve(me):
    while True:
        name, _, rest, _ = me.news.get()
        if name == "ship":
            seconds, errors = me.move(me.post.ship, int(rest))
            me.post.tell(0, b"shipped " + json.dumps([seconds, len(errors)]).encode())
        elif name == "fetch":
            for buffer in me.buffers:
                buffer[:] = 255
            me.post.tell(0, b"ready")
            seconds, errors = me.move(me.post.fetch, int(rest))
            right = all((b == (int(rest) * 64 + i) % 251).all() for i, b in enumerate(me.buffers))
            me.post.tell(0, b"fetched " + json.dumps([seconds, len(errors), right]).encode())
        elif name == "idle":
            me.post.tell(0, b"idled " + json.dumps(idle_share(float(rest))).encode())
        elif name == "busy":
            kind, seconds = rest.decode().split()
            me.post.tell(0, b"was " + json.dumps(BUSY[kind](float(seconds))).encode())
        elif name == "short":
            me.post.fetch(0, TAG, np.zeros(8, np.uint8), lambda error: me.post.tell(0, b"error " + str(error).encode()))
        elif name == "hang":
            me.post.fetch(int(rest), TAG, me.buffers[0], lambda error: me.post.tell(0, b"hung " + str(error).encode()))
            me.post.tell(0, b"hanging " + rest)
        elif name == "raws":
            me.post.tell(0, b"raw " + json.dumps(me.raw_s).encode())
        elif name == "leave":
            ends.leave(0)
        elif name == "raise":
            ends.end_alone()
            me.post.tell(0, b"raising")
            raise RuntimeError("as it should")
        elif name == "end":
            return


def round_trips(me, rank, count, pause_s):
    """Median and largest, in µs, as the main thread sees them."""
    times = []
    for index in range(count):
        time.sleep(pause_s)
        me.post.expect(1)
        start = time.perf_counter()
        me.post.tell(rank, b"echo %d" % index)
        assert me.next("back")[2] == b"%d" % index
        times.append((time.perf_counter() - start) * 1e6)
        me.post.expect(-1)
    return float(np.median(times)), max(times)


def losses(me):
    """Ends rank 3 to 5 each in its way, while rank 1 waits for bytes from it. Seconds until rank 0 and rank 1 know."""
    post, seen = me.post, {}
    for name, rank, act in (
        ("kill", 3, lambda: os.kill(me.pids[3], signal.SIGKILL)),
        ("exit 0", 4, lambda: post.tell(4, b"leave")),
        ("raise", 5, lambda: post.tell(5, b"raise")),
    ):
        post.tell(1, b"hang %d" % rank)
        me.next("hanging")
        post.ship(rank, TAG + 1, me.buffers[0], me.dones.put)  # which it will never fetch
        start = time.perf_counter()
        act()
        said = {}
        while not {"lost", "hung"} <= said.keys():
            kind, source, text, when = me.news.get(timeout=WAIT_S)
            said[kind] = when - start
            if kind == "lost":
                assert source == rank, (source, rank, text)
            if kind == "hung":
                assert b"died" in text, text
        assert isinstance(me.dones.get(timeout=WAIT_S), ConnectionError)
        post.tell(rank, b"dropped")
        seen[name] = {"lost": said["lost"], "hung": said["hung"]}
    return seen


def stop(me):
    """Stops rank 2 until rank 0 has given it up, and wakes it up. Seconds until that, and what came of it."""
    post, start = me.post, time.perf_counter()
    os.kill(me.pids[2], signal.SIGSTOP)
    post.ship(2, TAG + 7, me.buffers[3], me.dones.put)
    _, rank, why, when = me.next("lost")
    assert me.dones.empty()  # its buffer is not free
    post.tell(2, b"fetch 0")  # can still be said; its answers are not heard
    echo, _ = round_trips(me, 1, 3, 0)
    os.kill(me.pids[2], signal.SIGCONT)
    for index in range(COUNT):
        if index != 7:
            post.ship(2, TAG + index, me.buffers[index], me.dones.put)
    errors = [error for error in (me.dones.get(timeout=WAIT_S) for _ in range(COUNT)) if error is not None]
    return {
        "after": when - start,
        "rank": rank,
        "why": why,
        "echo_us": echo,
        "errors": [str(error) for error in errors],
    }


def idle(me):
    """Share of a core that ranks 0 to 2 take in 3 s without anything to do."""
    for rank in (1, 2):
        me.post.tell(rank, b"idle 3")
    return [idle_share(3), *(json.loads(me.next("idled")[2]) for _ in range(2))]


def refusals(me):
    """What may not be sent."""
    texts = []
    for rank, buffer in (
        (0, np.zeros(1)),
        (6, np.zeros(1)),
        (1, np.zeros((2, 2))[:, :1]),
        (1, types.SimpleNamespace(nbytes=2**31, address=0)),
    ):
        try:
            me.post.ship(rank, 0, buffer, me.dones.put)
        except ValueError as error:
            texts.append(str(error))
    return texts


def control(me):
    """The tasks of rank 0. What they showed."""
    post = me.post
    found = {
        "burst_us": round_trips(me, 1, 500, 0),
        "idle_us": round_trips(me, 1, 20, 0.05),
    }
    moves = []
    for _ in range(5):
        post.tell(2, b"fetch 1")
        me.next("ready")
        post.tell(1, b"ship 2")
        moves.append(
            {item[0]: json.loads(item[2]) for item in (me.news.get(timeout=WAIT_S), me.news.get(timeout=WAIT_S))}
        )
    found["ship_s"] = [move["shipped"][0] for move in moves]
    found["errors"] = sum(move["shipped"][1] + move["fetched"][1] for move in moves)
    found["right"] = all(move["fetched"][2] for move in moves)
    post.tell(1, b"short")
    post.ship(1, TAG, np.zeros(4, np.uint8), me.dones.put)
    found["short"] = me.next("error")[2].decode()
    assert me.dones.get(timeout=WAIT_S) is None
    post.tell(1, b"raws")
    found["raw_s"] = json.loads(me.next("raw")[2])
    for kind in BUSY:
        post.tell(1, f"busy {kind} 0.7".encode())
        found[f"busy_{kind}_us"] = round_trips(me, 1, 10, 0.01)
        me.next("was")
    found["idle"] = idle(me)
    if max(found["idle"]) > 0.05:  # the machine may have been busy with others, whose switches count, too
        found["idle"] = idle(me)
    found["refused"] = refusals(me)
    found["losses"] = losses(me)
    found["stop"] = stop(me)
    return found


if __name__ == "__main__":
    ends.install()
    if "abort" in sys.argv:  # rank 1 dies of a thread's exception at the start, while rank 0 waits for it
        if MPI.COMM_WORLD.rank == 1:
            threading.Thread(target=lambda: 1 // 0).start()
            threading.Event().wait(WAIT_S)
        MPI.COMM_WORLD.Barrier()
    here = Rank()
    if here.rank:
        serve(here)
        here.post.close(5)
        ends.leave(0)
    if "late" in sys.argv:  # rank 0 fails when another is dead already
        os.kill(here.pids[1], signal.SIGKILL)
        raise RuntimeError(here.next("lost"))
    result = control(here)
    for peer in (1, 2):
        here.post.tell(peer, b"end")
    result["clean"] = here.post.close(5)
    print("RESULT " + json.dumps(result), flush=True)
    ends.leave(0)
