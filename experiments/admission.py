"""What admission does above the rate that can be sustained: one workload at rates around it, with and without. Flags
enter; a table, summary.json and a picture leave. Run as `python -m pdjax.experiments.admission`.

The sustainable rate is the predicted goodput of the scheduler without admission (`pdjax.goodput`), in virtual time by
the latency profile. Of the requests that were rejected, each is taken in after all in a simulation of that moment: the
same requests up to then, admitted and rejected as they were, and nobody after. A rejection was right if that one then
misses its limits, or makes another miss that would not have. Of engines, passes there take what they took on them in
the end: the latency models as they were corrected.
"""

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags as absl_flags
from rich.table import Table

from pdjax import eventlog, goodput, metrics, provenance, report, rerun
from pdjax.config import EngineConfig
from pdjax.eventlog import Header
from pdjax.experiments import flags, launcher, measured, predictions
from pdjax.experiments.virtual import POINTS, Virtual, requests_of
from pdjax.models import source
from pdjax.report import Report
from pdjax.request import SLO, Request, State
from pdjax.schedulers import SCHEDULERS
from pdjax.schedulers.admission import guarded
from pdjax.schedulers.base import Ask, ClusterView, InstanceView, Place, Plan, Reject, Scheduler, Wait, traits_of
from pdjax.workload import Workload

MODES = ("without", "admission")
CHECKED = 40  # rejections of a point, at most, that are looked at: two simulations each

SIMULATE = absl_flags.DEFINE_bool("simulate", False, "In virtual time, by the latency model; without engines.")
TIMES = absl_flags.DEFINE_list("times", ["0.5", "1", "1.5", "2", "2.5"], "Rates, as multiples of the sustainable one.")
POINT = absl_flags.DEFINE_enum("slo_point", "balanced", list(POINTS), "Which limits, as in the launcher compare.")
absl_flags.adopt_module_key_flags(flags)  # --help shows them


class AsDecided:
    """Any policy, but requests that were rejected are rejected, and all others taken in."""

    def __init__(self, inner: Scheduler, rejected: frozenset[int]) -> None:
        self._inner, self._rejected = inner, rejected
        self.traits = traits_of(inner)

    def place(self, ask: Ask, cluster: ClusterView) -> Place | Wait | Reject:
        return Reject("as it was decided") if ask.id in self._rejected else self._inner.place(ask, cluster)

    def hand_off(self, ask: Ask, cluster: ClusterView) -> int | None:
        return self._inner.hand_off(ask, cluster)

    def iterate(self, instance: InstanceView, cluster: ClusterView) -> Plan:
        return self._inner.iterate(instance, cluster)


def was_right(number: int, requests: Sequence[Request], rejected: Mapping[int, float], header: Header) -> bool:
    """Whether a rejected request would have missed its limits, or broken another's promise.

    Args:
        number: its id.
        requests: of the run, in order of their ids, as `pdjax.rerun.workload_of` has them.
        rejected: all that were, by id, and when, in seconds like the arrivals.
        header: what served them; its policy is made anew, without admission.
    """
    there = [request for request in requests if request.arrival_s <= rejected[number]]
    bare = dataclasses.replace(header, admission=False, drop_late=False)

    def kept(refused: frozenset[int]) -> dict[int, bool]:
        played = rerun.simulate(there, bare, AsDecided(rerun.policy_of(bare), refused))
        return {request.id: metrics.met(record) for request, record in zip(there, played.records, strict=True)}

    without, taken = kept(frozenset(rejected)), kept(frozenset(rejected) - {number})
    return not taken[number] or any(ok and not taken[other] for other, ok in without.items())


def checked(played: Report, requests: Sequence[Request], start_s: float, header: Header) -> tuple[int, int]:
    """(rejections that were looked at, those that were right), evenly spread over a run. `start_s`: of the run's clock,
    where the arrivals of `requests` count from."""
    rejected = {
        request.id: (record.timeline.finished_s or 0.0) - start_s
        for request, record in zip(requests, played.records, strict=True)
        if record.state is State.REJECTED
    }
    chosen = list(rejected)[:: max(1, -(-len(rejected) // CHECKED))]
    return len(chosen), sum(was_right(number, requests, rejected, header) for number in chosen)


@dataclasses.dataclass(frozen=True, slots=True)
class Course:
    """What is played: the workload's kind, the limits, and the rates by their multiples of the sustainable one."""

    virtual: Virtual
    kind: str
    slo: SLO
    sustainable_rps: float
    times: tuple[float, ...]
    count: int
    seed: int

    def workload(self, times: float) -> Workload:
        make = predictions.make_of(self.virtual, self.kind)
        return make(times * self.sustainable_rps, self.seed, self.count, self.slo)


def sustainable(virtual: Virtual, kind: str, slo: SLO, scheduler: str, count: int, seed: int) -> float:
    """The rate at which nine of ten requests keep their limits without admission, in virtual time."""
    make = predictions.make_of(virtual, kind)

    def run(rate: float) -> goodput.Trial:
        records = virtual.play(scheduler, make(rate, seed, count, slo)).records
        return goodput.Trial(rate, tuple(metrics.met(record) for record in records))

    return goodput.crossing(goodput.search(run, 0.5, tolerance=0.05, max_runs=14)).rate


def line(mode: str, times: float, rate: float, played: Report, right: tuple[int, int]) -> dict[str, Any]:
    """A point of summary.json."""
    numbers = played.summary()
    names = ("num_requests", "admitted", "rejected", "degraded", "slo_attainment", "admitted_attainment", "goodput_rps")
    return {
        "mode": mode,
        "times_sustainable": times,
        "rate_rps": rate,
        **{name: numbers[name] for name in names},
        "rejections_checked": right[0],
        "rejections_right": right[1],
    }


def simulated(plan: Course, config: EngineConfig) -> list[dict[str, Any]]:
    """All points in virtual time."""
    points = []
    for mode in MODES:
        for times in plan.times:
            workload = plan.workload(times)
            policy = guarded(
                SCHEDULERS[config.scheduler](config.stream_from),
                admission=mode == "admission",
                drop_late=mode == "admission" and config.drop_late,
            )
            played = plan.virtual.play(policy, workload)
            specs = plan.virtual.specs(policy)
            header = eventlog.header_of(config, specs, [plan.virtual.model_of(spec) for spec in specs])
            right = checked(played, requests_of(workload), 0.0, header)
            points.append(line(mode, times, times * plan.sustainable_rps, played, right))
    return points


def measure(plan: Course, config: EngineConfig, out: str) -> list[dict[str, Any]]:
    """All points on engines, one after the other."""
    points = []
    pace = measured.Pace(len(MODES) * len(plan.times))
    for mode in MODES:
        log = str(Path(out) / f"events-{mode}.jsonl")
        own = dataclasses.replace(
            config,
            admission=mode == "admission",
            drop_late=mode == "admission" and config.drop_late,
            event_log=log,
        )
        with measured.Bench(own, out, pace) as bench:
            played = [bench.play(f"{mode}-{times:g}", plan.workload(times)).report for times in plan.times]
            latency = bench.engine.latency
        recorded = eventlog.read(log)
        header = dataclasses.replace(recorded.header, latency=latency)
        requests = rerun.workload_of(recorded)
        for index, (times, run) in enumerate(zip(plan.times, played, strict=True)):
            own_requests = requests[index * plan.count : (index + 1) * plan.count]
            right = checked(run, own_requests, played[0].start_s, header)
            points.append(line(mode, times, times * plan.sustainable_rps, run, right))
    return points


def summary_of(plan: Course, scheduler: str, points: list[dict[str, Any]], how: str) -> dict[str, Any]:
    """For summary.json; `at_twice`: the point nearest to twice the sustainable rate, with admission."""
    ours = [point for point in points if point["mode"] == "admission"]
    twice = min(ours, key=lambda point: abs(point["times_sustainable"] - 2))
    peak = max(point["goodput_rps"] for point in ours)
    return {
        "scheduler": scheduler,
        "how": how,
        "workload": plan.kind,
        "slo": dataclasses.asdict(plan.slo),
        "sustainable_rps": plan.sustainable_rps,
        "points": points,
        "at_twice": {
            "admitted_attainment": twice["admitted_attainment"],
            "goodput_over_peak": twice["goodput_rps"] / peak if peak else None,
            "rejections_right": twice["rejections_right"],
            "rejections_checked": twice["rejections_checked"],
        },
    }


def table(points: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each point."""
    shown = Table()
    for name in ("", "x rate", "rate/s", "goodput", "met", "of admitted", "rejected", "rightly"):
        shown.add_column(name, justify="right" if name else "left")
    for point in points:
        share = point["admitted_attainment"]
        shown.add_row(
            point["mode"],
            f"{point['times_sustainable']:g}",
            f"{point['rate_rps']:.3g}",
            f"{point['goodput_rps']:.3g}",
            f"{point['slo_attainment']:.0%}",
            "-" if share is None else f"{share:.0%}",
            str(point["rejected"]),
            f"{point['rejections_right']} of {point['rejections_checked']}" if point["rejections_checked"] else "-",
        )
    return shown


def finish(summary: dict[str, Any], origin: dict[str, Any]) -> None:
    """Shows and writes what was found."""
    console = launcher.console()
    console.print(table(summary["points"]))
    twice = summary["at_twice"]
    console.print(
        f"At twice the sustainable rate: {twice['admitted_attainment'] or 0:.0%} of the admitted keep their limits, "
        f"goodput is {twice['goodput_over_peak'] or 0:.2f} of its peak, {twice['rejections_right']} of "
        f"{twice['rejections_checked']} rejections would have missed or broken another.",
        highlight=False,
    )
    if out := flags.OUT.value:
        folder = report.write_summary(out, {"provenance": origin, **summary})
        from pdjax import plots_admission

        plots_admission.overload(summary, folder / "admission.png")
        console.print(f"{out}/ has summary.json and admission.png", highlight=False)


def times_of(texts: Sequence[str]) -> tuple[float, ...]:
    """The rates to play. ValueError naming `times`."""
    try:
        times = tuple(float(text) for text in texts)
    except ValueError:
        times = ()
    if not times or not all(0 < one < math.inf for one in times) or len(set(times)) < len(times):
        raise ValueError(f"times is {','.join(texts)!r}; allowed: finite numbers > 0 with commas, each once")
    return times


def main(argv: list[str]) -> None:
    del argv
    logging.getLogger("pdjax").setLevel(flags.LOG_LEVEL.value.upper())
    config = flags.build_config()
    flags.refuse_requests("workload", "num_requests")
    times = times_of(TIMES.value)
    if config.scheduler not in SCHEDULERS:
        raise ValueError(f"scheduler is {config.scheduler!r}; allowed: {', '.join(SCHEDULERS)}")
    out = flags.OUT.value or ""
    if not SIMULATE.value and not out:
        raise ValueError("out is empty; allowed: a folder, for the requests and events of every run")
    virtual = predictions.profiled(config, source.resolve(config.model).config)
    kind, count, seed = flags.WORKLOAD.value, flags.NUM_REQUESTS.value, flags.SEED.value
    slo = predictions.limits(virtual, kind)[0][POINT.value]
    rate = sustainable(virtual, kind, slo, config.scheduler, max(count, 150), seed)
    plan = Course(virtual, kind, slo, rate, times, count, seed)
    if SIMULATE.value:
        points = simulated(plan, config)
        finish(summary_of(plan, config.scheduler, points, "virtual time"), provenance.collect(flags.given()))
        return
    report.out_folder(out)

    def on_head() -> None:
        points = measure(plan, config, out)
        origin = provenance.collect(flags.given(), ranks=launcher.ranks_for(config))
        finish(summary_of(plan, config.scheduler, points, "measured"), origin)

    measured.on_ranks(on_head, config)


if __name__ == "__main__":
    measured.set_defaults()
    for _flag, _value in (
        (flags.WORKLOAD, predictions.WORKLOAD),
        (flags.NUM_REQUESTS, 60),
        (flags.OUT, "out/admission"),
    ):
        absl_flags.set_default(_flag, _value)
    absl_flags.FLAGS.set_default("max_model_len", 1024)
    absl_flags.FLAGS.set_default("decode_max_batch", 16)
    launcher.run(main)
