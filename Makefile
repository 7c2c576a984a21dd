# Two commands do everything: `make quickstart` trains, `make test` checks. Both make the environment first when needed.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: help install quickstart test lint unit integration generate constraints clean

help:            ## what there is
	@grep -E '^[a-z-]+: .*##|^[a-z-]+:  +##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

install:         ## make or mend the virtual environment (.venv); nothing to do when it is right
	@$(PYTHON) requirements/install.py

quickstart: install  ## train a small language model to add two numbers, from random weights, and write a report
	$(BIN)/rljob run examples/quickstart.yaml --output runs/quickstart --resume never

test: lint unit  ## everything that is fast: lint, types, import rules, tests

lint: install    ## ruff, mypy, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy api/rljob_api trainer/rljob_trainer operator/rljob_operator
	$(BIN)/lint-imports

unit: install    ## the tests alone
	$(BIN)/python -m pytest -n 2 --dist loadgroup

integration: install  ## the operator against a real API server (its programs are built once from Go modules: ten minutes)
	$(BIN)/python tests/integration/prepare.py
	$(BIN)/python -m pytest tests/integration

generate: install  ## what is generated from the code: CRD, list of metrics, table of conditions (tests check them for drift)
	$(BIN)/python -m rljob_api.crd
	$(BIN)/python -m rljob_operator.reference
	$(BIN)/python -m rljob_trainer.telemetry.names > docs/metrics.md

constraints: install  ## pin anew after a change of pyproject.toml
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python requirements/lock.py --all

clean:           ## remove the environment and the outputs of make quickstart
	rm -rf .venv runs .pytest_cache .ruff_cache .mypy_cache
