"""Where the state of a step rests between steps, how it lies inside one, and how gradients are reduced.

A strategy has one `StateLayout`. It gives each variable a `VariableLayout`, which a program keeps for
as long as it lives, and moves a whole state between the place where it rests and the devices that compute.
What lies in another way, such as optimizer state in shards, is a subclass of both: nothing else knows of it.

Tests: tests/virtual/strategies/test_contract.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import jax
import keras
import numpy as np

from unisono._mesh import ReplicaMesh
from unisono._system._blocks import set_for_block
from unisono._types import PyTree
from unisono._values import ReduceOp
from unisono.step._engines import SHARDED, UNSHARDED
from unisono.step._value_handle import ValueHandle, VariableValue

if TYPE_CHECKING:
    from unisono.collectives._process_group import ProcessGroup
    from unisono.step._functional import StatePlan
    from unisono.step._replicas import Replicas
    from unisono.step._value_handle import DeferredValue
    from unisono.training.trainer._protocol import StepFunction
    from unisono.training.trainer._trainer_step import TrainerTask

#: A gradient for each variable that an optimizer trains; None for one without.
Gradients = Sequence[jax.Array | None]

#: Sums or averages gradients of this replica, for variables, over all replicas.
GradientReducer = Callable[[ReduceOp, list[Any], Sequence[keras.Variable]], list[Any]]

#: An optimizer's update as a pure function: from its values, gradients and weights to weights and values.
PureUpdate = Callable[[list[jax.Array], Gradients, list[jax.Array]], tuple[list[jax.Array], list[jax.Array]]]

#: A replica's code: from values of its variables to results and new values.
ReplicaCode = Callable[[list[Any]], tuple[PyTree, list[Any]]]

#: The attribute of a variable that lies in a way of its own: its `VariableLayout`.
_LAYOUT = "_unisono_layout"

#: The attribute of an optimizer's variable that a layout has added, which no other strategy has.
_ADDED = "_unisono_added"

#: The same of an optimizer's variable, from where it begins to be made.
_SLOT = "_unisono_slot"

#: Whether an optimizer makes a variable.
_MAKING_SLOT: ContextVar[bool] = ContextVar("unisono_making_slot", default=False)


def making_slot() -> AbstractContextManager[object]:
    """Surround code in which an optimizer makes a variable."""
    return set_for_block(_MAKING_SLOT, True)


def note_slot(variable: keras.Variable) -> None:
    """Note whether a new variable is one of an optimizer: its first value may be made later."""
    if _MAKING_SLOT.get():
        object.__setattr__(variable, _SLOT, True)


def is_slot(variable: keras.Variable) -> bool:
    """Return whether an optimizer has made a variable, or is making it."""
    return hasattr(variable, _SLOT)


def mark_added(variable: keras.Variable) -> None:
    """Note that a layout has added a variable to an optimizer."""
    object.__setattr__(variable, _ADDED, True)


def is_added(variable: keras.Variable) -> bool:
    """Return whether a layout has added a variable to an optimizer: files of Keras leave it out."""
    return hasattr(variable, _ADDED)


@dataclasses.dataclass(frozen=True)
class VariableLayout:
    """How one variable lies: here the same array on every device."""

    mesh: ReplicaMesh

    @property
    def holds_arrays(self) -> bool:
        """True if a variable holds the very array of a program, where one process has all devices."""
        return type(self) is VariableLayout

    #: Whether all workers must gather the value before the first writes a file of Keras.
    is_gathered_for_file = True

    @property
    def spec(self) -> jax.sharding.PartitionSpec:
        """How the array of a program lies on the replicas inside `jax.shard_map`."""
        return UNSHARDED

    @property
    def sharding(self) -> jax.sharding.NamedSharding:
        """Where a program puts the new value."""
        return self.mesh.replicated

    def place(self, value: VariableValue) -> jax.Array:
        """Return the array that a program takes for what the variable holds; no communication.

        Args:
            value: what the variable holds between steps, or was assigned.
        """
        return self.mesh.put(value, self.sharding)  # type: ignore[no-any-return]

    def hold(self, array: jax.Array) -> Any:
        """Return what the variable holds between steps, for an array that a program gave."""
        return self.mesh.local(array)

    def assigned(self, array: jax.Array) -> Any:
        """Return the value to hold after the assignment of an array of this process, or of the host."""
        return jax.device_put(array, may_alias=False)

    def enter(self, array: jax.Array, in_replica: bool) -> Any:
        """Return the value that code in a program sees.

        Args:
            array: traced; in a replica, this replica's part.
            in_replica: whether the code runs inside `jax.shard_map`.
        """
        return array

    def leave(self, value: Any, in_replica: bool) -> jax.Array:
        """Return the array of a program for the value that its code has left; the inverse of `enter`."""
        return value  # type: ignore[no-any-return]

    def to_file(self, variable: keras.Variable) -> np.ndarray:
        """Return the value of a variable that lies so for a file of Keras, which knows no replicas."""
        value: np.ndarray = variable.numpy()
        return value

    def from_file(self, saved: np.ndarray) -> np.ndarray:
        """Return the value that the variable gets of a saved one.

        Args:
            saved: of a checkpoint, perhaps of another number of replicas; or of a file of Keras.
        """
        return saved

    def __deepcopy__(self, memo: dict[int, object]) -> VariableLayout:
        # A copied variable lies on the same devices, which cannot be copied.
        return self


class StackedLayout(VariableLayout):
    """How a variable lies that has one value for each replica: as rows of one array."""

    @property
    def spec(self) -> jax.sharding.PartitionSpec:
        """A row on each replica."""
        return SHARDED

    @property
    def sharding(self) -> jax.sharding.NamedSharding:
        """A row on each device."""
        return self.mesh.sharded


@dataclasses.dataclass(frozen=True)
class FittedLayout(VariableLayout):
    """How a variable lies that is whole, and gets another value of a saved one.

    Args:
        fit: from a saved value to the variable's.
    """

    fit: Callable[[np.ndarray], np.ndarray]

    def from_file(self, saved: np.ndarray) -> np.ndarray:
        return self.fit(saved)


def lie_as(variable: keras.Variable, layout: VariableLayout) -> None:
    """Let a variable lie in a way of its own from now on."""
    object.__setattr__(variable, _LAYOUT, layout)


def lie_whole(variable: keras.Variable) -> None:
    """Let a variable lie on every device again."""
    vars(variable).pop(_LAYOUT, None)


def own_layout(variable: keras.Variable) -> VariableLayout | None:
    """Return how a variable lies that lies in a way of its own; None for another."""
    layout: VariableLayout | None = getattr(variable, _LAYOUT, None)
    return layout


def from_file(variable: keras.Variable, saved: np.ndarray) -> np.ndarray:
    """Return the value that a variable gets of a saved one; see `VariableLayout.from_file`."""
    layout = own_layout(variable)
    return saved if layout is None else layout.from_file(saved)


def gathered_for_file(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    """Return those of an optimizer's variables that all workers gather before the first writes a file."""
    pairs = [(v, own_layout(v)) for v in variables if not is_added(v)]
    return [v for v, layout in pairs if layout is None or layout.is_gathered_for_file]


class Phases:
    """The steps between two exchanges of replicas that train apart; here replicas exchange at each step."""

    def make_train_function(self, model: keras.Model, replicas: Replicas) -> StepFunction | None:
        """Return the `train_function` of a model; None for the strategy's own."""
        return None

    def is_in_phase(self, model: keras.Model) -> bool:
        """Return whether replicas of a model hold what the others have not got yet."""
        return False

    def steps_to_end(self, function: Callable[..., object]) -> int:
        """Return after how many steps of a train function a phase ends; a large number without phases."""
        return sys.maxsize

    def begin(self, model: keras.Model) -> None:
        """Let the next step begin a phase, whatever an earlier `fit` was at; all workers call it."""

    def end(self, model: keras.Model) -> None:
        """Let the replicas exchange what they have learned; all workers call it."""

    def to_parts(self, model: keras.Model) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Return what replicas hold apart between two steps, as JSON and arrays; None where they do not.

        All workers call it, and must read the arrays, which last until the next step.
        """
        return None, {}

    def resume(self, model: keras.Model, facts: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Let the next step continue from what `to_parts` returned, and what variables hold; all call it."""


class StateLayout:
    """Where the state of a strategy lies; base of all layouts.

    Here every device holds a copy of every variable, and gradients are all-reduced.

    Args:
        mesh: the devices that compute.

    >>> from unisono.spi import ReplicaMesh, resolve_devices
    >>> layout = StateLayout(ReplicaMesh(resolve_devices(["cpu:0", "cpu:1"])))
    >>> layout.prepare(None)
    False
    """

    def __init__(self, mesh: ReplicaMesh) -> None:
        self._mesh = mesh
        self._whole = VariableLayout(mesh)
        self._stacked = StackedLayout(mesh)
        self._version = 0
        #: When replicas exchange what they have learned.
        self.phases = Phases()

    @property
    def version(self) -> int:
        """Another number after weights began to lie in another way: programs made before are made anew."""
        return self._version

    @property
    def keeps_weights(self) -> bool:
        """Whether each replica has all weights between steps."""
        return True

    @property
    def rests_elsewhere(self) -> bool:
        """True where `fetch` moves the state: between steps it is not on the devices that compute."""
        return type(self).fetch is not StateLayout.fetch

    @property
    def is_whole(self) -> bool:
        """Whether every device holds every variable as it is: a program need not run once per replica."""
        return True

    @property
    def needs_all(self) -> bool:
        """Whether all of several workers must read variables together."""
        return False

    @property
    def can_repeat(self) -> bool:
        """Whether training steps may run again from an earlier state: nothing is sent beside them."""
        return True

    @property
    def notes_updates(self) -> bool:
        """True while a program is traced in which `update` notes gradients, also outside of the replicas."""
        return False

    @property
    def meshes_beside(self) -> Sequence[ReplicaMesh]:
        """Devices on which programs with messages run beside the steps."""
        return ()

    def of(self, variable: keras.Variable, is_stacked: bool = False) -> VariableLayout:
        """Return how a variable lies.

        Args:
            variable: any.
            is_stacked: whether it has one value for each replica between steps.
        """
        return self._stacked if is_stacked else self._whole

    def extend(self, optimizer: keras.Optimizer, weights: Sequence[keras.Variable]) -> None:
        """Add variables that gradients need to an optimizer, before it makes its own ones for its weights."""

    def first(self, variable: keras.Variable, value: DeferredValue) -> ValueHandle | None:
        """Return what a variable holds that is being made; None for the whole value, as Keras makes it.

        Args:
            variable: has its shape and type, and no value.
            value: its first one.
        """
        return None

    def given(self, variable: keras.Variable, value: jax.Array) -> VariableValue | None:
        """Return the parts of a value that a new variable was given; None for one that stays whole."""
        return None

    def note_slot(self, variable: keras.Variable) -> None:
        """Note a new variable that an optimizer has made for itself; it may get another shape."""

    def decide(self, model: keras.Model, replicas: Replicas, task: TrainerTask, batch: PyTree) -> None:
        """Decide how a model's weights lie before a program is made, of which `batch` is the first one."""

    def decide_step(self, plan: StatePlan, run: Callable[..., object], arrays: Sequence[Any]) -> bool:
        """Decide how the variables of a step lie, a function of values and arrays; whether any changed."""
        return False

    def compiling(self, steps: int = 1) -> AbstractContextManager[object]:
        """Surround the first start of a program of so many training steps, in which it is compiled."""
        return contextlib.nullcontext()

    def prepare(self, optimizer: keras.Optimizer | None, variables: Sequence[keras.Variable] = ()) -> bool:
        """Decide how the variables of an optimizer lie, before a program is made that updates them.

        Args:
            optimizer: None for a model without one.
            variables: of which a step gives it the gradients now.

        Returns:
            Whether `update` may apply these gradients, and not the optimizer itself.
        """
        return False

    def place(self, layouts: Sequence[VariableLayout], values: Sequence[Any]) -> list[jax.Array]:
        """Return the arrays that a program takes, for many variables at once.

        Args:
            layouts: of the variables.
            values: what they hold, or were assigned.
        """
        # JAX looks at each array that it is given, also where it stays.
        wanted, placed = self._mesh.replicated, list(values)
        away = [i for i, x in enumerate(values) if not isinstance(x, jax.Array) or x.sharding != wanted]
        for i, x in zip(away, away and self._mesh.put([values[i] for i in away], wanted), strict=True):
            placed[i] = x
        return placed

    def fetch(self, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Bring arrays from where they rest to the devices that compute."""
        return arrays

    def rest(self, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Bring a program's new state to where it rests; the inverse of `fetch`."""
        return arrays

    def run_replica(
        self, variables: Sequence[keras.Variable], values: Sequence[Any], code: ReplicaCode
    ) -> tuple[PyTree, list[Any]]:
        """Run the code of a replica on what its variables hold.

        Args:
            variables: those that the code reads and writes.
            values: as they lie in its program.
            code: what is run.

        Returns:
            What the code returns; new values of variables as they lie in the program.
        """
        return code(list(values))

    def gather(self, variables: Iterable[keras.Variable]) -> None:
        """Let one of several workers alone read variables until the next step; all of them must call it.

        Args:
            variables: any.
        """

    def update(
        self,
        optimizer: keras.Optimizer,
        values: Sequence[jax.Array],
        weights: Sequence[jax.Array],
        aggregate: Callable[[GradientReducer | None], Gradients],
        apply: PureUpdate,
    ) -> tuple[list[jax.Array], list[jax.Array]] | None:
        """Update weights and an optimizer's variables in a replica, by the gradients of all.

        Args:
            optimizer: whose update.
            values: of its variables.
            weights: values of the variables that it trains.
            aggregate: returns the gradients of all replicas, reduced in a given way or, for None, by
                an all-reduce.
            apply: the optimizer's own update.

        Returns:
            The new weights and the new values; None where the optimizer updates everything itself.
        """
        return None


class CentralLayout(StateLayout):
    """State rests once, in one place; a step copies it to every device that computes."""

    def __init__(self, mesh: ReplicaMesh, home: jax.sharding.SingleDeviceSharding) -> None:
        super().__init__(mesh)
        self._home = home

    def fetch(self, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Copy the state to every device that computes."""
        return list(jax.device_put(list(arrays), self._mesh.replicated))

    def rest(self, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Bring the state back to its one place."""
        return [jax.device_put(self._on_first_device(a), self._home) for a in arrays]

    def _on_first_device(self, array: jax.Array) -> jax.Array:
        # JAX refuses to copy from several devices to host memory.
        first: jax.Array = (
            array.addressable_data(0)
            if array.is_fully_replicated
            else jax.device_put(array, self._mesh.devices[0])  # a copy for each replica
        )
        return first


class Synchronization:
    """How often replicas exchange what they have learned: a strategy's `sync`; base of `LocalUpdates`."""

    #: How many steps are taken beside an exchange.
    overlap = 0

    def _layout(self, layout: StateLayout, mesh: ReplicaMesh, group: ProcessGroup) -> StateLayout:
        """Return the state layout of a strategy with this `sync`: here the one that it has otherwise.

        Args:
            layout: what the other arguments of the strategy ask for.
            mesh: the devices that compute.
            group: the processes that train together.
        """
        return layout
