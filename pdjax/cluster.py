"""The seam between the controller and whatever executes: local meshes, MPI ranks, or a simulation.

A cluster takes commands and gives back events; it has a clock. `submit` never blocks on a device. Commands of one
instance are executed in order. Events of one instance come in the order of its commands.
"""

from typing import Protocol

from pdjax.messages import Command, Event, InstanceSpec


class Cluster(Protocol):
    """What the controller's loop needs; `pdjax.local` and `pdjax.simulated` implement it."""

    @property
    def specs(self) -> tuple[InstanceSpec, ...]:
        """One entry per instance; entry i has index i."""
        ...

    def now(self) -> float:
        """Seconds on the cluster's clock."""
        ...

    def submit(self, command: Command) -> None:
        """Takes a command. Raises RuntimeError after `close` or after a fault."""
        ...

    def post(self, event: Event) -> None:
        """Adds an outside event (arrival, abort) to the queue. Safe from any thread."""
        ...

    def next_event(self, timeout_s: float | None) -> Event | None:
        """The next event; None when nothing happened for timeout_s (None: no limit)."""
        ...

    def close(self) -> None:
        """Stops every thread within 5 s. Idempotent."""
        ...
