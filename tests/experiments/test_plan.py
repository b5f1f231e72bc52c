"""The launcher: its flags, and that the command it prints is one that serves."""

import pytest
from absl import flags as absl_flags
from absl.testing import flagsaver

from pdjax import build
from pdjax.experiments import flags, plan, serve
from pdjax.messages import Role
from pdjax.models.presets import PRESETS
from pdjax.planning import command
from pdjax.planning.clusters import Cluster, Part
from pdjax.planning.mix import Mix
from pdjax.request import SLO
from pdjax.schedulers.base import traits_of
from tests.planning import toys

MIX = Mix(((100, 11),), SLO(ttft_ms=50, tpot_ms=20))


@pytest.fixture
def parse():
    """Reads the words of a command as serve would."""
    assert serve.COMPARED  # its flags are there
    with flagsaver.flagsaver():

        def read(argv):
            at = argv.index("pdjax.experiments.serve")
            absl_flags.FLAGS.unparse_flags()
            assert absl_flags.FLAGS(["serve", *argv[at + 1 :]]) == ["serve"]
            return flags.build_config()

        yield read


def built(config):
    return build.specs_of(config, PRESETS["tiny"], traits_of(build.scheduler_of(config)), platform="gpu")


def test_the_command_of_a_split_builds_its_instances(parse):
    one, two = toys.shape(), toys.shape(tp=2)
    parts = Part(Role.PREFILL, two, 2), Part(Role.DECODE, one, 3)
    argv = command.of(Cluster("disaggregated", parts, 1.0), "tiny", "fixed:100,11", MIX, 12.0)
    config = parse(argv)
    assert argv[:3] == ("mpirun", "-n", "6") and config.transfer == "mpi"
    specs = built(config)
    assert [(spec.role, spec.devices) for spec in specs] == [(Role.PREFILL, 2)] * 2 + [(Role.DECODE, 1)] * 3
    assert all(spec.usable_pages * spec.page_size >= 20_000 for spec in specs)
    assert flags.RATE.value == 12.0 and flags.build_slo().tpot_ms == 20


def test_the_command_of_a_colocated_cluster_builds_as_many_instances(parse):
    part = Part(Role.MIXED, toys.shape(tp=2), 3)
    argv = command.of(Cluster("colocated_chunked", (part,), 1.0), "tiny", "fixed:100,11", MIX, 12.0)
    assert argv[:3] == ("mpirun", "-n", "4")
    assert [(spec.role, spec.devices) for spec in built(parse(argv))] == [(Role.MIXED, 2)] * 3


def test_sliders_are_in_the_command(parse):
    one = toys.shape()
    parts = Part(Role.PREFILL, one, 1), Part(Role.DECODE, one, 1)
    argv = command.of(Cluster("dynamic", parts, 1.0, chunks=(64, 32)), "tiny", "fixed:100,11", MIX, 1.0)
    assert [spec.max_chunk for spec in built(parse(argv))] == [64, 32]


def test_one_colocated_instance_has_no_command():
    part = Part(Role.MIXED, toys.shape(), 1)
    assert command.of(Cluster("colocated", (part,), 1.0), "tiny", "fixed:100,11", MIX, 1.0) == ()


def test_splits_to_compare_are_pairs_of_numbers():
    assert plan.splits(["4:12", "1:3"]) == [(4, 12), (1, 3)]
    for wrong in ("4", "4:0", "a:b", "1:2:3"):
        with pytest.raises(ValueError, match="compare is"):
            plan.splits([wrong])


@pytest.mark.slow
def test_the_launcher_writes_what_it_found(tmp_path, capsys, monkeypatch):
    from pdjax.planning import search

    monkeypatch.setattr(search, "JUDGED", {"prefill": 40, "decode": 20, "both": 20})
    monkeypatch.setattr(search, "JUDGED_CLUSTER", 30)
    monkeypatch.setattr(search, "JUDGED_BEST", 40)
    argv = ["--model=opt-13b", "--hardware=a100-80g:2", "--workload=fixed:256,8", "--ttft_slo_ms=400"]
    with flagsaver.flagsaver():
        absl_flags.FLAGS.unparse_flags()
        absl_flags.FLAGS(["plan", *argv, "--tpot_slo_ms=60", "--workers=1", f"--out={tmp_path}/out"])
        plan.main([])
    said = capsys.readouterr().out
    assert "mpirun -n" in said and "OPT" not in said
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"summary.json", "plan.png"}
