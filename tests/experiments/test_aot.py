"""The launcher: what is compiled, what is refused before, and what summary.json says."""

import dataclasses
import json

import jax
import pytest
from absl import flags as absl_flags
from absl.testing import flagsaver

from pdjax import hardware
from pdjax.aot.targets import Missing, Target
from pdjax.experiments import aot, aot_check, aot_runs
from pdjax.messages import Role
from pdjax.testing import spec

ABACUS = dataclasses.replace(hardware.get("h100"), name="abacus", memory_bytes=float(16 << 20))
SIZES = ("--max_model_len=128", "--prefill_chunk=32", "--prefill_max_batch=1", "--decode_max_batch=1")


@dataclasses.dataclass(frozen=True, slots=True)
class Abacus(Target):
    """Devices of the CPU under another name."""

    def devices(self):
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


def test_a_program_that_does_not_compile_ends_with_its_reason(run, monkeypatch, capsys):
    def refuse(program):
        return aot_runs.Compiled(program.name, 0.0, error="no such kernel")

    monkeypatch.setattr(aot_runs.compiled, "compile", refuse)
    with pytest.raises(SystemExit, match="decode instance 1: head 1 does not compile: no such kernel"):
        run()


def test_the_check_leaves_out_what_has_no_compiler_here(run, monkeypatch):
    def missing(target):
        raise Missing("no compiler")

    monkeypatch.setattr(Target, "devices", missing)
    told = run("--check")
    assert told["programs"] == [] and {each["reason"] for each in told["skipped"]} == {"no compiler"}
    assert [each["target"] for each in told["skipped"]] == [case.target for case in aot_check.CASES]


def test_equal_instances_are_compiled_once_on_the_devices_of_the_first():
    two = [spec(index, Role.PREFILL, devices=2) for index in range(2)]
    three = spec(2, Role.DECODE, devices=1)
    assert aot_runs.distinct([*two, three]) == [(two[0], 0), (three, 4)]
