"""`add_metrics`: an Estimator with further metrics.

Source: https://github.com/tensorflow/estimator (tensorflow_estimator/python/estimator/extenders.py)

Tests: tests/virtual/estimator/test_evaluate.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono._errors import InvalidArgumentError
from unisono._types import PyTree
from unisono.estimator._estimator import Estimator
from unisono.estimator._run_config import RunConfig
from unisono.estimator._spec import EstimatorSpec, ModeKeys
from unisono.estimator.session._model_step import argument_names

_ARGUMENTS = frozenset({"features", "labels", "predictions", "config"})


def add_metrics(estimator: Estimator, metric_fn: Callable[..., Any]) -> Estimator:
    """Return an Estimator that is another one with further metrics.

    Args:
        estimator: any, canned ones included, whose features are encoded ones.
        metric_fn: a function of some of `labels`, `predictions`, `features` and `config`, that returns
            metrics by name, as `EstimatorSpec(eval_metric_ops=...)` takes them.

    Returns:
        A new Estimator of the same `model_dir` and configuration.

    Raises:
        InvalidArgumentError: `metric_fn` has other arguments.

    >>> from unisono import feature_column
    >>> from unisono.estimator import LinearRegressor
    >>> add_metrics(LinearRegressor([feature_column.numeric_column("x")]), lambda labels: {}).params
    {}
    """
    known = argument_names(metric_fn)
    if others := sorted(known - _ARGUMENTS):
        raise InvalidArgumentError(
            f"metric_fn has following not expected args: {others}. Received: one of {sorted(known)}. It may "
            f"have {sorted(_ARGUMENTS)}."
        )
    inner = estimator.model_fn

    def model_fn(features: PyTree, labels: PyTree, mode: str, config: RunConfig) -> EstimatorSpec:
        spec: EstimatorSpec = inner(features, labels, mode, config)
        if mode != ModeKeys.EVAL:
            return spec
        every = {
            "features": features, "labels": labels, "predictions": spec.predictions, "config": config
        }  # fmt: skip
        further = metric_fn(**{name: value for name, value in every.items() if name in known})
        return spec.replace(eval_metric_ops={**(spec.eval_metric_ops or {}), **further})

    return estimator._with_model_fn(model_fn)
