"""What each rank knows of itself, and the comparison of all ranks before the first request. Called by `pdjax.mpi.job`.

Enters: the configuration that a rank was started with. Leaves: facts, and what does not fit together, in a line.
"""

import dataclasses
import importlib.metadata
import os
import platform
import socket

from pdjax.config import EngineConfig


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """Of one rank.

    Attributes:
        host, pid: where it runs.
        same: (name, value) of all that must be the same on every rank.
        error: why it cannot take part, or None.
        platform: of its devices ("cpu", "gpu", "tpu"); "" on rank 0, which needs none.
        hardware: what they are (`pdjax.build.hardware_here`).
        devices: how many it has for its part of an instance.
        offset_s: what to add to its `time.perf_counter()` to get rank 0's.
    """

    rank: int
    host: str
    pid: int
    same: tuple[tuple[str, str], ...] = ()
    error: str | None = None
    platform: str = ""
    hardware: str = ""
    devices: int = 0
    offset_s: float = 0.0


def collect(rank: int, config: EngineConfig) -> Facts:
    """What can be known before any device is used. What a ValueError says of the model becomes `error`."""
    from pdjax.models.digest import digest
    from pdjax.models.source import resolve

    same = [
        ("pdjax", importlib.metadata.version("pdjax")),
        ("python", ".".join(platform.python_version_tuple()[:2])),
        ("jax", importlib.metadata.version("jax")),
        ("numpy", importlib.metadata.version("numpy")),
    ]
    # The policy runs on rank 0 only, and may be an object; where the model lies is each rank's own matter.
    own = {"scheduler", "event_log", "model", "compilation_cache"}
    fields = dataclasses.fields(config)
    same += [(field.name, str(getattr(config, field.name))) for field in fields if field.name not in own]
    error = None
    try:
        source = resolve(config.model, max_len=config.max_model_len)
        model = source.config
        same += [
            ("layers", str(model.num_layers)),
            ("query heads", str(model.num_heads)),
            ("kv heads", str(model.num_kv_heads)),
            ("context limit", str(model.max_position)),
            ("model digest", digest(source)),
        ]
    except ValueError as wrong:
        error = str(wrong)
    return Facts(rank, socket.gethostname(), os.getpid(), tuple(same), error)


def disagreement(all_facts: tuple[Facts, ...]) -> str | None:
    """Why these ranks cannot work together, in a line; None if they can."""
    errors = {facts.error for facts in all_facts}
    if len(errors) == 1 and None not in errors:
        return all_facts[0].error  # of the configuration that all have
    for facts in all_facts:
        if facts.error is not None:
            return f"rank {facts.rank} on {facts.host}: {facts.error}"
    first = all_facts[0]
    for facts in all_facts[1:]:
        here, there = dict(first.same), dict(facts.same)
        for name in here | there:
            if here.get(name) != there.get(name):
                return (
                    f"{name} is {here.get(name)!r} on rank 0 ({first.host}) and {there.get(name)!r} on rank "
                    f"{facts.rank} ({facts.host}); allowed: the same on every rank"
                )
    return None
