# Two commands do everything on a fresh machine with Python 3.11 and pip: `make demo` and `make test`.

PYTHON ?= python3
VENV ?= .venv
# PyTorch goes first and by exact version, so that no later package picks another build. Override for another one.
TORCH ?= torch==2.13.0
PROMPT ?= The first light of the morning
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Tiny models run fastest on one thread; more of them only spin.
export OMP_NUM_THREADS ?= 1

.PHONY: help install demo test test-slow lint types floors docs clean

help:
	@echo "make demo       generate text with the embedded model"
	@echo "make test       the default tests (minutes on two cores)"
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

test: $(READY)
	$(BIN)/python -m pytest -n 2

test-slow: $(READY)
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
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
