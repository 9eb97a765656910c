# `make test` and `make demo` do all their set-up from a fresh clone: a virtual environment in .venv, the package in it,
# and (for the tests) Apache BookKeeper through Maven in .cache. PYTHON=… chooses the interpreter.

PYTHON ?= python3
BIN := .venv/bin
EXTENSIONS := bkctl/protocol/_wire.h bkctl/protocol/_runs.c bkctl/files/_scan.c
# How many processes share the tests, which wait more than they compute; WORKERS=0 runs them in one.
WORKERS ?= 4
# Each process would compile all tests for itself.
unexport PYTHONDONTWRITEBYTECODE

# `make fast`: the parts of the tests that start no server of Java's. What needs Java is skipped.
FAST := tests/test_*.py tests/formats tests/protocol tests/client tests/files tests/checks tests/repair tests/storage \
  tests/metadata tests/commands
PROTOS := $(shell find bkctl -name '*.proto')
# Arguments of benchmarks/run.py: `make bench BENCH='--runs 3 startup ledger-read'`.
BENCH ?=

.PHONY: demo test collected again fast lint format types generate protos picture site bench servers dist lock lowest clean

demo: .venv/.bkctl
	PATH="$(CURDIR)/$(BIN):$$PATH" demo/run.sh

test: .venv/.test
	$(MAKE) --no-print-directory -j2 --output-sync servers collected types lint
	$(BIN)/pytest -n $(WORKERS) --dist worksteal || { test $$? = 1 && $(MAKE) --no-print-directory again; }

# Compiles the tests while the servers come, once for all processes; what is wrong shows when they run.
collected: .venv/.test
	-@$(BIN)/pytest --collect-only -q >/dev/null

# What failed beside other tests runs once more, alone. A test that passes now is unsteady: mend it.
again:
	@echo 'make: tests failed beside others; once more, alone (those that pass now are unsteady)' >&2
	$(BIN)/pytest --last-failed --last-failed-no-failures none --maxfail 3

fast: .venv/.test
	BKCTL_TEST_WITHOUT=java $(BIN)/pytest -n $(WORKERS) --dist worksteal -m 'not java and not long' --durations=5 $(FAST)

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/zizmor --offline -q .github

format: .venv/.test
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

types: .venv/.test
	$(BIN)/mypy

generate: .venv/.test
	$(BIN)/python docs/commands_reference.py
	$(BIN)/python docs/python_reference.py
	$(BIN)/python docs/monitoring.py

protos: .venv/.test
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. $(PROTOS)

picture: .venv/.bkctl
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python docs/picture.py docs
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python docs/screenshots.py docs

# The documentation as a site, in build/site; a broken link fails.
site: .venv/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet -f site/mkdocs.yml

bench: .venv/.test
	$(BIN)/python benchmarks/run.py $(BENCH)

servers: .venv/.test
	PYTHONPATH=tests $(BIN)/python -m support.servers

# The sdist, this machine's wheel, their SBOM, and the program in one file.
dist: .venv/.test
	release/dist
	release/sbom
	release/onefile

lock: .venv/.test
	release/lock

# The fast tests with the oldest versions that pyproject.toml allows, in an environment of their own.
lowest: .venv/.test
	rm -rf .venv/lowest
	$(BIN)/uv venv -q --python $(BIN)/python .venv/lowest
	$(BIN)/uv pip install -q --python .venv/lowest --require-hashes -r release/requirements/test.txt
	$(BIN)/uv pip install -q --python .venv/lowest --require-hashes -r release/requirements/lowest.txt
	$(BIN)/uv pip install -q --python .venv/lowest --no-deps --no-build-isolation -e .
	BKCTL_TEST_WITHOUT=java .venv/lowest/bin/pytest -n $(WORKERS) --dist worksteal -m 'not java and not long' $(FAST)

clean:
	rm -rf .venv .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

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

# uv installs so many packages with half of pip's processor time. It does not read pip's configuration: pip is the other way.
.venv/.test: pyproject.toml release/requirements/test.txt release/requirements/uv.txt $(EXTENSIONS) | $(BIN)/python
	@echo "make: installing bkctl and what its tests need into .venv: some minutes at the first time"
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r release/requirements/uv.txt
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --require-hashes -r release/requirements/test.txt || \
	  $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --require-hashes -r release/requirements/test.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@$(BIN)/python -m compileall -q bkctl commands
	@touch $@ .venv/.bkctl
