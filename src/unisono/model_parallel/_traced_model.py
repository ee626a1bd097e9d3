"""The forward pass of a model, or a step of it, as a traced program whose weights are arguments.

Tests: tests/virtual/strategies/test_automatic_layout.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._context import OneReplica, entered
from unisono._system._blocks import garbage_collection_paused
from unisono._types import PyTree
from unisono.step._keras_internals import loss_of_step, stored_dtype, takes_training
from unisono.training.replica._rows import DiscardingScope
from unisono.training.replica._step_reading import shapes_of, with_rows
from unisono.training.trainer._trainer_step import TrainerStep, variables_of

if TYPE_CHECKING:
    from unisono.step._functional import StatePlan


@contextmanager
def _unnoticed() -> Iterator[None]:
    """Surround a trace of a user's code, which may draw random numbers: what follows must not notice."""
    states = random.getstate(), np.random.get_state()
    try:
        with garbage_collection_paused(), entered(None):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def shape_of(variable: keras.Variable, copies: int | None = None) -> jax.ShapeDtypeStruct:
    """Return the shape and type of a variable's array.

    Args:
        copies: the number of replicas, where each has its own value.
    """
    rows = () if copies is None else (copies,)
    return jax.ShapeDtypeStruct((*rows, *variable.shape), stored_dtype(variable))


def shapes_of_plan(plan: StatePlan, replicas: int) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of the values that the program of a step takes."""
    return [shape_of(s.variable, replicas if s.is_stacked else None) for s in plan.slots]


def traced(
    function: Callable[..., PyTree], values: Sequence[jax.ShapeDtypeStruct], arguments: PyTree
) -> jax.extend.core.ClosedJaxpr:
    """Return a function of variables' values, in a list, and other arrays as a program."""
    with _unnoticed():
        return jax.make_jaxpr(function)(list(values), arguments)


def rows_of_replica(batch: PyTree, replicas: int) -> PyTree:
    """Return the shapes of one replica's part of a batch."""
    shapes = shapes_of(batch)
    rows = max((x.shape[0] for x in jax.tree.leaves(shapes) if x.ndim), default=1)
    return with_rows(shapes, max(rows // replicas, 1))


def forward_pass(
    model: keras.Model, variables: Sequence[keras.Variable], batch: PyTree
) -> jax.extend.core.ClosedJaxpr:
    """Return a model's forward pass in training, with its loss where it has one.

    It is the same whatever the model does first, so that the choice does not depend on it.

    Args:
        variables: all of the model.
        batch: shapes of `(x, y, sample_weight)`, or of a shorter tuple.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    kwargs = {"training": True} if takes_training(model) else {}

    def forward(values: list[jax.Array], given: PyTree, with_loss: bool) -> PyTree:
        x, y, sample_weight = given
        pairs = list(zip(variables, values, strict=True))
        known = {id(v) for v in variables}
        own = (v for v in model.metrics_variables if id(v) not in known)
        pairs += [(v, jnp.zeros(tuple(v.shape), stored_dtype(v))) for v in own]
        with DiscardingScope(pairs, collect_losses=True) as scope:
            outputs = model(x, **kwargs)
            if with_loss:
                outputs = loss_of_step(model, x, y, outputs, sample_weight, training=True)
            states = [scope.get_current_value(v) for v in model.non_trainable_variables]
        return outputs, states

    shapes, given = list(map(shape_of, variables)), (x, y, sample_weight)
    if model.compiled and y is not None:
        try:
            return traced(lambda v, a: forward(v, a, True), shapes, given)
        except Exception:  # a loss of the user may need the context of a replica, or all rows
            pass
    return traced(lambda v, a: forward(v, a, False), shapes, given)


def whole_step(
    step: TrainerStep, variables: Sequence[keras.Variable], batch: PyTree
) -> jax.extend.core.ClosedJaxpr:
    """Return the whole step of a model whose forward pass is not by itself, such as one with two optimizers.

    Args:
        step: of the model.
        variables: all of its state, in the order of the step.
    """
    parts = variables_of(step.model, step.task)

    def run(values: list[jax.Array], batch: PyTree) -> PyTree:
        of_variable = dict(zip(map(id, variables), values, strict=True))
        state = tuple([of_variable[id(v)] for v in part] for part in parts)
        return step.inside(OneReplica(), state, batch)

    return traced(run, list(map(shape_of, variables)), batch)
