"""Names that mean one thing in a model_fn of TensorFlow 1, and another one elsewhere.

Tests: tests/unit/tf/test_estimator_names.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras

from unisono import summary as summary_v2
from unisono._errors import ContextError
from unisono._types import ArrayLike, PyTree
from unisono.data._pipeline._structure import TensorSpec
from unisono.estimator import _train_op
from unisono.estimator import summary as summary_v1
from unisono.estimator._collections import LOSSES, REGULARIZATION_LOSSES, SUMMARIES, required_collections
from unisono.estimator._collections import identity as named_identity
from unisono.estimator.losses._functions import mean_squared_error as mean_squared_error_v1
from unisono.estimator.losses._weighted import Reduction
from unisono.estimator.metrics._means import mean_absolute_error as absolute_error_metric
from unisono.estimator.metrics._means import mean_squared_error as squared_error_metric
from unisono.estimator.session._graph_iterators import current_input_run

#: Arguments of Keras' functions.
_OF_KERAS = frozenset({"y_true", "y_pred"})


def _of_either(v1: Callable[..., Any], v2: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of TensorFlow 1 or that of Keras, by its arguments and where it is called.

    With an argument `y_true` or `y_pred` it is Keras'; with another name of an argument, or in a model_fn,
    that of TensorFlow 1; else that of Keras.
    """

    def called(*args: object, **kwargs: object) -> Any:
        is_keras = bool(_OF_KERAS & set(kwargs))
        is_v1 = not is_keras and (bool(kwargs) or _train_op.current_call() is not None)
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
        if step is None and _train_op.current_call() is not None:
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


# --- graphs ------------------------------------------------------------------------------------------------


def identity(input: PyTree, name: str | None = None) -> PyTree:  # noqa: A002 (TensorFlow's name)
    """Return a tensor of the same value; in a model_fn hooks can ask for it by name.

    Args:
        input: array, or pytree of arrays.
        name: its name.
    """
    if _train_op.current_call() is None:
        return jax.tree.map(jnp.array, input)
    return named_identity(input, name)


def group(*inputs: object, name: str | None = None) -> Any:
    """Return what is to be done together: in a model_fn updates for `train_op`; elsewhere it has been done.

    Args:
        *inputs: results, or what `minimize` and its like returned.
        name: is not used.
    """
    return inputs if _train_op.current_call() is None else _train_op.group(*inputs)


def no_op(*args: object, **kwargs: object) -> Any:
    """Do nothing; in a model_fn, return an update that changes nothing.

    Args:
        *args: are not used.
        **kwargs: are not used.
    """
    return None if _train_op.current_call() is None else _train_op.no_op()


def initializer(*args: object, **kwargs: object) -> Any:
    """Return an update that changes nothing, for `tf.train.Scaffold`: variables have their first values.

    Args:
        *args: are not used.
        **kwargs: are not used.

    Raises:
        ContextError: outside of a model_fn, where it belongs to graphs and sessions.
    """
    _train_op.require_call("An initializer of variables or tables")
    return _train_op.no_op()


def _assignment(method: str, text: str) -> Callable[..., Any]:
    """Return the function of TensorFlow 1 for a method of variables."""

    def assigned(ref: keras.Variable, value: ArrayLike, *args: object, **kwargs: object) -> Any:
        def make() -> None:
            getattr(ref, method)(value)

        if _train_op.current_call() is not None:
            return _train_op.other_update(make, is_alike=False)
        make()
        return ref

    assigned.__name__ = method
    assigned.__doc__ = f"""{text} a variable; in a model_fn, return the update, for `train_op`.

    Args:
        ref: the variable.
        value: its new value, or the difference.
        *args: are not used.
        **kwargs: are not used.
    """
    return assigned


assign = _assignment("assign", "Assign to")
assign_add, assign_sub = _assignment("assign_add", "Add to"), _assignment("assign_sub", "Subtract from")


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


def gradients(ys: ArrayLike, xs: Any, *args: object, **kwargs: object) -> list[Any]:
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
