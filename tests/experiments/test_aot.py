"""The launcher: what is compiled, what is refused before, and what summary.json says."""

import dataclasses
import json

import jax
import pytest
from absl import flags as absl_flags
from absl.testing import flagsaver

from pdjax import hardware
from pdjax.aot.compiled import Compiled, Memory
from pdjax.aot.targets import Missing, Target, parse
from pdjax.catalogue import Program
from pdjax.experiments import aot, aot_check, aot_runs
from pdjax.messages import Role
from pdjax.testing import spec

ABACUS = dataclasses.replace(hardware.get("h100"), name="abacus", memory_bytes=float(16 << 20))
SIZES = (
    "--scheduler=disaggregated",
    "--max_model_len=128",
    "--prefill_chunk=32",
    "--prefill_max_batch=1",
    "--decode_max_batch=1",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Abacus(Target):
    """Devices of the CPU under another name; of one name there are none."""

    def devices(self):
        if self.text == "gone":
            raise Missing("no compiler")
        return jax.devices()[: self.count]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the launcher with these flags on two devices of 16 MiB; what summary.json says."""
    monkeypatch.setattr(aot, "parse", lambda text: Abacus(text, "cpu", "abacus", "2", ABACUS))

    def launch(*arguments):
        absl_flags.FLAGS.unparse_flags()
        given = ["aot", "--model=tiny", "--target=cpu:abacus:2", *SIZES, f"--out={tmp_path}", *arguments]
        aot.main(absl_flags.FLAGS(given))
        return json.loads((tmp_path / "summary.json").read_text())

    with flagsaver.flagsaver():
        yield launch


@pytest.mark.slow
def test_every_program_of_both_instances_is_compiled_with_its_pool_in_place(run, capsys):
    told = run()
    programs = told["programs"]
    assert all(each["compiled"] and each["target"] == "cpu:abacus:2" for each in programs)
    assert {each["kind"] for each in programs} == {"embed", "group", "head", "insert", "extract"}
    assert all(each["pool_aliased"] for each in programs if each["kind"] in ("group", "insert"))
    assert {each["instance"] for each in programs} == {"prefill instance 0", "decode instance 1"}
    first = next(each for each in programs if each["kind"] == "group")
    assert first["memory"]["total"] > 0 and first["flops"] > 0 and first["collectives"] == {}
    assert told["faults"] == [] and [each["fits"] for each in told["instances"]] == [True, True]
    assert "of the chip" in capsys.readouterr().out


def test_what_does_not_fit_is_refused_before_anything_is_compiled(run, monkeypatch):
    monkeypatch.setattr(aot_runs, "run", lambda *arguments: pytest.fail("compiled"))
    with pytest.raises(
        ValueError, match=r"^decode_num_pages is 2000: 0\.0\d GiB of weights, .* of 0\.015625 GiB \(abacus\)"
    ):
        run("--decode_num_pages=2000")


def test_too_few_chips_are_refused(run):
    with pytest.raises(ValueError, match="target is 'cpu:abacus:2', 2 chips; allowed: at least 3"):
        run("--prefill_tp=2")


def test_a_missing_compiler_is_told_before_another_one_works(run, monkeypatch):
    monkeypatch.setattr(aot_runs, "run", lambda *arguments: pytest.fail("compiled"))
    with pytest.raises(Missing, match="no compiler"):
        run("--target=cpu:abacus:2,gone")


def test_a_program_that_does_not_compile_ends_with_its_reason(run, monkeypatch, capsys):
    def refuse(program):
        return aot_runs.Compiled(program.name, 0.0, error="no such kernel")

    monkeypatch.setattr(aot_runs.compiled, "compile", refuse)
    with pytest.raises(SystemExit, match="decode instance 1: head 1 does not compile: no such kernel"):
        run()


def test_a_line_for_each_program_goes_to_a_file(run, monkeypatch, capsys):
    monkeypatch.setattr(aot_runs.compiled, "compile", lambda program: Compiled(program.name, 1.5, Memory(9, 9, 0, 9)))
    with pytest.raises(SystemExit, match=r"insert .* copies an array that it should update in place"):
        run()
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("cpu:abacus:2: head 1 took 1.5 s (") for line in lines)
    assert any("decode instance 1: " in line and " programs in " in line for line in lines)


def test_the_check_leaves_out_what_has_no_compiler_here_and_says_what_is_missing(run, monkeypatch, capsys):
    def missing(target):
        raise Missing("pip install -e '.[aot]'")

    monkeypatch.setattr(Target, "devices", missing)
    told = run("--check")
    assert told["programs"] == [] and {each["reason"] for each in told["skipped"]} == {"pip install -e '.[aot]'"}
    assert [each["target"] for each in told["skipped"]] == [case.target for case in aot_check.CASES]
    assert capsys.readouterr().out.count("pip install -e '.[aot]'") == len(aot_check.CASES)


def test_a_case_of_the_check_that_fails_leaves_the_others_to_run(run, monkeypatch, tmp_path):
    first, *others = aot_check.CASES
    asked = []

    def job(case):
        asked.append(case)
        raise RuntimeError("out of order") if case is first else Missing("no compiler")

    monkeypatch.setattr(aot_check, "job", job)
    with pytest.raises(SystemExit, match=r"tpu:v5e:2x4, llama3\.1-8b: RuntimeError: out of order"):
        run("--check")
    told = json.loads((tmp_path / "summary.json").read_text())
    assert asked == [first, *others]
    assert len(told["faults"]) == 1 and len(told["skipped"]) == len(others)


@pytest.mark.parametrize(
    ("number", "names"),
    [
        (
            0,
            [
                *("group of 1 2048+0", "group of 1 0+32", "embed 2048+32", "group of 1 2048+32", "head 36"),
                *("insert 1x2048", "extract 1x256", "slice 1x2048:2048"),
            ],
        ),
        (-1, ["embed 0+32", "group of 1 0+32", "head 32", "insert 1x2048"]),
    ],
)
def test_the_check_has_the_group_of_every_pass_and_one_program_of_every_other_kind(number, names, monkeypatch):
    monkeypatch.setattr(Target, "devices", lambda target: jax.devices()[: target.count])
    assert [program.name for program in aot_check.job(aot_check.CASES[number]).programs] == names


def test_a_list_of_its_own_has_no_profile(run):
    with pytest.raises(ValueError, match=r"profile is 'folder'; allowed with --check: none"):
        run("--check", "--profile=folder")


def test_pages_that_do_not_stay_in_place_are_a_fault():
    def answered(kind, in_place, error=None):
        program = Program(f"{kind} 1", Role.DECODE, 0, None, ())
        return program, Compiled(program.name, 1.0, pool_aliased=in_place, error=error)

    answers = (
        answered("embed", None), answered("group", True), answered("group", None, "no"),
        answered("insert", None), answered("head", False),
    )  # fmt: skip
    job = aot_runs.Job(parse("gpu:h100"), None, spec(0, Role.DECODE), "bfloat16", (), {})
    refused, *copied = aot_runs.Done(job, answers, (), None).faults
    assert refused == "gpu:h100, decode instance 0: group 1 does not compile: no"
    assert [fault.split(": ")[1].split()[0] for fault in copied] == ["insert", "head"]


def test_equal_instances_are_compiled_once_on_the_devices_of_the_first():
    two = [spec(index, Role.PREFILL, devices=2) for index in range(2)]
    three = spec(2, Role.DECODE, devices=1)
    assert aot_runs.distinct([*two, three]) == [(two[0], 0), (three, 4)]
