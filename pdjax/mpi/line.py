"""Words between ranks, on top of the post. Enters: words and buffers from any thread. Leaves: words of others, decoded,
in the post's thread. One for each process of a job; `MpiCluster` speaks through it on rank 0, `Part` on the others.

A word travels as JSON behind the sender's epoch, the number of the engine it belongs to. Words of an earlier epoch are
dropped, and so is all that comes from a lost instance, or would go to it: a process that was stopped, was given up, and
wakes up again disturbs nobody.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from pdjax.codec import decode_tagged, encode_tagged
from pdjax.mpi.layout import Layout
from pdjax.mpi.post import Post
from pdjax.mpi.words import Build, Goodbye, Leave, Word
from pdjax.transfer.parcel import Done

_ANY_EPOCH = Build | Goodbye | Leave
_log = logging.getLogger("pdjax")

Heard = Callable[[int, Any], None]
Lost = Callable[[int, str], None]


class Line:
    """Implements `pdjax.transfer.parcel.Carrier`.

    Args:
        post: of this rank; the line starts it.
        layout: of the job.
        offset_s: what to add to `clock` to get rank 0's clock.
        lost: told (rank, how it was noticed) once for each rank that died, in the post's thread.
        heard: takes (rank, word), in the post's thread, until `listen` names another.
    """

    def __init__(
        self,
        post: Post,
        layout: Layout,
        offset_s: float,
        heard: Heard,
        lost: Lost,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.layout, self.epoch = layout, 0
        self._post, self._offset_s, self._clock = post, offset_s, clock
        self._heard = heard
        self._gone: set[int] = set()  # ranks
        post.start(self._take, lost)

    @property
    def rank(self) -> int:
        return self._post.rank

    def now(self) -> float:
        return self._clock() + self._offset_s

    def listen(self, heard: Heard) -> None:
        """From now on `heard` takes what comes."""
        self._heard = heard

    def give_up(self, instance: int) -> None:
        """The ranks of an instance are neither listened to nor spoken to any more, but for `last_word`."""
        self._gone.update(self.layout.ranks[instance])

    def tell(self, rank: int, word: Any) -> None:
        self.tell_all((rank,), word)

    def tell_all(self, ranks: Iterable[int], word: Any) -> None:
        """Says the same to several ranks."""
        message = self._message(word)
        for rank in ranks:
            if rank not in self._gone:
                self._post.tell(rank, message)

    def last_word(self, rank: int, word: Leave | Goodbye) -> None:
        """Says it to a rank that may be given up already: it is to end."""
        self._post.tell(rank, self._message(word))

    def ship(self, rank: int, tag: int, buffer: Any, done: Done) -> None:
        self._post.ship(rank, tag, buffer, done)

    def fetch(self, rank: int, tag: int, buffer: Any, done: Done) -> None:
        self._post.fetch(rank, tag, buffer, done)

    def expect(self, more: int) -> None:
        """See `Post.expect`."""
        self._post.expect(more)

    def close(self, timeout_s: float) -> bool:
        """Says what is still to be said, and ends the post's thread; see `Post.close`."""
        return self._post.close(timeout_s)

    def _message(self, word: Any) -> bytes:
        return b"%d %s" % (self.epoch, json.dumps(encode_tagged(word), separators=(",", ":")).encode())

    def _take(self, rank: int, message: bytes) -> None:
        if rank in self._gone:
            _log.debug("rank %d is given up: %d bytes from it are dropped", rank, len(message))
            return
        epoch, _, text = message.partition(b" ")
        word = decode_tagged(Word, json.loads(text))
        if int(epoch) != self.epoch and not isinstance(word, _ANY_EPOCH):
            _log.debug("rank %d says %s of engine %d: dropped", rank, type(word).__name__, int(epoch))
            return
        self._heard(rank, word)
