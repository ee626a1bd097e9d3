"""Read the environment: Keras' backend, devices and threads, and how operations are computed.

Imports the standard library only. Keras reads `KERAS_BACKEND` once, when it is first imported, and falls back
to TensorFlow. XLA reads the size of its thread pool when JAX' backend starts.

Tests: tests/unit/test_public_names.py, tests/virtual/test_pooling.py, tests/unit/test_mesh.py.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

from unisono._checks import digits
from unisono._errors import BackendError
from unisono._system._program_end import EXPLAINERS
from unisono._tracebacks import add_advice


def select_jax() -> None:
    """Set `KERAS_BACKEND=jax`, unless it is set or Keras is already imported."""
    if "keras" not in sys.modules:
        os.environ.setdefault("KERAS_BACKEND", "jax")


def check_chosen_backend() -> None:
    """Raise where the environment chooses another backend, whose package may be missing or slow to import.

    Raises:
        BackendError: `KERAS_BACKEND` is not `jax`, and Keras is not imported yet.
    """
    chosen = os.environ.get("KERAS_BACKEND", "jax")
    if "keras" not in sys.modules and chosen != "jax":
        raise _wrong_backend(f"KERAS_BACKEND={chosen!r}")


def require_jax() -> None:
    """Import Keras and check that it runs on JAX.

    Raises:
        BackendError: when Keras already runs on another backend.
    """
    select_jax()
    check_chosen_backend()
    import keras

    if keras.config.backend() != "jax":
        raise _wrong_backend(f"keras.config.backend()={keras.config.backend()!r}")


def _wrong_backend(received: str) -> BackendError:
    return BackendError(
        f"Keras must run on the JAX backend. Received: {received}. Set KERAS_BACKEND=jax in the environment, "
        "or write `import unisono` before `import keras`."
    )


def _explain_missing_package(error: BaseException) -> None:
    """Say what to write where Keras has not found the package of the backend that the environment chooses."""
    chosen = os.environ.get("KERAS_BACKEND", "jax")
    if isinstance(error, ModuleNotFoundError) and chosen != "jax" and error.name == chosen:
        add_advice(
            error,
            f"KERAS_BACKEND={chosen!r} chooses a backend whose package is not installed, and Unisono runs on "
            "JAX. Set KERAS_BACKEND=jax in the environment, or leave it out.",
        )


EXPLAINERS.append(_explain_missing_package)


def wants_own_lowering(switch: str) -> bool:
    """Return whether to replace XLA's own code for an operation.

    Args:
        switch: the variable of the environment that forbids it with the value `xla`.
    """
    return os.environ.get(switch, "").lower() != "xla"


def devices_forced_by(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many virtual CPU devices XLA's flags ask for; 1 by default.

    >>> devices_forced_by({"XLA_FLAGS": "--xla_force_host_platform_device_count=4"})
    4
    """
    match = re.search(r"xla_force_host_platform_device_count=([0-9]{1,9})", environ.get("XLA_FLAGS", ""))
    return int(match.group(1)) if match else 1


def devices_asked_for(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many virtual CPU devices JAX makes in an environment if the program says nothing.

    >>> devices_asked_for({"JAX_NUM_CPU_DEVICES": "2"})
    2
    """
    number = environ.get("JAX_NUM_CPU_DEVICES", "")
    return max(devices_forced_by(environ), digits(number) or 1)


def threads_of_xla() -> int:
    """Return the size of XLA's thread pool on CPU."""
    for name in ("PJRT_NPROC", "NPROC"):
        if (number := digits(os.environ.get(name, ""))) is not None:
            return number
    return os.cpu_count() or 1


def reserve_threads(devices: int) -> None:
    """Make the thread pool of a backend that has not started large enough for collectives."""
    # Two threads per device: with fewer, the default pool of 2 cores deadlocked in every attempt at 400
    # unblocked steps of 2 or 8 devices. Not more than needed: XLA divides each operation into as many pieces
    # as there are threads.
    if devices > 1 and threads_of_xla() < 2 * devices:
        os.environ["PJRT_NPROC"] = str(2 * devices)
