"""The post over MPI: two communicators, and one thread that makes every call on them. Enters: messages and buffers,
from any thread. Leaves: callbacks in the post's thread. Made by `pdjax.mpi.job`; see `pdjax.mpi.post`.

Nothing blocks. A message is received in two steps, a matched probe and a receive that is tested, since the sender of a
long one may be stopped between its halves. How often the thread looks depends on what it has to wait for: see `nap_s`.
"""

import collections
import dataclasses
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from pdjax.mpi import ends
from pdjax.mpi.watch import Watch
from pdjax.transfer.parcel import Done

MAX_BYTES = 2**31 - 1  # of one message: MPI counts in 32 bits
_WORD, _PING, _PONG = range(3)  # tags of control messages
_ROUND = 64  # messages that one round takes before it looks at data again
_TIGHT_S, _OPEN_TIGHT_S = 300e-6, 1e-3  # of silence until the first nap: even the shortest one takes some 0.2 ms
_OPEN_S = 1.0
_SWITCH_S = 500e-6
_log = logging.getLogger("pdjax")


def nap_s(quiet_s: float, is_open: bool, awaited: bool) -> float:
    """How long the thread may sleep before it looks again, when nothing has happened for `quiet_s`; 0: only yield.

    Naps are an eighth of the silence: an answer is late by an eighth of what it took, and a long silence costs few
    looks. `is_open`: sends or receives are; bytes may move only while somebody looks. If none moves for long, the peer
    is stopped. `awaited`: an answer is.
    """
    if quiet_s < (_OPEN_TIGHT_S if is_open else _TIGHT_S):
        return 0.0
    if is_open and quiet_s < _OPEN_S:
        longest = 100e-6
    elif awaited:
        longest = 1e-3  # rank 0 may share its core with an instance: of whose time shorter naps took 3 %
    else:
        longest = 2e-3
    return min(quiet_s / 8, longest)


@dataclasses.dataclass(slots=True)
class _Open:
    """A request that is not complete. `buffer` keeps its bytes alive. `nbytes`: of a receive; None of a send."""

    request: Any
    rank: int
    buffer: Any
    done: Done | None = None
    nbytes: int | None = None


@dataclasses.dataclass(slots=True)
class _Arriving:
    request: Any
    tag: int
    message: bytearray


class MpiPost:
    """Implements `pdjax.mpi.post.Post`.

    Args:
        control, data: communicators of all ranks, of nobody else's use, whose errors are returned.
        survives: whether MPI tells of ranks that died, and works on (ULFM). Else the launcher ends the job.
        peer_timeout_s: rank 0 gives a rank up that is not heard of for so long, from `start` on.
    """

    def __init__(self, control: Any, data: Any, survives: bool, peer_timeout_s: float) -> None:
        from mpi4py import MPI

        self._mpi, self._control, self._data = MPI, control, data
        self._rank, self._size = control.Get_rank(), control.Get_size()
        self._survives, self._peer_timeout_s = survives, peer_timeout_s
        self._tags = int(data.Get_attr(MPI.TAG_UB)) + 1
        self._proc_failed = {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING}
        self._status = MPI.Status()
        # Not a SimpleQueue: its `get` with a timeout of microseconds may wait for ever (seen in Python 3.11.7).
        self._todo: collections.deque[Callable[[], None]] = collections.deque()
        self._bell = threading.Lock()  # open: something was put. A third cheaper than an Event at 500 naps a second
        self._bell.acquire()
        self._thread = threading.Thread(target=self._run, name="post", daemon=True)
        self._closing, self._gate = False, threading.Lock()  # nothing is put after the thread has looked last
        # Of the thread alone:
        self._arriving: dict[int, collections.deque[_Arriving]] = collections.defaultdict(collections.deque)
        self._open: list[_Open] = []
        self._kept: list[_Open] = []  # never completed; their buffers must outlive them
        self._awaited = 0
        self._dead: set[int] = set()
        self._lost: set[int] = set()
        self._end_s: float | None = None

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def start(self, heard: Callable[[int, bytes], None], lost: Callable[[int, str], None]) -> None:
        self._heard, self._lose = heard, lost
        # Every MPI call lets go of the interpreter, which a thread that computes in Python then keeps for 5 ms.
        sys.setswitchinterval(_SWITCH_S)
        self._thread.start()

    def tell(self, rank: int, message: bytes) -> None:
        self._check(rank, len(message))
        self._put(functools.partial(self._say, rank, _WORD, message))

    def ship(self, rank: int, tag: int, buffer: Any, done: Done) -> None:
        self._check(rank, buffer.nbytes)
        if not self._put(functools.partial(self._ship, rank, tag, self._raw(buffer), buffer, done)):
            done(ConnectionError("the post is closed"))

    def fetch(self, rank: int, tag: int, buffer: Any, done: Done) -> None:
        self._check(rank, buffer.nbytes)
        if not self._put(functools.partial(self._fetch, rank, tag, self._raw(buffer), buffer, done)):
            done(ConnectionError("the post is closed"))

    def expect(self, more: int) -> None:
        self._put(functools.partial(self._expect, more))

    def close(self, timeout_s: float) -> bool:
        self._put(functools.partial(self._close, timeout_s))
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s + 1)
        return not (self._thread.is_alive() or self._open or self._kept or self._lost)

    # --- any thread ---------------------------------------------------------------------------------------------------

    def _check(self, rank: int, nbytes: int) -> None:
        if not 0 <= rank < self._size or rank == self._rank:
            raise ValueError(f"rank is {rank}; allowed: 0 to {self._size - 1}, but not {self._rank} itself")
        if nbytes > MAX_BYTES:
            raise ValueError(f"a message has {nbytes} bytes; allowed: up to {MAX_BYTES}")

    def _raw(self, buffer: Any) -> Any:
        """The memory of an array, or of what a `Pointer` points to: MPI asks neither for type nor for writability."""
        if hasattr(buffer, "address"):
            address = buffer.address
        elif buffer.flags.c_contiguous:
            address = buffer.ctypes.data
        else:
            raise ValueError(f"a buffer has strides {buffer.strides}; allowed: C-contiguous")
        return self._mpi.buffer.fromaddress(address, buffer.nbytes)

    def _put(self, call: Callable[[], None]) -> bool:
        with self._gate:
            if not self._closing:
                self._todo.append(call)
                if self._bell.locked():
                    self._bell.release()
            return not self._closing

    # --- the post's thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            ends.crash(error)

    def _loop(self) -> None:
        moved_s = time.monotonic()
        watched = range(1, self._size) if self._rank == 0 else ()
        self._watch = Watch(watched, self._peer_timeout_s, moved_s)
        while not self._over():
            if self._round():
                moved_s = time.monotonic()
            now = time.monotonic()
            self._look_after(now)
            nap = nap_s(now - moved_s, bool(self._open or self._is_arriving()), self._awaited > 0)
            if nap == 0.0:
                os.sched_yield()
            elif self._bell.acquire(timeout=nap):
                moved_s = time.monotonic()

    def _round(self) -> bool:
        """One look at everything. Whether anything has happened."""
        return self._do() | self._listen() | self._deliver() | self._test()

    def _do(self) -> bool:
        """What other threads have asked for. Whether there was anything."""
        asked = bool(self._todo)
        while self._todo:
            self._todo.popleft()()
        return asked

    def _over(self) -> bool:
        """Whether all is sent and received after `close`, or its time is over; then nothing is taken any more."""
        if self._end_s is None:
            return False
        with self._gate:
            waits = self._todo or any(item.rank not in self._lost for item in self._open)
            if waits and time.monotonic() < self._end_s:
                return False
            self._closing = True
        self._do()
        for item in self._open:
            self._finish(item, ConnectionError("the post was closed"))
        return True

    def _close(self, timeout_s: float) -> None:
        self._end_s = time.monotonic() + timeout_s

    def _expect(self, more: int) -> None:
        self._awaited += more

    def _say(self, rank: int, tag: int, message: bytes) -> None:
        if rank not in self._dead:
            self._begin(_Open(None, rank, message), self._control.Isend, [message, self._mpi.BYTE], tag)

    def _ship(self, rank: int, tag: int, raw: Any, buffer: Any, done: Done) -> None:
        self._begin(_Open(None, rank, buffer, done), self._data.Isend, [raw, self._mpi.BYTE], tag % self._tags)

    def _fetch(self, rank: int, tag: int, raw: Any, buffer: Any, done: Done) -> None:
        item = _Open(None, rank, buffer, done, buffer.nbytes)
        self._begin(item, self._data.Irecv, [raw, self._mpi.BYTE], tag % self._tags)

    def _begin(self, item: _Open, call: Callable[..., Any], spec: list[Any], tag: int) -> None:
        if item.rank in self._dead:
            return self._finish(item, ConnectionError(f"rank {item.rank} is dead"))
        try:
            item.request = call(spec, item.rank, tag)
        except self._mpi.Exception as error:
            return self._finish(item, self._failure(item.rank, error))
        self._open.append(item)

    def _finish(self, item: _Open, error: Exception | None) -> None:
        if item.done is not None:
            item.done(error)

    def _failure(self, rank: int, error: Any) -> Exception:
        """What an MPI error of one peer means. Others are bugs, or a broken MPI."""
        kind = error.Get_error_class()
        if kind in self._proc_failed:
            return ConnectionError(f"rank {rank} died")
        if kind == self._mpi.ERR_TRUNCATE:
            return ValueError(f"rank {rank} shipped more bytes than were fetched")
        raise error

    def _test(self) -> bool:
        """Finishes the requests that are complete."""
        if not self._open:
            return False
        items, self._open = self._open, []
        for item in items:
            error: Exception | None = None
            try:
                if not item.request.Test(self._status):
                    self._open.append(item)
                    continue
                if item.nbytes is not None and item.nbytes != (count := self._status.Get_count(self._mpi.BYTE)):
                    error = ValueError(f"rank {item.rank} shipped {count} bytes; expected: {item.nbytes}")
            except self._mpi.Exception as failed:
                error = self._failure(item.rank, failed)
            self._finish(item, error)
        return len(self._open) < len(items)

    def _listen(self) -> bool:
        """Begins to receive the messages that are there."""
        for taken in range(_ROUND):
            try:
                # MPI looks, and only then reads what has come: what it read is found the second time.
                message = self._probe() or self._probe()
            except self._mpi.Exception as error:
                if error.Get_error_class() not in self._proc_failed:
                    raise
                return self._census()
            if message is None:
                return taken > 0
            room = bytearray(self._status.Get_count(self._mpi.BYTE))
            source, tag = self._status.Get_source(), self._status.Get_tag()
            self._arriving[source].append(_Arriving(message.Irecv([room, self._mpi.BYTE]), tag, room))
        return True

    def _probe(self) -> Any:
        return self._control.Improbe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, self._status)

    def _is_arriving(self) -> bool:
        return any(self._arriving.values())

    def _deliver(self) -> bool:
        """Hands on the messages that are complete, in the order in which their sender sent them."""
        delivered = False
        for source, waiting in list(self._arriving.items()):
            while waiting:
                try:
                    if not waiting[0].request.Test():
                        break
                except self._mpi.Exception as error:  # its sender died between the halves
                    self._failure(source, error)
                    waiting.clear()
                    break
                self._take(source, waiting.popleft())
                delivered = True
        return delivered

    def _take(self, source: int, item: _Arriving) -> None:
        self._watch.seen(source, time.monotonic())
        if item.tag == _PING:
            self._say(source, _PONG, b"")
        elif item.tag == _WORD and source not in self._lost:
            self._heard(source, bytes(item.message))

    def _look_after(self, now: float) -> None:
        ask, silent = self._watch.look(now)
        for rank in silent:
            self._give_up(rank, f"rank {rank} was not heard of for {self._peer_timeout_s:g} s")
        for rank in ask:
            self._say(rank, _PING, b"")

    def _census(self) -> bool:
        """A rank died: which? Whether there are new ones. What they said before is heard before they are lost."""
        if not self._survives:
            return False  # the launcher ends this process, too
        failed = self._control.Get_failed()
        group = self._control.Get_group()
        news = set(failed.Translate_ranks(None, group)) - self._dead
        group.Free()
        failed.Free()
        self._control.Ack_failed(self._size)  # or no message of the living would be seen any more
        self._dead |= news
        if news:
            while self._listen():
                self._deliver()
        for rank in sorted(news):
            self._bury(rank)
        return bool(news)

    def _bury(self, rank: int) -> None:
        """Ends what is open with a rank that died."""
        self._arriving.pop(rank, None)
        self._test()
        left = [item for item in self._open if item.rank == rank]
        self._open = [item for item in self._open if item.rank != rank]
        self._kept += left
        for item in left:
            self._finish(item, ConnectionError(f"rank {rank} died"))
        self._give_up(rank, f"the process of rank {rank} died")

    def _give_up(self, rank: int, why: str) -> None:
        self._watch.forget(rank)
        if rank not in self._lost:
            self._lost.add(rank)
            self._lose(rank, why)
