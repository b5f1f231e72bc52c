"""Who may import whom, read from the source and, where it counts, seen in a fresh interpreter."""

import ast
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLAIN = {"pdjax.request", "pdjax.messages", "pdjax.record"}  # types without behaviour
MAX_LINES, GOOD_LINES = 450, 400

# Folder -> what of pdjax its files may import, besides each other.
ALLOWED = {
    "models": PLAIN,
    "transfer": PLAIN,
    "schedulers": PLAIN | {"pdjax.latency", "pdjax.traffic"},
}


def files(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def imports(path):
    """(line, dotted name) of everything a file imports, wherever in the file; names of `from x import y` as x.y too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def within(name, packages):
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def fresh(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_folder_imports_of_pdjax_only_what_it_may(folder):
    own = f"pdjax.{folder}"
    for path in files(folder):
        for line, name in imports(path):
            if name.split(".")[0] == "pdjax" and name != "pdjax":
                assert within(name, ALLOWED[folder] | {own}), f"{path.relative_to(ROOT)}:{line} imports {name}"
            assert name != "pdjax", f"{path.relative_to(ROOT)}:{line} imports all of pdjax"


def test_only_launchers_know_flags_and_launchers():
    for path in files("pdjax", "models", "transfer", "schedulers"):
        for line, name in imports(path):
            assert not within(name, {"absl", "pdjax.experiments"}), f"{path.relative_to(ROOT)}:{line} imports {name}"


def test_schedulers_name_no_array_library():
    for path in files("schedulers"):
        for line, name in imports(path):
            assert not within(name, {"jax", "flax", "mpi4py"}), f"{path.relative_to(ROOT)}:{line} imports {name}"


def test_no_file_reaches_into_jax_private_modules():
    for path in files("pdjax", "models", "transfer", "schedulers", "experiments", "tests"):
        for line, name in imports(path):
            assert not within(name, {"jax._src", "jaxlib"}), f"{path.relative_to(ROOT)}:{line} imports {name}"


def test_schedulers_run_in_an_interpreter_without_jax():
    fresh("""
import sys
sys.modules |= dict.fromkeys(("jax", "flax", "mpi4py"))  # importing one of them now raises
import importlib, pkgutil
import pdjax.schedulers
for module in pkgutil.walk_packages(pdjax.schedulers.__path__, "pdjax.schedulers."):
    importlib.import_module(module.name)
""")


def test_importing_pdjax_starts_no_backend_and_no_mpi():
    fresh("""
import importlib, pkgutil, sys
import pdjax
for module in pkgutil.walk_packages(pdjax.__path__, "pdjax."):
    if not module.name.startswith("pdjax.experiments"):
        importlib.import_module(module.name)
assert "mpi4py.MPI" not in sys.modules
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 3)  # raises once there is a backend
assert jax.device_count() == 3
""")


def test_files_stay_readable_in_one_sitting():
    for path in files("pdjax", "models", "transfer", "schedulers", "experiments", "tests"):
        lines = len(path.read_text().splitlines())
        assert lines <= MAX_LINES, f"{path.relative_to(ROOT)} has {lines} lines; allowed: {MAX_LINES}"
        if lines > GOOD_LINES:
            warnings.warn(f"{path.relative_to(ROOT)} has {lines} lines, more than {GOOD_LINES}", stacklevel=1)


def test_every_module_says_what_it_is():
    for path in files("pdjax", "models", "transfer", "schedulers", "experiments"):
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path.relative_to(ROOT)} has no docstring"
