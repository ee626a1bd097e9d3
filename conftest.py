"""Eight virtual CPU devices for all tests and doctests, before JAX starts; programs are compiled quickly.

In a worker of a cluster (`tests/cluster/test_contract.py` runs the contract in several processes)
the strategy makes the devices.
"""

import atexit
import gc
import importlib.metadata
import os
import shutil
import signal
import tempfile
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

# Compilation is most of what tests that train models take (14 of 20 s of CPU for three of them, 2026-11-23).
# With these flags, which the tasks of clusters inherit, a training step compiles in a fifth of its time, and
# runs slower. `XLA_FLAGS= python -m pytest …` compiles as users do. A version of XLA that lacks one of the
# flags ends the process and names it.
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
# jaxlib 0.11.2 has it no longer.
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:3])) <= (0, 11, 0):
    QUICK += " --xla_cpu_use_fusion_emitters=false"
if os.environ.get("UNISONO_TEST_PLATFORM") == "gpu":
    # Comparisons need the same bits in each run, and products of float32 in float32: by default GPUs round
    # the factors to 10 bits. Several processes share a GPU, whose memory the first one would take.
    os.environ.setdefault("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_FLAGS", QUICK)

is_worker = "TF_CONFIG" in os.environ
if not is_worker:
    # Room for the collectives of eight devices: see `unisono/_mesh.py`.
    os.environ["PJRT_NPROC"] = "16"

# See `tests/light/sitecustomize.py`: for the processes that tests start.
LIGHT = str(Path(__file__).parent / "tests" / "light")
paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if LIGHT not in paths:
    os.environ["PYTHONPATH"] = os.pathsep.join([LIGHT, *filter(None, paths)])

# A shell starts programs in the background with SIGINT ignored; tests of Ctrl-C need Python's own handler.
signal.signal(signal.SIGINT, signal.default_int_handler)

import jax

if not is_worker:
    jax.config.update("jax_num_cpu_devices", 8)

# Many tests build the same small models: what one has compiled, the next one reads. It halves the time.
folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
if not folder:
    # Of this process alone, as JAX does not write the files at once.
    folder = tempfile.mkdtemp(prefix="unisono-compiled-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
jax.config.update("jax_compilation_cache_dir", folder)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

# Both set variables of the environment when they are imported; no test must be blamed for that.
import keras  # noqa: F401
import pytest
import sklearn  # noqa: F401

import unisono

# Doctests of single modules need what a program's `import unisono` gives them, in any order.
unisono.get_strategy  # noqa: B018

# What is loaded now stays: the garbage collector need not look at it again and again.
gc.collect()
gc.freeze()
# Tracing makes millions of objects: with Python's thresholds the collector took 7% of the time of such tests.
gc.set_threshold(50_000, 20, 20)

#: Programs for type checkers, which are not run.
collect_ignore = ["tests/typing"]

#: See `tools/slow_tests.py`.
SLOW = frozenset((Path(__file__).parent / "tests" / "slow_tests.txt").read_text().splitlines())


def pytest_collection_modifyitems(items):
    """Mark the tests that `make test` leaves to `make test-all`, as others of their files are quicker."""
    for item in items:
        if not SLOW.isdisjoint((item.nodeid, item.nodeid.partition("[")[0])):
            item.add_marker(pytest.mark.slow)
