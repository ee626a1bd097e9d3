"""Processes that tests start: Keras is imported without packages that it needs for none of them.

Keras imports scikit-learn, Matplotlib and Requests if they are installed, half of the 2.3 s of CPU of its
import (November 2026). Programs still import them themselves, after Keras.
"""

import sys

FOR_NONE = ("sklearn", "matplotlib", "requests")


class _WithoutExtras:
    """Answers Keras, while it is imported, that a package is not installed."""

    def find_spec(self, name, path=None, target=None):
        keras = sys.modules.get("keras")
        if name in FOR_NONE and keras is not None and keras.__spec__._initializing:
            raise ModuleNotFoundError(f"{name} is not imported for Keras in tests", name=name)


sys.meta_path.insert(0, _WithoutExtras())
