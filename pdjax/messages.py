"""The words between the controller and a cluster: commands out, events in.

The controller owns every page number and every row slot; commands carry them, instances only obey. Commands of one
instance are executed in the order of submission. All times are seconds of the cluster's clock.

A decode batch lives on the instance and is changed by deltas: rows join, leave and grow. So a command costs what
changes, not what stays. The last token of each row stays on the device, in the row's slot, and feeds the next step:
step n+1 can be issued before the tokens of step n are known on the host.
"""

import dataclasses
import enum
from typing import Literal, NamedTuple

from pdjax.request import Request, SamplingParams


class Role(enum.Enum):
    """What the scheduler uses an instance for. Weights and programs are the same for all."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclasses.dataclass(frozen=True, slots=True)
class InstanceSpec:
    """What the host side knows about one model replica.

    Attributes:
        index: its number in the cluster.
        role: its first role.
        devices: how many devices it has: pp stages of tp each.
        pp: pipeline stages; each owns a run of layers.
        max_rows: decode rows it can hold; row slots are 0..max_rows-1, and slot `max_rows` is a scratch slot for
            prompts whose rows will live elsewhere.
        max_chunk: most prompt tokens in one iteration.
        max_chunks: most prompts in one iteration.
        num_pages: KV pages of `page_size` tokens. Page 0 is the zero page and is never given out.
        max_in_flight: iterations it takes before the first is done.
        max_model_len: most tokens a request may hold.
        kv_bytes_per_token: bytes of K and V of one token, all layers.
        chunk_buckets, row_buckets: ascending padded sizes its programs are compiled for.
        row_block: decode rows that attend together, each as long as the longest of them; 0: all of the batch.
        query_block: prompt tokens that attend together, to whole pages; 0: each to those before it.
        moves: it can send and take KV whatever its role and those of the others.
        ranks: the ranks of an `mpirun` job that it runs on, its leader first; empty in one process.
    """

    index: int
    role: Role
    devices: int
    max_rows: int
    max_chunk: int
    max_chunks: int
    page_size: int
    num_pages: int
    max_model_len: int
    kv_bytes_per_token: int
    pp: int = 1
    max_in_flight: int = 2
    chunk_buckets: tuple[int, ...] = ()
    row_buckets: tuple[int, ...] = ()
    row_block: int = 0
    query_block: int = 0
    moves: bool = True
    ranks: tuple[int, ...] = ()

    def __hash__(self) -> int:
        return self.index  # what it costs is looked up by it with every decision: equal ones have the same

    @property
    def usable_pages(self) -> int:
        return self.num_pages - 1

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)


# --- commands -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a prompt to prefill.

    Attributes:
        request: engine id.
        tokens: the ids of this part.
        start: position of tokens[0]; everything before it is in `pages` already.
        pages: block table, long enough for start + len(tokens) tokens.
        slot: the row slot that receives the sampled token when `last` (the scratch slot if it decodes elsewhere).
        last: sample a token after the last position.
        sampling: used when `last`.
        stream: key of the transfer that this part's fresh KV is pushed to, or None.
    """

    request: int
    tokens: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    slot: int
    last: bool
    sampling: SamplingParams
    stream: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Join:
    """A row enters the decode batch. `token` None: the slot holds the input token already (prefilled here)."""

    slot: int
    request: int
    position: int  # of the input token: how many tokens of KV are in the pages
    pages: tuple[int, ...]
    token: int | None
    sampling: SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class Iteration:
    """One pass over the model: prompt parts, one decode step of the whole batch, or both in one program.

    `leaves`, `joins` and `grows` change the batch first, in this order; `grows` appends a page to a row.
    `decode` runs one step for all rows then in the batch; with `steps` above 1 (a *run*, without chunks) as many, which
    have the numbers from `number` on. Only clusters that compute no tokens get runs: pages that rows need meanwhile are
    not in `grows`.
    """

    instance: int
    number: int
    chunks: tuple[Chunk, ...] = ()
    leaves: tuple[int, ...] = ()
    joins: tuple[Join, ...] = ()
    grows: tuple[tuple[int, int], ...] = ()  # (slot, page)
    decode: bool = False
    steps: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """Something changes on an instance: its run ends with iteration number `last`."""

    instance: int
    last: int


@dataclasses.dataclass(frozen=True, slots=True)
class StartTransfer:
    """Move the KV of `tokens` tokens of a request from pages of `src` to pages of `dst`.

    mode "stream": chunks that name `key` in `stream` push their fresh KV, layer group by layer group, as computed.
    mode "whole": the KV lies in `src_pages`; it is read from there and sent in bounded slices.
    The unit on the wire is (request, attempt, token range, layer group, source shard -> destination shard).
    """

    key: int
    request: int
    attempt: int
    src: int
    dst: int
    src_pages: tuple[int, ...]
    dst_pages: tuple[int, ...]
    tokens: int
    mode: Literal["stream", "whole"]


@dataclasses.dataclass(frozen=True, slots=True)
class AbortTransfer:
    """Stop a transfer. Answered by exactly one TransferDone, TransferFailed or TransferAborted, whichever is true."""

    key: int


Command = Iteration | Cut | StartTransfer | AbortTransfer

# --- events ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    request: Request


@dataclasses.dataclass(frozen=True, slots=True)
class Abort:
    request: int


class Sampled(NamedTuple):
    """The tokens of one iteration: fields as in `IterationDone`."""

    rows: tuple[tuple[int, int], ...]
    firsts: tuple[tuple[int, int], ...]
    logprobs: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class RunStarted:
    """A run has begun; its steps will end at these times, if it is not cut."""

    instance: int
    number: int
    ends: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class IterationDone:
    """An iteration's tokens are on the host.

    Of a run, the steps are reported together until fewer than `max_in_flight` are left, then one by one: as the
    instance would get room for the next iteration if every step were an iteration of its own.

    Attributes:
        number: of the last iteration that is reported.
        rows: (slot, token) of every decode row, in batch order; None if the cluster computes no tokens.
        firsts: (request, token) of every chunk that was `last`.
        started_s, finished_s: when the device could start it (dispatched, the one before it done), and when its
            tokens were on the host.
        host_gap_s: how long the device stood still between the decode step before and this one.
        logprobs: of the tokens of `firsts`, then of `rows`; empty if nobody asked for them.
        steps: how many iterations are reported; more than one of a run only.
    """

    instance: int
    number: int
    rows: tuple[tuple[int, int], ...] | None
    firsts: tuple[tuple[int, int], ...]
    started_s: float
    finished_s: float
    host_gap_s: float = 0.0
    logprobs: tuple[float, ...] = ()
    steps: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class TransferDone:
    """Every byte is in the destination's pages, or ordered before whatever the destination runs next.

    Attributes:
        nbytes: payload moved.
        started_s, finished_s: first byte offered, last byte inserted.
        busy_s: time in which bytes were moving.
        hidden_s: the part of busy_s that lay before the end of the prefill.
    """

    key: int
    nbytes: int
    started_s: float
    finished_s: float
    busy_s: float = 0.0
    hidden_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class TransferFailed:
    """The transfer ended without success and will touch no page any more."""

    key: int
    error: str


@dataclasses.dataclass(frozen=True, slots=True)
class TransferAborted:
    """The abort is acknowledged: no page of either side will be touched any more."""

    key: int


@dataclasses.dataclass(frozen=True, slots=True)
class InstanceLost:
    """An instance is gone with everything on it."""

    instance: int
    error: str


@dataclasses.dataclass(frozen=True, slots=True)
class Tick:
    """Nothing happened until the controller's next deadline."""


Event = (
    Arrival | Abort | RunStarted | IterationDone | TransferDone | TransferFailed | TransferAborted | InstanceLost | Tick
)
