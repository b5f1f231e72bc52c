"""What is installed is what is in the tree, under the names of one package."""

import ast
import configparser
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"pdjax": "pdjax"} | {f"pdjax.{name}": name for name in ("models", "transfer", "schedulers", "experiments")}


def setup_cfg():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def packages_in_tree():
    found = {}
    for package, folder in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inside = init.parent.relative_to(ROOT / folder).parts
            found[".".join((package, *inside))] = str(init.parent.relative_to(ROOT))
    return found


def python_files(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def run_python(code, cwd, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_list_is_the_tree():
    options = setup_cfg()["options"]
    mapping = dict(line.split(" = ") for line in options["package_dir"].split("\n") if line)
    assert mapping == packages_in_tree()
    assert set(options["packages"].split()) == set(packages_in_tree())


def test_every_folder_of_modules_is_a_package():
    for path in python_files(*FOLDERS.values()):
        assert (path.parent / "__init__.py").exists(), f"{path.relative_to(ROOT)} would not be installed"


def test_all_is_the_union_of_the_other_extras():
    extras = {name: set(value.split()) for name, value in setup_cfg()["options.extras_require"].items()}
    for name in ("peers", "aot-tpu", "aot-gpu"):  # gigabytes that only a comparison needs, compilers for other chips
        extras.pop(name)
    assert extras.pop("all") == set().union(*extras.values())


def test_no_file_imports_a_folder_by_its_bare_name():
    # From the repository's root `import models` works, and loads every module a second time.
    bare = set(FOLDERS.values()) - {"pdjax"}
    for path in python_files(*FOLDERS.values(), "tests"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path.relative_to(ROOT)}:{node.lineno} imports relatively"
                names = [node.module]
            for name in names:
                assert name.split(".")[0] not in bare, f"{path.relative_to(ROOT)}:{node.lineno} imports {name}"


def test_no_module_is_loaded_under_two_names():
    loaded = run_python(
        """
import importlib, json, pkgutil, sys
import pdjax
for module in pkgutil.walk_packages(pdjax.__path__, "pdjax."):
    importlib.import_module(module.name)
print(json.dumps({n: m.__file__ for n, m in sys.modules.items() if getattr(m, "__file__", None)}))
""",
        cwd=ROOT,
    )
    names = {}
    for name, file in json.loads(loaded).items():
        if Path(file).resolve().is_relative_to(ROOT) and ".venv" not in file:
            names.setdefault(str(Path(file).resolve()), []).append(name)
    assert names and all(len(several) == 1 for several in names.values()), names
    assert all(name.split(".")[0] == "pdjax" for several in names.values() for name in several)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder holding what a wheel of this tree installs."""
    source, wheels, site = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "site"))
    for name in (*FOLDERS.values(), "setup.cfg", "pyproject.toml", "README.md"):
        # A copy, because building leaves files behind that would get into the next wheel.
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, source / name)
    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", wheels, source],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "invalid command 'bdist_wheel'" in done.stderr + done.stdout:
        pytest.skip("building a wheel here needs setuptools >= 70.1, which the extra `test` brings")
    assert done.returncode == 0, done.stderr
    (wheel,) = wheels.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    return site


@pytest.mark.slow
def test_a_wheel_puts_nothing_generic_into_site_packages(installed):
    assert {path.name.split("-")[0] for path in installed.iterdir()} == {"pdjax"}
    modules = {path.relative_to(installed / "pdjax") for path in (installed / "pdjax").rglob("*.py")}
    assert len(modules) == len(python_files(*FOLDERS.values()))


@pytest.mark.slow
def test_a_wheel_ships_the_type_marker_and_the_data(installed):
    assert (installed / "pdjax" / "py.typed").exists()
    for path in (ROOT / "pdjax" / "data").glob("*"):
        assert (installed / "pdjax" / "data" / path.name).exists(), path.name


@pytest.mark.slow
def test_an_installed_pdjax_lives_beside_a_users_own_models_and_experiments(installed, tmp_path):
    for name in ("models", "experiments"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("MINE = True\n")
    run_python(
        f"""
import pdjax, pdjax.models, pdjax.schedulers
import models, experiments
assert models.MINE and experiments.MINE
for module in (pdjax, pdjax.models, pdjax.schedulers):
    assert module.__file__.startswith({str(installed)!r}), module.__file__
""",
        cwd=tmp_path,
        PYTHONPATH=str(installed),
    )
