# Everything a person runs. Needs python3 (>= 3.11, with venv) and make; the rest is locked in requirements.lock.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

OTHER  := $(VENV)/duckdb-1.5

.PHONY: demo test test-torch check lint types imports tests-all tests-duckdb-1.5 bench bench-detect protos docs clean

# The tests start a thousand processes: none shall compile everything anew because a shell wants no bytecode kept.
unexport PYTHONDONTWRITEBYTECODE

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

$(OTHER): requirements.duckdb-1.5.lock $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps --upgrade \
		--target $@ -r requirements.duckdb-1.5.lock
	touch $@

demo: $(READY)          ## collector + simulated fleet with scripted faults; Ctrl-C ends it
	$(BIN)/fleet demo

# Many tests are real processes that wait for each other: four workers keep two cores busy.
PYTEST := $(BIN)/pytest -q -n 4

test: $(READY)          ## the fast tests
	$(PYTEST) -m "not slow and not gpu"

check: lint types imports tests-all tests-duckdb-1.5   ## what CI runs: lint + types + import contracts + every test

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

tests-all: $(READY)
	$(PYTEST) -m "not gpu"

tests-duckdb-1.5: $(OTHER)   ## every rule's drills, the queries and the store on the other major that stores must open in
	PYTHONPATH=$(OTHER) $(PYTEST) -m "drill and not slow and not gpu" tests/collector/judge
	PYTHONPATH=$(OTHER) $(PYTEST) -m "not slow and not gpu" tests/collector/query tests/collector/ingest/test_store.py

TORCH_PYTHON ?= python3

test-torch: $(READY)    ## a real PyTorch DataLoader; TORCH_PYTHON = a Python that has PyTorch
	GPUFLEET_TORCH_PYTHON=$(TORCH_PYTHON) $(BIN)/pytest -q -s tests/pytorch

bench: $(READY)         ## measure against the budgets of docs/benchmarks.md
	$(BIN)/python -m tests.bench

bench-detect: $(READY)  ## what the judge finds and what it says without reason, over simulated fleets
	$(BIN)/python -m tests.bench.detect

docs: $(READY)          ## regenerate docs/schema.md
	$(BIN)/python docs/generate.py

protos:                 ## regenerate the checked-in protobuf code (own pinned environment)
	$(PYTHON) protos/generate.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
