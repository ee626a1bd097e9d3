"""The state of a model while Keras' loop carries it from step to step.

Between two steps Keras and callbacks see arrays of this process; the step itself wants them on all its
devices, as it returned them. `FitState` keeps both, and puts the newest state back when a step fails.

Tests: tests/virtual/training/test_interrupts.py, tests/virtual/training/test_failures.py.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import jax
import keras
import numpy as np

from unisono._errors import InvalidArgumentError
from unisono._types import PyTree, UserValue
from unisono.step._dispatch import Started
from unisono.step._keras_internals import (
    empty_variables,
    is_synced,
    mark_synced,
    set_training_state,
    store_values,
    stored_value,
    training_state,
)
from unisono.step._layout import StateLayout, VariableLayout
from unisono.step._value_handle import AgreedHandle, VariableValue, in_parts
from unisono.training.replica._rows import has_own
from unisono.training.trainer._protocol import State
from unisono.training.trainer._trainer_step import TrainerTask, in_lists, variables_of

if TYPE_CHECKING:
    from unisono.step._replicas import Replicas


#: Keras' names of the lists of variables in a state, in its order.
LISTS = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")

#: By these names: the variables of a model.
_VARIABLES: dict[str, Callable[[keras.Model], list[keras.Variable]]] = {
    **{name: operator.attrgetter(name) for name in LISTS},
    "optimizer_variables": operator.attrgetter("optimizer.variables"),
}


# Keras empties the variables while its loop runs, and each step donates the state that it was given. At
# any moment the newest state is where Keras looks for it when the loop ends.
def hold_state(model: keras.Model, names: Sequence[str], state: Sequence[Sequence[jax.Array]]) -> None:
    """Note the newest state where Keras looks for it."""
    set_training_state(model, dict(zip(names, state, strict=True)))


def set_attribute(original: Callable[..., None], model: keras.Model, name: str, value: UserValue) -> None:
    """Set an attribute of a model, in place of Keras' own method.

    Keras' loop notes the state at each step, in which its own method looks for layers and variables: 36 calls
    of Python functions, and 8 us.
    """
    if type(value) is dict and {*map(type, value.values())} == {StatePart}:
        object.__setattr__(model, name, value)
    else:
        original(model, name, value)


def put_back(model: keras.Model) -> bool:
    """Let the variables of a model hold the newest state, where a step of a strategy has computed it.

    Keras assigns one variable after the other, and converts and checks each value.

    Returns:
        Whether they do: False for another state, which Keras puts back.
    """
    noted = training_state(model)
    if not noted or is_synced(model):
        return False
    parts = [part for part in noted.values() if isinstance(part, StatePart) and part.keeps_types]
    if len(parts) < len(noted):
        return False
    for part in parts:
        store_values(part.variables, part.seen_values())
    mark_synced(model, True)
    return True


def release_state(model: keras.Model) -> None:
    """Note that the variables hold the state themselves."""
    set_training_state(model, None)
    mark_synced(model, True)


def taken_state(original: Callable[..., State], model: keras.Model, wanted: dict[str, bool]) -> State:
    """Take the state from a model's variables, and note it before Keras empties the first of them.

    Args:
        wanted: which lists, and whether the variables are emptied.

    Returns:
        What `original` returns.
    """
    # Keras empties variable by variable, and notes the state afterwards: an interrupt between the two
    # would lose the weights.
    names = [name for name in LISTS if wanted.get(name)]
    kept = _unchanged(model, names)
    others = {name: True for name in names if name not in kept}
    with in_parts():
        read = iter(original(model, **others, purge_model_variables=False) if others else ())
    state = tuple(kept[name] if name in kept else next(read) for name in names)
    hold_state(model, names, state)
    mark_synced(model, False)
    lists = {name: wanted[name] for name in LISTS if name in wanted}
    if wanted.get("purge_model_variables"):
        empty_variables(model, lists)
    return state


def _unchanged(model: keras.Model, names: list[str]) -> dict[str, StatePart]:
    """Return the lists of the last step's state whose variables still hold it."""
    noted = training_state(model) or {}
    parts: dict[str, StatePart] = {}
    for name in names:
        part = noted.get(name)
        if isinstance(part, StatePart):
            held = list(map(stored_value, _VARIABLES[name](model)))
            seen = part.seen_values()
            if len(held) == len(seen) and all(map(operator.is_, held, seen)):
                parts[name] = part
    return parts


@contextlib.contextmanager
def weights_kept(model: keras.Model) -> Iterator[None]:
    """Put the state back into the model's variables when a callback or a step raises.

    Keras empties the variables while it trains, and fills them again only where `fit` ends.
    """
    try:
        yield
    except BaseException:
        if training_state(model):
            mark_synced(model, False)
            model.jax_state_sync()
        raise


@contextlib.contextmanager
def on_one_device(model: keras.Model) -> Iterator[None]:
    """Let the variables of metrics hold one device's copies: programs for several take long to compile.

    A user's own metric may read other variables, too, with which arrays of one device do not go together.
    """
    metrics = [part for m in model.metrics for part in getattr(m, "metrics", [m])]
    is_own = {type(m).__module__.partition(".")[0] for m in metrics} == {"keras"}
    variables = model.metrics_variables if is_own and not has_own(model, "get_metrics_result") else []
    before = list(map(stored_value, variables))
    copies: list[Any] = [
        x.addressable_data(0) if isinstance(x, jax.Array) and x.is_fully_replicated else x for x in before
    ]
    try:
        store_values(variables, copies)
        yield
    finally:
        for variable, value, copy in zip(variables, before, copies, strict=True):
            if stored_value(variable) is copy:
                store_values([variable], [value])


#: Numbers of train functions, alike on workers that make the same ones.
_NUMBERS = itertools.count()


#: From `(state, batch)` to `(logs, state)`; traced.
PureStep = Callable[[State, PyTree], tuple[PyTree, State]]


class HeldState:
    """The arrays of a state between two steps, and what Keras and callbacks have got for them.

    Args:
        values: the arrays, where the next step wants them; or a function that computes them on first access.
    """

    def __init__(self, values: State | Callable[[], State]) -> None:
        self._values = values
        #: By the numbers of the list and the variable.
        self.seen: dict[tuple[int, int], Any] = {}

    @property
    def values(self) -> State:
        """The arrays."""
        if callable(self._values):
            self._values = self._values()
        return self._values


class StatePart(Sequence[jax.Array]):
    """One list of the newest state, as Keras' loop carries it: the same object after each step.

    Not a list: Keras tracks every list that is stored on a model, which takes 0.2 ms a step.

    Args:
        carried: holds the newest state.
        number: of the list.
        layouts: of its variables; they give what Keras and callbacks see.
        variables: of which it has the values.
    """

    def __init__(
        self,
        carried: FitState,
        number: int,
        layouts: Sequence[VariableLayout],
        variables: Sequence[keras.Variable],
    ) -> None:
        self._carried, self._number, self._layouts = carried, number, layouts
        self.variables = variables
        self._places = [(number, i) for i in range(len(layouts))]
        #: True if they see the arrays themselves.
        self._is_plain = all(one.holds_arrays and not one.mesh.spans_processes for one in layouts)

    @property
    def values(self) -> Sequence[Any]:
        """The arrays."""
        return self._carried.held.values[self._number]

    def __len__(self) -> int:
        return len(self._layouts)

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.seen_values())

    @overload
    def __getitem__(self, index: int) -> jax.Array: ...

    @overload
    def __getitem__(self, index: slice) -> list[jax.Array]: ...

    def __getitem__(self, index: int | slice) -> jax.Array | list[jax.Array]:
        numbers = range(len(self))[index]
        return [self._at(i) for i in numbers] if isinstance(numbers, range) else self._at(numbers)

    @property
    def keeps_types(self) -> bool:
        """True if the arrays have the shapes and types of their variables."""
        return self._carried.keeps_types

    def seen_values(self) -> list[Any]:
        """Return the values that Keras and callbacks get, for all arrays."""
        if not self._is_plain:
            return list(map(self._at, range(len(self._layouts))))
        values = list(self.values)
        self._carried.held.seen.update(zip(self._places, values, strict=True))
        return values

    def _at(self, number: int) -> Any:
        seen, place = self._carried.held.seen, (self._number, number)
        if place not in seen:
            seen[place] = self._layouts[number].hold(self.values[number])
        return seen[place]

    def places(self, kind: type[VariableLayout]) -> list[int]:
        """Return the places of the variables of a layout."""
        return [i for i, layout in enumerate(self._layouts) if isinstance(layout, kind)]

    def see(self, number: int, seen: jax.Array) -> None:
        """Note what Keras and callbacks have got for an array."""
        self._carried.held.seen[self._number, number] = seen

    def behind(self, number: int, seen: jax.Array) -> jax.Array | None:
        """Return the array of which `seen` was given to Keras and callbacks; None for any other."""
        last = self._carried.held.seen.get((self._number, number))
        return self.values[number] if last is seen else None


def _are_alike(before: Any, after: Any) -> bool:
    """Return whether a value that a step leaves has the shape and type of the one before; traced."""
    return after is before or (
        getattr(after, "shape", None) == before.shape
        and after.dtype == before.dtype
        and getattr(after, "weak_type", False) == getattr(before, "weak_type", False)
    )


class FitState:
    """The state between the steps of one train function."""

    def __init__(self, model: keras.Model, replicas: Replicas, task: TrainerTask) -> None:
        self._model, self._replicas, self._task = model, replicas, task
        self._layout: StateLayout = replicas.state_layout
        self._layouts: tuple[list[VariableLayout], ...] = ()
        #: How many variables each part has, and the version of the layout; none before a state was placed.
        self.sizes: tuple[int, ...] = ()
        #: True if variables hold the very arrays of programs, in their own shapes and types; known when a
        #: program was traced.
        self.keeps_types = type(self._layout) is StateLayout
        #: The newest state, and its lists as Keras carries them; None before the first step.
        self.held = HeldState(())
        self._returned: tuple[StatePart, ...] | None = None
        # Whether a state lies between two steps as a program returns it.
        self._rests = type(self._layout).rest is not StateLayout.rest or self._layout.rests_elsewhere
        self._number, self._count = next(_NUMBERS), 0
        # Asked at each step, where an enum's own attributes are Python code.
        self._first_list, self._trains = task.value[0], task is TrainerTask.TRAIN
        #: `[(outputs, state, token)]` of a call's last program: until `keep`, nothing else holds the state.
        self.done: list[Started[PyTree, State]] = []

    @property
    def specs(self) -> tuple[list[jax.sharding.PartitionSpec], ...]:
        """How each variable lies on the replicas inside a program."""
        return tuple([layout.spec for layout in part] for part in self._layouts)

    @property
    def shardings(self) -> tuple[list[jax.sharding.NamedSharding], ...]:
        """Where a program puts the new value of each variable."""
        return tuple([layout.sharding for layout in part] for part in self._layouts)

    def require_unchanged(self, state: State) -> State:
        """Return the state of the last step, which was run ahead with others."""
        if self._returned is None or not self._is_own(state):
            raise InvalidArgumentError(
                "The weights may not be changed between two batches of an epoch unless a callback of `fit` "
                "does it, in `on_train_batch_begin` or `on_train_batch_end`. Received: other weights."
            )
        return self._returned

    def keep(self, state: State, steps: int) -> State:
        """Return a new state as Keras carries it.

        Args:
            state: as the last program of a call returned it.
            steps: how many steps were started in all.
        """
        self._count += 1
        rested = tuple([*self._layout.rest(part)] for part in state) if self._rests else state
        returned = self._carry(HeldState(rested))
        if self._trains:
            self._replicas.process_group.check_state(self._replicas.mesh, self, steps, self._compared)
        return returned

    def _carry(self, held: HeldState) -> State:
        """Hold a state, and return its lists as Keras carries them."""
        if self._returned is None:
            self._returned = self._parts()
        # From here on all lists have the new values.
        self.held = held
        # Keras stores them when the function has returned. An interrupt in between must find them, too.
        noted = training_state(self._model)
        if not noted or noted.get(self._first_list) is not self._returned[0]:
            set_training_state(self._model, dict(zip(self._task.value, self._returned, strict=True)))
        return self._returned

    def _parts(self) -> tuple[StatePart, ...]:
        lists = zip(self._layouts, variables_of(self._model, self._task), strict=True)
        return tuple(StatePart(self, i, *one) for i, one in enumerate(lists))

    def keep_unread(self, read: Callable[[], State]) -> State:
        """Return a state as Keras carries it, which is computed where Keras or a callback reads it."""
        return self._carry(HeldState(lambda: tuple([*self._layout.rest(part)] for part in read())))

    def _is_own(self, state: State) -> bool:
        """Return whether a state consists of the lists that Keras was given."""
        return state is self._returned or (
            self._returned is not None and all(a is b for a, b in zip(state, self._returned, strict=True))
        )

    def is_returned(self, state: State) -> bool:
        """Return whether a state is the very one that the last step returned, and was not read."""
        return not self.held.seen and self._is_own(state)

    def is_unchanged(self, state: State, kind: type[VariableLayout] = VariableLayout) -> bool:
        """Return whether a state has the values that the last step returned, read or not.

        Args:
            kind: of variables of this layout; others may have changed.
        """
        return self._returned is not None and all(
            part is own
            or (len(part) == len(own) and all(own.behind(i, part[i]) is not None for i in own.places(kind)))
            for part, own in zip(state, self._returned, strict=True)
        )

    def _compared(self) -> tuple[list[str], list[jax.Array]]:
        """Return names and arrays of what must be equal on all workers."""
        # The optimizer's first: a learning rate that differs is the cause, weights are the effect.
        trainable, non_trainable, optimizer, _ = zip(
            variables_of(self._model, self._task), self._returned or (), strict=True
        )
        pairs = [
            (v, x)
            for vs, xs in (optimizer, trainable, non_trainable)
            for v, x in zip(vs, xs.values, strict=True)
            if x.is_fully_replicated
        ]
        return [v.path for v, _ in pairs], [x for _, x in pairs]

    def place(self, state: State, batch: PyTree) -> State:
        """Return a state as the next program wants it.

        Args:
            state: what Keras carries: the one that `keep` returned, or one with values that a callback set.
            batch: the first batch of the call, which workers compare where they begin.
        """
        held = self.held.values if self._is_own(state) else self._placed(state, batch)
        return tuple([*self._layout.fetch(part)] for part in held) if self._rests else held

    def _placed(self, state: State, batch: PyTree) -> State:
        self._layout.decide(self._model, self._replicas, self._task, batch)
        values: list[Any] = list(itertools.chain(*state))
        # What lies in parts is not sent: each worker has its own part of it.
        agreed = {
            i: x for i, x in enumerate(values) if not isinstance(x, jax.Array) and isinstance(x, AgreedHandle)
        }
        for i, own in agreed.items():
            values[i] = own.token
        # What the last step returned lies on the devices already.
        last: list[VariableValue | None] = [*self._last(state)]
        known = [array is not None for array in last]
        key = self._number, self._count
        found = self._replicas.same_on_all(values, self._task.name, known, key, batch)
        if found is not None:
            rows = zip(values, found, last, strict=True)
            last = [new if placed is None or new is not old else placed for old, new, placed in rows]
            for i in [i for i in agreed if last[i] is found[i]]:
                last[i] = agreed[i].agreed(np.asarray(found[i]))
        self._lay_out(state)
        flat = self._layout.place(list(itertools.chain(*self._layouts)), last)
        return in_lists(flat, state)

    def _lay_out(self, state: Sequence[Sequence[object]]) -> None:
        """Decide how the variables of a state lie, where it is the first one, or others are in it."""
        sizes = *map(len, state), self._layout.version
        if self.sizes != sizes:
            # Also after a layer was frozen: its weights move to another part of the state.
            self._layouts = self._layouts_of_state()
            self.sizes, self._returned = sizes, None

    def in_step(self, step: PureStep, is_joined: bool = False) -> PureStep:
        """Return a step for the arrays of a program: of each replica, or one of all where it is joined."""
        layouts, in_replica = self._layouts, self._replicas.mesh.num_replicas > 1 and not is_joined

        def program(state: State, batch: PyTree) -> tuple[PyTree, State]:
            entered = tuple(
                [one.enter(x, in_replica) for one, x in zip(part, xs, strict=True)]
                for part, xs in zip(layouts, state, strict=True)
            )
            logs, new = step(entered, batch)
            given, returned = itertools.chain(*entered), itertools.chain(*new)
            self.keeps_types &= all(map(_are_alike, given, returned))
            left = tuple(
                [one.leave(x, in_replica) for one, x in zip(part, xs, strict=True)]
                for part, xs in zip(layouts, new, strict=True)
            )
            return logs, left

        return program

    def _layouts_of_state(self) -> tuple[list[VariableLayout], ...]:
        if self._task is TrainerTask.TRAIN:
            self._layout.prepare(self._model.optimizer)
        return tuple(list(map(self._layout.of, part)) for part in variables_of(self._model, self._task))

    def _last(self, state: State) -> list[jax.Array | None]:
        """Return the last step's arrays; None where a state has another."""
        if self._returned is None:
            return [None for part in state for _ in part]
        last: list[jax.Array | None] = []
        for returned, part in zip(self._returned, state, strict=True):
            # Most are the very lists that the last step has left.
            is_own = part is returned
            last += returned.values if is_own else [returned.behind(i, x) for i, x in enumerate(part)]
        return last

    def give_back(self, state: State) -> None:
        """Store the newest state in the variables, which Keras has emptied, when a call failed.

        Args:
            state: what the call was given; used where none of its programs was started.
        """
        if self.done:
            state = tuple(
                [layout.hold(value) for layout, value in zip(layouts, self._layout.rest(part), strict=True)]
                for layouts, part in zip(self._layouts, self.done[0][1], strict=True)
            )
        for variables, values in zip(variables_of(self._model, self._task), state, strict=True):
            for variable, value in zip(variables, values, strict=True):
                if not value.is_deleted():
                    variable.assign(self._replicas.mesh.local(value))
        release_state(self._model)
