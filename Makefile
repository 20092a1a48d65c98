# Everything a developer or CI runs. `make demo` and `make test` set up .venv when it is missing.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test unit swarm faults soak check format bench clean

# Rebuilt when the dependencies change. The CPU build of torch is taken where pip is given one.
.venv/installed: pyproject.toml constraints.txt
	@echo "Setting up .venv: some minutes and about 2 GB, once."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: .venv/installed
	$(BIN)/opendiloco demo $(ARGS)

test: check swarm

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest tests/unit tests/contracts -m "not swarm"

unit: .venv/installed
	$(BIN)/pytest tests/unit

swarm: .venv/installed
	$(BIN)/pytest -m "swarm and not faults"

# Every fault in every phase of a round, and on an emulated WAN (which needs root).
faults: .venv/installed
	$(BIN)/pytest -m faults

# Hundreds of rounds with faults: nothing grows.
soak: .venv/installed
	OPENDILOCO_LONG_TESTS=1 $(BIN)/pytest tests/swarm/test_long_faults.py

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/installed
	$(BIN)/python -m tests.benchmarks.inner_loop
	$(BIN)/python -m tests.benchmarks.averaging
	$(BIN)/python -m tests.benchmarks.averaging_memory

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
