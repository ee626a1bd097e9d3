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
from unisono._types import ArrayLike, PyTree, UserValue
from unisono.data._pipeline._structure import TensorSpec
from unisono.estimator import _train_op
from unisono.estimator import summary as summary_v1
from unisono.estimator._collections import LOSSES, REGULARIZATION_LOSSES, SUMMARIES, required_collections
from unisono.estimator._collections import identity as named_identity
from unisono.estimator.losses import _functions as losses
from unisono.estimator.losses._weighted import Reduction
from unisono.estimator.metrics import _means as metrics
from unisono.estimator.session._graph_iterators import current_input_run
from unisono.tf.adapters._operations import identity as copy_identity

#: Arguments of Keras' functions.
_OF_KERAS = frozenset({"y_true", "y_pred"})


def _of_either(v1: Callable[..., Any], v2: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of TensorFlow 1 or that of Keras, by its arguments and where it is called.

    With an argument `y_true` or `y_pred` it is Keras'; with another name of an argument, or in a model_fn,
    that of TensorFlow 1; else that of Keras.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        is_keras = bool(_OF_KERAS & set(kwargs))
        is_v1 = not is_keras and (bool(kwargs) or _train_op.current_call() is not None)
        return (v1 if is_v1 else v2)(*args, **kwargs)

    called.__name__ = v1.__name__
    # Its example calls the other function of that name.
    text = (inspect.getdoc(v1) or "").partition(">>>")[0].rstrip()
    called.__doc__ = f"{text}\n\nWith `y_true` and `y_pred`, or outside of a model_fn, it is Keras'."
    return called


mean_squared_error_loss = _of_either(losses.mean_squared_error, keras.losses.mean_squared_error)
mean_squared_error = _of_either(metrics.mean_squared_error, keras.metrics.mean_squared_error)
mean_absolute_error = _of_either(metrics.mean_absolute_error, keras.metrics.mean_absolute_error)


class LossReduction(Reduction):
    """The names of a loss's reductions, in TensorFlow 1 and in Keras.

    >>> LossReduction.SUM_BY_NONZERO_WEIGHTS
    'weighted_sum_by_nonzero_weights'
    """

    AUTO = "sum_over_batch_size"


# --- summaries ---------------------------------------------------------------------------------------------


def _is_v1(step: UserValue) -> bool:
    return step is None and _train_op.current_call() is not None


def scalar(name: str, data: ArrayLike = None, step: Any = None, **options: Any) -> Any:
    """Record a number: in a model_fn as TensorFlow 1 does, with a step or elsewhere as TensorFlow 2.

    Args:
        name: its tag in TensorBoard.
        data: the number.
        step: of TensorFlow 2.
        options: others; `tensor` is TensorFlow 1's name of `data`.
    """
    data = options.pop("tensor", data)
    if _is_v1(step):
        return summary_v1.scalar(name, data, **options)
    return summary_v2.scalar(name, data, step)


def histogram(
    name: str, data: ArrayLike = None, step: Any = None, buckets: int | None = None, **options: Any
) -> Any:
    """Record a distribution: in a model_fn as TensorFlow 1 does, with a step or elsewhere as TensorFlow 2.

    Args:
        name: its tag in TensorBoard.
        data: the numbers.
        step: of TensorFlow 2.
        buckets: of TensorFlow 2.
        options: others; `values` is TensorFlow 1's name of `data`.
    """
    data = options.pop("values", data)
    if _is_v1(step):
        return summary_v1.histogram(name, data, **options)
    return summary_v2.histogram(name, data, step, **({} if buckets is None else {"buckets": buckets}))


def image(name: str, data: ArrayLike = None, step: Any = None, max_outputs: int = 3, **options: Any) -> Any:
    """Record images: in a model_fn as TensorFlow 1 does, with a step or elsewhere as TensorFlow 2.

    Args:
        name: their tag in TensorBoard.
        data: the images.
        step: of TensorFlow 2.
        max_outputs: the most images.
        options: others; `tensor` is TensorFlow 1's name of `data`.
    """
    data = options.pop("tensor", data)
    if _is_v1(step):
        return summary_v1.image(name, data, max_outputs, **options)
    return summary_v2.image(name, data, step, max_outputs)


def text(name: str, data: Any = None, step: Any = None, **options: Any) -> Any:
    """Record text: in a model_fn as TensorFlow 1 does, with a step or elsewhere as TensorFlow 2.

    Args:
        name: its tag in TensorBoard.
        data: the text.
        step: of TensorFlow 2.
        options: others; `tensor` is TensorFlow 1's name of `data`.
    """
    data = options.pop("tensor", data)
    return summary_v1.text(name, data, **options) if _is_v1(step) else summary_v2.text(name, data, step)


# --- graphs ------------------------------------------------------------------------------------------------


def identity(input: PyTree, name: str | None = None) -> PyTree:  # noqa: A002 (TensorFlow's name)
    """Return a tensor of the same value; in a model_fn hooks can ask for it by name.

    Args:
        input: array, or pytree of arrays.
        name: its name.
    """
    return copy_identity(input) if _train_op.current_call() is None else named_identity(input, name)


def group(*inputs: UserValue, name: str | None = None) -> Any:
    """Return what is to be done together: in a model_fn updates for `train_op`; elsewhere it has been done.

    Args:
        *inputs: results, or what `minimize` and its like returned.
        name: is not used.
    """
    return inputs if _train_op.current_call() is None else _train_op.group(*inputs)


def no_op(*args: UserValue, **kwargs: UserValue) -> Any:
    """Do nothing; in a model_fn, return an update that changes nothing.

    Args:
        *args: are not used.
        **kwargs: are not used.
    """
    return None if _train_op.current_call() is None else _train_op.no_op()


def initializer(*args: UserValue, **kwargs: UserValue) -> Any:
    """Return an update that changes nothing, for `tf.train.Scaffold`: variables have their first values.

    Args:
        *args: are not used.
        **kwargs: are not used.

    Raises:
        ContextError: outside of a model_fn, where it belongs to graphs and sessions.
    """
    _train_op.require_call("An initializer of variables or tables")
    return _train_op.no_op()


def _assigned(method: str, variable: keras.Variable, value: ArrayLike) -> Any:
    def make() -> None:
        getattr(variable, method)(value)

    if _train_op.current_call() is not None:
        return _train_op.other_update(make, is_alike=False)
    make()
    return variable


def assign(ref: keras.Variable, value: ArrayLike, *args: UserValue, **kwargs: UserValue) -> Any:
    """Assign to a variable; in a model_fn, return the update, for `train_op`.

    Args:
        ref: the variable.
        value: its new value.
        *args: are not used.
        **kwargs: are not used.
    """
    return _assigned("assign", ref, value)


def assign_add(ref: keras.Variable, value: ArrayLike, *args: UserValue, **kwargs: UserValue) -> Any:
    """Add to a variable; in a model_fn, return the update, for `train_op`.

    Args:
        ref: the variable.
        value: what is added.
        *args: are not used.
        **kwargs: are not used.
    """
    return _assigned("assign_add", ref, value)


def assign_sub(ref: keras.Variable, value: ArrayLike, *args: UserValue, **kwargs: UserValue) -> Any:
    """Subtract from a variable; in a model_fn, return the update, for `train_op`.

    Args:
        ref: the variable.
        value: what is subtracted.
        *args: are not used.
        **kwargs: are not used.
    """
    return _assigned("assign_sub", ref, value)


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


class GraphKeys:
    """The names of collections that have members in a model_fn; those of others have none."""

    GLOBAL_STEP = "global_step"
    GLOBAL_VARIABLES = "variables"
    LOCAL_VARIABLES = "local_variables"
    LOSSES = LOSSES
    METRIC_VARIABLES = "metric_variables"
    MODEL_VARIABLES = "model_variables"
    MOVING_AVERAGE_VARIABLES = "moving_average_variables"
    REGULARIZATION_LOSSES = REGULARIZATION_LOSSES
    SAVERS = "savers"
    SUMMARIES = SUMMARIES
    TABLE_INITIALIZERS = "table_initializer"
    TRAINABLE_VARIABLES = "trainable_variables"
    UPDATE_OPS = "update_ops"


def get_collection(key: str, scope: str | None = None) -> list[Any]:
    """Return what a model_fn has collected so far.

    `GraphKeys.UPDATE_OPS` has no members: layers update their own statistics.

    Args:
        key: one of `GraphKeys`, or a name that `add_to_collection` was given.
        scope: with what the names of variables begin.

    Raises:
        ContextError: outside of a model_fn.
    """
    found = required_collections("get_collection")
    if key == GraphKeys.TRAINABLE_VARIABLES:
        return trainable_variables(scope)
    if key in (GraphKeys.GLOBAL_VARIABLES, GraphKeys.MODEL_VARIABLES):
        return global_variables(scope)
    if key == GraphKeys.GLOBAL_STEP:
        return [_train_op.get_global_step()]
    if key == GraphKeys.REGULARIZATION_LOSSES:
        return found.regularization_losses()
    return list(found.members.get(key, ()))


def add_to_collection(name: str, value: Any) -> None:
    """Let `get_collection` find a value in this run of the model_fn.

    Args:
        name: of the collection.
        value: any.

    Raises:
        ContextError: outside of a model_fn.
    """
    # Its `initializer` goes there: an iterator of an input_fn needs none.
    if current_input_run() is None or _train_op.current_call() is not None:
        required_collections("add_to_collection").add(name, value)


def trainable_variables(scope: str | None = None) -> list[keras.Variable]:
    """Return the trainable variables that the model_fn has made so far.

    Args:
        scope: with what their names begin.

    Raises:
        ContextError: outside of a model_fn.
    """
    return _below(scope, _train_op.trainable_variables())


def global_variables(scope: str | None = None) -> list[keras.Variable]:
    """Return the variables that the model_fn has made so far.

    Args:
        scope: with what their names begin.

    Raises:
        ContextError: outside of a model_fn.
    """
    return _below(scope, list(_train_op.require_call("global_variables").store.used))


def _below(scope: str | None, variables: list[keras.Variable]) -> list[keras.Variable]:
    return [v for v in variables if scope is None or v.path.startswith(scope)]


def gradients(ys: ArrayLike, xs: Any, *args: UserValue, **kwargs: UserValue) -> list[Any]:
    """Return the gradients of a loss of the model_fn by variables.

    Args:
        ys: the loss; or a list, whose sum is meant.
        xs: variables.
        args: are not used.
        kwargs: are not used.

    Raises:
        ContextError: outside of a model_fn, where there is no graph.
    """
    if _train_op.current_call() is None:
        raise ContextError(
            "`tf.gradients` belongs to graphs. Received: a call outside of a model_fn. Write "
            "`with tf.GradientTape() as tape:` and `tape.gradient(y, x)`."
        )
    total = sum(ys[1:], ys[0]) if isinstance(ys, (list, tuple)) else ys
    wanted = list(xs) if isinstance(xs, (list, tuple)) else [xs]
    return _train_op.ambient_gradients(total, wanted)
