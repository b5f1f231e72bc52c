"""The parts of a workload whose mix moves: the text after `phases:` enters, its phases leave. Called by
`pdjax.workload` and by launchers that show where a phase begins.

    KIND@N;KIND@N*PACE;...

KIND is one that draws lengths (fixed, uniform, lengths), N how many requests of it come, PACE by how much faster than
the workload's rate (1 where it is not given; a closed loop has none).
"""

import dataclasses
import math

KINDS = ("fixed", "uniform", "lengths")


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """`count` requests of a kind of workload, at `pace` times the rate."""

    kind: str
    count: int
    pace: float


def parse(text: str) -> tuple[Phase, ...]:
    """Phases in order.

    Raises:
        ValueError: the text is no list of phases.
    """
    return tuple(_phase(part, text) for part in text.split(";"))


def _phase(part: str, text: str) -> Phase:
    kind, _, numbers = part.rpartition("@")
    count, star, pace = numbers.partition("*")
    try:
        phase = Phase(kind.strip(), int(count), float(pace) if star else 1.0)
    except ValueError:
        phase = Phase("", 0, 0.0)
    if phase.kind.partition(":")[0] not in KINDS or phase.count < 1 or not 0 < phase.pace < math.inf:
        raise ValueError(
            f"workload has phases {text!r}, in which {part!r} is none; allowed: KIND@N or KIND@N*PACE with semicolons "
            f"between, KIND one of {', '.join(KINDS)}, N a whole number >= 1, PACE a number > 0"
        )
    return phase
