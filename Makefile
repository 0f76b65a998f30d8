# The work is in scripts/ and in the eagle3 command; this file only names it.

SHELL := /bin/bash
VENV := .venv/bin
# Tests find it too, so that a server started by hand uses the same Python.
export PATH := $(CURDIR)/$(VENV):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format soak ui pictures lock clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## build .venv from the lock files (3 minutes once, then instant)
	@scripts/setup.sh

demo: setup  ## prompts to a served draft on this machine's CPU; QUALITY=full for the longer recipe
	@$(VENV)/eagle3 run --recipe $(if $(filter full,$(QUALITY)),smollm2-cpu-full,smollm2-cpu)

# The real vLLM takes all cores, so that its tests run alone. 5: PYTEST_ARGS chose no test of that kind.
test: setup lint  ## lint, and all tests but the soak (the ones marked real start vLLM on the CPU)
	@$(VENV)/python -m pytest -m "not soak and not real" -n auto --maxprocesses 4 --dist loadfile $(PYTEST_ARGS) || [ $$? -eq 5 ]
	@$(VENV)/python -m pytest -m real $(PYTEST_ARGS) || [ $$? -eq 5 ]

lint: setup  ## ruff, mypy, import contracts
	@$(VENV)/ruff check .
	@$(VENV)/ruff format --check .
	@$(VENV)/mypy
	@$(VENV)/lint-imports

format: setup  ## let ruff rewrite what it can
	@$(VENV)/ruff check --fix .
	@$(VENV)/ruff format .

soak: setup  ## hours: the demo three times, the full demo, the full report, many kills; numbers go to benchmarks/results
	@$(VENV)/python -m pytest -m soak $(PYTEST_ARGS)

# DAGSTER_HOME has to be absolute and to hold dagster.yaml. A link, so that an edit there is an edit here.
ui: export DAGSTER_HOME := $(CURDIR)/.dagster
ui: setup  ## the Dagster web UI and daemon on http://127.0.0.1:3000
	@mkdir -p $(DAGSTER_HOME)
	@ln -sfn ../dagster.yaml $(DAGSTER_HOME)/dagster.yaml
	@$(VENV)/dagster dev -w workspace.yaml -h 127.0.0.1 -p 3000

pictures: setup  ## the pictures in docs/, taken of the finished demo (needs chromium)
	@$(VENV)/python -m scripts.screenshots

lock: setup  ## resolve requirements/lock-*.txt again from pyproject.toml and pins.txt
	@$(VENV)/python requirements/lock.py

clean:  ## remove .venv and caches; keeps what was made, data/ and .dagster/
	@rm -rf .venv .setup.log .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@rm -rf build *.egg-info
	@find . -name __pycache__ -type d -not -path './data/*' -prune -exec rm -rf {} +
