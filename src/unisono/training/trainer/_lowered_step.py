"""The program of one training step of a model, to look into: it is lowered, and does not run.

Tests: tests/virtual/test_planned_sizes.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.extend.core as jex
import keras

from unisono._errors import InvalidArgumentError
from unisono._types import PyTree
from unisono.training.groups._batch_source import BatchSource
from unisono.training.trainer._protocol import State
from unisono.training.trainer._trainer_function import TrainerFunction


class _LoweredError(Exception):
    """Ends Keras' call before the step."""

    def __init__(self, lowered: jax.stages.Lowered, trace: jex.ClosedJaxpr) -> None:
        super().__init__()
        self.lowered, self.trace = lowered, trace


def lowered_step(model: keras.Model, x: PyTree, y: PyTree) -> jax.stages.Lowered:
    """Return the program of a training step on one batch. The model cannot be used afterwards.

    Args:
        model: compiled, and made in the scope of a strategy that trains synchronously.

    Raises:
        InvalidArgumentError: the model trains in another way.
    """
    return lowered_and_traced(model, x, y)[0]


def lowered_and_traced(
    model: keras.Model, x: PyTree, y: PyTree
) -> tuple[jax.stages.Lowered, jex.ClosedJaxpr]:
    """Return the program of a training step on one batch, and its trace; see `lowered_step`."""
    model.make_train_function()
    function = model.train_function
    if not isinstance(function, TrainerFunction) or function.loop.is_eager:
        raise InvalidArgumentError(
            "A model must train by compiled steps of Keras' own. Received: one with `run_eagerly`, "
            "`jit_compile=False` or a `train_step` in TensorFlow's form."
        )

    def lower(state: State, iterator: Iterator[PyTree]) -> None:
        function.begin_with(state)
        group = function.loop.take(BatchSource(), iterator, is_ahead=False)
        if group is None:
            raise StopIteration
        ready = function.prepare(group)
        given = ready.state, ready.data
        raise _LoweredError(ready.program.lower(*given), ready.program.jaxpr(*given))

    model.train_function = lower
    try:
        model.train_on_batch(x, y)
    except _LoweredError as end:
        return end.lowered, end.trace
    raise AssertionError("Keras has not called the train function.")
