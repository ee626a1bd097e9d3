"""Canned Estimators: linear models, networks, both together, and what labels alone can predict.

Sources: https://www.tensorflow.org/api_docs/python/tf/estimator/LinearClassifier,
https://www.tensorflow.org/api_docs/python/tf/estimator/DNNClassifier,
https://www.tensorflow.org/api_docs/python/tf/estimator/DNNLinearCombinedClassifier,
https://arxiv.org/abs/1606.07792 (wide and deep),
https://www.tensorflow.org/api_docs/python/tf/estimator/BaselineClassifier

Tests: tests/virtual/estimator/test_canned.py.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from unisono._checks import whole_numbers
from unisono._errors import InvalidArgumentError
from unisono.estimator._docstrings import Texts, class_of
from unisono.estimator._run_config import RunConfig
from unisono.estimator.canned._canned import ROWS, CannedEstimator
from unisono.estimator.canned._classification import binary_or_multi_class_head
from unisono.estimator.canned._head import Head
from unisono.estimator.canned._logits import (
    Activation,
    BaselineLogits,
    Logits,
    dnn_logits,
    linear_logits,
    optimizer_maker,
)
from unisono.estimator.canned._regression import RegressionHead
from unisono.estimator.canned._texts import LINEAR, OPTIMIZER, TEXTS
from unisono.feature_column._encode import checked_columns, make_dense

if TYPE_CHECKING:
    from unisono._system._literals import Combiner
    from unisono.feature_column._column import FeatureColumn

#: The learning rates of optimizers that are given by name; each part of a combined model keeps its own.
_LINEAR_RATE, _DNN_RATE, _BASELINE_RATE = 0.2, 0.05, 0.3
_WIDE_RATE, _DEEP_RATE = 0.005, 0.001

_LINEAR_TEXTS = TEXTS.with_texts(
    LINEAR,
    optimizer=f"{OPTIMIZER}{_LINEAR_RATE}; None for Ftrl with `min({_LINEAR_RATE}, 1 / sqrt(columns))`.",
)
_DNN_TEXTS = TEXTS.with_texts(optimizer=f"{OPTIMIZER}{_DNN_RATE}.")
_BASELINE_TEXTS = TEXTS.with_texts(optimizer=f"{OPTIMIZER}{_BASELINE_RATE}.")


@_LINEAR_TEXTS
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
        sparse_combiner: Combiner = "sum",
        warm_start_from: object = None,
    ) -> None:
        columns = checked_columns(feature_columns, type(self).__name__)
        # TensorFlow's: by name 0.2, and for None less where there are many columns.
        rate = _LINEAR_RATE if optimizer is not None else min(_LINEAR_RATE, 1 / math.sqrt(len(columns)))
        logits = functools.partial(linear_logits, columns, head.logits_dimension, sparse_combiner)
        part = logits, optimizer_maker(optimizer or "Ftrl", rate)
        super().__init__(head, columns, [part], model_dir, config, warm_start_from)


def _checked_units(hidden_units: Sequence[int], argument: str) -> list[int]:
    units = whole_numbers(hidden_units, 1)
    if units is None:
        raise InvalidArgumentError(
            f"{argument} must be a list of positive integers. Received: {hidden_units!r}."
        )
    return units


@_DNN_TEXTS
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
        logits = functools.partial(
            dnn_logits, columns, _checked_units(hidden_units, "hidden_units"), head.logits_dimension,
            activation_fn, dropout, batch_norm,
        )  # fmt: skip
        part = logits, optimizer_maker(optimizer, _DNN_RATE)
        super().__init__(head, columns, [part], model_dir, config, warm_start_from)


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
        linear_sparse_combiner: Combiner = "sum",
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
        hidden_units, units = (
            _checked_units(dnn_hidden_units or (), "dnn_hidden_units"),
            head.logits_dimension,
        )
        deep = functools.partial(
            dnn_logits, make_dense(dnn, name), hidden_units, units, dnn_activation_fn, dnn_dropout, batch_norm
        )
        wide = functools.partial(linear_logits, linear, units, linear_sparse_combiner)
        rate = min(_WIDE_RATE, 1 / math.sqrt(max(1, len(linear))))
        every = (
            (dnn, deep, optimizer_maker(dnn_optimizer, _DEEP_RATE)),
            (linear, wide, optimizer_maker(linear_optimizer, rate)),
        )
        parts = [(logits, make_optimizer) for columns, logits, make_optimizer in every if columns]
        super().__init__(head, [*linear, *dnn], parts, model_dir, config, warm_start_from)


@_BASELINE_TEXTS
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
        def logits(features: Mapping[str, jax.Array], mode: str) -> Logits:
            layer = BaselineLogits(head.logits_dimension, name="baseline")
            return layer(features[ROWS]), layer.trainable_variables

        part = logits, optimizer_maker(optimizer, _BASELINE_RATE)
        super().__init__(head, (), [part], model_dir, config)


def _with_head(
    name: str, base: type[Any], make_head: Callable[..., Head], texts: Texts, doc: str, order: str
) -> type[Any]:
    """Return a class of Estimators that make their own head.

    Args:
        base: the class of Estimators that are given a head.
        order: the names of arguments, of `make_head` and of `base`, with spaces between them.
    """
    of_head = inspect.signature(make_head).parameters
    known = {**inspect.signature(base).parameters, **of_head}

    def init(self: CannedEstimator, **given: object) -> None:
        head = make_head(**{name: given.pop(name) for name in of_head if name in given})
        base.__init__(self, head, **given)

    return texts(class_of(name, (base,), doc, [known[name] for name in order.split()], init))


# fmt: off
LinearClassifier = _with_head(
    "LinearClassifier", LinearEstimator, binary_or_multi_class_head, _LINEAR_TEXTS,
    """A linear model that tells classes apart.

    >>> from unisono import feature_column
    >>> classifier = LinearClassifier([feature_column.numeric_column("age")])
    >>> ages, labels = {"age": [20.0, 60.0]}, [0, 1]
    >>> sorted(classifier.train(lambda: (ages, labels), steps=1).get_variable_names())[-2:]
    ['linear/linear_model/age/weights', 'linear/linear_model/bias_weights']
    """,
    "feature_columns model_dir n_classes weight_column label_vocabulary optimizer config "
    "warm_start_from loss_reduction sparse_combiner",
)
LinearRegressor = _with_head(
    "LinearRegressor", LinearEstimator, RegressionHead, _LINEAR_TEXTS,
    """A linear model that predicts numbers.

    >>> from unisono import feature_column
    >>> model = LinearRegressor([feature_column.numeric_column("age")])
    """,
    "feature_columns model_dir label_dimension weight_column optimizer config warm_start_from "
    "loss_reduction sparse_combiner",
)
DNNClassifier = _with_head(
    "DNNClassifier", DNNEstimator, binary_or_multi_class_head, _DNN_TEXTS,
    """A network that tells classes apart.

    >>> from unisono import feature_column
    >>> classifier = DNNClassifier([4], [feature_column.numeric_column("age")], n_classes=3)
    >>> predictions = classifier.predict(lambda: {"age": [20.0]}, predict_keys="probabilities")
    >>> next(predictions)["probabilities"].shape
    (3,)
    """,
    "hidden_units feature_columns model_dir n_classes weight_column label_vocabulary optimizer "
    "activation_fn dropout config warm_start_from loss_reduction batch_norm",
)
DNNRegressor = _with_head(
    "DNNRegressor", DNNEstimator, RegressionHead, _DNN_TEXTS,
    """A network that predicts numbers.

    >>> from unisono import feature_column
    >>> model = DNNRegressor([4], [feature_column.numeric_column("age")])
    """,
    "hidden_units feature_columns model_dir label_dimension weight_column optimizer activation_fn "
    "dropout config warm_start_from loss_reduction batch_norm",
)
DNNLinearCombinedClassifier = _with_head(
    "DNNLinearCombinedClassifier", DNNLinearCombinedEstimator, binary_or_multi_class_head, TEXTS,
    """A linear model and a network that tell classes apart ("wide and deep").

    >>> from unisono import feature_column
    >>> age = feature_column.numeric_column("age")
    >>> model = DNNLinearCombinedClassifier(
    ...     linear_feature_columns=[age], dnn_feature_columns=[age], dnn_hidden_units=[4]
    ... )
    """,
    "model_dir linear_feature_columns linear_optimizer dnn_feature_columns dnn_optimizer "
    "dnn_hidden_units dnn_activation_fn dnn_dropout n_classes weight_column label_vocabulary config "
    "warm_start_from loss_reduction batch_norm linear_sparse_combiner",
)
DNNLinearCombinedRegressor = _with_head(
    "DNNLinearCombinedRegressor", DNNLinearCombinedEstimator, RegressionHead, TEXTS,
    """A linear model and a network that predict numbers.

    >>> from unisono import feature_column
    >>> age = feature_column.numeric_column("age")
    >>> model = DNNLinearCombinedRegressor(
    ...     linear_feature_columns=[age], dnn_feature_columns=[age], dnn_hidden_units=[4]
    ... )
    """,
    "model_dir linear_feature_columns linear_optimizer dnn_feature_columns dnn_optimizer "
    "dnn_hidden_units dnn_activation_fn dnn_dropout label_dimension weight_column config "
    "warm_start_from loss_reduction batch_norm linear_sparse_combiner",
)
BaselineClassifier = _with_head(
    "BaselineClassifier", BaselineEstimator, binary_or_multi_class_head, _BASELINE_TEXTS,
    """A model that predicts how frequent classes are.

    >>> model = BaselineClassifier(n_classes=3)
    """,
    "model_dir n_classes weight_column label_vocabulary optimizer config loss_reduction",
)
BaselineRegressor = _with_head(
    "BaselineRegressor", BaselineEstimator, RegressionHead, _BASELINE_TEXTS,
    """A model that predicts the mean of the labels.

    >>> model = BaselineRegressor(label_dimension=2)
    """,
    "model_dir label_dimension weight_column optimizer config loss_reduction",
)
