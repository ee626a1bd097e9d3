"""Feature columns: from a table's columns, strings among them, to what a model computes with.

The vocabulary of `tf.feature_column`, with its numbers. Strings, hashes and crosses become integers on the
host: `dataset.map(encode(columns))`, after `batch`; canned estimators do it themselves.
"""

from __future__ import annotations

import importlib
from typing import Any

from unisono import _names

#: The module of each public name.
_HOMES = {
    "_categorical": [
        "categorical_column_with_hash_bucket", "categorical_column_with_identity",
        "categorical_column_with_vocabulary_file", "categorical_column_with_vocabulary_list",
    ],
    "_crossed": ["crossed_column", "weighted_categorical_column"],
    "_dense": ["embedding_column", "indicator_column", "shared_embeddings"],
    "_encode": ["encode"],
    "_models": ["DenseFeatures", "LinearModel", "input_layer", "linear_model"],
    "_numeric": ["bucketized_column", "numeric_column"],
}  # fmt: skip

_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 (computed, and tested)


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise _names.no_attribute(__name__, name, __all__)
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return __all__
