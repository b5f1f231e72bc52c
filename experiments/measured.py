"""Measures on real instances: engine configurations and workloads enter, points with their files leave. Called by the
launchers that compare policies (`interference`, `compare`, `switch`).

    def measure():                                  # on rank 0; the other ranks are the instances
        pace = Pace(points=4)
        for config in configs:                      # engines of one layout, one after the other
            with Bench(config, out, pace) as bench:
                for rate in (0.5, 1.0):
                    point = bench.play(f"{config.scheduler}-{rate:g}", workload(rate))
                    print(judge(point.path, slo).goodput_rps)

    measured.on_ranks(measure, configs[0])

Every point's requests are kept in OUT/points/NAME/requests.jsonl, and `judge` says from that file alone how many of
them met an SLO: a policy that does not look at the SLO is measured once and judged by many. Compared points should have
workloads of one seed: `pdjax.workload.parse` then gives the same requests, and at another rate the same gaps, scaled.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from absl import flags as absl_flags

import pdjax
from pdjax import metrics, mpi, report
from pdjax.config import EngineConfig
from pdjax.experiments import flags, launcher, mpirun
from pdjax.mpi.start import job_layout
from pdjax.record import RequestRecord, Timeline
from pdjax.report import Report
from pdjax.request import SLO, State
from pdjax.workload import Workload

IDLE_S = 60.0  # for pages to come back after the last answer


def set_defaults(**defaults: Any) -> None:
    """Of flags, for launchers that measure: instances are ranks, each with cores of its own; and `defaults`, by name.
    To be called where the launcher is the program: who only imports it keeps the flags as they are."""
    absl_flags.set_default(flags.TRANSFER, "mpi")
    absl_flags.set_default(flags.PIN, True)
    for name, value in defaults.items():
        absl_flags.FLAGS.set_default(name, value)


def on_ranks(main: Callable[[], None], config: EngineConfig) -> None:
    """`launcher.on_ranks`; a launcher that is to serve over ranks and was started alone starts itself again as a job of
    as many ranks as the configuration needs.

    Raises:
        ValueError: the configuration fits no job, or there is no mpirun.
    """
    if config.transfer == "mpi" and not mpi.launched():
        _start_again(job_layout(config).size)
    launcher.on_ranks(main, config)


def _start_again(ranks: int) -> None:
    """Replaces this process by the job: its output, its signals and its status are mpirun's."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", module.name] if module is not None else [sys.argv[0]]
    line = mpirun.command(ranks, [*program, *sys.argv[1:]])
    # Helpers of mpirun look at the variables, not at the flag.
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(line[0], line, os.environ | allowed)


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """A workload that was served once.

    Attributes:
        path: its requests.jsonl.
        report: of the requests that count.
        failed: requests that failed; if there are any, the numbers are those of another workload.
    """

    name: str
    path: Path
    report: Report
    failed: int


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    """What an SLO says of a point: `attainment` = met / requests; rates are per second of `duration_s`, from the first
    arrival to the end of the last request. `throughput_rps` counts all that finished, `goodput_rps` those that met."""

    requests: int
    met: int
    attainment: float
    goodput_rps: float
    throughput_rps: float
    duration_s: float


class Pace:
    """Tells how far a measurement is. `points`: how many there will be; a search may correct it on the way."""

    def __init__(self, points: int, say: Callable[[str], None] | None = None) -> None:
        self.points = points
        self._say = say or (lambda line: print(line, flush=True))
        self._done = 0
        self._began_s = time.monotonic()

    def say(self, line: str) -> None:
        self._say(line)

    def point(self, name: str, words: str) -> None:
        """One more is done; the time left is guessed by the mean of those before, starts of engines included."""
        self._done += 1
        left_s = (time.monotonic() - self._began_s) / self._done * max(self.points - self._done, 0)
        self._say(f"[{self._done}/{max(self.points, self._done)}] {name}: {words}; about {left_s / 60:.1f} min left")


class Bench:
    """One warm engine that plays workloads one after the other. A context manager, on rank 0 of a job or in one
    process, as the configuration says.

    Args:
        config: of the engine.
        out: folder whose `points/` gets the files; made if missing.
        pace: told of every point.

    Raises:
        ValueError: a configuration that cannot be served, or `out` is no folder to write to.
    """

    def __init__(self, config: EngineConfig, out: str | Path, pace: Pace) -> None:
        self.config = config
        self._points = report.out_folder(Path(out) / "points")
        self._pace = pace
        self._engine: pdjax.Engine | None = None

    def __enter__(self) -> "Bench":
        began = time.monotonic()
        self._engine = pdjax.Engine(self.config)
        name = self.config.scheduler if isinstance(self.config.scheduler, str) else type(self.config.scheduler).__name__
        said = launcher.control_latency(self._engine)
        self._pace.say(f"{name}: warm after {time.monotonic() - began:.0f} s{f'; {said}' if said else ''}")
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.close()

    @property
    def engine(self) -> pdjax.Engine:
        """For its `specs` and latency models. RuntimeError outside of the `with`."""
        if self._engine is None:
            raise RuntimeError("a Bench has an engine inside of its `with` only")
        return self._engine

    def play(self, name: str, workload: Workload, *, warmup_requests: int = 0) -> Point:
        """Serves a workload, waits until the engine is idle, and writes the point's files.

        Args:
            name: of the point, and of its folder; "/" makes folders in folders.
            workload: what is asked.
            warmup_requests: first requests that are served but do not count: not in the files, nor in the report.

        Raises:
            ValueError: a request that the engine refuses.
            RuntimeError: the engine broke, or kept pages for IDLE_S after the last answer.
        """
        played = self.engine.replay(workload).without(warmup_requests)
        if not self.engine.wait_idle(IDLE_S):
            raise RuntimeError(f"point {name}: the engine is not idle {IDLE_S:g} s after its last answer")
        summary = played.summary()
        facts = {"name": name, "workload": workload.note, "warmup_requests": warmup_requests}
        compiles = {"compiles_while_serving": self.engine.compiles_while_serving}
        folder = report.write_summary(self._points / name, facts | summary | compiles)
        path = report.write_requests(folder, {name: played})
        self._pace.point(name, f"{summary['completed']} of {len(played.records)} requests in {played.duration_s:.1f} s")
        return Point(name, path, played, summary["failed"])


def known(out: str | Path, name: str, workload: Workload) -> tuple[Path, dict[str, Any]] | None:
    """(the requests.jsonl, the numbers) of a point that was played before into this folder, from the same workload and
    without a failure; None: there is none."""
    folder = Path(out) / "points" / name
    try:
        summary = json.loads((folder / "summary.json").read_text())
        same = summary["name"] == name and summary["workload"] == workload.note and not summary["failed"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    path = folder / "requests.jsonl"
    return (path, summary) if same and path.exists() else None


def check(points: Iterable[Point]) -> None:
    """Ends the launcher with status 1 if a request of any point failed."""
    failed = {point.name: point.failed for point in points if point.failed}
    if failed:
        sys.exit(f"error: requests failed: {failed}; the reasons are in requests.jsonl")


def judge(path: Path, slo: SLO | None = None) -> Judged:
    """Attainment and goodput of the requests in a point's file.

    Args:
        path: of a requests.jsonl of one run.
        slo: limits to judge by; None: those that each request was asked with.

    Raises:
        ValueError: the file has no request, or is not such a file.
    """
    records = read_requests(path)
    if not records:
        raise ValueError(f"{path} has no request; allowed: at least one")
    arrival_s = min(record.timeline.arrival_s for record in records)
    duration_s = max(record.timeline.finished_s or arrival_s for record in records) - arrival_s
    met = sum(metrics.met(record, slo) for record in records)
    finished = sum(record.state is State.FINISHED for record in records)
    per_s = 1 / duration_s if duration_s > 0 else 0.0  # all rejected at once: nothing was served
    return Judged(len(records), met, met / len(records), met * per_s, finished * per_s, duration_s)


def read_requests(path: Path) -> list[RequestRecord]:
    """The requests of a requests.jsonl, as `pdjax.metrics` takes them; seconds count from the first arrival.

    Raises:
        ValueError: not such a file.
    """
    try:
        with open(path) as file:
            return [_record(json.loads(line)) for line in file]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {error!r}; allowed: a requests.jsonl") from None


def _record(line: dict[str, Any]) -> RequestRecord:
    return RequestRecord(
        request_id=line["request_id"],
        prompt_tokens=line["prompt_tokens"],
        token_ids=tuple(line["token_ids"]),
        state=State(line["state"]),
        finish_reason=line["finish_reason"],
        slo=SLO(**line["slo"]),
        slo_class=line["slo_class"],
        degraded_from=line["degraded_from"],
        timeline=Timeline(**line["timeline"]),
        prefill_instance=line["placement"]["prefill"],
        decode_instance=line["placement"]["decode"],
        reason=line["placement"]["reason"],
        preemptions=line["preemptions"],
        restarts=line["restarts"],
    )
