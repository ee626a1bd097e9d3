"""How the rows of a batch reach the replicas: split, whole on each, or filled up and split.

A batch that divides is split over the replicas. The ragged last batch of an epoch runs whole on
every replica: exact for every layer, loss and metric. A batch size that never divides is padded
and split where each row's results depend on this row alone; then losses and metrics see the true rows of
all replicas, so that they too are exact. A step that relates rows to each other is one program over all
rows, which XLA divides.

Tests: tests/unit/training/test_batch_policy.py, tests/virtual/training/test_exact.py.
"""

from __future__ import annotations

import enum
import logging
import weakref
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._types import KerasWrap, PyTree
from unisono.step._keras_internals import all_layers, layers_with_input
from unisono.training.replica._step_reading import StepReading

_LOG = logging.getLogger("unisono")

#: Subjects of which was spoken for each model: every function of a model has a policy, and `compile` makes
#: new ones.
_SAID: weakref.WeakKeyDictionary[keras.Model, set[str]] = weakref.WeakKeyDictionary()

#: The subject of every cause for which all rows are computed together: training and validation may have
#: different ones, and a model gets one warning.
_SPEED = "speed"

#: With fewer rows on a replica, a last batch is not split where a layer normalizes over them.
_FEW_ROWS = 3

#: So many shapes of rows are not those of a few lengths on purpose.
_MANY_SHAPES = 16

#: Marks an `InputLayer` that Keras made from the first data.
_FROM_DATA = "_unisono_from_data"


Array = TypeVar("Array", np.ndarray, jax.Array)


class Mode(enum.Enum):
    """How a batch reaches the replicas."""

    SPLIT = "each replica gets its equal part"
    WHOLE = "every replica gets all rows and computes the same"
    PADDED = "filled up to a size that divides, and split"
    JOINED = "one program computes all rows, of which each device holds its part"


class BatchPolicy:
    """Chooses the mode of each batch of a model.

    The size of the first batch of a call of `fit`, `evaluate` or `predict` is taken for the usual one of
    that call; another one is the ragged last.

    Args:
        read: returns how the model's step treats the rows of a batch.
        joins: whether one program may compute all rows.
        joins_groups: whether it may do so where convolutions have groups of channels.
    """

    def __init__(
        self,
        model: keras.Model,
        replicas: int,
        read: Callable[[PyTree], StepReading],
        joins: bool = False,
        joins_groups: bool = True,
    ) -> None:
        self._model, self._replicas, self._read = model, replicas, read
        self._joins, self._joins_groups = joins, joins_groups
        #: Of the running call; None until its first batch.
        self.usual_rows: int | None = None
        self._is_fixed: bool | None = None
        #: True after a batch with arrays of unequal lengths: other ones may have equal lengths by chance.
        self._is_unequal = False
        #: By number of rows; the first one's is that of the usual batch.
        self._readings: dict[int, StepReading] = {}
        self._shapes: set[tuple[tuple[int, ...], ...]] = set()

    def _say(self, level: int, subject: str, text: str) -> None:
        """Log a line, once for a model and a subject."""
        said = _SAID.setdefault(self._model, set())
        if subject not in said:
            said.add(subject)
            _LOG.log(level, "%s", text)

    def warn(self, subject: str, text: str) -> None:
        """Log a warning, once for a model and a subject."""
        self._say(logging.WARNING, subject, text)

    def note_shapes(self, batch: PyTree) -> None:
        """Warn where batches of many shapes are given, each of which makes a program."""
        if len(self._shapes) == _MANY_SHAPES:
            return
        self._shapes.add(tuple(np.shape(x)[1:] for x in jax.tree.leaves(batch)))
        if len(self._shapes) == _MANY_SHAPES:
            from unisono.training.groups._batch_texts import many_shapes

            self.warn("shapes", many_shapes(_MANY_SHAPES))

    def mode_of(self, batch: PyTree) -> tuple[Mode, int]:
        """Return how a batch reaches the replicas, and its number of rows, or 0 for unequal arrays."""
        self.note_shapes(batch)
        if self.is_unequal(batch):
            return Mode.WHOLE, 0
        rows = rows_in(batch)
        return self.mode(batch, rows), rows

    def is_unequal(self, batch: PyTree) -> bool:
        """Return whether the inputs of a batch, or of an earlier one, have unequal lengths, as of a graph."""
        lengths = {np.shape(x)[:1] for x in jax.tree.leaves(batch[0] if isinstance(batch, tuple) else batch)}
        if len(lengths) > 1 and () not in lengths:
            self._is_unequal = True
            if self._replicas > 1:
                from unisono.training.groups._batch_texts import of_unequal

                self.warn(_SPEED, of_unequal(self._model.name, batch))
        return self._is_unequal

    def mode(self, batch: PyTree, rows: int) -> Mode:
        """Return how a batch with this number of rows reaches the replicas."""
        replicas = self._replicas
        if self.usual_rows is None:
            self.usual_rows = rows
        if rows == 0 or replicas == 1:
            return Mode.SPLIT if rows else Mode.WHOLE
        if self._is_fixed is None:
            self._is_fixed = self._has_one_size()
        if self._is_fixed:
            return Mode.WHOLE
        usual, divides = self._usual_reading(batch, rows), rows % replicas == 0
        # A ragged last batch: to pad it would be a program of its own too, and only some models allow it.
        is_last = self._is_too_small(rows, usual) if divides else rows != self.usual_rows or rows < replicas
        reading = usual if is_last else self._reading_of(batch, rows)
        if reading.mixes:
            return self._together(rows, reading)
        if is_last or not (divides or self._can_fill(rows, reading)):
            return Mode.WHOLE
        self._note_differences(reading)
        return Mode.SPLIT if divides else Mode.PADDED

    def _usual_reading(self, batch: PyTree, rows: int) -> StepReading:
        """Return the reading of the first batch."""
        return next(iter(self._readings.values()), None) or self._reading_of(batch, rows)

    def _reading_of(self, batch: PyTree, rows: int) -> StepReading:
        if rows not in self._readings:
            self._readings[rows] = self._read(batch)
        return self._readings[rows]

    def _together(self, rows: int, reading: StepReading) -> Mode:
        """Return the mode of a batch whose rows must be computed together."""
        from unisono.training.groups._batch_texts import together

        joins = self._joins and (self._joins_groups or not reading.has_groups)
        # A batch of another size is mostly a last one, which costs little. One warning is enough.
        is_usual = rows == self.usual_rows
        self._say(
            logging.WARNING if is_usual else logging.INFO,
            _SPEED if is_usual else "together at another size",
            together(self._model.name, reading, joins),
        )
        return Mode.JOINED if joins and rows % self._replicas == 0 else Mode.WHOLE

    def _note_differences(self, reading: StepReading) -> None:
        """Say once what will not be as on one device."""
        if reading.apart or reading.draws or reading.others:
            from unisono.training.groups._batch_texts import differences

            self.warn("differences", differences(self._model.name, self._replicas, reading))

    def _is_too_small(self, rows: int, reading: StepReading) -> bool:
        """Return whether a last batch would leave a replica too few rows for its statistics."""
        usual = self.usual_rows or rows
        if not reading.apart or rows >= usual:
            return False
        return usual % self._replicas > 0 or 2 * rows <= usual or rows < _FEW_ROWS * self._replicas

    def _has_one_size(self) -> bool:
        reason = one_batch_size(self._model)
        if reason:
            from unisono.training.groups._batch_texts import whole

            self.warn(
                _SPEED, whole(f"A batch cannot be split over {self._replicas} replicas, because {reason}")
            )
        return reason is not None

    def _can_fill(self, rows: int, reading: StepReading) -> bool:
        """Return whether a batch that does not divide is filled up."""
        size = -(-rows // self._replicas) * self._replicas
        what = f"A batch of {rows} rows does not divide over {self._replicas} replicas"
        if reading.unfillable:
            from unisono.training.groups._batch_texts import whole

            self.warn(_SPEED, f"{whole(f'{what}, and {reading.unfillable}')} Use a batch size of {size}.")
            return False
        self._say(logging.INFO, "filled", f"{what}: it is filled up and split.")
        return True


def rows_in(batch: PyTree) -> int:
    """Return the number of rows of a batch.

    Raises:
        InvalidArgumentError: when its arrays have none, or not the same number.

    >>> rows_in((np.zeros((4, 2)), np.zeros(4), None))
    4
    """
    numbers = {np.shape(x)[:1] for x in jax.tree.leaves(batch)}
    if len(numbers) != 1 or not (rows := numbers.pop()):
        from unisono.training.groups._batch_texts import without_rows

        raise without_rows(batch)
    return int(rows[0])


def pad_rows(array: Array, parts: int) -> Array:
    """Repeat the last row until the number of rows divides by `parts`.

    True rows, and not zeros, because a row of zeros may give NaN where a true one does not.

    >>> pad_rows(np.array([1, 2, 3]), 2)
    array([1, 2, 3, 3])
    """
    missing = -len(array) % parts
    if missing == 0:
        return array
    if isinstance(array, np.ndarray):
        return np.concatenate([array, np.repeat(array[-1:], missing, axis=0)])
    return jnp.concatenate([array, jnp.repeat(array[-1:], missing, axis=0)])


def one_batch_size(model: keras.Model) -> str | None:
    """Return why a model takes batches of one size only, or None when it takes any."""
    for layer in all_layers(model):
        name = f"the layer {layer.name!r} ({type(layer).__name__})"
        if getattr(layer, "stateful", False):
            return f"{name} keeps a state for each row"
        if isinstance(layer, keras.layers.InputLayer) and not getattr(layer, _FROM_DATA, False):
            rows = layer.batch_shape[0]
            if rows is not None:
                return f"{name} takes {rows} rows (write its shape without them if it takes any number)"
    return None


def wraps() -> list[KerasWrap]:
    """Return what is wrapped of `keras.Sequential`."""
    return [(keras.Sequential, "build", build_sequential)]


def build_sequential(
    original: Callable[..., None], self: keras.Sequential, *args: object, **kwargs: object
) -> None:
    """Build a `keras.Sequential`, and note whether its input's shape is only that of the first batch.

    Keras makes the input of a model without one from the first data, with their number of rows, and
    accepts any other number afterwards. A user who writes `Input(batch_shape=...)` asks for that number.
    """
    declared = any(isinstance(layer, keras.layers.InputLayer) for layer in layers_with_input(self)[:1])
    original(self, *args, **kwargs)
    first = next(iter(layers_with_input(self)), None)
    if not declared and isinstance(first, keras.layers.InputLayer):
        object.__setattr__(first, _FROM_DATA, True)
