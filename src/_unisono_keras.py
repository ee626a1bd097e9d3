"""Choose JAX where a program imports Keras before Unisono, and Keras would end without TensorFlow.

Python runs `unisono_keras.pth` when it starts, which imports this module: it must stay small, and imports
nothing but `sys`. Formatters sort `import keras` above `import unisono`, and Keras, unless it is told
otherwise, imports TensorFlow. Nothing is changed where TensorFlow is installed, where `KERAS_BACKEND` is set,
or where `keras.json` chooses a backend other than TensorFlow, which Keras writes there itself.

Tests: tests/unit/test_import_order.py.
"""

import sys


class KerasFinder:
    """A finder of modules that finds none: it is asked before Keras is imported."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Choose the backend before Keras reads it; the finders behind this one find the module."""
        if name == "keras":
            choose()


def choose() -> None:
    """Set `KERAS_BACKEND=jax` where Keras would look for a TensorFlow that is not installed."""
    import importlib.util
    import os

    if "KERAS_BACKEND" in os.environ or "tensorflow" in sys.modules:
        return
    if configured() == "tensorflow" and importlib.util.find_spec("tensorflow") is None:
        os.environ["KERAS_BACKEND"] = "jax"


def configured() -> object:
    """Return the backend in `keras.json`; "tensorflow", as Keras, where there is none that can be read."""
    import json
    import os

    home = os.path.expanduser("~")
    home = os.environ.get("KERAS_HOME") or os.path.join(
        home if os.access(home, os.W_OK) else "/tmp", ".keras"
    )
    try:
        with open(os.path.join(home, "keras.json"), encoding="utf-8") as file:
            return json.load(file).get("backend", "tensorflow")
    except (OSError, ValueError, AttributeError):
        return "tensorflow"


sys.meta_path.insert(0, KerasFinder)
