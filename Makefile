# `make demo` and `make test` do all the set-up on a machine with Python 3.11; a second call starts at once.
PYTHON ?= python3.11
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lint clean

demo: $(READY)
	$(BIN)/python benchmarks/demo.py

test: $(READY)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m pytest -q tests

lint: $(READY)
	$(BIN)/python -m ruff check .

$(READY): requirements.txt setup.py
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip>=23.1'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps torchmeta==1.8.0
	touch $@

clean:
	rm -rf .venv
