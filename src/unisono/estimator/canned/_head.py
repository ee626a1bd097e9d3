"""`Head`: what a canned model predicts, its loss and its metrics, given logits.

Source: https://github.com/tensorflow/estimator (tensorflow_estimator/python/estimator/head/base_head.py)

Tests: tests/unit/estimator/test_heads.py.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono._types import UserValue
from unisono.estimator import _train_op
from unisono.estimator._serving import PredictOutput
from unisono.estimator._spec import EstimatorSpec, ModeKeys
from unisono.estimator.canned._texts import TEXTS
from unisono.feature_column._encode import weight_column_of
from unisono.preprocessing._fingerprints import on_host

if TYPE_CHECKING:
    from unisono.feature_column._numeric import NumericColumn

#: Reductions of a loss over a batch.
SUM_OVER_BATCH_SIZE, SUM = "sum_over_batch_size", "sum"

_REDUCTIONS = {
    SUM_OVER_BATCH_SIZE: SUM_OVER_BATCH_SIZE, "weighted_sum_over_batch_size": SUM_OVER_BATCH_SIZE,
    "auto": SUM_OVER_BATCH_SIZE, SUM: SUM, "weighted_sum": SUM,
}  # fmt: skip


@TEXTS
class Head(abc.ABC):
    """A function from logits to a loss, predictions and metrics.

    >>> from unisono import estimator
    >>> isinstance(estimator.RegressionHead(), Head)
    True
    """

    def __init__(
        self,
        weight_column: str | NumericColumn | None,
        loss_reduction: str,
        loss_fn: Callable[..., Any] | None,
        name: str | None,
    ) -> None:
        if loss_reduction not in _REDUCTIONS:
            raise InvalidArgumentError(
                f"loss_reduction must be {SUM_OVER_BATCH_SIZE!r} or {SUM!r}. Received: {loss_reduction!r}."
            )
        self._weights = weight_column_of(weight_column)
        self._loss_reduction = _REDUCTIONS[loss_reduction]
        self._loss_fn = loss_fn
        self._name = name

    @property
    def name(self) -> str | None:
        """The name, which metrics have after a slash."""
        return self._name

    @property
    @abc.abstractmethod
    def logits_dimension(self) -> int:
        """How many logits an example has."""

    @property
    def loss_reduction(self) -> str:
        """How the losses of a batch become one."""
        return self._loss_reduction

    @property
    def feature_keys(self) -> tuple[str, ...]:
        """The key of the weights, where the head reads them."""
        return () if self._weights is None else self._weights.feature_keys()

    def key(self, metric: str) -> str:
        """Return the name of a metric of this head.

        Args:
            metric: its name without the head's.
        """
        return f"{metric}/{self._name}" if self._name else metric

    # --- what a kind of head decides ---------------------------------------------------------------

    @abc.abstractmethod
    def losses(self, labels: jax.Array, logits: jax.Array) -> jax.Array:
        """Return the loss of each example, of shape `(batch, 1)`, or of each label."""

    @TEXTS
    @abc.abstractmethod
    def predictions(self, logits: jax.Array, keys: Sequence[str] | None = None) -> dict[str, jax.Array]:
        """Return predictions by key."""

    def _own_metrics(self) -> dict[str, keras.metrics.Metric]:
        """Return the new metrics of this kind of head, by their names without the head's."""
        return {}

    def _batch_values(self, labels: jax.Array, logits: jax.Array) -> dict[str, tuple[jax.Array, ...]]:
        """Return the updates of these metrics for a batch, by name."""
        return {}

    @TEXTS
    def _host_predictions(self, predictions: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return predictions with those that are strings, which only the host can hold."""
        return predictions

    def _host_labels(self, labels: object) -> UserValue:
        """Return labels as a step takes them: strings as integers.

        Args:
            labels: of a batch, on the host.
        """
        return labels

    # --- what all heads do -------------------------------------------------------------------------

    def loss(
        self,
        labels: jax.Array,
        logits: jax.Array,
        features: Mapping[str, jax.Array] | None = None,
        mode: str | None = None,
        regularization_losses: Sequence[jax.Array] | None = None,
    ) -> jax.Array:
        """Return the loss of a batch, a scalar.

        Args:
            labels: of shape `(batch, ...)`.
            logits: of shape `(batch, logits_dimension)`.
            features: by key; the weights are among them.
            mode: accepted; the loss is the same in all.
            regularization_losses: scalars that are added.
        """
        losses, weights = self._losses_and_weights(labels, logits, features)
        weighted = losses if weights is None else losses * weights
        # Keras' loss knows of all replicas: a sum is over all their rows.
        loss = SummedLosses()(weighted, weighted) if self._loss_reduction == SUM else jnp.mean(weighted)
        return loss + sum(regularization_losses) if regularization_losses else loss

    def _losses_and_weights(
        self, labels: jax.Array, logits: jax.Array, features: Mapping[str, jax.Array] | None
    ) -> tuple[jax.Array, jax.Array | None]:
        logits = self._checked_logits(logits)
        labels = self._label_array(labels, logits)
        if self._loss_fn is None:
            losses = self.losses(labels, logits)
        else:
            losses = jnp.asarray(_call_loss(self._loss_fn, labels, logits, features))
        weights = None if self._weights is None else self._weights.dense(features or {})
        return losses, weights

    def _checked_logits(self, logits: jax.Array) -> jax.Array:
        logits = jnp.asarray(logits, jnp.float32)
        if logits.ndim < 2 or logits.shape[-1] != self.logits_dimension:
            raise InvalidArgumentError(
                f"{type(self).__name__} needs logits of shape (batch, {self.logits_dimension}). "
                f"Received: {logits.shape}."
            )
        return logits

    def _label_array(self, labels: Any, logits: Any) -> Any:
        """Return labels of the shape that the losses need.

        Args:
            labels: of a batch.
            logits: of the batch.

        Raises:
            InvalidArgumentError: there are no labels, or their shape does not fit.
        """
        if labels is None:
            raise InvalidArgumentError(
                "A head needs labels to train and to evaluate. Received: labels=None. "
                "Let input_fn return (features, labels)."
            )
        if isinstance(labels, Mapping):
            raise InvalidTypeError("A head takes an array of labels. Received: a dict.")
        labels = jnp.asarray(labels)
        labels = labels[..., None] if labels.ndim == logits.ndim - 1 else labels
        if labels.shape != (*logits.shape[:-1], self._label_width):
            raise InvalidArgumentError(
                f"{type(self).__name__} needs labels of shape {(*logits.shape[:-1], self._label_width)}. "
                f"Received: {labels.shape}."
            )
        return labels

    @property
    def _label_width(self) -> int:
        """How many labels an example has."""
        return 1

    @TEXTS.with_texts(labels="array of shape `(batch, ...)`.")
    def update_metrics(
        self,
        eval_metrics: Mapping[str, keras.metrics.Metric],
        features: Mapping[str, jax.Array] | None,
        logits: jax.Array,
        labels: jax.Array,
        regularization_losses: Sequence[jax.Array] | None = None,
    ) -> Mapping[str, keras.metrics.Metric]:
        """Update metrics with a batch, and return them."""
        losses, weights = self._losses_and_weights(labels, logits, features)
        logits = self._checked_logits(logits)
        if regularization_losses:
            eval_metrics[self.key("regularization_loss")].update_state(sum(regularization_losses))
        values = self._batch_values(self._label_array(labels, logits), logits)
        for name, given in {"average_loss": (losses,), **values}.items():
            shares = None if weights is None else jnp.broadcast_to(weights, jnp.shape(given[0]))
            eval_metrics[self.key(name)].update_state(*given, shares)
        return eval_metrics

    @TEXTS
    def metrics(
        self, regularization_losses: Sequence[jax.Array] | None = None
    ) -> dict[str, keras.metrics.Metric]:
        """Return new metrics by name."""
        metrics = {"average_loss": keras.metrics.Mean(name="average_loss")}
        if regularization_losses:
            metrics["regularization_loss"] = keras.metrics.Mean(name="regularization_loss")
        return {self.key(name): metric for name, metric in (metrics | self._own_metrics()).items()}

    def create_estimator_spec(
        self,
        features: Mapping[str, Any],
        mode: str,
        logits: Any,
        labels: Any = None,
        optimizer: keras.Optimizer | None = None,
        trainable_variables: Sequence[keras.Variable] | None = None,
        train_op_fn: Callable[[Any], Any] | None = None,
        update_ops: object = None,
        regularization_losses: Sequence[Any] | None = None,
    ) -> EstimatorSpec:
        """Return the result of a model_fn.

        Args:
            features: by key.
            mode: of `ModeKeys`.
            logits: of shape `(batch, logits_dimension)`.
            labels: of the batch; None to predict.
            optimizer: that trains the model.
            trainable_variables: which it changes; all by default.
            train_op_fn: a function of the loss that returns the train op, instead of `optimizer`.
            update_ops: accepted; Keras' layers update their statistics themselves.
            regularization_losses: scalars that are added to the loss.

        Raises:
            InvalidArgumentError: to train, neither or both of `optimizer` and `train_op_fn` are given.
        """
        predictions = self.predictions(logits)
        if mode == ModeKeys.PREDICT:
            output = PredictOutput(predictions)
            outputs = {"serving_default": output, "predict": output}
            return EstimatorSpec(mode, predictions=predictions, export_outputs=outputs)
        loss = self.loss(labels, logits, features, mode, regularization_losses)
        if mode == ModeKeys.EVAL:
            metrics = self.metrics(regularization_losses)
            self.update_metrics(metrics, features, logits, labels, regularization_losses)
            return EstimatorSpec(mode, predictions=predictions, loss=loss, eval_metric_ops=metrics)
        if (optimizer is None) == (train_op_fn is None):
            raise InvalidArgumentError(
                "A head needs an optimizer or a train_op_fn to train. "
                f"Received: optimizer={optimizer}, train_op_fn={train_op_fn}."
            )
        if train_op_fn is not None:
            train_op = train_op_fn(loss)
        else:
            train_op = minimized(optimizer, loss, trainable_variables)
        return EstimatorSpec(mode, predictions=predictions, loss=loss, train_op=train_op)


class SummedLosses(keras.losses.Loss):
    """The sum of the losses of all rows.

    >>> float(SummedLosses()(jnp.zeros((2, 1)), jnp.ones((2, 1))))
    2.0
    """

    def __init__(self) -> None:
        super().__init__(reduction="sum")

    def call(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        """Return the losses as they are given."""
        return y_pred


def minimized(optimizer: Any, loss: jax.Array, variables: Sequence[keras.Variable] | None) -> Any:
    """Return the train op of an optimizer: Keras', or one with TensorFlow 1's `minimize`."""
    if isinstance(optimizer, keras.Optimizer):
        return _train_op.minimize(optimizer, loss, var_list=variables)
    return optimizer.minimize(loss, var_list=variables)


def _call_loss(function: Callable[..., Any], labels: jax.Array, logits: jax.Array, features: Any) -> Any:
    names = set(inspect.signature(function).parameters)
    if not {"labels", "logits"} <= names <= {"labels", "logits", "features", "loss_reduction"}:
        raise InvalidArgumentError(
            "loss_fn must be a function of `labels` and `logits`, and perhaps of `features`. "
            f"Received: one of {sorted(names)}."
        )
    more = {"features": features} if "features" in names else {}
    return function(labels=labels, logits=logits, **more)


def check_label_range(labels: np.ndarray, classes: int) -> np.ndarray:
    """Return labels on the host, if they are classes.

    >>> check_label_range(np.array([0, 1]), 2).tolist()
    [0, 1]
    """
    outside = (labels < 0) | (labels > classes - 1)
    if outside.any():
        raise InvalidArgumentError(
            f"Labels must be >= 0 and <= n_classes - 1 = {classes - 1}. "
            f"Received: {labels[outside][:5].tolist()}."
        )
    return labels


def labels_on_host(labels: object) -> np.ndarray | None:
    """Return labels as an array on the host; None for none."""
    return None if labels is None else on_host(labels, "A head's labels")
