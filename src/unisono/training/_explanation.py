"""A table of how each part of a model is computed on the replicas of a strategy, and why.

Tests: tests/virtual/training/test_explanation.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

import jax
import jax.numpy as jnp
import keras

from unisono._context import entered
from unisono._errors import InvalidArgumentError
from unisono._types import PyTree, Tree
from unisono._values import ReduceOp
from unisono.step._keras_internals import all_layers, build_for_batch
from unisono.training._step_form import is_stateful
from unisono.training.groups._batch_policy import one_batch_size
from unisono.training.replica._rows import DiscardingScope, rows_of
from unisono.training.replica._step_reading import (
    APART,
    PartTreatment,
    StepReading,
    collected_in,
    shapes_of,
    with_rows,
)
from unisono.training.trainer._trainer_step import TrainerStep, TrainerTask

if TYPE_CHECKING:
    from unisono.step._replicas import Replicas


def explanation(model: keras.Model, replicas: Replicas, data: PyTree = None) -> str:
    """Return a table of how each part of a model is computed.

    Args:
        data: `x`, or a tuple `(x, y)` or `(x, y, sample_weight)` of arrays; None takes the shapes of the
            model's inputs.

    Raises:
        InvalidArgumentError: the shapes of the inputs are not known, and no data is given.
    """
    count = replicas.num_replicas_in_sync
    batch = _batch_of(model, data, 4 * count)
    lines = list(_findings(model, replicas, batch)) if count > 1 else []
    if not lines:
        return f"{model.name}: one replica computes all rows, as plain Keras does."
    rows = [PartTreatment("part", f"on {count} replicas", "because"), *lines]
    widths = [max(len(x.part) for x in rows), max(len(x.treatment) for x in rows)]
    return "\n".join(f"{x.part:{widths[0]}}  {x.treatment:{widths[1]}}  {x.reason}".rstrip() for x in rows)


def _batch_of(model: keras.Model, data: PyTree, rows: int) -> PyTree:
    """Return arrays, or shapes, of a batch for all replicas."""
    if data is not None:
        batch = data if isinstance(data, tuple) else (data,)
        return with_rows(shapes_of(batch), rows)
    inputs = getattr(model, "inputs", None) if model.built else None
    if not inputs or any(None in x.shape[1:] for x in inputs):
        found = f"inputs of shapes {[tuple(x.shape) for x in inputs]}" if inputs else "no known inputs"
        raise InvalidArgumentError(
            "The shapes of a model's inputs must be known to explain it. Received: "
            f"{model.name!r} with {found}. Pass a few rows: `strategy.explain(model, (x[:8], y[:8]))`."
        )
    fixed = {x.shape[0] for x in inputs} - {None}
    rows = fixed.pop() if fixed else rows
    # As the model was given them: one, a list, or a dict.
    given = inputs[0] if isinstance(model, keras.Sequential) else model.input
    shape = lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)  # noqa: E731
    return (keras.tree.map_structure(shape, given),)


def _findings(model: keras.Model, replicas: Replicas, batch: PyTree) -> Iterator[PartTreatment]:
    fixed = one_batch_size(model)
    if fixed:
        yield PartTreatment("all", "every replica computes all rows", fixed)
        return
    task = TrainerTask.TRAIN if model.compiled else TrainerTask.PREDICT
    if is_stateful(model, task):
        reason = "the model has a `train_step` in TensorFlow's form, as in tf.distribute"
        yield PartTreatment("train_step", APART, reason)
        return
    if model.compiled:
        # The variables of the optimizer, which Keras makes in the first step.
        model.optimizer.build(model.trainable_variables)
        if len(batch) > 1:
            # Metrics, which Keras makes for the first targets.
            build_for_batch(model, batch)
    reading = TrainerStep(model, replicas, task).read(batch)
    yield from _of_layers(model, reading)
    yield from reading.findings
    if reading.mixes:
        joins = replicas.joins_rows and (replicas.mesh.devices_per_replica == 1 or not reading.has_groups)
        how = "one program, divided by XLA" if joins else "every replica computes all rows"
        yield PartTreatment("rows of a batch", how, reading.mixes)
    elif model.compiled and len(batch) > 1:
        yield from _of_losses(model, replicas, batch)


def _of_layers(model: keras.Model, reading: StepReading) -> Iterator[PartTreatment]:
    layers = [x for x in all_layers(model, include_self=False) if not isinstance(x, keras.layers.InputLayer)]
    layers = [x for x in layers if not isinstance(x, keras.Model)]
    apart = [x for x in layers if x.name in reading.apart]
    for layer in apart:
        reason = "it normalizes, as in tf.distribute; `synchronized=True` takes all rows"
        if not isinstance(layer, keras.layers.BatchNormalization):
            reason = "it is marked by `unisono.per_replica`"
        elif getattr(layer, "synchronized", False):
            yield PartTreatment(layer.name, "with statistics of all rows", "`synchronized=True`")
            continue
        yield PartTreatment(layer.name, "with the rows of one replica", reason)
    others = len(layers) - len(apart)
    if others and not reading.mixes:
        what = f"{others} {'other ' if apart else ''}layer{'s' if others > 1 else ''}"
        yield PartTreatment(what, APART, "each row depends on itself")


class _AllRowsEngine:
    """An engine for a trace that computes nothing, in which every replica has the same rows."""

    is_empty, replica_id = False, 0

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas

    def all_reduce(self, op: ReduceOp, tree: Tree) -> Tree:
        """Return the replica's own values."""
        return tree

    def total(self, size: int) -> int:
        """Return the size in all replicas."""
        return size * self.num_replicas

    def all_gather(self, tree: Tree, axis: int) -> Tree:
        """Return the rows as often as there are replicas."""
        gathered: Tree = jax.tree.map(lambda x: jnp.concatenate([x] * self.num_replicas, axis), tree)
        return gathered

    def exchange(self, tree: PyTree) -> NoReturn:
        """Reject the call: losses and metrics do not exchange single values."""
        raise NotImplementedError


def _of_losses(model: keras.Model, replicas: Replicas, batch: Sequence[PyTree]) -> list[PartTreatment]:
    """Return how losses and metrics are computed of predictions whose rows are apart."""
    count = replicas.num_replicas_in_sync
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(
        with_rows(tuple(batch), (rows_of(batch) or count) // count)
    )
    findings: list[PartTreatment] = []
    context = replicas.context(_AllRowsEngine(count), means=True)

    def losses(x: PyTree, y: PyTree, sample_weight: PyTree) -> None:
        with DiscardingScope():
            with entered(None):
                outputs = model(x)
            with entered(context):
                model.compute_loss(x, y, outputs, sample_weight)
                model.compute_metrics(x, y, outputs, sample_weight)

    with collected_in(findings):
        jax.eval_shape(losses, x, y, sample_weight)
    return findings
