"""Read the environment: Keras' backend, and how operations are computed. Imports the standard library only.

Keras reads `KERAS_BACKEND` once, when it is first imported, and falls back to TensorFlow.

Tests: tests/unit/test_public_names.py, tests/virtual/test_pooling.py.
"""

from __future__ import annotations

import os
import sys

from unisono._errors import BackendError


def select_jax() -> None:
    """Set `KERAS_BACKEND=jax`, unless it is set or Keras is already imported."""
    if "keras" not in sys.modules:
        os.environ.setdefault("KERAS_BACKEND", "jax")


def require_jax() -> None:
    """Import Keras and check that it runs on JAX.

    Raises:
        BackendError: when Keras already runs on another backend.
    """
    select_jax()
    import keras

    if keras.config.backend() != "jax":
        raise BackendError(
            "Keras must run on the JAX backend. "
            f"Received: keras.config.backend()={keras.config.backend()!r}. Set KERAS_BACKEND=jax in the "
            "environment, or write `import unisono` before `import keras`."
        )


def wants_own_lowering(switch: str) -> bool:
    """Return whether to replace XLA's own code for an operation.

    Args:
        switch: the variable of the environment that forbids it with the value `xla`.
    """
    return os.environ.get(switch, "").lower() != "xla"
