"""The commands in the notes for operators are ones that pdjax takes: with the ranks, and the chips, that they need."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from pdjax.aot.targets import parse
from pdjax.build import check_meshes
from pdjax.config import EngineConfig
from pdjax.models.presets import PRESETS
from pdjax.mpi.start import job_layout
from pdjax.schedulers.base import Traits

DOCS = Path(__file__).resolve().parents[1] / "docs"
FIELDS = {field.name for field in dataclasses.fields(EngineConfig)}


def commands():
    for path in sorted(DOCS.glob("operators-*.md")):
        for line in path.read_text().replace("\\\n", "").splitlines():
            if re.match(r" {4}(mpirun|python) .*pdjax\.experiments\.(serve|transfer)\b", line):
                yield pytest.param(shlex.split(line), id=f"{path.stem}: {line.strip()[:60]}")


def compiled():
    for path in sorted(DOCS.glob("operators-*.md")):
        for line in re.findall(r"python -m pdjax\.experiments\.aot --[^`\n]+", path.read_text()):
            yield pytest.param(shlex.split(line), id=path.stem)


COMMANDS, COMPILED = list(commands()), list(compiled())
OVER_RANKS = [command for command in COMMANDS if command.values[0][0] == "mpirun"]


def config_of(words):
    given = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
    fields = {name: int(value) if value.isdigit() else value for name, value in given.items() if name in FIELDS}
    return EngineConfig(**fields)


def test_there_are_commands_for_one_process_for_many_and_for_chips_that_are_not_there():
    assert len(OVER_RANKS) >= 6 and len(COMMANDS) > len(OVER_RANKS) and len(COMPILED) >= 2


@pytest.mark.parametrize("words", OVER_RANKS)
def test_a_job_has_the_ranks_that_its_flags_need_and_a_place_for_each(words):
    ranks = int(words[words.index("-n") + 1])
    assert job_layout(config_of(words)).size == ranks
    if "--host" in words:
        assert sum(int(host.split(":")[1]) for host in words[words.index("--host") + 1].split(",")) == ranks


@pytest.mark.parametrize("words", COMMANDS)
def test_a_model_of_eight_kv_heads_can_be_cut_so(words):
    check_meshes(config_of(words), PRESETS["llama3.1-8b"], Traits())


@pytest.mark.parametrize("words", COMPILED)
def test_what_is_compiled_for_has_the_chips_that_its_flags_need(words):
    (target,) = (word.removeprefix("--target=") for word in words if word.startswith("--target="))
    assert config_of(words).devices <= parse(target).count
