"""Compressed gradients of replicas of several devices: each device sends what is compressed of its own part.

Errors lie in parts as their weights: each device has, of the row of its replica, the elements that it has of
the weight.

Tests: tests/virtual/strategies/test_compressed_grids.py.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import jax
import keras
import numpy as np
from jax.sharding import PartitionSpec

from unisono._types import PyTree
from unisono.compression._compressed_layout import CompressedLayout, ErrorLayout, fitted_errors
from unisono.model_parallel._cut_layout import CutLayout
from unisono.model_parallel._replica_grid import MODEL_AXIS, ReplicaGrid
from unisono.model_parallel._spanning_layout import SpanningLayout
from unisono.step._layout import StateLayout, VariableLayout, lie_as, own_layout
from unisono.training.trainer._trainer_step import TrainerTask

if TYPE_CHECKING:
    from unisono.step._functional import StatePlan
    from unisono.step._replicas import Replicas
    from unisono.step._value_handle import DeferredValue, VariableValue

#: The attribute of the errors of a weight: a weak reference to it.
_WEIGHT = "_unisono_error_of"


@dataclasses.dataclass(frozen=True)
class CutErrorLayout(CutLayout):
    """How the errors of the only replica lie: in parts as their weight.

    Args:
        shape: of the errors.
    """

    shape: tuple[int, ...] = ()

    def from_file(self, saved: np.ndarray) -> np.ndarray:
        return fitted_errors(self.shape, saved)


@dataclasses.dataclass(frozen=True)
class SpanningErrorLayout(CutErrorLayout, SpanningLayout):
    """The same, where the replica's devices belong to several processes."""


class CompressedCutLayout(CompressedLayout):
    """Errors of compressed gradients lie in parts as their weights; everything else as in another layout."""

    @property
    def of_replica(self) -> StateLayout:
        """How the devices of a replica share each weight."""
        shared: StateLayout = getattr(self._inner, "of_replica", self._inner)
        return shared

    def of(self, variable: keras.Variable, is_stacked: bool = False) -> VariableLayout:
        """Return how a variable lies; see `StateLayout.of`."""
        weight = getattr(variable, _WEIGHT, lambda: None)()
        if weight is not None and not is_stacked:
            # How the weight lies may have been decided since the errors were made.
            self._lie_for(variable, weight)
            return cast(VariableLayout, own_layout(variable))
        return self._inner.of(variable, is_stacked)

    def _lie_for(self, error: keras.Variable, weight: keras.Variable) -> None:
        axis = getattr(own_layout(weight), "axis", None)
        shape = tuple(error.shape)
        place = None if axis is None else axis + 1
        if self._mesh.num_replicas > 1:
            layout: VariableLayout = ErrorLayout(self._mesh, shape, self._group, place)
        else:
            cut = PartitionSpec(*[None] * (place or 0), *[MODEL_AXIS] * (place is not None))
            grid = cast(ReplicaGrid, self._mesh)
            layout = CutErrorLayout(grid, cut, shape)
            if grid.processes_per_replica > 1 and place is not None:
                layout = SpanningErrorLayout(grid, cut, shape, group=self._group)
        if own_layout(error) != layout:
            lie_as(error, layout)

    def _lay_error(self, error: keras.Variable, weight: keras.Variable) -> None:
        object.__setattr__(error, _WEIGHT, weakref.ref(weight))
        self._lie_for(error, weight)

    def first(self, variable: keras.Variable, value: DeferredValue) -> Any:
        """Return the first value of a variable; of errors a promise of zeros, as they are never whole."""
        if self._adds and value.is_repeatable:
            return value.lying(lambda assigned: jax.device_put(assigned, may_alias=False))
        return self._inner.first(variable, value)

    def given(self, variable: keras.Variable, value: jax.Array) -> VariableValue | None:
        """Return the parts of a value that a new variable was given, as the other layout does."""
        return self._inner.given(variable, value)

    def note_slot(self, variable: keras.Variable) -> None:
        """Note the weight of an optimizer's variable, as the other layout does."""
        self._inner.note_slot(variable)

    def decide(self, model: keras.Model, replicas: Replicas, task: TrainerTask, batch: PyTree) -> None:
        """Decide how a model's weights lie, as the other layout does."""
        self._inner.decide(model, replicas, task, batch)

    def decide_step(self, plan: StatePlan, run: Callable[..., object], arrays: Sequence[Any]) -> bool:
        """Decide how the variables of a step of `run` lie, as the other layout does."""
        return self._inner.decide_step(plan, run, arrays)

    def compiling(self, steps: int = 1) -> AbstractContextManager[object]:
        """Surround the first start of a program, as the other layout does."""
        return self._inner.compiling(steps)

    def place(self, layouts: Sequence[VariableLayout], values: Sequence[Any]) -> list[jax.Array]:
        """Return the arrays that a program takes; see `StateLayout.place`."""
        return self._inner.place(layouts, values)

    def _has_parts(self, optimizer: keras.Optimizer) -> bool:
        holds: Callable[[keras.Optimizer], bool] | None = getattr(self._inner, "holds_parts", None)
        return holds is not None and holds(optimizer)
