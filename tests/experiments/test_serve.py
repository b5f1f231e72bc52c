"""serve on an engine that answers at once: what is shown, what is compared, and what is written."""

import io
import json
import subprocess
import sys

import pytest
from absl import flags as absl_flags
from absl.testing import flagsaver
from rich.console import Console

from pdjax import metrics
from pdjax.config import EngineConfig
from pdjax.experiments import answers, serve, table
from pdjax.messages import InstanceSpec, Role
from pdjax.record import IterationRecord, RequestRecord, Timeline
from pdjax.report import Report, write
from pdjax.request import SLO, State
from pdjax.workload import parse


def workload(**options):
    defaults = {"num_requests": 4, "vocab_size": 100, "max_model_len": 1000, "rate": 1.0, "slo": SLO(ttft_ms=350)}
    return parse("chat", **(defaults | options))


def spec(index, role):
    return InstanceSpec(index, role, 1, 8, 64, 4, 16, 65, 1024, 1000)


class FakeEngine:
    """Request i gets its first token after 0.1 * (i + 1) s and two more, 0.05 s apart."""

    made: list["FakeEngine"] = []  # noqa: RUF012 the list is shared on purpose: it counts engines

    def __init__(self, config, progress):
        self.config, self.closed = config, False
        self.warmup_s, self.compile_s, self.compiles_while_serving = 3.5, 2.5, 0
        self.state = State.FINISHED
        progress(1, 1, "ready")
        FakeEngine.made.append(self)

    def __enter__(self):
        assert all(engine.closed for engine in FakeEngine.made[:-1]), "two engines at a time"
        return self

    def __exit__(self, *error):
        self.closed = True

    def replay(self, workload, on_text=None, progress=None):
        records = []
        for index, item in enumerate(workload.items):
            if on_text:
                for piece in ("The answer ", f"is {index}", ".\n"):
                    on_text(index, piece)
            if progress:
                progress(index + 1, len(workload.items))
            first = item.arrival_s + 0.1 * (index + 1)
            marks = Timeline(item.arrival_s, token_s=[first, first + 0.05, first + 0.1], finished_s=first + 0.1)
            records.append(
                RequestRecord(item.user_id, 9, (1, 2, 3), self.state, "length", item.slo, marks, 0, 1, "fake")
            )
        passes = [IterationRecord(0, 0, 64, 0, 0.0, 0.1), IterationRecord(1, 0, 0, 2, 0.1, 0.2)]
        specs = (spec(0, Role.PREFILL), spec(1, Role.DECODE))
        return Report(records, passes, [], records[-1].timeline.finished_s, specs)


@pytest.fixture(autouse=True)
def no_engines():
    FakeEngine.made.clear()


def console(**options):
    return Console(file=io.StringIO(), width=120, **options)


def run(*names, out=None, **options):
    configs = {name: EngineConfig(scheduler=name) for name in names}
    targets = metrics.preset_targets("interactive")
    return serve.serve(configs, workload(), out or console(), targets=targets, make_engine=FakeEngine, **options)


# --- the runs -------------------------------------------------------------------------------------------------------


def test_each_scheduler_gets_an_engine_of_its_own_and_the_last_is_closed():
    entries, reports = run("colocated", "dynamic")
    assert [entry["scheduler"] for entry in entries] == list(reports) == ["colocated", "dynamic"]
    assert [engine.config.scheduler for engine in FakeEngine.made] == ["colocated", "dynamic"]
    assert FakeEngine.made[-1].closed


def test_an_entry_has_the_metrics_of_its_run_and_the_cost_of_warming_up():
    entry = run("dynamic")[0][0]
    assert entry["ttft_ms"]["p50"] == pytest.approx(250)
    assert entry["tpot_ms"]["max"] == pytest.approx(50)
    assert entry["slo_attainment"] == 0.75
    assert (entry["devices"], entry["warmup_s"], entry["compile_s"], entry["compiles_while_serving"]) == (
        2,
        3.5,
        2.5,
        0,
    )


def test_warmup_requests_are_left_out():
    entries, reports = run("dynamic", warmup_requests=1)
    assert entries[0]["num_requests"] == len(reports["dynamic"].records) == 3


def test_only_the_first_run_shows_its_answers():
    out = console()
    run("colocated", "dynamic", out=out)
    assert out.file.getvalue().count("[2] The answer is 2.") == 1


def test_the_summary_can_be_written_with_all_its_files(tmp_path):
    entries, reports = run("colocated", "dynamic")
    write(tmp_path, {"runs": entries}, reports)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert [entry["completed"] for entry in written["runs"]] == [4, 4]


def test_a_run_with_failed_requests_ends_with_an_error():
    serve.check([{"scheduler": "colocated", "failed": 0}])
    with pytest.raises(SystemExit, match=r"error: requests failed: \{'dynamic': 2\}"):
        serve.check([{"scheduler": "colocated", "failed": 0}, {"scheduler": "dynamic", "failed": 2}])


# The keys of a run in summary.json that others rely on.
SPREAD = {"mean", "p50", "p90", "p95", "p99", "max"}
KEYS = {
    "scheduler", "model", "devices", "num_requests", "completed", "rejected", "failed", "aborted", "preempted",
    "duration_s", "throughput_rps", "output_tokens_per_s", "goodput_rps", "slo_attainment", "attainment_target",
    "attained", "compile_s", "compiles_while_serving", "capacity",
}  # fmt: skip
GROUPS = {
    "ttft_ms": SPREAD, "tpot_ms": SPREAD, "itl_ms": SPREAD, "e2e_ms": SPREAD, "host_gap_ms": SPREAD,
    "stages_ms": set(metrics.PARTS), "kv_transfer": {"count", "bytes", "ms", "share_of_e2e", "overlap"},
}  # fmt: skip


def test_an_entry_has_every_key_that_is_documented():
    entry = run("dynamic")[0][0]
    assert KEYS | GROUPS.keys() <= entry.keys()
    assert {name: set(entry[name]) for name in GROUPS} == GROUPS
    assert set(entry["kv_transfer"]["ms"]) == SPREAD


# --- which schedulers -----------------------------------------------------------------------------------------------


def test_all_means_the_three_that_are_compared():
    assert serve.schedulers("all") == ("colocated", "disaggregated", "dynamic")


def test_schedulers_may_be_listed():
    assert serve.schedulers("dynamic,colocated_chunked") == ("dynamic", "colocated_chunked")


@pytest.mark.parametrize("value", ["fifo", "dynamic,", "", "dynamic,dynamic"])
def test_an_unknown_or_repeated_scheduler_is_refused(value):
    with pytest.raises(ValueError, match=f"scheduler is {value!r}; allowed: all"):
        serve.schedulers(value)


def test_events_are_logged_into_the_folder_only_when_asked_for():
    with flagsaver.flagsaver():
        absl_flags.FLAGS.unparse_flags()
        absl_flags.FLAGS(["test", "--out=there"])
        assert serve.event_log("dynamic", ["dynamic"]) == ""
        absl_flags.FLAGS(["test", "--log_events"])
        assert serve.event_log("dynamic", ["dynamic"]) == "there/events.jsonl"
        assert serve.event_log("dynamic", ["colocated", "dynamic"]) == "there/events-dynamic.jsonl"
        absl_flags.FLAGS(["test", "--out="])
        with pytest.raises(ValueError, match="log_events is True without out; allowed"):
            serve.event_log("dynamic", ["dynamic"])


# --- answers --------------------------------------------------------------------------------------------------------


def test_interleaved_answers_are_printed_in_whole_numbered_lines():
    out = console()
    with answers.Answers(out, workload().items[:2]) as show:
        for index, piece in [(0, "one "), (1, "eins "), (0, "two\nthree"), (1, "zwei")]:
            show(index, piece)
    assert out.file.getvalue().splitlines()[2:] == ["[0] one two", "[0] three", "[1] eins zwei"]


def test_a_long_line_is_cut_at_a_blank_and_nothing_is_lost():
    out = console()
    text = " ".join(f"word{n}" for n in range(60))
    with answers.Answers(out, workload().items[:1]) as show:
        for start in range(0, len(text), 7):
            show(0, text[start : start + 7])
    lines = [line.removeprefix("[0] ") for line in out.file.getvalue().splitlines()[1:]]
    assert " ".join(lines) == text
    assert max(map(len, lines)) <= answers.WIDTH


def test_markup_in_an_answer_is_text():
    out = console()
    with answers.Answers(out, workload().items[:1]) as show:
        show(0, "[bold]x[/bold] [/red]")
    assert "[0] [bold]x[/bold] [/red]" in out.file.getvalue()


def test_on_a_terminal_the_panel_ends_with_every_answer():
    out = console(force_terminal=True)
    with answers.Answers(out, workload().items) as show:
        for index in range(4):
            show(index, f"answer number {index}")
    end = out.file.getvalue()[out.file.getvalue().rfind("What is the capital of France?") :]
    assert all(f"answer number {index}" in end for index in range(4))


def test_answers_beyond_the_shown_are_counted_out():
    with answers.Answers(console(), workload(num_requests=16).items) as show:
        show(answers.SHOWN, "unseen")


def test_a_question_is_one_short_line():
    items = workload(num_requests=3).items
    assert answers.question(items[0]) == "What is the capital of France?"
    assert len(answers.question(items[2])) <= answers.WIDTH
    ids = parse("fixed:5,1", num_requests=1, vocab_size=9, max_model_len=9, rate=1.0).items[0]
    assert answers.question(ids) == "5 token ids"


# --- the table ------------------------------------------------------------------------------------------------------


def printed(entries):
    out = console()
    out.print(table.comparison(entries))
    return {
        cells[0].strip(): [cell.strip() for cell in cells[1:]]
        for line in out.file.getvalue().splitlines()
        if "│" in line and (cells := line.strip("│").split("│"))
    }


def test_the_table_puts_goodput_beside_throughput():
    rows = printed(run("colocated", "dynamic")[0])
    assert rows["TTFT p50 / p95, ms"] == ["250 / 385"] * 2
    assert float(rows["goodput at SLO, requests/s"][0]) < float(rows["throughput, requests/s"][0])
    names = list(rows)
    assert names.index("goodput at SLO, requests/s") == names.index("throughput, requests/s") + 1
    assert rows["met the SLO"] == ["75% below 90%"] * 2
    assert rows["warm-up, s"] == ["3.5"] * 2


def test_the_table_says_whether_the_attainment_is_reached():
    assert printed(run("dynamic", attainment=0.75)[0])["met the SLO"] == ["75% reaches 75%"]


def test_the_table_checks_the_targets():
    rows = printed(run("dynamic")[0])
    assert rows["TTFT p95 <= 500 ms"] == ["385 ok"]


def test_a_table_without_a_finished_request_can_be_printed():
    entry = run("dynamic")[0][0] | metrics.summarize([], devices=2, duration_s=1.0) | {"targets": []}
    assert printed([entry])["TTFT p50 / p95, ms"] == ["- / -"]


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--scheduler=fifo", "scheduler is 'fifo'"),
        ("--workload=fixed:0,1", "workload has lengths '0,1'"),
        ("--decode_tp=0", "decode_tp"),
        ("--warmup_requests=16", "warmup_requests is 16"),
        ("--attainment=0", "attainment"),
        ("--nonsense=1", "nonsense"),
    ],
)
def test_a_mistake_ends_with_one_line_and_status_2(argument, message):
    command = [sys.executable, "-m", "pdjax.experiments.serve", "--model=tiny", argument]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
