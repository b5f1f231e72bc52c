"""Which ranks are which instance. Enters: the instances and how many ranks each has. Leaves: a `Layout`, on every rank
the same. Pure: no MPI.

Rank 0 controls and is no instance. The ranks from 1 on are dealt out in the order of the instances.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from pdjax.config import EngineConfig
from pdjax.schedulers.base import Traits


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """`ranks[i]`: the world ranks of instance i; the first of them is its leader, which reports its iterations."""

    ranks: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Ranks of the job, rank 0 included."""
        return 1 + sum(len(ranks) for ranks in self.ranks)

    def instance_of(self, rank: int) -> int:
        """The instance that a rank belongs to. ValueError for rank 0 and for ranks of nobody."""
        for index, ranks in enumerate(self.ranks):
            if rank in ranks:
                return index
        raise ValueError(f"rank is {rank}; allowed: 1 to {self.size - 1}, the ranks of instances")


def deal(counts: Sequence[int]) -> Layout:
    """A layout whose instance i has counts[i] ranks."""
    bounds = [1]
    for count in counts:
        bounds.append(bounds[-1] + count)
    return Layout(tuple(tuple(range(*pair)) for pair in itertools.pairwise(bounds)))


def layout_of(config: EngineConfig, traits: Traits) -> Layout:
    """The layout of an engine's instances, in the order of `pdjax.build.specs_of`.

    Raises:
        ValueError: colocated instances do not divide the devices, or devices do not divide over the ranks.
    """
    return deal([config.ranks_of(role) for role in config.roles(traits.colocated)])


def check_size(layout: Layout, config: EngineConfig, size: int) -> None:
    """ValueError if a job of `size` ranks is not what the layout needs."""
    if size != layout.size:
        terms = " + ".join(str(len(ranks)) for ranks in layout.ranks)
        raise ValueError(
            f"mpirun -n is {size}; allowed: {layout.size}: one rank that controls + {terms} of the instances "
            f"(prefill_instances * prefill_ranks is {config.prefill_instances} * {config.prefill_ranks}, "
            f"decode_instances * decode_ranks is {config.decode_instances} * {config.decode_ranks})"
        )
