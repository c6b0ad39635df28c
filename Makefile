# `make demo` and `make test` need only Python 3.11, git and make; everything else goes into .venv.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check bench clean

demo: $(READY)  ## compare the heuristics on held-out seeds, and draw power against SLA
	$(BIN)/cloudsched compare --preset default --workload poisson --out runs/demo

test: $(READY)  ## run every test
	$(BIN)/python -m pytest

check: $(READY)  ## what CI runs: lint, types, import directions, tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest
	NUMBA_DISABLE_JIT=1 $(BIN)/coverage run -m pytest tests/sim tests/envs/test_cluster.py -m "not slow"
	$(BIN)/coverage report --include "cloudsched/sim/*,cloudsched/envs/observation.py"

bench: $(READY)  ## steps a second of the simulator and of its yardsticks
	$(BIN)/cloudsched bench env

clean:  ## remove the virtual environment, results and compiled kernels
	rm -rf $(VENV) runs
	find . -name "*.nb[ic]" -delete

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $(READY)
