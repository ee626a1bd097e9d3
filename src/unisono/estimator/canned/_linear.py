"""`LinearClassifier`, `LinearRegressor`, `LinearEstimator`.

Source: https://www.tensorflow.org/api_docs/python/tf/estimator/LinearClassifier

Tests: tests/virtual/estimator/test_canned.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from unisono.estimator._run_config import RunConfig
from unisono.estimator.canned._canned import CannedEstimator, Model
from unisono.estimator.canned._classification import binary_or_multi_class_head
from unisono.estimator.canned._head import SUM_OVER_BATCH_SIZE, Head, minimized
from unisono.estimator.canned._logits import linear_logits, optimizer_maker
from unisono.estimator.canned._regression import RegressionHead
from unisono.estimator.canned._texts import LINEAR, OPTIMIZER, TEXTS
from unisono.feature_column._encode import checked_columns

if TYPE_CHECKING:
    from unisono.feature_column._column import FeatureColumn
    from unisono.feature_column._numeric import NumericColumn

_LEARNING_RATE = 0.2

_TEXTS = TEXTS.with_texts(
    LINEAR,
    optimizer=f"{OPTIMIZER}{_LEARNING_RATE}; None for Ftrl with `min({_LEARNING_RATE}, 1 / sqrt(columns))`.",
)


def _model(columns: Sequence[FeatureColumn], units: int, optimizer: object, combiner: str) -> Model:
    # TensorFlow's: by name 0.2, and for None less where there are many columns.
    rate = _LEARNING_RATE if optimizer is not None else min(_LEARNING_RATE, 1 / math.sqrt(len(columns)))

    make_optimizer = optimizer_maker(optimizer or "Ftrl", rate)

    def model(features: Mapping[str, jax.Array], mode: str) -> tuple[Any, Callable[[Any], Any]]:
        logits, variables = linear_logits(features, columns, units, combiner)

        def train_op(loss: jax.Array) -> Any:
            return minimized(make_optimizer(), loss, variables)

        return logits, train_op

    return model


@_TEXTS
class LinearEstimator(CannedEstimator):
    """A linear model with a head.

    >>> from unisono import estimator, feature_column
    >>> model = LinearEstimator(estimator.MultiLabelHead(3), [feature_column.numeric_column("age")])
    """

    def __init__(
        self,
        head: Head,
        feature_columns: Iterable[FeatureColumn],
        model_dir: str | os.PathLike[str] | None = None,
        optimizer: object = "Ftrl",
        config: RunConfig | None = None,
        sparse_combiner: str = "sum",
        warm_start_from: object = None,
    ) -> None:
        columns = checked_columns(feature_columns, type(self).__name__)
        model = _model(columns, head.logits_dimension, optimizer, sparse_combiner)
        super().__init__(head, columns, model, model_dir, config, warm_start_from)


@_TEXTS
class LinearClassifier(LinearEstimator):
    """A linear model that tells classes apart.

    >>> from unisono import feature_column
    >>> classifier = LinearClassifier([feature_column.numeric_column("age")])
    >>> ages, labels = {"age": [20.0, 60.0]}, [0, 1]
    >>> sorted(classifier.train(lambda: (ages, labels), steps=1).get_variable_names())[-2:]
    ['linear/linear_model/age/weights', 'linear/linear_model/bias_weights']
    """

    def __init__(
        self,
        feature_columns: Iterable[FeatureColumn],
        model_dir: str | os.PathLike[str] | None = None,
        n_classes: int = 2,
        weight_column: str | NumericColumn | None = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: object = "Ftrl",
        config: RunConfig | None = None,
        warm_start_from: object = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
        sparse_combiner: str = "sum",
    ) -> None:
        head = binary_or_multi_class_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        super().__init__(
            head, feature_columns, model_dir, optimizer, config, sparse_combiner, warm_start_from
        )


@_TEXTS
class LinearRegressor(LinearEstimator):
    """A linear model that predicts numbers.

    >>> from unisono import feature_column
    >>> model = LinearRegressor([feature_column.numeric_column("age")])
    """

    def __init__(
        self,
        feature_columns: Iterable[FeatureColumn],
        model_dir: str | os.PathLike[str] | None = None,
        label_dimension: int = 1,
        weight_column: str | NumericColumn | None = None,
        optimizer: object = "Ftrl",
        config: RunConfig | None = None,
        warm_start_from: object = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
        sparse_combiner: str = "sum",
    ) -> None:
        head = RegressionHead(label_dimension, weight_column, loss_reduction)
        super().__init__(
            head, feature_columns, model_dir, optimizer, config, sparse_combiner, warm_start_from
        )
