"""Points are kept in files, and what they are worth is worked out from the files alone."""

import sys

import pytest

from pdjax import report
from pdjax.experiments import measured
from pdjax.messages import Role
from pdjax.record import RequestRecord, Timeline
from pdjax.report import Report
from pdjax.request import SLO, State
from pdjax.testing import spec
from pdjax.workload import Workload

SPEC = spec(0, Role.MIXED)


def request(arrival_s, *token_s, state=State.FINISHED, slo=SLO()):  # noqa: B008
    ended = token_s[-1] if token_s else arrival_s
    marks = Timeline(arrival_s, finished_s=ended, token_s=list(token_s))
    return RequestRecord("r", 5, (0,) * len(token_s), state, "length", slo, marks)


def write(folder, *records):
    return report.write_requests(folder, {"run": Report(list(records), [], [], 4.0, (SPEC,))})


RUN = (
    request(10.0, 10.5, 10.6, 10.7),  # TTFT 500, TPOT 100
    request(11.0, 12.0, 12.1, slo=SLO(ttft_ms=900)),  # 1000, 100
    request(12.0, 12.1, 13.1, 14.0),  # 100, 950
    request(13.0, state=State.REJECTED),
)


def test_one_file_is_judged_by_many_limits(tmp_path):
    path = write(tmp_path, *RUN)
    strict, fast, none = (measured.judge(path, slo) for slo in (SLO(500, 100), SLO(ttft_ms=600), SLO()))
    assert (strict.requests, strict.met, strict.attainment) == (4, 1, 0.25)
    assert strict.duration_s == pytest.approx(4.0)
    assert (strict.goodput_rps, strict.throughput_rps) == (pytest.approx(0.25), pytest.approx(0.75))
    assert (fast.met, none.met) == (2, 3)


def test_without_limits_each_request_is_judged_by_its_own(tmp_path):
    assert measured.judge(write(tmp_path, *RUN)).met == 2


def test_what_is_rejected_at_once_has_no_goodput(tmp_path):
    judged = measured.judge(write(tmp_path, request(10.0, state=State.REJECTED)))
    assert (judged.attainment, judged.goodput_rps, judged.duration_s) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("text", ["", "{}\n", "no json\n"])
def test_a_file_of_something_else_is_a_value_error(tmp_path, text):
    (tmp_path / "requests.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"requests\.jsonl"):
        measured.judge(tmp_path / "requests.jsonl")


def test_the_time_left_is_that_of_the_points_before(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    said = []
    pace = measured.Pace(3, said.append)
    for _ in range(3):
        now[0] += 60
        pace.point("one", "served")
    assert [line.rsplit(";", 1)[1] for line in said] == [f" about {left} min left" for left in ("2.0", "1.0", "0.0")]


def test_a_launcher_started_alone_becomes_a_job_with_its_arguments(monkeypatch):
    asked = []
    monkeypatch.setattr("os.execve", lambda path, line, environment: asked.append((path, line, environment)))
    monkeypatch.setattr(measured.mpirun.shutil, "which", lambda name: "/bin/mpirun")
    monkeypatch.setattr(sys, "argv", ["launcher", "--seed=3"])
    measured._start_again(3)
    ((path, line, environment),) = asked
    assert path == line[0] and "mpirun" in path and line[line.index("-n") + 1] == "3"
    assert line[-1] == "--seed=3" and environment["OMPI_ALLOW_RUN_AS_ROOT"] == "1"


def test_failed_requests_end_a_launcher(tmp_path):
    played = Report([], [], [], 1.0, (SPEC,))
    measured.check([measured.Point("fine", tmp_path, played, 0)])
    with pytest.raises(SystemExit, match=r"'bad': 2"):
        measured.check([measured.Point("fine", tmp_path, played, 0), measured.Point("bad", tmp_path, played, 2)])


def played(out, note="a workload", failed=0):
    """A point as `Bench.play` leaves it."""
    folder = report.write_summary(out / "points" / "one", {"name": "one", "workload": note, "failed": failed})
    return write(folder, *RUN)


def test_a_point_that_was_played_is_found_again(tmp_path):
    path, numbers = played(tmp_path), {"name": "one", "workload": "a workload", "failed": 0}
    assert measured.known(tmp_path, "one", Workload((), "a workload")) == (path, numbers)


@pytest.mark.parametrize(
    ("name", "note", "failed"), [("two", "a workload", 0), ("one", "other", 0), ("one", "a workload", 1)]
)
def test_a_point_of_another_workload_or_with_failures_is_played_again(tmp_path, name, note, failed):
    played(tmp_path, note, failed)
    assert measured.known(tmp_path, name, Workload((), "a workload")) is None
