"""What moving a prompt's KV costs on a link, by arithmetic. Enter: the shape of a model, a prompt, the time of its
prefill, links. Leave: bytes, seconds, requests per second. Called by `pdjax.experiments.kv_cost`.

Nothing is measured here (`pdjax.experiments.transfer` does that), and the start of a message counts as nothing: it
takes microseconds, KV of a prompt milliseconds.
"""

import dataclasses

from pdjax.models.config import ModelConfig

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
BUSY = 0.8  # of a link's, or an instance's, capacity can be used for long: queues grow fast beyond

# Dense 16-bit matrix products, 1e12 operations per second, from the vendors' data sheets.
ACCELERATORS = {"a100": 312.0, "h100": 989.0, "h200": 989.0, "b200": 2250.0, "l40s": 362.0, "tpu-v5e": 197.0}


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What of a model its KV depends on.

    Attributes:
        heads: query heads.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    def bytes_per_token(self, dtype: str) -> int:
        """K and V of one token in all layers, at a dtype of `BYTES`."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES[dtype]


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """A way between two instances.

    Attributes:
        gbits: line rate, 1e9 bits per second.
        rdma: the NIC reads and writes the memory of the other side without its CPU.
    """

    name: str
    gbits: float
    rdma: bool


LINKS = {
    known.name: known
    for known in (
        Link("10 GbE", 10, rdma=False),
        Link("25 GbE", 25, rdma=False),
        Link("InfiniBand HDR", 200, rdma=True),
        Link("InfiniBand NDR", 400, rdma=True),
        Link("2 x NDR GPUDirect", 800, rdma=True),
        Link("4 x NDR GPUDirect", 1600, rdma=True),
        Link("8 x NDR GPUDirect", 3200, rdma=True),
    )
}


def link(name: str) -> Link:
    """One of `LINKS`, or NAME:GBITS or NAME:GBITS:rdma. ValueError naming `links`."""
    if name in LINKS:
        return LINKS[name]
    label, _, rest = name.partition(":")
    gbits, _, kind = rest.partition(":")
    try:
        speed = float(gbits)
    except ValueError:
        speed = 0.0
    if not label or not 0 < speed < 1e6 or kind not in ("", "rdma"):
        raise ValueError(f"links has {name!r}; allowed: {', '.join(LINKS)}, NAME:GBITS or NAME:GBITS:rdma")
    return Link(label, speed, rdma=kind == "rdma")


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What is to be moved.

    Attributes:
        nbytes: KV of a prompt.
        prefill_s: seconds until the prompt is computed.
        groups: layer groups, each sent as soon as it is computed.
        rate: prompts per second over one link.
    """

    nbytes: int
    prefill_s: float
    groups: int
    rate: float

    @property
    def hiding_bytes_per_s(self) -> float:
        """The bandwidth from which on a group is sent while the next one is computed: all but the last are hidden."""
        return self.nbytes / self.prefill_s


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """A job on a link. Times in seconds, rates in prompts per second.

    Attributes:
        whole_s: the transfer behind the prefill; all of it delays the second token.
        streamed_s: what of a transfer by layer groups is left when the prefill is done.
        saturated_rate: what fills the link; with more, its queue grows for ever.
        sustained_rate: what it carries with short queues, `BUSY` of that.
        busy: the part of the time that the link is busy at the job's rate; over 1 it cannot keep up.
        queue_s: mean wait for the transfers before it at the job's rate; None where the link cannot keep up.
    """

    link: Link
    whole_s: float
    streamed_s: float
    saturated_rate: float
    sustained_rate: float
    busy: float
    queue_s: float | None

    def share(self, job: Job) -> float:
        """Of the prefill's time: what a user sees of a streamed transfer, the wait for others included. Infinite where
        the link cannot keep up."""
        return float("inf") if self.queue_s is None else (self.streamed_s + self.queue_s) / job.prefill_s


def cost(job: Job, link: Link, efficiency: float = 1.0) -> Cost:
    """What `job` costs on `link`, of whose line rate KV gets the part `efficiency`.

    A group of G is computed in prefill / G and sent in whole / G. If sending is faster, the last group is left at the
    end; if it is slower, the link is behind from the first group on.

    Prompts of one prefill instance come one after the other, and wait for nobody where sending is faster. More than
    one instance computes come at random: busy / (2 (1 - busy)) transfers are waited for on average (M/D/1; DistServe,
    section 3.1, equation 1, has the same term).
    """
    whole_s = job.nbytes / (link.gbits * 1e9 / 8 * efficiency)
    last_s = whole_s / job.groups
    behind_s = whole_s - job.prefill_s * (job.groups - 1) / job.groups
    busy = job.rate * whole_s
    queue_s = whole_s * busy / (2 * (1 - busy)) if busy < 1 else None
    if whole_s <= job.prefill_s and job.rate * job.prefill_s <= 1:
        queue_s = 0.0
    return Cost(link, whole_s, max(last_s, behind_s), 1 / whole_s, BUSY / whole_s, busy, queue_s)


def suffices(one: Cost, job: Job, share: float) -> bool:
    """Whether a link keeps up with the job, and what is seen of a transfer is at most `share` of the prefill."""
    return one.busy <= BUSY and one.share(job) <= share


def prefill_flops(config: ModelConfig, tokens: int) -> float:
    """Operations of a prompt: two per weight and token, and scores and values of causal attention. The head computes
    one token.

    Args:
        tokens: of the prompt, none of them cached.
    """
    width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    weights = 2 * config.hidden_size * (width + kv_width) + 3 * config.hidden_size * config.ffn_size
    attention = 2 * 2 * width * tokens * (tokens + 1) / 2
    return config.num_layers * (2.0 * weights * tokens + attention) + 2.0 * config.hidden_size * config.vocab_size


def shape_of(config: ModelConfig) -> Shape:
    return Shape(config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim)
