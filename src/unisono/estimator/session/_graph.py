"""Functions of TensorFlow 1's graphs, in a model_fn, an input_fn and outside of them.

In a model_fn an update is returned, for `EstimatorSpec.train_op`; outside of one it is made at once.

Tests: tests/unit/tf/test_estimator_names.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from unisono._errors import ContextError
from unisono._system._replacements import given, put
from unisono._types import ArrayLike, PyTree
from unisono.data._dataset import Dataset
from unisono.data._distribute import DistributedDataset
from unisono.data._iterator import DistributedIterator
from unisono.estimator import _train_op
from unisono.estimator._collections import LOSSES, REGULARIZATION_LOSSES, SUMMARIES, required_collections
from unisono.estimator._collections import identity as named_identity
from unisono.estimator._train_op import current_call, require_call
from unisono.estimator.session._input import (
    IteratorInitializer,
    current_input_run,
    make_one_shot_iterator,
)


def in_model_fn() -> bool:
    """Return whether the running code is part of a model_fn."""
    return current_call() is not None


# --- values ------------------------------------------------------------------------------------------------


def expose(name: str, value: ArrayLike) -> None:
    """Let hooks ask for an array by a name, in a model_fn; outside of one, do nothing."""
    if in_model_fn():
        _train_op.expose(name, value)


def identity(input: PyTree, name: str | None = None) -> PyTree:  # noqa: A002 (TensorFlow's name)
    """Return a tensor of the same value; in a model_fn hooks can ask for it by name.

    Args:
        input: array, or pytree of arrays.
        name: its name.
    """
    if not in_model_fn():
        return jax.tree.map(jnp.array, input)
    return named_identity(input, name)


# --- updates -----------------------------------------------------------------------------------------------


def group(*inputs: object, name: str | None = None) -> Any:
    """Return updates that are done together: in a model_fn for `train_op`; elsewhere they are done.

    Args:
        *inputs: results, or what `minimize` and its like returned.
        name: is not used.
    """
    return _train_op.group(*inputs) if in_model_fn() else inputs


def no_op(*args: object, **kwargs: object) -> Any:
    """Do nothing; in a model_fn, return an update that changes nothing.

    Args:
        *args: are not used.
        **kwargs: are not used.
    """
    return _train_op.group() if in_model_fn() else None


def initializer(*args: object, **kwargs: object) -> Any:
    """Return an update that changes nothing, for `tf.train.Scaffold`: variables have their first values.

    Args:
        *args: are not used.
        **kwargs: are not used.

    Raises:
        ContextError: outside of a model_fn, where it belongs to graphs and sessions.
    """
    require_call("An initializer of variables or tables")
    return _train_op.group()


def _assignment(method: str, text: str) -> Callable[..., Any]:
    """Return the function of TensorFlow 1 for a method of variables."""

    def assigned(ref: keras.Variable, value: ArrayLike, *args: object, **kwargs: object) -> Any:
        def make() -> None:
            getattr(ref, method)(value)

        if in_model_fn():
            return _train_op.OtherUpdate(make, is_alike=False)
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


@contextlib.contextmanager
def control_dependencies(control_inputs: Sequence[object] | None) -> Iterator[None]:
    """Let the updates of a block be made after others, which `train_op` reaches through them.

    Variables that Keras assigns change in the order of the program, at once.

    Args:
        control_inputs: what `minimize` and its like returned, and arrays; None for none, also of the blocks
            around this one.

    >>> with control_dependencies([group()]):
    ...     pass
    """
    call = current_call()
    if call is None:
        yield
        return
    outer = call.before
    call.before = () if control_inputs is None else (*outer, *control_inputs)
    try:
        yield
    finally:
        call.before = outer


# --- collections -------------------------------------------------------------------------------------------


class GraphKeys:
    """The names of collections that have members in a model_fn; other collections are empty."""

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
    """Return a collection of a model_fn so far.

    `GraphKeys.UPDATE_OPS` has no members: layers update their own statistics.

    Args:
        key: one of `GraphKeys`, or a name that `add_to_collection` was given.
        scope: with what the names of variables begin.

    Raises:
        ContextError: outside of a model_fn.
    """
    collections = required_collections("get_collection")
    if key == GraphKeys.TRAINABLE_VARIABLES:
        return trainable_variables(scope)
    if key in (GraphKeys.GLOBAL_VARIABLES, GraphKeys.MODEL_VARIABLES):
        return global_variables(scope)
    if key == GraphKeys.GLOBAL_STEP:
        return [_train_op.get_global_step()]
    if key == GraphKeys.REGULARIZATION_LOSSES:
        return collections.regularization_losses()
    return list(collections.members.get(key, ()))


def add_to_collection(name: str, value: Any) -> None:
    """Let `get_collection` find a value in this run of the model_fn.

    Args:
        name: of the collection.
        value: any.

    Raises:
        ContextError: outside of a model_fn.
    """
    # Its `initializer` goes there: an iterator of an input_fn needs none.
    if current_input_run() is None or in_model_fn():
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
    return _below(scope, list(require_call("global_variables").store.used))


def _below(scope: str | None, variables: list[keras.Variable]) -> list[keras.Variable]:
    return [v for v in variables if scope is None or v.path.startswith(scope)]


# --- gradients ---------------------------------------------------------------------------------------------


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
    if not in_model_fn():
        raise ContextError(
            "`tf.gradients` belongs to graphs. Received: a call outside of a model_fn. Write "
            "`with tf.GradientTape() as tape:` and `tape.gradient(y, x)`."
        )
    total = sum(ys[1:], ys[0]) if isinstance(ys, (list, tuple)) else ys
    wanted = list(xs) if isinstance(xs, (list, tuple)) else [xs]
    return _train_op.ambient_gradients(total, wanted)


# --- iterators ---------------------------------------------------------------------------------------------


def make_iterator(dataset: Any, shared_name: Any = None) -> Any:
    """Return an iterator of TensorFlow 1, with `get_next` and `initializer`.

    Args:
        dataset: what is read, also a distributed one.
        shared_name: is not used.
    """
    if isinstance(dataset, DistributedDataset):
        return iter(dataset)
    return make_one_shot_iterator(dataset)


def add_iterators() -> None:
    """Let data sets make iterators of TensorFlow 1, for input functions and loops of sessions."""
    names = ("make_initializable_iterator", "make_one_shot_iterator")
    initializer = property(lambda self: IteratorInitializer(), doc="As that of other iterators.")
    put(
        __name__,
        [
            *((kind, name, given(make_iterator)) for kind in (Dataset, DistributedDataset) for name in names),
            (DistributedIterator, "initializer", given(initializer)),
        ],
    )
