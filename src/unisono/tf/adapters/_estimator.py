"""Names that mean one thing in a model_fn of TensorFlow 1, and another one elsewhere.

Tests: tests/unit/tf/test_estimator_names.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras

from unisono import summary as summary_v2
from unisono._errors import ContextError
from unisono._types import ArrayLike
from unisono.data._pipeline._structure import TensorSpec
from unisono.estimator import summary as summary_v1
from unisono.estimator.losses._functions import mean_squared_error as mean_squared_error_v1
from unisono.estimator.losses._weighted import Reduction
from unisono.estimator.metrics._means import mean_absolute_error as absolute_error_metric
from unisono.estimator.metrics._means import mean_squared_error as squared_error_metric
from unisono.estimator.session._graph import in_model_fn

#: Arguments of Keras' functions.
_OF_KERAS = frozenset({"y_true", "y_pred"})


def _of_either(v1: Callable[..., Any], v2: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of TensorFlow 1 or that of Keras, by its arguments and where it is called.

    With an argument `y_true` or `y_pred` it is Keras'; with another name of an argument, or in a model_fn,
    that of TensorFlow 1; else that of Keras.
    """

    def called(*args: object, **kwargs: object) -> Any:
        is_keras = bool(_OF_KERAS & set(kwargs))
        is_v1 = not is_keras and (bool(kwargs) or in_model_fn())
        return (v1 if is_v1 else v2)(*args, **kwargs)

    called.__name__ = v1.__name__
    # Its example calls the other function of that name.
    text = (inspect.getdoc(v1) or "").partition(">>>")[0].rstrip()
    called.__doc__ = f"{text}\n\nWith `y_true` and `y_pred`, or outside of a model_fn, it is Keras'."
    return called


mean_squared_error_loss = _of_either(mean_squared_error_v1, keras.losses.mean_squared_error)
mean_squared_error = _of_either(squared_error_metric, keras.metrics.mean_squared_error)
mean_absolute_error = _of_either(absolute_error_metric, keras.metrics.mean_absolute_error)


class LossReduction(Reduction):
    """The names of a loss's reductions, in TensorFlow 1 and in Keras.

    >>> LossReduction.SUM_BY_NONZERO_WEIGHTS
    'weighted_sum_by_nonzero_weights'
    """

    AUTO = "sum_over_batch_size"


# --- summaries ---------------------------------------------------------------------------------------------


def _summary(kind: str, older: str, option: str = "") -> Callable[..., Any]:
    """Return `tf.summary`'s function of a kind, whose data TensorFlow 1 names otherwise."""

    def record(
        name: str,
        data: ArrayLike = None,
        step: int | keras.Variable | None = None,
        *args: int,
        **options: Any,
    ) -> Any:
        data = options.pop(older, data)
        if step is None and in_model_fn():
            options.pop("buckets", None)
            return getattr(summary_v1, kind)(name, data, *args, **options)
        known = {option: options[option]} if options.get(option) is not None else {}
        return getattr(summary_v2, kind)(name, data, step, *args, **known)

    record.__name__ = kind
    record.__doc__ = f"""Record data: in a model_fn as TensorFlow 1, with a step or elsewhere as TensorFlow 2.

    Args:
        name: its tag in TensorBoard.
        data: a {kind}.
        step: of TensorFlow 2.
        *args: others.
        **options: others; `{older}` is TensorFlow 1's name of `data`.
    """
    return record


scalar, histogram = _summary("scalar", "tensor"), _summary("histogram", "values", "buckets")
image, text = _summary("image", "tensor", "max_outputs"), _summary("text", "tensor")


def placeholder(dtype: Any, shape: Any = None, name: str | None = None) -> TensorSpec:
    """Return what a `ServingInputReceiver` takes for an input of an exported model: its shape and dtype.

    Args:
        dtype: of the input.
        shape: with None for any number of rows.
        name: of the input.

    Raises:
        ContextError: without a shape, as graphs are fed.

    >>> placeholder("float32", [None, 3]).shape
    (None, 3)
    """
    if shape is None:
        raise ContextError(
            "`tf.placeholder` says of which form an exported model's input is. Received: shape=None. Write "
            "`tf.placeholder(tf.float32, [None, 3])`; to feed values, a `tf.function` of arguments."
        )
    return TensorSpec(shape, dtype, name)
