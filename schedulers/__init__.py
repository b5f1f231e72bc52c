"""Placement policies. Pure host logic: nothing here imports jax, flax or mpi4py."""

from collections.abc import Callable

from pdjax.schedulers.base import (
    Drop,
    Flip,
    Move,
    Place,
    Plan,
    Reject,
    Scheduler,
    Traits,
    Wait,
    decoders,
    prefillers,
    take_chunks,
    take_prompts,
)
from pdjax.schedulers.colocated import ChunkedColocated, Colocated
from pdjax.schedulers.disaggregated import Disaggregated
from pdjax.schedulers.dynamic import Dynamic
from pdjax.schedulers.splitwise import Splitwise

__all__ = [
    "SCHEDULERS",
    "ChunkedColocated",
    "Colocated",
    "Disaggregated",
    "Drop",
    "Dynamic",
    "Flip",
    "Move",
    "Place",
    "Plan",
    "Reject",
    "Scheduler",
    "Splitwise",
    "Traits",
    "Wait",
    "decoders",
    "prefillers",
    "take_chunks",
    "take_prompts",
]

# By the name that configurations and flags use; the argument says from how many prompt tokens on KV is streamed.
SCHEDULERS: dict[str, Callable[[int | None], Scheduler]] = {
    "colocated": lambda stream_from: Colocated(),
    "colocated_chunked": lambda stream_from: ChunkedColocated(),
    "disaggregated": Disaggregated,
    "splitwise": Splitwise,
    "dynamic": Dynamic,
}
