"""A metric whose state is sums over elements, and the pair that `tf.metrics` functions return.

Sums add up over batches and over replicas, so that a metric is what one device would compute of all rows.

Tests: tests/unit/estimator/test_metrics.py, tests/virtual/estimator/test_replica_metrics.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import keras

from unisono._errors import InvalidArgumentError
from unisono._types import ArrayLike
from unisono.estimator._collections import unique_name
from unisono.estimator._docstrings import Texts
from unisono.estimator._train_op import current_call, expose
from unisono.estimator.losses._weighted import check_weights
from unisono.spi import running_step


def pair_of(shape: str) -> str:
    """Return the text for the results of a metric function whose values have a shape."""
    return (
        "A `MetricPair`: the value of the metric, and its value after the update by this batch; float arrays "
        f"of {shape}."
    )


#: The sums of a metric, by name.
Sums = Mapping[str, jax.Array]

#: The mode in which metrics are not evaluated: `ModeKeys.TRAIN`.
_TRAIN = "train"


class SumsMetric(keras.metrics.Metric):
    """A metric that adds up arrays, and computes its result from the sums.

    Args:
        shapes: the shape of each sum, by name.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], compute: Callable[[Sums], jax.Array], name: str
    ) -> None:
        super().__init__(name=name)
        self._compute = compute
        self._sums = {
            key: self.add_variable(shape=shape, initializer="zeros", name=key)
            for key, shape in shapes.items()
        }

    def update_state(self, **parts: jax.Array) -> None:
        """Add arrays to the sums."""
        replica = running_step().replica
        # The arrays of a replica without data are stand-ins.
        if replica is not None and replica._engine.is_empty:
            return
        for key, part in parts.items():
            variable = self._sums[key]
            variable.assign_add(jnp.asarray(part).astype(variable.dtype))

    def result(self) -> jax.Array:
        """Return the metric of what was added so far."""
        return self._compute({key: variable.value for key, variable in self._sums.items()})


class MetricPair:
    """A metric of a model_fn, in the form of TensorFlow 1: a value, and what updates it.

    The batch updates the metric at once. In training, where `EstimatorSpec.eval_metric_ops` are not
    evaluated, it updates the metric when the second member is read.

    Args:
        metric: Keras metric.
        update: function without arguments that updates the metric by the batch.

    >>> mean = keras.metrics.Mean()
    >>> value, update = MetricPair(mean, lambda: mean.update_state([1.0, 3.0]))
    >>> float(value)
    2.0
    """

    def __init__(self, metric: keras.metrics.Metric, update: Callable[[], None]) -> None:
        self.metric = metric
        self._update: Callable[[], None] | None = update
        call = current_call()
        if call is None or call.mode != _TRAIN:
            self.update()

    def update(self) -> None:
        """Update the metric by the batch of the step, once."""
        update, self._update = self._update, None
        if update is not None:
            update()

    def __iter__(self) -> Iterator[Any]:
        return iter((self[0], self[1]))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> jax.Array:
        """Return the value without, or with, this batch.

        Args:
            index: 0 or 1.

        Returns:
            The value of the metric, a float array.
        """
        if range(2)[index] == 1:
            self.update()
        value = self.metric.result()
        if current_call() is not None:
            expose(self.metric.name, value)
        result: jax.Array = value
        return result


class Naming(TypedDict, total=False):
    """The arguments with which metrics end."""

    metrics_collections: object
    updates_collections: object
    name: str | None


def pair_of_sums(
    default_name: str,
    parts: Mapping[str, ArrayLike],
    compute: Callable[[Sums], jax.Array],
    metrics_collections: object = None,
    updates_collections: object = None,
    name: str | None = None,
) -> MetricPair:
    """Return a metric of sums."""
    arrays = {key: jnp.asarray(part) for key, part in parts.items()}
    own = unique_name(name or default_name)
    metric = SumsMetric({key: a.shape for key, a in arrays.items()}, compute, own)
    return MetricPair(metric, lambda: metric.update_state(**arrays))


#: The texts for arguments of metrics.
TEXTS = Texts(
    {
        "values": "float array of any shape.",
        "labels": "array of any shape; the targets.",
        "predictions": "array of the shape of `labels`; one of the two may lack a last axis of size 1.",
        "weights": "number, or float array with the axes of the elements, each of the same size or 1; a last "
        "axis of size 1 may be missing. None for 1.",
        "metrics_collections": "names of collections; has no effect.",
        "updates_collections": "names of collections; has no effect.",
        "name": "string; the name of the metric. None for an automatic one.",
    },
    pair_of("shape `()`"),
    {"InvalidArgumentError": "the shapes do not fit each other."},
    options_of=pair_of_sums,
)


def quotient(value: jax.Array, number: jax.Array) -> jax.Array:
    """Return a quotient, or 0 where the divisor is not positive."""
    return jnp.where(number > 0, value / jnp.where(number > 0, number, 1), 0)


def floats(value: ArrayLike) -> jax.Array:
    """Return an array of at least 32 bits for sums."""
    array: jax.Array = keras.ops.convert_to_tensor(value)
    is_wide = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize >= 4
    return array if is_wide else array.astype(jnp.float32)


def aligned(
    predictions: ArrayLike, labels: ArrayLike, weights: ArrayLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return predictions, labels and weights of equal shapes.

    A last axis of size 1 that one of the first two lacks is dropped; weights get or lose one.
    """
    given, wanted = keras.ops.convert_to_tensor(predictions), keras.ops.convert_to_tensor(labels)
    if given.ndim == wanted.ndim + 1 and given.shape[-1] == 1:
        given = jnp.squeeze(given, -1)
    elif wanted.ndim == given.ndim + 1 and wanted.shape[-1] == 1:
        wanted = jnp.squeeze(wanted, -1)
    if given.shape != wanted.shape:
        raise InvalidArgumentError(
            "`labels` and `predictions` must have the same shape. Received: "
            f"{wanted.shape} and {given.shape}. Write `reshape` around one of them."
        )
    return given, wanted, broadcast_weights(weights, given)


def broadcast_weights(weights: ArrayLike, values: jax.Array) -> jax.Array:
    """Return weights in the shape of values.

    Raises:
        InvalidArgumentError: the weights do not fit.
    """
    shares = jnp.ones((), jnp.float32) if weights is None else floats(weights)
    if shares.ndim == values.ndim + 1 and shares.shape[-1] == 1:
        shares = jnp.squeeze(shares, -1)
    elif shares.ndim and shares.ndim == values.ndim - 1:
        shares = shares[..., None]
    check_weights(shares, values)
    return jnp.broadcast_to(shares, values.shape)
