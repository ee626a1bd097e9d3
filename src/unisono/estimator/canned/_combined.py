"""`DNNLinearCombinedClassifier` and its sisters: a linear model and a network, whose logits are added.

Sources: https://www.tensorflow.org/api_docs/python/tf/estimator/DNNLinearCombinedClassifier,
https://arxiv.org/abs/1606.07792 (wide and deep)

Tests: tests/virtual/estimator/test_canned.py.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from unisono._errors import InvalidArgumentError
from unisono.estimator._run_config import RunConfig
from unisono.estimator._train_op import group
from unisono.estimator.canned._canned import CannedEstimator, is_training
from unisono.estimator.canned._classification import binary_or_multi_class_head
from unisono.estimator.canned._dnn import Activation, checked_units
from unisono.estimator.canned._head import SUM_OVER_BATCH_SIZE, Head, minimized
from unisono.estimator.canned._logits import Logits, dnn_logits, linear_logits, optimizer_maker
from unisono.estimator.canned._regression import RegressionHead
from unisono.estimator.canned._texts import TEXTS
from unisono.feature_column._encode import checked_columns, make_dense

if TYPE_CHECKING:
    from unisono.feature_column._column import FeatureColumn
    from unisono.feature_column._numeric import NumericColumn

_DNN_LEARNING_RATE, _LINEAR_LEARNING_RATE = 0.001, 0.005


@dataclasses.dataclass(frozen=True)
class WideAndDeep:
    """Both models."""

    linear_columns: Sequence[FeatureColumn]
    linear_optimizer: Callable[[], Any]
    sparse_combiner: str
    dnn_columns: Sequence[FeatureColumn]
    dnn_optimizer: Callable[[], Any]
    hidden_units: Sequence[int]
    activation_fn: Activation
    dropout: float | None
    batch_norm: bool

    def logits(
        self, features: Mapping[str, jax.Array], mode: str, units: int
    ) -> tuple[Any, Callable[[Any], Any]]:
        """Return the sum of both logits, and the function that returns the train op of a loss."""
        parts: list[tuple[Logits, Callable[[], Any]]] = []
        if self.dnn_columns:
            logits = dnn_logits(
                features, self.dnn_columns, self.hidden_units, units, self.activation_fn, self.dropout,
                self.batch_norm, is_training(mode),
            )  # fmt: skip
            parts.append((logits, self.dnn_optimizer))
        if self.linear_columns:
            logits = linear_logits(features, self.linear_columns, units, self.sparse_combiner)
            parts.append((logits, self.linear_optimizer))

        def train_op(loss: jax.Array) -> Any:
            return group(
                *(minimized(make_optimizer(), loss, variables) for (_, variables), make_optimizer in parts)
            )

        return sum(logits for (logits, _), _ in parts), train_op


@TEXTS.with_texts(raises={"InvalidArgumentError": "there is no column, or a network without hidden layers."})
class DNNLinearCombinedEstimator(CannedEstimator):
    """A linear model and a network with a head.

    >>> from unisono import estimator, feature_column
    >>> age = feature_column.numeric_column("age")
    >>> model = DNNLinearCombinedEstimator(
    ...     estimator.MultiLabelHead(3), dnn_feature_columns=[age], dnn_hidden_units=[4]
    ... )
    """

    def __init__(
        self,
        head: Head,
        model_dir: str | os.PathLike[str] | None = None,
        linear_feature_columns: Iterable[FeatureColumn] | None = None,
        linear_optimizer: object = "Ftrl",
        dnn_feature_columns: Iterable[FeatureColumn] | None = None,
        dnn_optimizer: object = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: Activation = "relu",
        dnn_dropout: float | None = None,
        config: RunConfig | None = None,
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
        warm_start_from: object = None,
    ) -> None:
        name = type(self).__name__
        linear = checked_columns(linear_feature_columns, name) if linear_feature_columns else []
        dnn = checked_columns(dnn_feature_columns, name) if dnn_feature_columns else []
        if not linear and not dnn:
            raise InvalidArgumentError(
                f"{name} needs linear_feature_columns or dnn_feature_columns. Received: neither."
            )
        if dnn and not dnn_hidden_units:
            raise InvalidArgumentError(
                f"{name} needs dnn_hidden_units with dnn_feature_columns. Received: {dnn_hidden_units!r}."
            )
        rate = min(_LINEAR_LEARNING_RATE, 1 / math.sqrt(max(1, len(linear))))
        models = WideAndDeep(
            linear, optimizer_maker(linear_optimizer, rate), linear_sparse_combiner,
            make_dense(dnn, name), optimizer_maker(dnn_optimizer, _DNN_LEARNING_RATE),
            checked_units(dnn_hidden_units or (), "dnn_hidden_units"), dnn_activation_fn, dnn_dropout,
            batch_norm,
        )  # fmt: skip

        def model(features: Mapping[str, jax.Array], mode: str) -> tuple[Any, Callable[[Any], Any]]:
            return models.logits(features, mode, head.logits_dimension)

        super().__init__(head, [*linear, *dnn], model, model_dir, config, warm_start_from)


@TEXTS
class DNNLinearCombinedClassifier(DNNLinearCombinedEstimator):
    """A linear model and a network that tell classes apart ("wide and deep").

    >>> from unisono import feature_column
    >>> age = feature_column.numeric_column("age")
    >>> model = DNNLinearCombinedClassifier(
    ...     linear_feature_columns=[age], dnn_feature_columns=[age], dnn_hidden_units=[4]
    ... )
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        linear_feature_columns: Iterable[FeatureColumn] | None = None,
        linear_optimizer: object = "Ftrl",
        dnn_feature_columns: Iterable[FeatureColumn] | None = None,
        dnn_optimizer: object = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: Activation = "relu",
        dnn_dropout: float | None = None,
        n_classes: int = 2,
        weight_column: str | NumericColumn | None = None,
        label_vocabulary: Sequence[str] | None = None,
        config: RunConfig | None = None,
        warm_start_from: object = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
    ) -> None:
        super().__init__(
            binary_or_multi_class_head(n_classes, weight_column, label_vocabulary, loss_reduction),
            model_dir, linear_feature_columns, linear_optimizer, dnn_feature_columns, dnn_optimizer,
            dnn_hidden_units, dnn_activation_fn, dnn_dropout, config, batch_norm, linear_sparse_combiner,
            warm_start_from,
        )  # fmt: skip


@TEXTS
class DNNLinearCombinedRegressor(DNNLinearCombinedEstimator):
    """A linear model and a network that predict numbers.

    >>> from unisono import feature_column
    >>> age = feature_column.numeric_column("age")
    >>> model = DNNLinearCombinedRegressor(
    ...     linear_feature_columns=[age], dnn_feature_columns=[age], dnn_hidden_units=[4]
    ... )
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        linear_feature_columns: Iterable[FeatureColumn] | None = None,
        linear_optimizer: object = "Ftrl",
        dnn_feature_columns: Iterable[FeatureColumn] | None = None,
        dnn_optimizer: object = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: Activation = "relu",
        dnn_dropout: float | None = None,
        label_dimension: int = 1,
        weight_column: str | NumericColumn | None = None,
        config: RunConfig | None = None,
        warm_start_from: object = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
    ) -> None:
        super().__init__(
            RegressionHead(label_dimension, weight_column, loss_reduction),
            model_dir, linear_feature_columns, linear_optimizer, dnn_feature_columns, dnn_optimizer,
            dnn_hidden_units, dnn_activation_fn, dnn_dropout, config, batch_norm, linear_sparse_combiner,
            warm_start_from,
        )  # fmt: skip
