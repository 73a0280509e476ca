# make serve, make test; make help lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXAMPLES := clients/examples/node_modules
CONFIG ?= deployments/spd.yaml

# Ray reads these when it starts. Workers at nice 15, its default, starve beside any other program.
export RAY_worker_niceness ?= 0
export RAY_USAGE_STATS_ENABLED ?= 0
# Progress is shown as it happens.
export PYTHONUNBUFFERED := 1

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-full bench load load-results chaos check format clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info < (3, 14)' 2>/dev/null \
	  || { echo "spd-serve needs Python 3.11 to 3.13, and $(PYTHON) is `$(PYTHON) --version`. Use: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
	  || { echo "No virtual environment could be made. On Debian: apt install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --editable . --group dev
	@touch $@

setup: $(STAMP) ## Make the virtual environment and the default model
	@$(BIN)/python -m service.default_model > /dev/null

serve: $(STAMP) ## Serve the default model on http://127.0.0.1:8000 (CONFIG=deployments/spd.yaml)
	@$(BIN)/python -m service.launch $(CONFIG)

# What the Node example needs; without npm its test is skipped.
$(EXAMPLES): clients/examples/package.json
	@if command -v npm > /dev/null; then \
	  npm --prefix clients/examples install --no-package-lock --no-audit --no-fund --silent \
	    && touch $@ || echo "The Node example is not tested: npm install failed"; fi

test: setup $(EXAMPLES) ## Run the tests, as CI does (16 minutes on two cores)
	$(BIN)/python -m pytest -m "not full"

test-full: setup $(EXAMPLES) ## Run all tests, the whole matrices on the real model too
	$(BIN)/python -m pytest

bench: setup ## Measure one chat, beside transformers and llama.cpp (BENCH="--rounds 1")
	$(BIN)/python -m benchmarks.chat $(BENCH)

load: setup ## Load a server for a few seconds, and report (LOAD="--url http://127.0.0.1:8000")
	$(BIN)/python -m loadtest $(LOAD)

load-results: setup ## The published load test, under 8 minutes; wants a quiet machine
	$(BIN)/python -m loadtest $(addprefix loadtest/scenarios/,one-chat.yaml four-chats.yaml overload.yaml) \
	  --out loadtest/results/$$(date -u +%Y-%m-%d)

chaos: setup ## Faults under load, and what becomes of the streams (about 20 minutes)
	$(BIN)/python -m tests.chaos

check: $(STAMP) ## Lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the virtual environment and caches (not the model)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
