"""How a launcher ends: mistakes of the user in one line and status 2, mistakes of the program with a traceback."""

import os
import subprocess
import sys

import pytest

from pdjax.experiments import launcher

SCRIPT = """
from absl import flags
from pdjax.experiments import launcher

COUNT = flags.DEFINE_integer("count", 1, "A number.", lower_bound=0)
SHARE = flags.DEFINE_float("share", 1, "A part.", lower_bound=0, upper_bound=1)

def main(argv):
    if COUNT.value == 2:
        raise ValueError("count is 2;\\n allowed: others")
    if COUNT.value == 3:
        raise RuntimeError("broken")
    print("count", COUNT.value)

launcher.run(main)
"""


def run(*flags):
    return subprocess.run([sys.executable, "-c", SCRIPT, *flags], capture_output=True, text=True, timeout=60)


def test_main_sees_the_flags():
    done = run("--count=5")
    assert (done.returncode, done.stdout, done.stderr) == (0, "count 5\n", "")


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--count=2", "error: count is 2; allowed: others"),
        ("--count=x", "error: flag --count=x: "),
        ("--count=-1", "error: flag --count=-1: "),
        ("--share=nan", "error: flag --share=nan: allowed: a number"),
        ("--color=1", "error: Unknown command line flag 'color'"),
        ("count", "error: argument 'count' is not a flag"),
    ],
)
def test_mistakes_of_the_user_are_one_line(flag, line):
    done = run(flag)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(line) and done.stderr.count("\n") == 1


def test_mistakes_of_the_program_have_a_traceback():
    done = run("--count=3")
    assert done.returncode == 1 and "Traceback" in done.stderr and "broken" in done.stderr


def test_tables_are_wide_on_a_terminal_without_a_size(monkeypatch):
    head, tail = os.openpty()  # as mpirun gives its ranks
    with os.fdopen(head, "rb"), os.fdopen(tail, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert launcher.console().width == launcher.WIDE
