# `make serve` and `make test` need only Python 3.11 (or 3.12: PYTHON=python3.12) and make.
PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: help install serve test check lint format

help:
	@echo "make serve    check cluster.yaml and start the cluster"
	@echo "make test     lint, types and tests"
	@echo "make check    lint, types and the unit tests of what differs from the main branch"
	@echo "make install  only build .venv, with what tests and benchmarks need"
	@echo "make format   rewrite the sources as 'make test' wants them"

install: .venv/installed

INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.venv/installed: pyproject.toml constraints.txt | .venv/bin/pip
	$(INSTALL) -e '.[bench,dev]'
	touch .venv/serving $@

# What serving needs, without what tests and benchmarks do.
.venv/serving: pyproject.toml constraints.txt | .venv/bin/pip
	$(INSTALL) -e .
	touch $@

# Python 3.11's own pip takes a quarter more of a processor; it serves where the index has no other.
.venv/bin/pip:
	$(PYTHON) -m venv .venv
	-$(INSTALL) --upgrade pip

serve: .venv/serving
	$(BIN)/pliant serve cluster.yaml

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# One worker trains the models and asks the cluster that serves them, the others run the rest (tests/conftest.py).
test: lint
	$(BIN)/pytest -n auto

check: lint
	$(BIN)/mypy
	@tests=$$($(BIN)/python tests/changed.py); if [ -n "$$tests" ]; then $(BIN)/pytest $$tests; else echo "no unit test to run"; fi

format: install
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
