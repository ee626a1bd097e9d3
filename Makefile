# Everything a fresh machine needs: Python 3.11 to 3.13, make, and the package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all test-for clusters others all-clusters all-others coverage mutants versions soak lint types check bench clean

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: $(VENV)/installed  ## train a CNN on handwritten digits over two virtual devices
	$(BIN)/python examples/demo_digits.py

# Their tasks are small scripts without JAX, or mostly wait: they run beside tests that compute.
LAUNCHER := tests/cluster/test_launch.py tests/cluster/test_launch_restarts.py tests/cluster/test_peers.py

# Clusters one at a time, as they start processes of their own, and the others two at a time beside them: clusters
# wait for much of their time.
CLUSTERS = $(BIN)/python -m pytest tests/cluster $(LAUNCHER:%=--ignore=%)
OTHERS = $(BIN)/python -m pytest -n 2 --dist worksteal $(LAUNCHER) tests/unit tests/virtual src

test: $(VENV)/installed  ## all but the tests marked exhaustive
	$(MAKE) --jobs=2 clusters others

clusters:
	$(CLUSTERS) -m "not exhaustive"

others:
	$(OTHERS) -m "not exhaustive"

test-all: test  ## those, too, and those marked numbers again, compiled as users' programs are
	$(MAKE) --jobs=2 all-clusters all-others

all-clusters:
	XLA_FLAGS= $(CLUSTERS) -m exhaustive

all-others:
	XLA_FLAGS= $(OTHERS) -m "exhaustive or numbers"

coverage: $(VENV)/installed  ## which lines the tests without clusters run, and which test runs which
	$(OTHERS) -m "not exhaustive" --cov --cov-context=test --cov-report=term:skip-covered

test-for: $(VENV)/installed  ## what changed files need: FILES="src/unisono/_mesh.py docs/signals.md"
	tests=$$($(BIN)/python -m tests.needed $(FILES)) && $(BIN)/python -m pytest -m "not exhaustive" $$tests

N ?= 20

mutants: $(VENV)/installed  ## N random small mistakes, each judged by the tests that run its line: after `make coverage`
	$(BIN)/python tools/mutation.py --number $(N) --seed $(SEED)

OLDEST ?= python3.11
NEWEST ?= python3.13

versions:  ## the core of the tests with the oldest and the newest JAX and Keras, on two versions of Python
	tools/versions.sh $(OLDEST) $(NEWEST)

MINUTES ?= 3
SEED ?= 0

soak: $(VENV)/installed  ## random jobs and random faults; MINUTES=480 SEED=10000 for a night
	$(BIN)/python benchmarks/soak.py --minutes $(MINUTES) --seed $(SEED)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	$(BIN)/mypy

check: lint types test

$(VENV)/bench-installed: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[dev,bench]'
	touch $@

bench: $(VENV)/bench-installed  ## all claims about speed; QUICK=1 for some of them, ROWS='mlp-*' by name
	$(BIN)/python benchmarks/run.py $(if $(QUICK),--quick) $(ROWS)

clean:
	rm -rf $(VENV) build dist demo_output .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
