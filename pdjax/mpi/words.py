"""What ranks say to each other once a job has started. Plain data: `pdjax.mpi.line` makes JSON of it.

Rank 0 says `Build`, then `Warm`, to every rank of an engine; then commands of the controller to the ranks of an
instance, the same words in the same order to each; `EndEngine` and at last `Goodbye`. Ranks answer. Ranks say `Parcel`
and `Credit` (`pdjax.transfer.parcel`) to each other.
"""

import dataclasses

from pdjax.latency import Probe, Sample
from pdjax.messages import InstanceSpec, Iteration, IterationDone, StartTransfer
from pdjax.transfer.parcel import Credit, Parcel

# --- rank 0 to the ranks of instances ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Build:
    """Make your part of an engine: load the weights, make the pages. Answered by `Built`.

    Attributes:
        engine: counts the engines of the job; the epoch of all that its ranks say.
        specs: of all instances.
        dtype: of the weights, resolved.
        The others are fields of `EngineConfig`.
    """

    engine: int
    specs: tuple[InstanceSpec, ...]
    dtype: str
    stream_layers: int
    transfer: str
    verify_kv: bool
    transfer_timeout_s: float
    compilation_cache: str


@dataclasses.dataclass(frozen=True, slots=True)
class Echo:
    """Answered at once by the same: how long a word takes there and back."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Warm:
    """Compile, and measure these passes, or (None) a few of each size. Answered by `Warmed`, after any number of
    `Progress`."""

    probes: tuple[Probe, ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """A transfer ends without success. Answered by `Stopped` when nothing here touches its pages any more."""

    key: int


@dataclasses.dataclass(frozen=True, slots=True)
class Settle:
    """A transfer is committed: forget it."""

    key: int


@dataclasses.dataclass(frozen=True, slots=True)
class Compare:
    """`verify_kv`: read the pages of a transfer back. Answered by `Digests`."""

    key: int


@dataclasses.dataclass(frozen=True, slots=True)
class Gone:
    """An instance is lost: nothing it says counts any more, and nothing is said to it."""

    instance: int


@dataclasses.dataclass(frozen=True, slots=True)
class Leave:
    """Your instance was given up: end this process."""

    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class EndEngine:
    """The engine is closed: free what belongs to it. Answered by `Ended`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Goodbye:
    """The job ends with this exit status."""

    status: int


# --- ranks of instances to rank 0 -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Built:
    """`error`: a ValueError's text if the engine cannot be built here; `road`: how KV will cross, and why so."""

    error: str | None = None
    road: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    done: int
    total: int
    what: str


@dataclasses.dataclass(frozen=True, slots=True)
class Warmed:
    """What a warm-up did; see `pdjax.build.Warmup`."""

    samples: tuple[Sample, ...]
    programs: tuple[str, ...]
    compile_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Inserted:
    """Every token of every layer of a transfer is in this rank's pages.

    Attributes:
        nbytes: payload of this rank.
        moved_s: when each parcel's bytes began to move and had arrived, on rank 0's clock.
    """

    key: int
    nbytes: int
    moved_s: tuple[tuple[float, float], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Stopped:
    key: int


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """A transfer cannot go on here. Rank 0 stops it everywhere."""

    key: int
    error: str


@dataclasses.dataclass(frozen=True, slots=True)
class Digests:
    """Of the heads that a rank holds: (layer, head, digest)."""

    key: int
    heads: tuple[tuple[int, int, str], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """Programs compiled on this rank since its warm-up; said when their number changes, which is a bug."""

    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """The engine's part on this rank is freed."""


Word = (
    Build
    | Echo
    | Warm
    | Iteration
    | StartTransfer
    | Stop
    | Settle
    | Compare
    | Gone
    | Leave
    | EndEngine
    | Goodbye
    | Built
    | Progress
    | Warmed
    | IterationDone
    | Inserted
    | Stopped
    | Failed
    | Digests
    | Compiled
    | Ended
    | Parcel
    | Credit
)
