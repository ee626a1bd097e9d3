"""`BaselineClassifier`, `BaselineRegressor`, `BaselineEstimator`: what labels alone can predict.

Source: https://www.tensorflow.org/api_docs/python/tf/estimator/BaselineClassifier

Tests: tests/virtual/estimator/test_canned.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unisono._types import UserValue
from unisono.estimator._run_config import RunConfig
from unisono.estimator.canned._canned import ROWS, CannedEstimator
from unisono.estimator.canned._classification import binary_or_multi_class_head
from unisono.estimator.canned._head import SUM_OVER_BATCH_SIZE, Head, minimized
from unisono.estimator.canned._logits import BaselineLogits, optimizer_maker
from unisono.estimator.canned._regression import RegressionHead
from unisono.feature_column._numeric import NumericColumn

_LEARNING_RATE = 0.3


class BaselineEstimator(CannedEstimator):
    """A model that reads no features: it learns the mean of the labels.

    Args:
        head: such as `MultiLabelHead(n_classes)`.
        model_dir: of checkpoints and event files.
        optimizer: a name, an optimizer, or a function that returns one; by name its learning rate is 0.3.
        config: a `RunConfig`.
    """

    def __init__(
        self,
        head: Head,
        model_dir: str | os.PathLike[str] | None = None,
        optimizer: UserValue = "Ftrl",
        config: RunConfig | None = None,
    ) -> None:
        make_optimizer = optimizer_maker(optimizer, _LEARNING_RATE)

        def model(features: Mapping[str, Any], mode: str) -> tuple[Any, Callable[[Any], Any]]:
            layer = BaselineLogits(head.logits_dimension, name="baseline")
            logits = layer(features[ROWS])

            def train_op(loss: Any) -> Any:
                return minimized(make_optimizer(), loss, layer.trainable_variables)

            return logits, train_op

        super().__init__(head, (), model, model_dir, config)


class BaselineClassifier(BaselineEstimator):
    """A model that predicts how frequent classes are.

    Args:
        model_dir: of checkpoints and event files.
        n_classes: how many classes there are.
        weight_column: the key of a feature with weights of examples, a numeric column, or None.
        label_vocabulary: the names of the classes, where labels are strings.
        optimizer: a name, an optimizer, or a function that returns one; by name its learning rate is 0.3.
        config: a `RunConfig`.
        loss_reduction: "sum_over_batch_size" or "sum".
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        n_classes: int = 2,
        weight_column: str | NumericColumn | None = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: UserValue = "Ftrl",
        config: RunConfig | None = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
    ) -> None:
        head = binary_or_multi_class_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        super().__init__(head, model_dir, optimizer, config)


class BaselineRegressor(BaselineEstimator):
    """A model that predicts the mean of the labels.

    Args:
        model_dir: of checkpoints and event files.
        label_dimension: how many numbers an example has.
        weight_column: the key of a feature with weights of examples, a numeric column, or None.
        optimizer: a name, an optimizer, or a function that returns one; by name its learning rate is 0.3.
        config: a `RunConfig`.
        loss_reduction: "sum_over_batch_size" or "sum".
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        label_dimension: int = 1,
        weight_column: str | NumericColumn | None = None,
        optimizer: UserValue = "Ftrl",
        config: RunConfig | None = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
    ) -> None:
        super().__init__(
            RegressionHead(label_dimension, weight_column, loss_reduction), model_dir, optimizer, config
        )
