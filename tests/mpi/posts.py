"""Posts of several ranks in one process, whose losses and delays a test decides. Enters: what is told, shipped and
fetched at `network.posts[rank]`. Leaves: the same callbacks as from the real post, each in the thread of its rank.

    with FakeNetwork(3) as network:
        network.posts[1].start(heard, lost)
        network.posts[0].tell(1, b"...")
        network.settle()            # until nothing moves any more
"""

import collections
import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from pdjax.transfer.parcel import Done


def flat(buffer: Any) -> np.ndarray:
    """The bytes of an array, or of what a `Pointer` points to, as a uint8 view."""
    if isinstance(buffer, np.ndarray):
        return buffer.reshape(-1).view(np.uint8)
    return np.frombuffer((ctypes.c_uint8 * buffer.nbytes).from_address(buffer.address), np.uint8)


class FakeNetwork:
    """`size` posts, and what is under way between them.

    Set `hold` to keep messages and bytes under way until `release`. What a callback raises is raised again when the
    `with` block ends.
    """

    def __init__(self, size: int, hold: bool = False) -> None:
        self.hold = hold
        self.errors: list[Exception] = []
        self._moves = threading.Condition()  # guards all that follows, in the posts too
        self._wire: list[tuple[int, int, Callable[[], None]]] = []  # (from, to, how it arrives), oldest first
        self._dead: set[int] = set()
        self._frozen: set[int] = set()
        self.posts = tuple(FakePost(self, rank) for rank in range(size))

    def __enter__(self) -> "FakeNetwork":
        return self

    def __exit__(self, *_: object) -> None:
        for post in self.posts:
            post.close(10)
        if self.errors:
            raise self.errors[0]

    def release(self, count: int | None = None) -> int:
        """Lets the oldest `count` (all) of what is held go. How many went."""
        with self._moves:
            return self._go(count)

    def under_way(self) -> list[tuple[int, int]]:
        """(from, to) of what is held, or stopped by a frozen rank; oldest first."""
        with self._moves:
            return [(source, dest) for source, dest, _ in self._wire]

    def settle(self, timeout_s: float = 30) -> None:
        """Returns when no post has anything to do. TimeoutError if that does not come."""
        with self._moves:
            if not self._moves.wait_for(lambda: not any(post.busy() for post in self.posts), timeout_s):
                raise TimeoutError(f"ranks {[post.rank for post in self.posts if post.busy()]} are still busy")

    def kill(self, rank: int) -> None:
        """The process is dead (SIGKILL): all others notice, what is open with it fails."""
        with self._moves:
            self._dead.add(rank)
            self._frozen.discard(rank)
            self._wire = [item for item in self._wire if rank not in item[:2]]
            self.posts[rank].die()
            for post in self.posts:
                if post.rank not in self._dead:
                    post.bury(rank, f"rank {rank} was killed")
            self._moves.notify_all()

    def freeze(self, rank: int) -> None:
        """The process is stopped (SIGSTOP): it calls nothing, and nothing of it or to it moves. A callback that runs
        already runs to its end."""
        with self._moves:
            self._frozen.add(rank)

    def thaw(self, rank: int) -> None:
        """The process goes on (SIGCONT), with all that came meanwhile."""
        with self._moves:
            self._frozen.discard(rank)
            if not self.hold:
                self._go(None)
            self._moves.notify_all()

    def time_out(self, rank: int) -> None:
        """Rank 0 has not heard of a rank for too long: it is lost for rank 0 alone, what is open with it stays open."""
        with self._moves:
            self.posts[0].give_up(rank, f"rank {rank} was not heard of")

    def _send(self, source: int, dest: int, arrive: Callable[[], None]) -> None:
        self._wire.append((source, dest, arrive))
        if not self.hold:
            self._go(None)

    def _go(self, count: int | None) -> int:
        held, self._wire = self._wire, []
        gone = 0
        for item in held:
            if self._frozen.intersection(item[:2]) or gone == count:
                self._wire.append(item)
            else:
                gone += 1
                item[2]()
        self._moves.notify_all()
        return gone


class FakePost:
    """Implements `pdjax.mpi.post.Post`; a shipment is done when it is fetched, whatever its size. `awaited` is the sum
    of what `expect` was told."""

    def __init__(self, network: FakeNetwork, rank: int) -> None:
        self.rank, self.awaited = rank, 0
        self._network, self._moves = network, network._moves
        self._todo: collections.deque[Callable[[], None]] = collections.deque()
        self._running = self._ended = False
        self._lost: set[int] = set()
        # By (peer, tag), oldest first. A ship waits at its destination until that fetches.
        self._shipped: dict[tuple[int, int], list[tuple[Any, Done]]] = collections.defaultdict(list)
        self._fetched: dict[tuple[int, int], list[tuple[Any, Done]]] = collections.defaultdict(list)
        self._thread = threading.Thread(target=self._run, name=f"fake post {rank}", daemon=True)

    @property
    def size(self) -> int:
        return len(self._network.posts)

    def start(self, heard: Callable[[int, bytes], None], lost: Callable[[int, str], None]) -> None:
        self._heard, self._lose = heard, lost
        self._thread.start()

    def tell(self, rank: int, message: bytes) -> None:
        if rank == self.rank:
            raise ValueError(f"rank is {rank}; allowed: any but its own")
        with self._moves:
            if not self._ended and rank not in self._network._dead:
                self._network._send(self.rank, rank, lambda: self._network.posts[rank]._hear(self.rank, message))

    def ship(self, rank: int, tag: int, buffer: Any, done: Done) -> None:
        if self._refused(rank, done):
            return
        with self._moves:
            dest = self._network.posts[rank]
            dest._shipped[self.rank, tag].append((buffer, done))
            self._network._send(self.rank, rank, lambda: dest._match(self.rank, tag))

    def fetch(self, rank: int, tag: int, buffer: Any, done: Done) -> None:
        if self._refused(rank, done):
            return
        with self._moves:
            self._fetched[rank, tag].append((buffer, done))
            # Its match may be here already: it waits like the bytes that it allows to come.
            self._network._send(rank, self.rank, lambda: self._match(rank, tag))

    def expect(self, more: int) -> None:
        with self._moves:
            self.awaited += more

    def close(self, timeout_s: float) -> bool:
        with self._moves:
            self._ended = True
            self._moves.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        left = [*self._shipped.values(), *self._fetched.values()]
        return not (any(left) or self._lost)

    def busy(self) -> bool:
        """Whether a callback runs, or one is due that may run."""
        able = self._thread.is_alive() and self.rank not in self._network._frozen
        return self._running or (able and bool(self._todo))

    def die(self) -> None:
        self._ended = True
        self._todo.clear()

    def bury(self, rank: int, why: str) -> None:
        for key in [key for key in self._shipped if key[0] == rank]:
            del self._shipped[key]
        for waiting, peer in ((self._fetched, rank), (self._network.posts[rank]._shipped, self.rank)):
            for key in [key for key in waiting if key[0] == peer]:
                for _, done in waiting.pop(key):
                    self._later(done, ConnectionError(why))
        self.give_up(rank, why)

    def give_up(self, rank: int, why: str) -> None:
        if rank not in self._lost:
            self._lost.add(rank)
            self._todo.append(lambda: self._lose(rank, why))
            self._moves.notify_all()

    def _refused(self, rank: int, done: Done) -> bool:
        with self._moves:
            if not self._ended and rank in self._network._dead:
                self._later(done, ConnectionError(f"rank {rank} is dead"))
                return True
            ended = self._ended
        if ended:
            done(ConnectionError("the post is closed"))
        return ended

    def _hear(self, source: int, message: bytes) -> None:
        if source not in self._lost:
            self._todo.append(lambda: self._heard(source, message))

    def _match(self, source: int, tag: int) -> None:
        key = source, tag
        if not self._shipped[key] or not self._fetched[key]:
            return
        (sent, shipped), (room, fetched) = self._shipped[key].pop(0), self._fetched[key].pop(0)
        error = None
        if sent.nbytes == room.nbytes:
            flat(room)[:] = flat(sent)
        else:
            error = ValueError(f"rank {source} shipped {sent.nbytes} bytes under tag {tag}; expected: {room.nbytes}")
        self._network.posts[source]._later(shipped, None)
        self._later(fetched, error)

    def _later(self, done: Done, error: Exception | None) -> None:
        self._todo.append(lambda: done(error))
        self._moves.notify_all()

    def _ready(self) -> bool:
        return self._ended or (bool(self._todo) and self.rank not in self._network._frozen)

    def _run(self) -> None:
        while True:
            with self._moves:
                self._running = False
                self._moves.notify_all()
                self._moves.wait_for(self._ready)
                if self._ended:
                    return
                call, self._running = self._todo.popleft(), True
            try:
                call()
            except Exception as error:
                self._network.errors.append(error)
