"""Labels outside of a model's classes, for which Keras' loss is 0 on JAX: one warning for each model."""

from __future__ import annotations

import logging
import weakref

import keras
import numpy as np

from unisono._types import PyTree
from unisono.step._keras_internals import function_arguments

_LOG = logging.getLogger("unisono")

#: What a model may override to change its labels.
_STEPS = ("train_step", "compute_loss")

_warned: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def check_labels(model: keras.Model, labels: PyTree, weights: PyTree = None) -> None:
    """Warn where the loss takes labels for the numbers of classes, and the model lacks some of these.

    Labels on devices are not read, as that would wait for them.

    Args:
        model: compiled; one of several outputs, of an unknown shape or with a step of its own is not checked.
        weights: of the same rows: where there are any, some labels may not count.
    """
    if weights is not None or not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iuf":
        return
    loss, classes = model.loss, _classes_of(model, labels)
    if classes is None or not _takes_numbers(loss) or model in _warned:
        return
    ignored = function_arguments(loss).get("ignore_class")
    counted = labels if ignored is None else labels[labels != ignored]
    if not counted.size or (counted.min() >= 0 and counted.max() < classes):
        return
    _warned.add(model)
    low, high = int(counted.min()), int(counted.max())
    _LOG.warning(
        "Labels must be whole numbers from 0 to %d, as %r has %d classes. Received: labels from %d to %d. "
        "Keras' loss is 0 for the others, so that nothing is learned of them. Write %s.",
        classes - 1, model.name, classes, low, high, _remedy(low, high, classes),
    )  # fmt: skip


def _remedy(low: int, high: int, classes: int) -> str:
    if low < 0:
        return f"`SparseCategoricalCrossentropy(ignore_class={low})`, where {low} stands for no class"
    return f"`y - {low}`" if high - low < classes else f"a last layer of {high + 1} units"


def _takes_numbers(loss: object) -> bool:
    if isinstance(loss, keras.losses.SparseCategoricalCrossentropy):
        return True
    named = ("sparse_categorical_crossentropy", "SparseCategoricalCrossentropy")
    return loss is keras.losses.sparse_categorical_crossentropy or loss in named


def _classes_of(model: keras.Model, labels: np.ndarray) -> int | None:
    """Return the length of the last axis of the output of which `labels` has all axes before."""
    outputs: list[keras.KerasTensor] = getattr(model, "outputs", None) or []
    has_own = any(getattr(type(model), name) is not getattr(keras.Model, name) for name in _STEPS)
    if len(outputs) != 1 or has_own:
        return None
    *rows, classes = outputs[0].shape
    # Keras itself leaves out a last axis of one.
    given = labels.shape[:-1] if labels.ndim > len(rows) and labels.shape[-1] == 1 else labels.shape
    fits = len(given) == len(rows) > 0 and all(n in (None, m) for n, m in zip(rows, given, strict=True))
    return classes if fits else None
