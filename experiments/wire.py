"""`--transfer_test`: how KV would cross between two ranks of a job, and how fast. Enters: a job of three ranks. Leaves:
on rank 0 lines that say what was chosen, and the bandwidth both ways through pdjax's own outbox, inbox and post. Called
by `pdjax.experiments.transfer`, in every rank.

No engine is there: ranks 1 and 2 send each other units of the size that the model's KV has.
"""

import dataclasses
import queue
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes  # noqa: F401  bfloat16 as a numpy dtype
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pdjax.config import EngineConfig
from pdjax.messages import StartTransfer
from pdjax.models.source import resolve
from pdjax.mpi import ends, words
from pdjax.mpi.devices import host_address
from pdjax.mpi.line import Line
from pdjax.mpi.start import Job, start
from pdjax.transfer.base import Unit, UnitHeader
from pdjax.transfer.inbox import Inbox
from pdjax.transfer.outbox import Outbox
from pdjax.transfer.parcel import Credit, Parcel, Side
from pdjax.transfer.pointers import cuda_aware, self_test

TOKENS, LAYERS, UNITS = 256, 3, 32  # a transfer has UNITS units of so many tokens of so many layers
PAIR = 1, 2  # ranks: one prefills, one decodes
_ANSWER_S, _CLOSE_S = 60.0, 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Crossing:
    """How KV crossed.

    Attributes:
        road: in words.
        pointers: MPI was given device memory.
        speeds: (source rank, destination rank, bytes, seconds) of each transfer that counts.
    """

    road: str
    pointers: bool
    speeds: tuple[tuple[int, int, int, float], ...]


def run(
    config: EngineConfig,
    show: Callable[[str], None],
    *,
    staged: bool = False,
    heads: tuple[int, int] | None = None,
) -> Crossing | None:
    """Rank 0 returns when it has shown all; the other ranks, with None, when it says goodbye.

    Args:
        staged: KV goes through host memory even where MPI takes device pointers.
        heads: kv heads and head dimension of the units; None: those of the model.

    Raises:
        ValueError: the ranks cannot work together.
        RuntimeError: on rank 0, if a transfer failed, or a rank does not answer.
    """
    from mpi4py import MPI

    ends.install()
    job = start(MPI.COMM_WORLD, config)
    if job.post.rank:
        _End(job, config, staged, heads).serve()
        return None
    return _control(job, show)


def road(config: EngineConfig, kind: str, said: tuple[bool, str], proof: str | None) -> str:
    """In words, how KV crosses.

    Args:
        kind: of the devices: "cpu", "gpu" or "tpu".
        said: what the MPI library says of device pointers (`pdjax.transfer.pointers.cuda_aware`).
        proof: what went wrong in the self-test; None: nothing, or it was not made.
    """
    if config.transfer == "jax_transfer":
        return "jax_transfer: the destination pulls from JAX's transfer servers"
    if kind == "cpu":
        return "mpi, staged in host memory, where the KV of CPU devices lies anyway"
    if not said[0]:
        return f"mpi, staged in host memory: {said[1]}"
    if proof is not None:
        return f"mpi, staged in host memory: {said[1]}, but the self-test failed: {proof}"
    return f"mpi, device pointers: {said[1]}, and bytes that crossed from device to device were right"


def _control(job: Job, show: Callable[[str], None]) -> Crossing:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    line = Line(
        job.post,
        job.layout,
        0.0,
        heard=lambda rank, word: answers.put(word),
        lost=lambda rank, why: answers.put(words.Failed(-1, why)),
    )
    try:
        ready = [_answer(answers, words.Progress) for _ in PAIR]
        show(f"transport: {ready[0].what}")
        speeds = []
        for key, (src, dst) in enumerate((PAIR, PAIR[::-1]) * 2):  # the first each way makes connections and buffers
            transfer = StartTransfer(1 + key, 0, 0, src - 1, dst - 1, (), (), UNITS * TOKENS, "whole")
            line.tell_all((dst, src), transfer)
            inserted = _answer(answers, words.Inserted)
            seconds = max(stop for _, stop in inserted.moved_s) - min(start for start, _ in inserted.moved_s)
            if key >= len(PAIR):
                ends_of = " to ".join(f"rank {rank} on {job.facts[rank].host}" for rank in (src, dst))
                size, speed = inserted.nbytes / 1e6, inserted.nbytes / seconds / 1e9
                show(f"{ends_of}: {size:.0f} MB in {seconds:.3f} s, {speed:.2f} GB/s")
                speeds.append((src, dst, inserted.nbytes, seconds))
        return Crossing(ready[0].what, bool(ready[0].done), tuple(speeds))
    finally:
        for rank in PAIR:
            line.last_word(rank, words.Goodbye(0))
        line.close(_CLOSE_S)


def _answer(answers: "queue.SimpleQueue[Any]", kind: Any) -> Any:
    try:
        word = answers.get(timeout=_ANSWER_S)
    except queue.Empty:
        raise RuntimeError(f"no rank answers within {_ANSWER_S:g} s") from None
    if not isinstance(word, kind):
        raise RuntimeError(f"a rank says {word}")
    return word


class _End:
    """Rank 1 or 2: one end of the transfers."""

    def __init__(self, job: Job, config: EngineConfig, staged: bool, heads: tuple[int, int] | None) -> None:
        self._todo: queue.SimpleQueue[words.Goodbye] = queue.SimpleQueue()
        self._line = Line(job.post, job.layout, job.offset_s, self._heard, lambda rank, why: ends.leave(1))
        rank = job.post.rank
        self._index, self._moved = rank - 1, list[tuple[float, float]]()
        device = jax.local_devices()[0]
        kind = device.platform
        said, proof = (False, "asked for") if staged else cuda_aware(), None
        if config.transfer == "mpi" and kind != "cpu" and said[0]:
            other = PAIR[rank % 2]
            proof = self_test(self._line, other, other, device, _ANSWER_S)
        pointers = config.transfer == "mpi" and kind != "cpu" and said[0] and proof is None
        host = None
        if config.transfer == "jax_transfer":
            host = "127.0.0.1" if len({facts.host for facts in job.facts}) == 1 else host_address()

        if heads is None:
            model = resolve(config.model).config
            heads = model.num_kv_heads, model.head_dim
        K, H = heads
        dtype = "float32" if kind == "cpu" else "bfloat16"
        mesh = Mesh(np.array([[device]]), ("kv", "rep"))
        sharding = NamedSharding(mesh, PartitionSpec(None, None, None, "kv", None))
        self._kv = jax.device_put(np.ones((LAYERS, 2, TOKENS, K, H), dtype), sharding)
        sides = tuple(Side(1, 1, (each,)) for each in PAIR)
        head_bytes, timeout_s = self._kv.nbytes // K, float(config.transfer_timeout_s)
        self._outbox = Outbox(
            self._line, sides, self._index, K, head_bytes, timeout_s, first_tag=1, pointers=pointers, host=host
        )
        self._inbox = Inbox(
            self._line, sides, self._index, [sharding] * LAYERS, K, H, dtype, head_bytes,
            pointers=pointers, host=host, timeout_s=timeout_s,
        )  # fmt: skip
        # Which says that it is ready, too.
        self._line.tell(0, words.Progress(int(pointers), 1, road(config, kind, said, proof)))

    def serve(self) -> None:
        """Until rank 0 says goodbye."""
        self._todo.get()
        self._outbox.end()
        self._inbox.end()
        self._line.close(_CLOSE_S)

    def _heard(self, rank: int, word: Any) -> None:
        """In the post's thread."""
        match word:
            case StartTransfer():
                self._open(word)
            case Parcel():
                self._inbox.parcel(rank, word)
            case Credit():
                self._outbox.credit(rank, word)
            case words.Goodbye():
                self._todo.put(word)
            case _:
                raise RuntimeError(f"rank {rank} says {word} in a test of transfers")

    def _open(self, transfer: StartTransfer) -> None:
        def failed(error: str) -> None:
            self._line.tell(0, words.Failed(transfer.key, error))

        if transfer.dst == self._index:
            self._moved = []
            self._inbox.open(
                transfer.key, transfer.src, transfer.tokens, lambda unit: self._arrived(transfer.key, unit), failed
            )
            return
        self._outbox.open(transfer.key, transfer.dst, failed)
        for number in range(UNITS):
            header = UnitHeader(transfer.key, 0, LAYERS, number * TOKENS, TOKENS, self._kv.shape, str(self._kv.dtype))
            self._outbox.send(Unit(header, self._kv))

    def _arrived(self, key: int, unit: Unit) -> None:
        """In the inbox's thread."""
        self._moved.append(unit.moved_s)
        if len(self._moved) == UNITS:
            self._line.tell(0, words.Inserted(key, UNITS * unit.header.nbytes, tuple(self._moved)))
