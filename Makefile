# `make demo` and `make test` need only Python 3.11, git and make; everything else goes into .venv.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check bench clean

demo: $(READY)  ## train a policy, compare it with the rules on held-out seeds, serve it, ask it over HTTP
	$(BIN)/cloudsched train rllib_configs/ppo.py --steps 3000000 --minutes 3 --out runs/demo/train
	$(BIN)/cloudsched compare --workload poisson --out runs/demo --policies rr sjf ffd power_aware \
		power_aware+headroom best_fit+sleep@poisson headroom@poisson runs/demo/train/bundle
	$(BIN)/python serve/simulated_hour.py --policy runs/demo/train/bundle
	@echo "picture: runs/demo/power_sla.png"

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

bench: $(READY)  ## speeds of simulator, training, offline learning and serving, beside their peers
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[bench]"
	for part in env train offline serve; do $(BIN)/cloudsched bench $$part; done

clean:  ## remove the virtual environment, results and compiled kernels
	rm -rf $(VENV) runs
	find . -name "*.nb[ic]" -delete

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $(READY)
