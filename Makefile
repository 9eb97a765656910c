# `make test` and `make demo` do all their set-up from a fresh clone: a virtual environment in .venv, the package in it,
# and (for the tests) Apache BookKeeper through Maven in .cache. PYTHON=… chooses the interpreter.

PYTHON ?= python3
BIN := .venv/bin
EXTENSIONS := bkctl/protocol/_add_runs.c bkctl/storage/_scan.c commands/_rows.c
# How many processes share the tests; WORKERS=0 runs them in one.
WORKERS ?= 2

.PHONY: demo test lint types servers clean

demo: .venv/.bkctl
	PATH="$(CURDIR)/$(BIN):$$PATH" demo/run.sh

test: .venv/.test
	$(MAKE) --no-print-directory -j2 --output-sync lint types servers
	$(BIN)/pytest -n $(WORKERS) --dist worksteal

lint: .venv/.test
	$(BIN)/ruff check .

types: .venv/.test
	$(BIN)/mypy

servers: .venv/.test
	$(BIN)/python tests/servers.py

clean:
	rm -rf .venv .cache build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make: Python 3.11 or newer is needed, and there is no '$(PYTHON)'; install it, or name one: make PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: Python 3.11 or newer is needed, '$(PYTHON)' is $$($(PYTHON) -V 2>&1); name another: make PYTHON=…" >&2; exit 1; }
	@if $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then $(PYTHON) -m venv .venv; \
	elif $(PYTHON) -c 'import virtualenv' 2>/dev/null; then $(PYTHON) -m virtualenv -q .venv; \
	else \
	  echo "make: '$(PYTHON)' cannot make a virtual environment; install its venv module (Debian: python3-venv) or virtualenv" >&2; \
	  exit 1; \
	fi || { rm -rf .venv; exit 1; }

.venv/.bkctl: pyproject.toml $(EXTENSIONS) | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -e .
	@$(BIN)/python -m compileall -q bkctl commands
	@touch $@

.venv/.test: pyproject.toml $(EXTENSIONS) | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[test]'
	@$(BIN)/python -m compileall -q bkctl commands
	@touch $@ .venv/.bkctl
