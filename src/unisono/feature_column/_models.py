"""`DenseFeatures` and `LinearModel`: the layers that read feature columns.

Source: https://www.tensorflow.org/api_docs/python/tf/compat/v1/feature_column
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras

from unisono._errors import InvalidArgumentError
from unisono.feature_column._column import CategoricalColumn, DenseColumn, FeatureColumn, Features
from unisono.feature_column._dense import (
    COMBINERS,
    EmbeddingColumn,
    EmbeddingSettings,
    IndicatorColumn,
)
from unisono.feature_column._encode import FeatureEncoder, categories_in_step, checked_columns, make_dense
from unisono.feature_column._numeric import BucketizedColumn, NumericColumn

if TYPE_CHECKING:
    from unisono._system._literals import Combiner


def combined(
    table: jax.Array, ids: jax.Array, weights: jax.Array | None, combiner: str, max_norm: float | None = None
) -> jax.Array:
    """Return one row for each row of categories, as `tf.nn.safe_embedding_lookup_sparse`.

    Returns:
        An array of shape `(batch, dimension)`, zeros for rows without categories.

    >>> combined(jnp.eye(3), jnp.array([[0, 2], [-1, -1]]), None, "mean").tolist()
    [[0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]
    """
    present = ids >= 0
    rows = jnp.take(table, jnp.where(present, ids, 0), axis=0)
    if max_norm is not None:
        norms = jnp.sqrt(jnp.sum(rows * rows, axis=-1, keepdims=True))
        rows = rows * (max_norm / jnp.maximum(norms, max_norm))
    factors = present.astype(table.dtype)
    if weights is not None:
        weights = weights.astype(table.dtype)
        # As in TensorFlow, categories of weight zero and less count only in sums.
        factors = factors * (weights if combiner == "sum" else jnp.maximum(weights, 0))
    total = jnp.einsum("bl,bld->bd", factors, rows)
    if combiner == "sum":
        return total
    divisor = jnp.sum(factors, 1) if combiner == "mean" else jnp.sqrt(jnp.sum(factors * factors, 1))
    return total / jnp.where(divisor > 0, divisor, 1)[:, None]


def counts(column: CategoricalColumn, features: Features) -> jax.Array:
    """Return how often each category occurs in a row, or the sum of its weights."""
    ids, weights = categories_in_step(column, features)
    hot = (ids[..., None] == jnp.arange(column.num_buckets)).astype(keras.config.floatx())
    return jnp.sum(hot if weights is None else hot * weights[..., None], axis=1)


class EmbeddingTable(keras.layers.Layer):
    """The table of one embedding column, or of several that share it."""

    def __init__(self, buckets: int, settings: EmbeddingSettings, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._buckets, self._settings = buckets, settings

    def build(self, input_shape: tuple[int | None, ...] | None = None) -> None:
        """Create the table."""
        settings = self._settings
        initializer = settings.initializer
        if initializer is None:
            initializer = keras.initializers.TruncatedNormal(0.0, 1 / math.sqrt(settings.dimension))
        self.embedding_weights = self.add_weight(
            name="embedding_weights",
            shape=(self._buckets, settings.dimension),
            initializer=initializer,
            trainable=settings.trainable and self.trainable,
        )
        self.built = True

    def call(self, ids: jax.Array, weights: jax.Array | None = None) -> jax.Array:
        """Return one row for each row of categories."""
        settings = self._settings
        table = jnp.asarray(keras.ops.convert_to_tensor(self.embedding_weights))
        return combined(table, ids, weights, settings.combiner, settings.max_norm)


class FeatureColumnsLayer(keras.layers.Layer):
    """A layer whose input is a dict of features."""

    #: Read where a model is trained: `training/_host_layers`.
    _encodes_on_host = True

    def __init__(self, columns: Sequence[FeatureColumn], width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._width = width
        # Strings are encoded in `call`, where the layer is called outside of a step.
        self._convert_input_args = False
        self._allow_non_tensor_positional_args = True
        self.encode = FeatureEncoder(columns)

    def _features(self, features: object) -> Features:
        if not isinstance(features, dict):
            raise InvalidArgumentError(
                f"{type(self).__name__} takes a dict of features by key. Received: {type(features).__name__}."
            )
        return features

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...] | None = None
    ) -> tuple[int | None, int]:
        """Return the shape of the output."""
        return (None, self._width)


class DenseFeatures(FeatureColumnsLayer):
    """The layer that makes of features one array of floats, as `tf.keras.layers.DenseFeatures`.

    Args:
        feature_columns: dense columns; their outputs stand beside each other, sorted by name.
        trainable: whether training changes embedding tables.
        **kwargs: arguments of any layer.

    Raises:
        InvalidTypeError: a column is not dense.

    >>> from unisono import feature_column
    >>> color = feature_column.categorical_column_with_vocabulary_list("color", ["red", "green"])
    >>> columns = [feature_column.indicator_column(color), feature_column.numeric_column("age")]
    >>> feature_column.DenseFeatures(columns)({"age": [30, 4], "color": ["green", "red"]}).tolist()
    [[30.0, 0.0, 1.0], [4.0, 1.0, 0.0]]
    """

    def __init__(
        self, feature_columns: FeatureColumn | Iterable[FeatureColumn], trainable: bool = True, **kwargs: Any
    ) -> None:
        columns = make_dense(checked_columns(feature_columns, "DenseFeatures"), "DenseFeatures")
        super().__init__(columns, sum(column.width for column in columns), **kwargs)
        self.trainable = trainable
        self._dense_columns = tuple(columns)
        tables: dict[int, EmbeddingTable] = {}
        for column in columns:
            if isinstance(column, EmbeddingColumn) and id(column.settings) not in tables:
                buckets = column.categorical_column.num_buckets
                tables[id(column.settings)] = EmbeddingTable(
                    buckets, column.settings, name=column.table_name.replace("/", "_"), trainable=trainable
                )
        self._tables = [
            tables[id(column.settings)] if isinstance(column, EmbeddingColumn) else None for column in columns
        ]

    def build(self, input_shape: tuple[int | None, ...] | None = None) -> None:
        """Create the tables, whose shapes the columns say."""
        for table in self._tables:
            if table is not None and not table.built:
                table.build()
        self.built = True

    def call(self, features: object, training: bool | None = None) -> jax.Array:
        """Return an array of shape `(batch, width)`."""
        given = self._features(features)
        parts = [
            self._part(column, table, given)
            for column, table in zip(self._dense_columns, self._tables, strict=True)
        ]
        return jnp.concatenate(parts, axis=1)

    def _part(self, column: DenseColumn, table: EmbeddingTable | None, features: Features) -> Any:
        if table is not None and isinstance(column, EmbeddingColumn):
            return table(*categories_in_step(column.categorical_column, features))
        return _numbers(column, features)


def _numbers(column: DenseColumn, features: Features) -> jax.Array:
    if isinstance(column, (NumericColumn, BucketizedColumn)):
        return column.dense(features)
    if isinstance(column, IndicatorColumn):
        return counts(column.categorical_column, features)
    raise InvalidArgumentError(
        "A linear model takes numeric, bucketized, categorical and indicator columns. "
        f"Received: {column.name!r}. Give it the categorical column of an embedding itself."
    )


class ColumnWeights(keras.layers.Layer):
    """The weights of one column in a linear model."""

    def __init__(self, column: FeatureColumn, units: int, combiner: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._convert_input_args = False
        self._allow_non_tensor_positional_args = True
        self._column, self._units, self._combiner = column, units, combiner

    def build(self, input_shape: tuple[int | None, ...] | None = None) -> None:
        """Create the weights, which are zeros at first."""
        column = self._column
        rows = column.num_buckets if isinstance(column, CategoricalColumn) else column.width  # type: ignore[attr-defined]
        self.weights_of_column = self.add_weight(
            name="weights", shape=(rows, self._units), initializer="zeros", trainable=self.trainable
        )
        self.built = True

    def call(self, features: Features) -> jax.Array:
        """Return the weighted sum of the column, shape `(batch, units)`."""
        weights = jnp.asarray(keras.ops.convert_to_tensor(self.weights_of_column))
        if isinstance(self._column, CategoricalColumn):
            return combined(weights, *categories_in_step(self._column, features), self._combiner)
        return _numbers(self._column, features) @ weights  # type: ignore[arg-type]


class LinearModel(FeatureColumnsLayer):
    """A linear function of features, as `tf.keras.experimental.LinearModel` of feature columns.

    Args:
        feature_columns: numeric, bucketized, categorical and indicator columns.
        units: how many outputs there are.
        sparse_combiner: how the weights of a row's categories are combined: "sum", "mean" or "sqrtn".
        trainable: whether training changes the weights.
        **kwargs: arguments of any layer.

    Raises:
        InvalidArgumentError: a column cannot be used, or a combiner does not exist.

    >>> from unisono import feature_column
    >>> LinearModel([feature_column.numeric_column("age")])({"age": [30, 4]}).tolist()
    [[0.0], [0.0]]
    """

    def __init__(
        self,
        feature_columns: FeatureColumn | Iterable[FeatureColumn],
        units: int = 1,
        sparse_combiner: Combiner = "sum",
        trainable: bool = True,
        **kwargs: Any,
    ) -> None:
        columns = checked_columns(feature_columns, "LinearModel")
        if sparse_combiner not in COMBINERS:
            raise InvalidArgumentError(
                f"sparse_combiner must be one of {', '.join(COMBINERS)}. Received: {sparse_combiner!r}."
            )
        super().__init__(columns, units, **kwargs)
        self.trainable = trainable
        self._parts = [
            ColumnWeights(
                column, units, sparse_combiner, name=column.name.replace("/", "_"), trainable=trainable
            )
            for column in sorted(columns, key=lambda column: column.name)
        ]

    def build(self, input_shape: tuple[int | None, ...] | None = None) -> None:
        """Create the weights and the bias."""
        for part in self._parts:
            part.build()
        self.bias = self.add_weight(
            name="bias_weights", shape=(self._width,), initializer="zeros", trainable=self.trainable
        )
        self.built = True

    def call(self, features: object) -> jax.Array:
        """Return the weighted sums, shape `(batch, units)`."""
        given = self._features(features)
        total = jnp.asarray(keras.ops.convert_to_tensor(self.bias))
        for part in self._parts:
            total = total + part(given)
        return total


def input_layer(
    features: Features, feature_columns: FeatureColumn | Iterable[FeatureColumn], trainable: bool = True
) -> Any:
    """Return one array of floats for a batch of features, as TensorFlow 1's function in a model_fn.

    Args:
        features: by key.
        feature_columns: dense columns.
        trainable: whether training changes embedding tables.

    Returns:
        An array of shape `(batch, width)`.

    >>> from unisono import feature_column
    >>> input_layer({"age": [30, 4]}, [feature_column.numeric_column("age")]).tolist()
    [[30.0], [4.0]]
    """
    return DenseFeatures(feature_columns, trainable, name="input_layer")(features)


def linear_model(
    features: Features,
    feature_columns: FeatureColumn | Iterable[FeatureColumn],
    units: int = 1,
    sparse_combiner: Combiner = "sum",
    trainable: bool = True,
) -> Any:
    """Return a linear function of a batch of features, as TensorFlow 1's function in a model_fn.

    Args:
        features: by key.
        feature_columns: numeric, bucketized, categorical and indicator columns.
        units: how many outputs there are.
        sparse_combiner: how the weights of a row's categories are combined.
        trainable: whether training changes the weights.

    Returns:
        An array of shape `(batch, units)`.
    """
    return LinearModel(feature_columns, units, sparse_combiner, trainable, name="linear_model")(features)
