# Two commands do everything on a fresh machine with Python 3.11 and pip: `make demo` and `make test`.

PYTHON ?= python3
VENV ?= .venv
# PyTorch goes first and by exact version, so that no later package picks another build. Override for another one.
TORCH ?= torch==2.13.0
PROMPT ?= The first light of the morning
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NPM := tests/serve/npm
# Tiny models run fastest on one thread; more of them only spin.
export OMP_NUM_THREADS ?= 1

.PHONY: help install clients demo test test-slow lint types floors docs clean

help:
	@echo "make demo       generate text with the embedded model"
	@echo "make test       the default tests (minutes on two cores)"
	@echo "make clients    fetch the npm packages that tests of the server use"
	@echo "make test-slow  the long tests"
	@echo "make lint       ruff"
	@echo "make types      mypy --strict"
	@echo "make floors     import-linter"
	@echo "make docs       write the generated pages"
	@echo "make clean      remove $(VENV) and caches"

install: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $(READY)

demo: $(READY)
	@echo "The embedded model has random weights: what follows is noise, made by the whole engine."
	$(BIN)/firstlight generate --prompt "$(PROMPT)" --max-tokens 48

# OpenAI's client and what drives a browser, by the versions and hashes of the lock. Without npm their tests are skipped and say so.
clients: $(if $(shell command -v npm),$(NPM)/node_modules/.package-lock.json)
	@$(if $(shell command -v npm),:,echo "npm is not installed: its tests will be skipped")

$(NPM)/node_modules/.package-lock.json: $(NPM)/package.json $(NPM)/package-lock.json
	npm ci --prefix $(NPM)
	touch $@

test: $(READY) clients
	$(BIN)/python -m pytest -n 2

test-slow: $(READY) clients
	$(BIN)/python -m pytest -m slow

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

floors: $(READY)
	$(BIN)/lint-imports --no-cache --no-logo

docs: $(READY)
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) $(NPM)/node_modules .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
