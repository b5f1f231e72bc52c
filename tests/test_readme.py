"""The README runs as it is printed, and what it and the documents point to is there.

Its Python blocks are one program. Two things are changed before it is run: the model is `tiny`, whose random weights
need no download; and since a test cannot wait for the compiler, there are few programs, compiled when first used.
"""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pdjax.experiments import flags
from pdjax.schedulers import SCHEDULERS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODEL = 'model="smollm2-135m"'
IN_TESTS = 'model="tiny", warmup=False, prefill_chunk=16, decode_max_batch=1'


def documents(test):
    return pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())(test)


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What the README's blocks print, run in order in a fresh interpreter that has no compiled programs yet."""
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 9
    program = "\n".join(blocks)
    assert program.count(MODEL) == 3
    folder = tmp_path_factory.mktemp("readme")
    script = folder / "readme.py"
    script.write_text(program.replace(MODEL, IN_TESTS))
    # Half of the time goes to XLA's optimiser, whose work nobody here looks at.
    environment = os.environ | {"HOME": str(folder), "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run([sys.executable, script], cwd=folder, env=environment, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode(errors="replace")


def test_every_prompt_of_the_first_block_is_prefilled_and_decoded_on_instances_of_their_own(printed):
    assert printed.count("Placement(prefill=0, decode=1, reason='shortest prefill queue") == 2


def test_the_other_blocks_print_what_they_say(printed):
    assert re.search(r"^.*abort$", printed, re.MULTILINE)
    repeated = r"^equal: True \[-\d+\.\d+, -"
    assert re.search(repeated, printed, re.MULTILINE), "a seed repeats; log probabilities are there"
    assert re.search(r"^deadline$", printed, re.MULTILINE)
    assert re.search(r"^goodput \d+\.\d+ of \d+\.\d+ requests/s$", printed, re.MULTILINE)


def test_a_request_of_a_class_is_admitted_with_what_is_expected_of_it(printed):
    assert re.search(r"^chat Predicted\(ttft_ms=.*admission: admitted", printed, re.MULTILINE)


def test_a_users_scheduler_places_what_the_engine_serves(printed):
    assert "Placement(prefill=1, decode=1, reason='short: stays')" in printed
    assert "Placement(prefill=0, decode=1, reason='long: moves')" in printed


def test_the_same_scheduler_trades_latencies_in_simulation(printed):
    rows = [line.split() for line in printed.splitlines() if re.fullmatch(r"\d+( \d+\.\d+){3}", line)]
    assert [int(row[0]) for row in rows] == [0, 500, 4000]
    tpot = [float(row[3]) for row in rows]
    assert tpot == sorted(tpot), "the fewer prompts move, the more answers are held up"
    assert [row[1] for row in rows] == ["125.1", "63.0", "284.8"], "the text quotes them"
    assert (round(tpot[1] - tpot[0], 1), round(tpot[2] - tpot[1], 1)) == (0.9, 4.3), "the text quotes them"


def test_the_table_of_placements_has_every_scheduler():
    rows = re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)
    assert rows == ["scheduler", *SCHEDULERS]  # the first is the table's head


def test_every_flag_that_is_named_exists():
    named = set(re.findall(r"--(\w+)(?=[=`])", README)) - {"help"}
    named -= {"simulate", "quick", "paper"}  # of single launchers
    assert named >= {"scheduler", "workload", "stream_layers"}
    assert named <= set(flags.given())


@documents
def test_every_link_leads_to_a_file(path):
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text())
    assert links
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


@documents
def test_every_dotted_name_is_there(path):
    def found(name):
        parts = name.split(".")
        for count in range(len(parts), 0, -1):
            try:
                value = importlib.import_module(".".join(parts[:count]))
            except ModuleNotFoundError:
                continue
            for part in parts[count:]:
                if not hasattr(value, part):
                    return False
                value = getattr(value, part)
            return True
        return False

    names = set(re.findall(r"`(pdjax(?:\.\w+)+)`", path.read_text()))
    assert [name for name in sorted(names) if not found(name)] == []
