"""`BaselineClassifier`, `BaselineRegressor`, `BaselineEstimator`: what labels alone can predict.

Source: https://www.tensorflow.org/api_docs/python/tf/estimator/BaselineClassifier

Tests: tests/virtual/estimator/test_canned.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from unisono.estimator._run_config import RunConfig
from unisono.estimator.canned._canned import ROWS, CannedEstimator
from unisono.estimator.canned._classification import binary_or_multi_class_head
from unisono.estimator.canned._head import SUM_OVER_BATCH_SIZE, Head, minimized
from unisono.estimator.canned._logits import BaselineLogits, optimizer_maker
from unisono.estimator.canned._regression import RegressionHead
from unisono.estimator.canned._texts import OPTIMIZER, TEXTS

if TYPE_CHECKING:
    from unisono.feature_column._numeric import NumericColumn

_LEARNING_RATE = 0.3

_TEXTS = TEXTS.with_texts(optimizer=f"{OPTIMIZER}{_LEARNING_RATE}.")


@_TEXTS
class BaselineEstimator(CannedEstimator):
    """A model that reads no features: it learns the mean of the labels.

    >>> from unisono import estimator
    >>> model = BaselineEstimator(estimator.MultiLabelHead(3))
    """

    def __init__(
        self,
        head: Head,
        model_dir: str | os.PathLike[str] | None = None,
        optimizer: object = "Ftrl",
        config: RunConfig | None = None,
    ) -> None:
        make_optimizer = optimizer_maker(optimizer, _LEARNING_RATE)

        def model(features: Mapping[str, jax.Array], mode: str) -> tuple[Any, Callable[[Any], Any]]:
            layer = BaselineLogits(head.logits_dimension, name="baseline")
            logits = layer(features[ROWS])

            def train_op(loss: jax.Array) -> Any:
                return minimized(make_optimizer(), loss, layer.trainable_variables)

            return logits, train_op

        super().__init__(head, (), model, model_dir, config)


@_TEXTS
class BaselineClassifier(BaselineEstimator):
    """A model that predicts how frequent classes are.

    >>> model = BaselineClassifier(n_classes=3)
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        n_classes: int = 2,
        weight_column: str | NumericColumn | None = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: object = "Ftrl",
        config: RunConfig | None = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
    ) -> None:
        head = binary_or_multi_class_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        super().__init__(head, model_dir, optimizer, config)


@_TEXTS
class BaselineRegressor(BaselineEstimator):
    """A model that predicts the mean of the labels.

    >>> model = BaselineRegressor(label_dimension=2)
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        label_dimension: int = 1,
        weight_column: str | NumericColumn | None = None,
        optimizer: object = "Ftrl",
        config: RunConfig | None = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
    ) -> None:
        super().__init__(
            RegressionHead(label_dimension, weight_column, loss_reduction), model_dir, optimizer, config
        )
