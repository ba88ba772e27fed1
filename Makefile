# `make demo`, `make test` and `make docs` do all the set-up on a machine with Python 3.11; a second call starts at once.
PYTHON ?= python3.11
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-fast lint docs docs-serve clean

demo: $(READY)
	$(BIN)/python benchmarks/demo.py

test: lint docs
	$(BIN)/python -m pytest -q -n 2 tests

test-fast: $(READY)
	$(BIN)/python -m pytest -q -n 2 -m "not slow" tests

lint: $(READY)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --site-dir site

docs-serve: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

$(READY): requirements.txt setup.py
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip>=23.1'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps torchmeta==1.8.0
	touch $@

clean:
	rm -rf .venv site
