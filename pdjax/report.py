"""What a run leaves behind: `Report`s of one or more runs enter, files in one folder leave. Called by the launchers.

    summary.json    the caller's dict
    requests.jsonl  a line per request and run: tokens, timeline, placement and why
    timeline.json   Chrome trace format (chrome://tracing, ui.perfetto.dev): a process per run, a track per instance
    *.png           `pdjax.plots`, where matplotlib is installed

Times in the files count from the first arrival of their run.
"""

import dataclasses
import importlib.util
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdjax import metrics
from pdjax.messages import InstanceSpec
from pdjax.record import FlipRecord, IterationRecord, MoveRecord, RequestRecord, TransferRecord
from pdjax.request import SLO

log = logging.getLogger("pdjax")
_INSTANT_S = 1e-9  # of a run in virtual time whose requests were all rejected when they came


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """One workload served once.

    Attributes:
        records: one per request, in the order of the workload's items.
        iterations: of all instances, those of one instance in order.
        transfers: KV moves that were completed.
        duration_s: first arrival to the end of the last request.
        specs: the instances it ran on.
        revisions: role flips that were completed, and decode rows that moved, in order.
        capacity: `pdjax.capacity.Gauge.summary` of the whole run, warm-up requests included; None: it was not sampled.
    """

    records: list[RequestRecord]
    iterations: list[IterationRecord]
    transfers: list[TransferRecord]
    duration_s: float
    specs: tuple[InstanceSpec, ...]
    capacity: dict[str, Any] | None = None
    revisions: tuple[FlipRecord | MoveRecord, ...] = ()

    @property
    def flips(self) -> list[FlipRecord]:
        return [revision for revision in self.revisions if isinstance(revision, FlipRecord)]

    @property
    def moves(self) -> list[MoveRecord]:
        return [revision for revision in self.revisions if isinstance(revision, MoveRecord)]

    @property
    def start_s(self) -> float:
        """The first arrival, on the cluster's clock."""
        return min((record.timeline.arrival_s for record in self.records), default=0.0)

    def without(self, warmup: int) -> "Report":
        """The same run as if the first `warmup` requests had not been measured."""
        records = self.records[warmup:]
        if not records:
            raise ValueError(f"warmup_requests is {warmup}; allowed: fewer than the {len(self.records)} requests")
        start_s = min(record.timeline.arrival_s for record in records)
        return dataclasses.replace(
            self,
            records=records,
            iterations=[iteration for iteration in self.iterations if iteration.started_s >= start_s],
            transfers=[transfer for transfer in self.transfers if transfer.started_s >= start_s],
            revisions=tuple(revision for revision in self.revisions if _time_s(revision) >= start_s),
            duration_s=self.duration_s - (start_s - self.start_s),
        )

    def summary(
        self,
        *,
        slo: SLO | None = None,
        targets: Sequence[metrics.Target] = (),
        attainment: float = metrics.ATTAINMENT,
    ) -> dict[str, Any]:
        """`pdjax.metrics.summarize` of this run, its `capacity`, how many rows moved, and every role flip."""
        numbers = metrics.summarize(
            self.records,
            devices=sum(spec.devices for spec in self.specs),
            duration_s=self.duration_s or _INSTANT_S,
            slo=slo,
            targets=targets,
            attainment=attainment,
            iterations=self.iterations,
            transfers=self.transfers,
        )
        flips = [
            {
                "instance": flip.instance,
                "from": flip.before.value,
                "to": flip.after.value,
                "seconds": flip.finished_s - flip.started_s,
                "reason": flip.reason,
            }
            for flip in self.flips
        ]
        return numbers | {"capacity": self.capacity, "moves": len(self.moves), "flips": flips}


def _time_s(revision: FlipRecord | MoveRecord) -> float:
    """When it had happened."""
    return revision.finished_s if isinstance(revision, FlipRecord) else revision.time_s


def out_folder(out: str | Path) -> Path:
    """The folder, made if missing. ValueError naming `out` if it cannot be."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"out is {str(out)!r}, which is no folder to write to: {error}") from None
    return folder


def write_summary(out_dir: str | Path, summary: dict[str, Any]) -> Path:
    """Writes summary.json alone into `out_dir`, which is made if missing; returns it."""
    folder = out_folder(out_dir)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return folder


def write(out_dir: str | Path, summary: dict[str, Any], runs: Mapping[str, Report]) -> None:
    """Writes every file into `out_dir`, which is made if missing; files of an earlier call are replaced."""
    folder = write_summary(out_dir, summary)
    write_requests(folder, runs)
    (folder / "timeline.json").write_text(json.dumps(chrome_trace(runs)) + "\n")
    if importlib.util.find_spec("matplotlib") is None:
        log.warning("no plots: matplotlib is not installed (pip install pdjax[plot])")
        return
    from pdjax import plots

    plots.latency_by_run(runs, folder / "latency.png")
    plots.timeline(runs, folder / "timeline.png")


def write_requests(folder: Path, runs: Mapping[str, Report]) -> Path:
    """Writes requests.jsonl alone into `folder`, which exists; returns it."""
    path = folder / "requests.jsonl"
    with open(path, "w") as file:
        for run, report in runs.items():
            for record in report.records:
                file.write(json.dumps({"run": run, **request_line(record, report.start_s, report.specs)}) + "\n")
    return path


def request_line(record: RequestRecord, start_s: float, specs: Sequence[InstanceSpec]) -> dict[str, Any]:
    """One request as a line of requests.jsonl; seconds count from `start_s`. `specs`: of the instances; those that are
    ranks of a job are named by these too."""
    used = {"prefill": record.prefill_instance, "decode": record.decode_instance}
    ranks = {f"{phase}_ranks": list(specs[index].ranks) for phase, index in used.items() if index is not None}
    timeline = {
        name: _since(value, start_s) if name.endswith("_s") and name not in _DURATIONS else value
        for name, value in dataclasses.asdict(record.timeline).items()
    }
    return {
        "request_id": record.request_id,
        "state": record.state.value,
        "finish_reason": record.finish_reason,
        "prompt_tokens": record.prompt_tokens,
        "token_ids": list(record.token_ids),
        "timeline": timeline,
        "placement": {
            **used,
            **{name: numbers for name, numbers in ranks.items() if numbers},
            "reason": record.reason,
        },
        "preemptions": record.preemptions,
        "restarts": record.restarts,
        "moves": [
            {"src": move.src, "dst": move.dst, "time_s": _since(move.time_s, start_s), "reason": move.reason}
            for move in record.moves
        ],
        "ttft_ms": metrics.ttft_ms(record),
        "tpot_ms": metrics.tpot_ms(record),
        "e2e_ms": metrics.e2e_ms(record),
        "parts_ms": metrics.parts(record) if record.timeline.token_s else None,
        "slo": dataclasses.asdict(record.slo),
        "slo_class": record.slo_class,
        "degraded_from": record.degraded_from,
        "slo_met": metrics.met(record),
    }


_DURATIONS = ("transfer_busy_s", "transfer_hidden_s")


def _since(value: Any, start_s: float) -> Any:
    if isinstance(value, list):
        return [_since(item, start_s) for item in value]
    return None if value is None else round(value - start_s, 6)


def instance_name(report: Report, index: int) -> str:
    """How files and pictures call an instance."""
    return f"instance {index} ({report.specs[index].role.value})"


def iteration_name(iteration: IterationRecord) -> str:
    """What it computed: "prefill 128", "decode x8" or "mixed 128 x8"."""
    if not iteration.rows:
        return f"prefill {iteration.chunk_tokens}"
    if not iteration.chunk_tokens:
        return f"decode x{iteration.rows}"
    return f"mixed {iteration.chunk_tokens} x{iteration.rows}"


def chrome_trace(runs: Mapping[str, Report]) -> dict[str, Any]:
    """All runs in Chrome trace format; times are microseconds since the run's first arrival."""
    events: list[dict[str, Any]] = []
    for pid, (run, report) in enumerate(runs.items()):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": run}})
        for index in range(len(report.specs)):
            name = instance_name(report, index)
            events.append({"ph": "M", "pid": pid, "tid": index, "name": "thread_name", "args": {"name": name}})
        for iteration in report.iterations:
            events.append(
                {
                    "ph": "X",
                    "cat": "iteration",
                    "name": iteration_name(iteration),
                    "pid": pid,
                    "tid": iteration.instance,
                    "ts": 1e6 * (iteration.started_s - report.start_s),
                    "dur": 1e6 * (iteration.finished_s - iteration.started_s),
                    "args": {"number": iteration.number, "requests": list(iteration.requests)},
                }
            )
        for number, transfer in enumerate(report.transfers):
            # Moves overlap each other and the iterations: asynchronous slices need not nest.
            common = {
                "cat": "transfer",
                "name": f"KV {transfer.src} to {transfer.dst}",
                "id": number,
                "pid": pid,
                "tid": transfer.dst,
            }
            args = {"request": transfer.request_id, "bytes": transfer.nbytes}
            events.append(common | {"ph": "b", "ts": 1e6 * (transfer.started_s - report.start_s), "args": args})
            events.append(common | {"ph": "e", "ts": 1e6 * (transfer.finished_s - report.start_s)})
        for revision in report.revisions:
            events.append({"pid": pid, "ts": 1e6 * (_time_s(revision) - report.start_s)} | _mark(revision))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _mark(revision: FlipRecord | MoveRecord) -> dict[str, Any]:
    """A revision as an instant event on the track of its instance."""
    args: dict[str, Any] = {"reason": revision.reason}
    if isinstance(revision, FlipRecord):
        name, index = f"flip {revision.before.value} to {revision.after.value}", revision.instance
        args["seconds"] = revision.finished_s - revision.started_s
    else:
        name, index = f"move to {revision.dst}", revision.src
        args["request"] = revision.request_id
    return {"ph": "i", "s": "t", "cat": "revision", "name": name, "tid": index, "args": args}
