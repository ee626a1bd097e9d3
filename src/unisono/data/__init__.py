"""Input pipelines: `tf.data`'s vocabulary on Grain, and how a distribution splits them.

Names are loaded on first use: Grain imports JAX, which takes seconds, and a program that only names a
policy should not wait for it.
"""

from __future__ import annotations

import importlib
from typing import Any

#: The module of each public name.
_HOMES = {
    "_pipeline._cardinality": ["AUTOTUNE", "INFINITE_CARDINALITY", "SHARD_HINT", "UNKNOWN_CARDINALITY"],
    "_dataset": ["Dataset"],
    "_keras_input": ["as_keras_input"],
    "_options": ["Options"],
    "_readers": ["ArrayRecordDataset", "TFRecordDataset", "TextLineDataset"],
    "_sharding": ["AutoShardPolicy", "DatasetCreator"],
    "_pipeline._structure": ["DatasetSpec", "TensorSpec"],
}

_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted([*_MODULE_OF, "experimental"])  # noqa: PLE0605 (computed, and tested)


def __getattr__(name: str) -> Any:
    if name == "experimental":
        return importlib.import_module(f"{__name__}.experimental")
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return __all__
