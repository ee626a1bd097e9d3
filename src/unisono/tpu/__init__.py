"""Start a TPU, under TensorFlow's names: JAX needs none of these calls, but old programs make them.

Tests: tests/unit/test_tpu.py.
"""

from __future__ import annotations

import importlib
from typing import Any

#: The module of each public name.
_HOMES = {
    "cluster_resolver._tpu": [
        "TPUClusterResolver",
        "experimental_connect_to_cluster",
        "initialize_tpu_system",
    ],
}

_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted([*_MODULE_OF, "experimental"])  # noqa: PLE0605 (computed, and tested)


def __getattr__(name: str) -> Any:
    if name == "experimental":
        return importlib.import_module(f"{__name__}.experimental")
    module = _MODULE_OF.get(name)
    if module is None:
        raise importlib.import_module("unisono._names").no_attribute(__name__, name, __all__)
    return getattr(importlib.import_module(f"unisono.{module}"), name)


def __dir__() -> list[str]:
    return __all__
