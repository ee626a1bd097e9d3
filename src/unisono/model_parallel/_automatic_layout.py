"""Variables in parts on the devices of a replica, along axes that the traced program of a model decides.

A variable begins as a promise of its first value, so that it is whole on no device, and lies in parts from
where the first program of its model is made: then the model's forward pass is traced, and `_automatic_cut`
chooses. The choice is made once for each weight; it depends on the program alone, and is the same in every
process.

Tests: tests/virtual/strategies/test_automatic_layout.py.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import keras
from jax.sharding import PartitionSpec

from unisono._types import PyTree
from unisono.collectives._cross_device import CrossDeviceOps
from unisono.collectives._process_group import ProcessGroup
from unisono.model_parallel._automatic_cut import CutClass, GivenWeight, cuts_and_reasons
from unisono.model_parallel._cut_layout import CutLayout, CutStateLayout, note_weight_of
from unisono.model_parallel._replica_grid import MODEL_AXIS, ReplicaGrid
from unisono.model_parallel._traced_model import (
    forward_pass,
    rows_of_replica,
    shapes_of_plan,
    traced,
    whole_step,
)
from unisono.step._layout import is_slot, lie_as, own_layout
from unisono.step._value_handle import DeferredValue, VariableValue
from unisono.step.variables._weights_of_slots import weight_of
from unisono.training.replica._step_reading import shapes_of
from unisono.training.trainer._trainer_step import TrainerStep, TrainerTask, variables_of

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr

    from unisono.step._functional import StatePlan
    from unisono.step._replicas import Replicas

_LOG = logging.getLogger("unisono")

#: The attribute of a variable whose layout is decided: a weak reference to the state layout.
_DECIDED = "_unisono_decided"

#: Bytes up to which a first value is made at once: for a promise of it nothing would be saved.
_SMALL = 1 << 14


class UndecidedRule:
    """The rule of a layout that decides later."""

    def __call__(self, variable: keras.Variable) -> tuple[str | None, ...] | None:
        return None

    def unused(self) -> list[str]:
        """Return nothing: there are no patterns."""
        return []


class AutomaticStateLayout(CutStateLayout):
    """State in parts on the devices of each replica, along axes that the program of a model decides.

    Args:
        mesh: the devices of all replicas.
        ops: how gradients are reduced.
        group: the processes that train together.
    """

    of_map = False

    def __init__(self, mesh: ReplicaGrid, ops: CrossDeviceOps, group: ProcessGroup) -> None:
        super().__init__(mesh, UndecidedRule(), ops, group)
        #: By path: the axis of each weight that is cut, for people.
        self.chosen: dict[str, int] = {}
        #: By path: why a weight is whole, for people.
        self.reasons: dict[str, str] = {}
        #: The classes that are cut, with the bytes that they save and send.
        self.cuts: list[CutClass] = []

    def first(self, variable: keras.Variable, value: DeferredValue) -> Any:
        """Return the promise of a value, or the parts of a weight's slot; see `StateLayout.first`."""
        reference = note_weight_of(variable) if is_slot(variable) else None
        if reference is not None and self._is_decided(reference):
            return super().first(variable, value)
        # Any other code than Keras' may count its calls, and must be called once.
        if value.nbytes <= _SMALL or not value.is_repeatable:
            return None
        # What is read from a file before the decision is not whole either.
        return value.lying(self.cut_as(self._evenly(value.shape)).assigned)

    def given(self, variable: keras.Variable, value: jax.Array) -> VariableValue | None:
        """Return the parts of a value, along any axis until it is decided; see `StateLayout.given`."""
        cut = self._evenly(value.shape)
        return self.cut_as(cut).assigned(value) if value.nbytes > _SMALL and any(cut) else None

    def _evenly(self, shape: Sequence[int]) -> PartitionSpec:
        """Return how a value lies until it is decided: along its longest axis that divides."""
        size = self._grid.devices_per_replica
        axes = [i for i, n in enumerate(shape) if n % size == 0]
        longest = max(axes, key=lambda i: shape[i], default=None)
        return PartitionSpec(*[MODEL_AXIS if i == longest else None for i in range(len(shape))])

    def decide(self, model: keras.Model, replicas: Replicas, task: TrainerTask, batch: PyTree) -> None:
        """Decide how a model's weights lie, before its first program is made; see `StateLayout.decide`."""
        self._planned = self._decide(model, replicas, task, batch)
        super().decide(model, replicas, task, batch)

    def _decide(self, model: keras.Model, replicas: Replicas, task: TrainerTask, batch: PyTree) -> int | None:
        """Decide as `decide` does; return the bytes that a step should send, if it was not decided before."""
        step = TrainerStep(model, replicas, task)
        variables = list({id(v): v for part in variables_of(model, task) for v in part}.values())
        of_model = {id(v) for v in model.variables}
        weights = [v for v in variables if id(v) in of_model and not is_slot(v)]
        if all(map(self._is_decided, weights)):
            return None
        rows = rows_of_replica(batch, replicas.num_replicas_in_sync)
        everything = list(model.variables)

        def forward() -> list[CutClass]:
            return self._chosen(forward_pass(model, everything, rows), everything, weights)

        def whole() -> list[CutClass]:
            trains = task is TrainerTask.TRAIN
            return self._chosen(whole_step(step, variables, rows), variables, weights, trains)

        cuts, of = self._first_readable(model.name, (forward, everything), (whole, variables))
        optimizer = getattr(model, "optimizer", None)
        slots = [] if optimizer is None else list(optimizer.variables)
        self._lie(of, cuts, weights, slots)
        return sum(cut.sent for cut in cuts)

    def decide_step(
        self,
        plan: StatePlan,
        run: Callable[..., object],
        arrays: Sequence[Any],
    ) -> bool:
        """Decide how the variables of a step of `run` lie; see `StateLayout.decide_step`."""
        self._planned = self._decide_step(plan, run, arrays)
        super().decide_step(plan, run, arrays)
        return self._planned is not None

    def _decide_step(self, plan: StatePlan, run: Callable[..., object], arrays: Sequence[Any]) -> int | None:
        """Decide as `decide_step` does; return the bytes that the step should send, if it decided."""
        variables = plan.variables
        weights = [v for v in variables if not is_slot(v) and not self._is_decided(v)]
        if not any(v.trainable for v in weights):
            return None
        trains = any(slot.written and slot.variable.trainable for slot in plan.slots)
        shapes = shapes_of_plan(plan, self._mesh.num_replicas)

        def whole() -> list[CutClass]:
            return self._chosen(traced(run, shapes, shapes_of(arrays)), variables, weights, trains)

        cuts, of = self._first_readable("a step of `run`", (whole, variables))
        self._lie(of, cuts, weights, [v for v in variables if is_slot(v)])
        return sum(cut.sent for cut in cuts)

    def _first_readable(
        self, what: str, *ways: tuple[Callable[[], list[CutClass]], Sequence[keras.Variable]]
    ) -> tuple[list[CutClass], Sequence[keras.Variable]]:
        """Return the choice of the first way that can be traced, and its variables."""
        reasons = []
        for choose, variables in ways:
            try:
                return choose(), variables
            except Exception as error:  # a user's code may do anything
                reasons.append(f"{type(error).__name__}: {error}".splitlines()[0])
        _LOG.warning(
            "The weights of %s lie whole on each device: its program could not be read (%s). Give a "
            "`layout_map` to cut them.",
            what,
            reasons[0],
        )
        return [], ways[0][1]

    def _chosen(
        self,
        program: ClosedJaxpr,
        variables: Sequence[keras.Variable],
        weights: Sequence[keras.Variable],
        has_gradients: bool = False,
    ) -> list[CutClass]:
        """Return the classes to cut.

        Args:
            program: its first arguments are the values of the variables.
            weights: those that are decided now.
            has_gradients: whether the program computes gradients itself.
        """
        now = {id(v) for v in weights if not self._is_decided(v)}
        given = {}
        for number, variable in enumerate(variables):
            axis = getattr(own_layout(variable), "axis", None)
            is_trained = bool(variable.trainable) and not has_gradients
            given[number] = GivenWeight(is_trained, id(variable) not in now, axis)
        cuts, reasons = cuts_and_reasons(program, given, self._grid.devices_per_replica)
        self.reasons |= {variables[n].path: text for n, text in reasons.items()}
        self.cuts += [cut._replace(paths=tuple(variables[n].path for n in cut.axes)) for cut in cuts]
        return cuts

    def _lie(
        self,
        variables: Sequence[keras.Variable],
        cuts: Sequence[CutClass],
        weights: Sequence[keras.Variable],
        slots: Sequence[keras.Variable],
    ) -> None:
        """Let weights, and the slots that were made for them, lie as was chosen."""
        axes = {id(variables[n]): axis for cut in cuts for n, axis in cut.axes.items()}
        for variable in weights:
            if self._is_decided(variable):
                continue
            object.__setattr__(variable, _DECIDED, weakref.ref(self))
            axis = axes.get(id(variable))
            if axis is None:
                self._note_whole(variable)
                continue
            cut = [MODEL_AXIS if i == axis else None for i in range(len(variable.shape))]
            lie_as(variable, self.cut_as(PartitionSpec(*cut)))
            self.chosen[variable.path] = axis
        for slot in slots:
            weight = weight_of(slot)
            layout = None if weight is None else own_layout(weight)
            if isinstance(layout, CutLayout):
                lie_as(slot, layout)

    def decides_later(self, variable: keras.Variable) -> bool:
        return not self._is_decided(variable)

    def _is_decided(self, variable: keras.Variable) -> bool:
        reference = getattr(variable, _DECIDED, None)
        return reference is not None and reference() is self
