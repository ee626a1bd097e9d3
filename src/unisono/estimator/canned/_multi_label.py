"""The head of classes of which an example has any number.

Source: https://github.com/tensorflow/estimator (tensorflow_estimator/python/estimator/head)

Tests: tests/unit/estimator/test_heads.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._checks import whole_number
from unisono._errors import InvalidArgumentError
from unisono._types import UserValue
from unisono.estimator.canned._class_metrics import checked_thresholds, sigmoid_losses, threshold_metrics
from unisono.estimator.canned._classification import ClassHead, chosen_predictions
from unisono.estimator.canned._head import SUM_OVER_BATCH_SIZE, check_label_range, labels_on_host
from unisono.estimator.canned._texts import TEXTS

if TYPE_CHECKING:
    from unisono.feature_column._numeric import NumericColumn


@TEXTS.with_texts(
    classes_for_class_based_metrics="sequence of classes or of their names, which have own metrics.",
    raises={"InvalidArgumentError": "there are fewer than two classes, or a class does not exist."},
)
class MultiLabelHead(ClassHead):
    """The head of classes of which an example has any number: a sigmoid for each.

    Labels have a one for each class of an example: shape `(batch, n_classes)`.

    >>> MultiLabelHead(3).logits_dimension
    3
    """

    def __init__(
        self,
        n_classes: int,
        weight_column: str | NumericColumn | None = None,
        thresholds: Sequence[float] | None = None,
        label_vocabulary: Sequence[str] | None = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
        loss_fn: Callable[..., Any] | None = None,
        classes_for_class_based_metrics: Sequence[int | str] | None = None,
        name: str | None = None,
    ) -> None:
        if n_classes < 2:
            raise InvalidArgumentError(f"MultiLabelHead's n_classes must be > 1. Received: {n_classes}.")
        super().__init__(n_classes, label_vocabulary, weight_column, loss_reduction, loss_fn, name)
        self._thresholds = checked_thresholds(thresholds)
        self._measured = tuple(self._class_number(c) for c in classes_for_class_based_metrics or ())

    def _class_number(self, chosen: int | str) -> int:
        names = self._vocabulary or ()
        found = names.index(chosen) if isinstance(chosen, str) and chosen in names else chosen
        number = whole_number(found, 0)
        if number is None or number >= self._classes:
            raise InvalidArgumentError(
                f"classes_for_class_based_metrics must be among the {self._classes} classes. "
                f"Received: {chosen!r}."
            )
        return number

    @property
    def logits_dimension(self) -> int:
        """One for each class."""
        return self._classes

    @property
    def label_width(self) -> int:
        """One for each class."""
        return self._classes

    @TEXTS.with_texts(raises={"InvalidArgumentError": "a label is another number, or a string."})
    def host_labels(self, labels: object) -> UserValue:
        """Return labels on the host, if they are zeros and ones."""
        array = labels_on_host(labels)
        if array is not None and array.dtype.kind == "O":
            raise InvalidArgumentError(
                "MultiLabelHead takes labels of zeros and ones, shape (batch, n_classes). Received: strings."
            )
        return None if array is None else check_label_range(array, 2)

    def losses(self, labels: jax.Array, logits: jax.Array) -> jax.Array:
        """Return the mean cross entropy of each example's classes."""
        return jnp.mean(sigmoid_losses(labels, logits), axis=-1, keepdims=True)

    def predictions(self, logits: jax.Array, keys: Sequence[str] | None = None) -> dict[str, jax.Array]:
        """Return logits and probabilities.

        Args:
            logits: of shape `(batch, n_classes)`.
            keys: those that are wanted; all by default.
        """
        logits = self._checked_logits(logits)
        return chosen_predictions(
            {"logits": lambda: logits, "probabilities": lambda: jax.nn.sigmoid(logits)}, keys
        )

    @TEXTS
    def host_predictions(self, predictions: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return predictions with "classes": the names of all."""
        shape = np.shape(next(iter(predictions.values())))
        return {**predictions, "classes": np.broadcast_to(self.class_names(), shape)}

    def _own_metrics(self) -> dict[str, keras.metrics.Metric]:
        made: dict[str, keras.metrics.Metric] = {
            "auc": keras.metrics.AUC(name="auc"),
            "auc_precision_recall": keras.metrics.AUC(curve="PR", name="auc_precision_recall"),
            **threshold_metrics(self._thresholds),
        }
        for number in self._measured:
            mean, auc, area = self._metrics_of_class(number)
            made[mean] = keras.metrics.Mean(name=f"probability_mean_{number}")
            made[auc] = keras.metrics.AUC(name=f"auc_{number}")
            made[area] = keras.metrics.AUC(curve="PR", name=f"auc_pr_{number}")
        return made

    def _batch_values(self, labels: jax.Array, logits: jax.Array) -> dict[str, tuple[jax.Array, ...]]:
        floats, found = labels.astype(jnp.float32), jax.nn.sigmoid(logits)
        names = ("auc", "auc_precision_recall", *threshold_metrics(self._thresholds))
        values: dict[str, tuple[jax.Array, ...]] = dict.fromkeys(names, (floats, found))
        for number in self._measured:
            one, label = found[..., number, None], floats[..., number, None]
            mean, *areas = self._metrics_of_class(number)
            values |= {mean: (one,), **dict.fromkeys(areas, (label, one))}
        return values

    def _metrics_of_class(self, number: int) -> list[str]:
        suffix = f"class{number}" if self._vocabulary is None else self._vocabulary[number]
        return [f"{kind}/{suffix}" for kind in ("probability_mean", "auc", "auc_precision_recall")]
