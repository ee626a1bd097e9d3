"""Choose Keras' backend before Keras chooses, and how JAX lowers pooling; only the standard library.

Keras reads `KERAS_BACKEND` once, when it is first imported, and falls back to TensorFlow.
"""

from __future__ import annotations

import os
import sys

from unisono._errors import BackendError


def select_jax() -> None:
    """Set `KERAS_BACKEND=jax` where nothing is set and Keras is not imported yet."""
    if "keras" not in sys.modules:
        os.environ.setdefault("KERAS_BACKEND", "jax")


def require_jax() -> None:
    """Import Keras and make sure that it runs on JAX.

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


def wants_fast_pooling() -> bool:
    """Return whether the derivative of max-pooling on CPUs is ours: not with `UNISONO_MAX_POOLING=xla`."""
    return os.environ.get("UNISONO_MAX_POOLING", "").lower() != "xla"
