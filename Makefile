# Everything a fresh machine needs: Python 3.11 to 3.14, make, and the package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo dist test test-all test-for clusters others all-clusters all-others slow-tests coverage mutants versions keras-sources extras soak random-models simulate reach recording notebooks facts lint types check docs bench bench-against gpu gpu-wheels gpu-stand-in clean

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable . --group dev
	touch $@

# Without what the tests need, which takes three times as long to install.
$(VENV)/demo-installed: pyproject.toml
	test -e $(VENV)/installed || $(PYTHON) -m venv $(VENV)
	test -e $(VENV)/installed || $(BIN)/python -m pip install --quiet --upgrade pip
	test -e $(VENV)/installed || $(BIN)/python -m pip install --quiet --editable . --group demo
	touch $@

demo: $(VENV)/demo-installed  ## train a CNN on handwritten digits over two virtual devices
	$(BIN)/python examples/demo_digits.py

# Their tasks are small scripts without JAX, or mostly wait: they run beside tests that compute.
LAUNCHER := tests/cluster/test_launch.py tests/cluster/test_launch_restarts.py tests/cluster/test_peers.py

# Clusters one at a time, as they start processes of their own, and the others two at a time beside them: clusters
# wait for much of their time.
CLUSTERS = $(BIN)/python -m pytest tests/cluster $(LAUNCHER:%=--ignore=%)
OTHERS = $(BIN)/python -m pytest -n 2 --dist worksteal $(LAUNCHER) tests/unit tests/virtual src

test: $(VENV)/installed  ## all but the tests marked exhaustive or slow
	$(MAKE) --jobs=2 clusters others

clusters:
	$(CLUSTERS) -m "not exhaustive and not slow"

others:
	$(OTHERS) -m "not exhaustive and not slow"

times = -o junit_family=xunit1 --junitxml=build/times/$(1).xml

test-all: $(VENV)/installed  ## those, too, and those marked numbers compiled as users' programs are
	$(MAKE) --jobs=2 all-clusters all-others

all-clusters:
	$(CLUSTERS) $(call times,clusters)

# What `numbers` compares is compiled with all of XLA's optimizations, which take most of the compilation's time;
# further cases of it quickly.
all-others:
	$(OTHERS) -m "exhaustive or not numbers" $(call times,others)
	XLA_FLAGS= $(OTHERS) -m "numbers and not exhaustive" $(call times,numbers)

slow-tests:  ## which tests `make test` leaves out, by the times of the last `make test-all`
	$(BIN)/python tools/slow_tests.py build/times/*.xml

coverage: $(VENV)/installed  ## which lines the tests without clusters run, and which test runs which
	$(OTHERS) -m "not exhaustive" --cov --cov-context=test --cov-report=term:skip-covered

test-for: $(VENV)/installed  ## what changed files need: FILES="src/unisono/_mesh.py docs/signals.md"
	tests=$$($(BIN)/python -m tests.needed $(FILES)) && $(BIN)/python -m pytest -m "not exhaustive" $$tests

N ?= 20

mutants: $(VENV)/installed  ## N random small mistakes, each judged by the tests that run its line: after `make coverage`; ALL=1 for the slow ones, too
	$(BIN)/python tools/mutation.py --number $(N) --seed $(SEED) $(if $(ALL),--all)

OLDEST ?= python3.11
NEWEST ?= python3.13

versions:  ## the core of the tests with the oldest and the newest JAX and Keras, on two versions of Python
	tools/versions.sh $(OLDEST) $(NEWEST)

keras-sources: $(VENV)/installed  ## the core of the tests with sources of Keras: KERAS=~/keras, a clone
	tools/keras_sources.sh $(KERAS)

EXTRAS ?=

extras: $(VENV)/installed  ## every public name with each extra alone, each in an environment that pip makes; EXTRAS="none cluster": some
	$(BIN)/python tools/extras.py $(EXTRAS)

recording: $(VENV)/installed  ## docs/kill.svg: a worker is killed, and training goes on
	$(BIN)/python -m tools.recording

notebooks: $(VENV)/installed  ## examples/*.ipynb and the pictures of docs/gallery.md, executed anew
	$(BIN)/python -m tools.notebooks

facts: $(VENV)/installed  ## the numbers of the first page of the site, compared with it
	$(BIN)/python -m tools.facts --check

MINUTES ?= 3
SEED ?= 0

soak: $(VENV)/installed  ## random files, random jobs and random faults; MINUTES=480 SEED=10000 for a night
	$(BIN)/python -m tests.fuzzing --minutes $(MINUTES)/3 --seed $(SEED)
	$(BIN)/python benchmarks/soak.py --minutes $(MINUTES) --seed $(SEED)

MODELS ?= 300

random-models: $(VENV)/installed  ## random models and steps on strategies, each compared with one device; SEED=10000 for other ones, GRIDS=1 for replicas of two devices
	$(BIN)/python -m tests.random_models $(SEED) $$(( $(SEED) + $(MODELS) )) $(if $(GRIDS),grids)

SCHEDULES ?= 1000000

simulate: $(VENV)/installed  ## the protocols in a simulated world; MINUTES=30 SEED=10000 for more of other ones
	$(BIN)/python -m tests.simulation --minutes $(MINUTES) --seed $(SEED) --schedules $(SCHEDULES)

reach: $(VENV)/installed  ## which branches of the protocols' code the simulation reaches; MISSING=launcher lists the others
	$(BIN)/python -m tests.simulation --reach --minutes $(MINUTES) --seed $(SEED) $(if $(MISSING),--missing $(MISSING))

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	$(BIN)/mypy
	# As for a user: without this project's settings.
	MYPYPATH=src $(BIN)/mypy --config-file= --ignore-missing-imports --check-untyped-defs --allow-redefinition examples/*.py

check: lint types test

docs: $(VENV)/installed  ## the documentation site, in site/; a warning is an error
	$(BIN)/python -m tools.site

dist: $(VENV)/installed  ## the wheel and the source distribution, checked
	$(BIN)/python -m pip install --quiet twine
	rm -rf dist
	$(BIN)/hatchling build
	$(BIN)/twine check --strict dist/*

$(VENV)/bench-installed: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable . --group bench
	touch $@

bench: $(VENV)/bench-installed  ## all claims about speed; QUICK=1 for some of them, ROWS='mlp-*' by name
	$(BIN)/python benchmarks/run.py $(if $(QUICK),--quick) $(ROWS)

REV ?= main

bench-against: $(VENV)/installed  ## this checkout against REV=main, in turns; ROWS='ps-*' picks, QUICK=1 for fewer rounds
	$(BIN)/python benchmarks/against.py $(REV) $(if $(QUICK),--quick) $(ROWS)

CUDA ?= 13
GPU_VENV := .venv-gpu
GPU_PYTHON := $(GPU_VENV)/bin/python
GPU_INSTALLED := $(GPU_VENV)/installed-cuda$(CUDA)

WHEELS ?=
GPU_EXTRAS ?= cluster

# JAX for one version of CUDA, and what the tests of tests/gpu and the benchmarks import.
$(GPU_INSTALLED): pyproject.toml
	tools/gpu_environment.sh $(PYTHON) $(GPU_VENV) $(CUDA) $(WHEELS)
	touch $@

gpu-wheels:  ## WHEELS=folder for `make gpu WHEELS=folder` where JAX for CUDA is, but no index; GPU_EXTRAS=cuda13,cluster: JAX, too
	$(PYTHON) -m venv build/wheels
	build/wheels/bin/python -m pip install --quiet --upgrade pip
	build/wheels/bin/python -m pip wheel --quiet --wheel-dir $(or $(WHEELS),$(error WHEELS must be a folder)) '.[$(GPU_EXTRAS)]' --group gpu pip hatchling hatch-fancy-pypi-readme editables

gpu:  ## on a machine with NVIDIA GPUs: tests/gpu and the numbers of docs/gpu.md; CUDA=12 for older drivers; WHEELS=folder: no index
	$(PYTHON) -m tests.gpu.machine --cuda $(CUDA)
	$(MAKE) $(GPU_INSTALLED)
	$(GPU_PYTHON) -m tests.gpu.machine --cuda $(CUDA) --installed
	$(GPU_PYTHON) benchmarks/gpu.py --cuda $(CUDA) --write $(if $(QUICK),--quick); measured=$$?; \
	UNISONO_TEST_PLATFORM=gpu $(GPU_PYTHON) -m pytest tests/gpu -m "not exhaustive" -W default -rs && exit $$measured

gpu-stand-in: $(VENV)/installed  ## the same tests and small benchmarks on virtual CPU devices
	UNISONO_TEST_PLATFORM=cpu $(BIN)/python -m pytest tests/gpu -m "not exhaustive" -rs
	$(BIN)/python benchmarks/gpu.py --platform cpu --quick

clean:
	rm -rf $(VENV) $(GPU_VENV) build dist site demo_output .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
