"""`DNNClassifier`, `DNNRegressor`, `DNNEstimator`.

Source: https://www.tensorflow.org/api_docs/python/tf/estimator/DNNClassifier

Tests: tests/virtual/estimator/test_canned.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from unisono._checks import whole_numbers
from unisono._errors import InvalidArgumentError
from unisono.estimator._run_config import RunConfig
from unisono.estimator.canned._canned import CannedEstimator, is_training
from unisono.estimator.canned._classification import binary_or_multi_class_head
from unisono.estimator.canned._head import SUM_OVER_BATCH_SIZE, Head, minimized
from unisono.estimator.canned._logits import dnn_logits, optimizer_maker
from unisono.estimator.canned._regression import RegressionHead
from unisono.estimator.canned._texts import OPTIMIZER, TEXTS
from unisono.feature_column._encode import checked_columns, make_dense

if TYPE_CHECKING:
    from unisono.feature_column._column import FeatureColumn
    from unisono.feature_column._numeric import NumericColumn

_LEARNING_RATE = 0.05

_TEXTS = TEXTS.with_texts(optimizer=f"{OPTIMIZER}{_LEARNING_RATE}.")

#: What a layer computes of its sums.
Activation = Callable[[Any], Any] | str | None


def checked_units(hidden_units: Sequence[int], argument: str) -> list[int]:
    """Return the sizes of hidden layers.

    >>> checked_units([8, 4], "hidden_units")
    [8, 4]
    """
    units = whole_numbers(hidden_units, 1)
    if units is None:
        raise InvalidArgumentError(
            f"{argument} must be a list of positive integers. Received: {hidden_units!r}."
        )
    return units


@_TEXTS
class DNNEstimator(CannedEstimator):
    """A network with a head.

    >>> from unisono import estimator, feature_column
    >>> model = DNNEstimator(estimator.MultiLabelHead(3), [4], [feature_column.numeric_column("age")])
    """

    def __init__(
        self,
        head: Head,
        hidden_units: Sequence[int],
        feature_columns: Iterable[FeatureColumn],
        model_dir: str | os.PathLike[str] | None = None,
        optimizer: object = "Adagrad",
        activation_fn: Activation = "relu",
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: object = None,
        batch_norm: bool = False,
    ) -> None:
        name = type(self).__name__
        columns = make_dense(checked_columns(feature_columns, name), name)
        sizes = checked_units(hidden_units, "hidden_units")

        make_optimizer = optimizer_maker(optimizer, _LEARNING_RATE)

        def model(features: Mapping[str, jax.Array], mode: str) -> tuple[Any, Callable[[Any], Any]]:
            units, training = head.logits_dimension, is_training(mode)
            logits, variables = dnn_logits(
                features, columns, sizes, units, activation_fn, dropout, batch_norm, training
            )

            def train_op(loss: jax.Array) -> Any:
                return minimized(make_optimizer(), loss, variables)

            return logits, train_op

        super().__init__(head, columns, model, model_dir, config, warm_start_from)


@_TEXTS
class DNNClassifier(DNNEstimator):
    """A network that tells classes apart.

    >>> from unisono import feature_column
    >>> classifier = DNNClassifier([4], [feature_column.numeric_column("age")], n_classes=3)
    >>> predictions = classifier.predict(lambda: {"age": [20.0]}, predict_keys="probabilities")
    >>> next(predictions)["probabilities"].shape
    (3,)
    """

    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Iterable[FeatureColumn],
        model_dir: str | os.PathLike[str] | None = None,
        n_classes: int = 2,
        weight_column: str | NumericColumn | None = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: object = "Adagrad",
        activation_fn: Activation = "relu",
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: object = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
        batch_norm: bool = False,
    ) -> None:
        super().__init__(
            binary_or_multi_class_head(n_classes, weight_column, label_vocabulary, loss_reduction),
            hidden_units, feature_columns, model_dir, optimizer, activation_fn, dropout, config,
            warm_start_from, batch_norm,
        )  # fmt: skip


@_TEXTS
class DNNRegressor(DNNEstimator):
    """A network that predicts numbers.

    >>> from unisono import feature_column
    >>> model = DNNRegressor([4], [feature_column.numeric_column("age")])
    """

    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Iterable[FeatureColumn],
        model_dir: str | os.PathLike[str] | None = None,
        label_dimension: int = 1,
        weight_column: str | NumericColumn | None = None,
        optimizer: object = "Adagrad",
        activation_fn: Activation = "relu",
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: object = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
        batch_norm: bool = False,
    ) -> None:
        super().__init__(
            RegressionHead(label_dimension, weight_column, loss_reduction),
            hidden_units, feature_columns, model_dir, optimizer, activation_fn, dropout, config,
            warm_start_from, batch_norm,
        )  # fmt: skip
