"""Heads of classes: two, several, or several of which an example has any number.

Source: https://github.com/tensorflow/estimator (tensorflow_estimator/python/estimator/head)

Tests: tests/unit/estimator/test_heads.py.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._checks import whole_number
from unisono._errors import InvalidArgumentError
from unisono._types import UserValue
from unisono.estimator.canned._head import SUM_OVER_BATCH_SIZE, Head, check_label_range, labels_on_host
from unisono.estimator.canned._texts import TEXTS
from unisono.estimator.losses._functions import sigmoid_losses

if TYPE_CHECKING:
    from unisono.feature_column._numeric import NumericColumn


class AccuracyBaseline(keras.metrics.Mean):
    """The accuracy of a model that always says the more frequent of two classes.

    >>> metric = AccuracyBaseline()
    >>> metric.update_state([1.0, 0.0, 0.0, 0.0])
    >>> float(metric.result())
    0.75
    """

    def result(self) -> Any:
        """Return the larger of the labels' mean and its rest."""
        mean = super().result()
        return keras.ops.maximum(mean, 1 - mean)


class PositiveThresholdAccuracy(keras.metrics.Mean):
    """How often a probability and a label are on the same side of a threshold."""

    def __init__(self, threshold: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._threshold = threshold

    def update_state(
        self, y_true: jax.Array, y_pred: jax.Array, sample_weight: jax.Array | None = None
    ) -> None:
        """Count a batch."""
        equal = (jnp.asarray(y_pred) > self._threshold) == (jnp.asarray(y_true) > 0.5)
        super().update_state(equal.astype(jnp.float32), sample_weight)


def _threshold_metrics(thresholds: Sequence[float]) -> dict[str, keras.metrics.Metric]:
    """Return new metrics of thresholds by name."""
    made: dict[str, keras.metrics.Metric] = {}
    for number, threshold in enumerate(thresholds):
        end = f"positive_threshold_{threshold:g}"
        made[f"accuracy/{end}"] = PositiveThresholdAccuracy(threshold, name=f"accuracy_at_{number}")
        made[f"precision/{end}"] = keras.metrics.Precision(threshold, name=f"precision_at_{number}")
        made[f"recall/{end}"] = keras.metrics.Recall(threshold, name=f"recall_at_{number}")
    return made


def _checked_thresholds(thresholds: Sequence[float] | None) -> tuple[float, ...]:
    checked = tuple(thresholds or ())
    if not all(0 < threshold < 1 for threshold in checked):
        raise InvalidArgumentError(f"thresholds must be between 0 and 1. Received: {thresholds!r}.")
    return checked


class ClassHead(Head):
    """A head of classes, with a vocabulary of labels and predictions as strings."""

    def __init__(self, classes: int, label_vocabulary: Sequence[str] | None, *head_arguments: Any) -> None:
        super().__init__(*head_arguments)
        if label_vocabulary is not None and len(label_vocabulary) != classes:
            raise InvalidArgumentError(
                f"label_vocabulary must have a name for each of the {classes} classes. "
                f"Received: {len(label_vocabulary)} names."
            )
        self._classes = classes
        self._vocabulary = None if label_vocabulary is None else tuple(map(str, label_vocabulary))

    def _host_labels(self, labels: object) -> UserValue:
        """Return labels as integers on the host."""
        array = labels_on_host(labels)
        if array is None:
            return None
        if self._vocabulary is None:
            if array.dtype.kind == "O":
                raise InvalidArgumentError(
                    "Labels that are strings need label_vocabulary. "
                    f"Received: labels such as {array.ravel()[:3].tolist()}, and label_vocabulary=None."
                )
            return check_label_range(array, self._classes)
        if array.dtype.kind != "O":
            raise InvalidArgumentError(
                "Labels must be strings of label_vocabulary. "
                f"Received: labels of {array.dtype} such as {array.ravel()[:3].tolist()}."
            )
        table = {name.encode(): index for index, name in enumerate(self._vocabulary)}
        unknown = sorted({label for label in array.ravel().tolist() if label not in table})
        if unknown:
            raise InvalidArgumentError(
                f"Labels must be in label_vocabulary {self._vocabulary[:10]}. Received: {unknown[:5]}."
            )
        flat = [table[label] for label in array.ravel().tolist()]
        return np.array(flat, np.int32).reshape(array.shape)

    def _class_names(self) -> np.ndarray:
        """Return the classes' names as bytes, from the vocabulary, or else their numbers."""
        names = map(str, range(self._classes)) if self._vocabulary is None else self._vocabulary
        result = np.empty(self._classes, object)
        result[:] = [name.encode() for name in names]
        return result

    def _host_predictions(self, predictions: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return predictions with "classes" and "all_classes", as bytes."""
        names, named = self._class_names(), dict(predictions)
        if "class_ids" in named:
            named["classes"] = names[np.asarray(named["class_ids"])]
        if "all_class_ids" in named:
            named["all_classes"] = names[np.asarray(named["all_class_ids"])]
        return named


def chosen_predictions(
    predictions: Mapping[str, Callable[[], Any]], keys: Sequence[str] | None
) -> dict[str, jax.Array]:
    """Return predictions by key."""
    unknown = sorted(set(keys or ()) - {*predictions, "classes", "all_classes"})
    if unknown:
        raise InvalidArgumentError(
            f"Prediction keys must be among {sorted(predictions)}. Received: {unknown}."
        )
    return {key: make() for key, make in predictions.items() if not keys or key in keys}


class SingleClassHead(ClassHead, abc.ABC):
    """A head whose examples have one class each."""

    @abc.abstractmethod
    def _class_logits(self, logits: jax.Array) -> jax.Array:
        """Return a logit for each class."""

    def _class_predictions(self, logits: jax.Array) -> dict[str, Callable[[], jax.Array]]:
        by_class = self._class_logits(logits)
        numbers = jnp.arange(self._classes, dtype=jnp.int32)
        return {
            "probabilities": lambda: jax.nn.softmax(by_class),
            "class_ids": lambda: jnp.argmax(by_class, axis=-1)[..., None],
            "all_class_ids": lambda: jnp.broadcast_to(numbers, by_class.shape),
        }


@TEXTS.with_texts(
    raises={"InvalidArgumentError": "a threshold is not between 0 and 1."},
)
class BinaryClassHead(SingleClassHead):
    """The head of two classes: one logit, the sigmoid, and its cross entropy.

    >>> BinaryClassHead().logits_dimension
    1
    """

    def __init__(
        self,
        weight_column: str | NumericColumn | None = None,
        thresholds: Sequence[float] | None = None,
        label_vocabulary: Sequence[str] | None = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
        loss_fn: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(2, label_vocabulary, weight_column, loss_reduction, loss_fn, name)
        self._thresholds = _checked_thresholds(thresholds)

    @property
    def logits_dimension(self) -> int:
        """One."""
        return 1

    def losses(self, labels: jax.Array, logits: jax.Array) -> jax.Array:
        """Return the cross entropy of each example."""
        return sigmoid_losses(labels, logits)

    def _class_logits(self, logits: jax.Array) -> jax.Array:
        return jnp.concatenate([jnp.zeros_like(logits), logits], axis=-1)

    def predictions(self, logits: jax.Array, keys: Sequence[str] | None = None) -> dict[str, jax.Array]:
        """Return logits, logistic, probabilities, class_ids and all_class_ids.

        Args:
            logits: of shape `(batch, 1)`.
            keys: those that are wanted; all by default.
        """
        logits = self._checked_logits(logits)
        own = {"logits": lambda: logits, "logistic": lambda: jax.nn.sigmoid(logits)}
        return chosen_predictions({**own, **self._class_predictions(logits)}, keys)

    def _own_metrics(self) -> dict[str, keras.metrics.Metric]:
        return {
            "accuracy": keras.metrics.Mean(name="accuracy"),
            "precision": keras.metrics.Precision(name="precision"),
            "recall": keras.metrics.Recall(name="recall"),
            "prediction/mean": keras.metrics.Mean(name="prediction_mean"),
            "label/mean": keras.metrics.Mean(name="label_mean"),
            "accuracy_baseline": AccuracyBaseline(name="accuracy_baseline"),
            "auc": keras.metrics.AUC(name="auc"),
            "auc_precision_recall": keras.metrics.AUC(curve="PR", name="auc_precision_recall"),
            **_threshold_metrics(self._thresholds),
        }

    def _batch_values(self, labels: jax.Array, logits: jax.Array) -> dict[str, tuple[jax.Array, ...]]:
        predictions = self.predictions(logits, ["logistic", "class_ids"])
        ids, logistic = predictions["class_ids"], predictions["logistic"]
        floats = labels.astype(jnp.float32)
        equal = (labels == ids).astype(jnp.float32)
        by_name: dict[str, tuple[jax.Array, ...]] = {
            "accuracy": (equal,), "precision": (floats, ids), "recall": (floats, ids),
            "prediction/mean": (logistic,), "label/mean": (floats,), "accuracy_baseline": (floats,),
            "auc": (floats, logistic), "auc_precision_recall": (floats, logistic),
        }  # fmt: skip
        return by_name | dict.fromkeys(_threshold_metrics(self._thresholds), (floats, logistic))


@TEXTS.with_texts(
    raises={"InvalidArgumentError": "there are fewer than three classes."},
)
class MultiClassHead(SingleClassHead):
    """The head of three or more classes: a logit for each, the softmax, and its cross entropy.

    >>> MultiClassHead(3).logits_dimension
    3
    """

    def __init__(
        self,
        n_classes: int,
        weight_column: str | NumericColumn | None = None,
        label_vocabulary: Sequence[str] | None = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
        loss_fn: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> None:
        if n_classes <= 2:
            raise InvalidArgumentError(
                f"MultiClassHead's n_classes must be > 2. Received: {n_classes}. Use BinaryClassHead."
            )
        super().__init__(n_classes, label_vocabulary, weight_column, loss_reduction, loss_fn, name)

    @property
    def logits_dimension(self) -> int:
        """One for each class."""
        return self._classes

    def losses(self, labels: jax.Array, logits: jax.Array) -> jax.Array:
        """Return the cross entropy of each example."""
        scores = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(scores, labels.astype(jnp.int32), axis=-1)

    def _class_logits(self, logits: jax.Array) -> jax.Array:
        return logits

    def predictions(self, logits: jax.Array, keys: Sequence[str] | None = None) -> dict[str, jax.Array]:
        """Return logits, probabilities, class_ids and all_class_ids.

        Args:
            logits: of shape `(batch, n_classes)`.
            keys: those that are wanted; all by default.
        """
        logits = self._checked_logits(logits)
        return chosen_predictions({"logits": lambda: logits, **self._class_predictions(logits)}, keys)

    def _own_metrics(self) -> dict[str, keras.metrics.Metric]:
        return {"accuracy": keras.metrics.Mean(name="accuracy")}

    def _batch_values(self, labels: jax.Array, logits: jax.Array) -> dict[str, tuple[jax.Array, ...]]:
        equal = labels == self.predictions(logits, ["class_ids"])["class_ids"]
        return {"accuracy": (equal.astype(jnp.float32),)}


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
        self._thresholds = _checked_thresholds(thresholds)
        self._measured = tuple(self._class_number(c) for c in classes_for_class_based_metrics or ())

    def _class_number(self, chosen: int | str) -> int:
        names = self._vocabulary or ()
        number_of_class = names.index(chosen) if isinstance(chosen, str) and chosen in names else chosen
        number = whole_number(number_of_class, 0)
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
    def _label_width(self) -> int:
        """One for each class."""
        return self._classes

    @TEXTS.with_texts(raises={"InvalidArgumentError": "a label is another number, or a string."})
    def _host_labels(self, labels: object) -> UserValue:
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
    def _host_predictions(self, predictions: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return predictions with "classes": the names of all."""
        shape = np.shape(next(iter(predictions.values())))
        return {**predictions, "classes": np.broadcast_to(self._class_names(), shape)}

    def _own_metrics(self) -> dict[str, keras.metrics.Metric]:
        made: dict[str, keras.metrics.Metric] = {
            "auc": keras.metrics.AUC(name="auc"),
            "auc_precision_recall": keras.metrics.AUC(curve="PR", name="auc_precision_recall"),
            **_threshold_metrics(self._thresholds),
        }
        for number in self._measured:
            mean, auc, area = self._metrics_of_class(number)
            made[mean] = keras.metrics.Mean(name=f"probability_mean_{number}")
            made[auc] = keras.metrics.AUC(name=f"auc_{number}")
            made[area] = keras.metrics.AUC(curve="PR", name=f"auc_pr_{number}")
        return made

    def _batch_values(self, labels: jax.Array, logits: jax.Array) -> dict[str, tuple[jax.Array, ...]]:
        floats, probabilities = labels.astype(jnp.float32), jax.nn.sigmoid(logits)
        names = ("auc", "auc_precision_recall", *_threshold_metrics(self._thresholds))
        values: dict[str, tuple[jax.Array, ...]] = dict.fromkeys(names, (floats, probabilities))
        for number in self._measured:
            one, label = probabilities[..., number, None], floats[..., number, None]
            mean, *areas = self._metrics_of_class(number)
            values |= {mean: (one,), **dict.fromkeys(areas, (label, one))}
        return values

    def _metrics_of_class(self, number: int) -> list[str]:
        suffix = f"class{number}" if self._vocabulary is None else self._vocabulary[number]
        return [f"{kind}/{suffix}" for kind in ("probability_mean", "auc", "auc_precision_recall")]


def binary_or_multi_class_head(
    n_classes: int = 2,
    weight_column: str | NumericColumn | None = None,
    label_vocabulary: Sequence[str] | None = None,
    loss_reduction: str = SUM_OVER_BATCH_SIZE,
) -> BinaryClassHead | MultiClassHead:
    """Return the head of a classifier.

    >>> type(binary_or_multi_class_head(2)).__name__
    'BinaryClassHead'
    """
    if n_classes == 2:
        return BinaryClassHead(weight_column, None, label_vocabulary, loss_reduction)
    return MultiClassHead(n_classes, weight_column, label_vocabulary, loss_reduction)
