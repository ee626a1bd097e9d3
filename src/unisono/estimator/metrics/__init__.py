"""Metrics with TensorFlow 1's names and arguments: `tf.metrics`.

Each returns a `MetricPair`: its value, and what updates it by the batch. In an evaluation it counts the rows
of all batches and replicas.
Source: https://www.tensorflow.org/versions/r1.15/api_docs/python/tf/metrics

Tests: tests/unit/estimator/test_metrics.py, tests/virtual/estimator/test_replica_metrics.py.
"""

from __future__ import annotations

import importlib
from typing import Any

from unisono._names import no_attribute

#: Where each public name lives.
_HOMES = {
    "_answers": [
        "false_negatives", "false_negatives_at_thresholds", "false_positives",
        "false_positives_at_thresholds", "true_negatives", "true_negatives_at_thresholds", "true_positives",
        "true_positives_at_thresholds",
    ],
    "_curves": ["auc", "sensitivity_at_specificity", "specificity_at_sensitivity"],
    "_means": [
        "accuracy", "mean", "mean_absolute_error", "mean_cosine_distance", "mean_iou",
        "mean_per_class_accuracy", "mean_relative_error", "mean_squared_error", "mean_tensor",
        "percentage_below", "root_mean_squared_error",
    ],
    "_precision": ["precision", "precision_at_thresholds", "recall", "recall_at_thresholds"],
    "_ranking": [
        "average_precision_at_k", "precision_at_k", "precision_at_top_k", "recall_at_k", "recall_at_top_k",
    ],
    "_sums": ["MetricPair"],
}  # fmt: skip

_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

#: Old names of TensorFlow 1.
_ALIASES = {
    "sparse_average_precision_at_k": "average_precision_at_k",
    "sparse_precision_at_k": "precision_at_k",
}

__all__ = sorted([*_MODULE_OF, *_ALIASES])  # noqa: PLE0605 (computed, and tested)


def __getattr__(name: str) -> Any:
    own = _ALIASES.get(name, name)
    module = _MODULE_OF.get(own)
    if module is None:
        raise no_attribute(__name__, name, __all__)
    return getattr(importlib.import_module(f"{__name__}.{module}"), own)


def __dir__() -> list[str]:
    return __all__
