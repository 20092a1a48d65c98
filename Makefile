# Everything a developer or CI runs. `make demo` and `make test` set up .venv when it is missing.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test unit swarm check format bench clean

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
	$(BIN)/pytest -m swarm

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/installed
	$(BIN)/python -m tests.benchmarks.inner_loop

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
