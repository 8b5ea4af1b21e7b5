# `make serve` and `make test` need only Python 3.11 (or 3.12: PYTHON=python3.12) and make.
PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: help install serve test lint zoo pytest format

help:
	@echo "make serve    check cluster.yaml, train what the zoo lacks, start the cluster"
	@echo "make test     lint, types and tests"
	@echo "make install  only build .venv"
	@echo "make format   rewrite the sources as 'make test' wants them"

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench,dev]'
	touch $@

serve: install
	$(BIN)/pliant serve cluster.yaml

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: install
	@$(MAKE) --no-print-directory --jobs=2 zoo pytest

# The models that end-to-end tests serve: trained after linting, while other tests run.
zoo: lint
	$(BIN)/pliant zoo --train

pytest: install
	$(BIN)/pytest

format: install
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
