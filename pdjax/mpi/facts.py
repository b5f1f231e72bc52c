"""What a rank knows of itself, and the comparison of all ranks before the first request. Pure but for `gather`."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """Of one rank.

    Attributes:
        host, pid: where it runs.
        platform: of its devices ("cpu", "gpu", "tpu"); "" on rank 0, which has none.
        error: why it cannot take part, or None.
    """

    rank: int
    host: str
    pid: int
    platform: str = ""
    error: str | None = None
