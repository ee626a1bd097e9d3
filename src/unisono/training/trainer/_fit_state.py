"""The state of a model while Keras' loop carries it from step to step.

Between two steps Keras and callbacks see arrays of this process; the step itself wants them on all its
devices, as it returned them. `FitState` keeps both, and puts the newest state back when a step fails.

Tests: tests/virtual/training/test_interrupts.py, tests/virtual/training/test_failures.py.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, overload

import jax
import keras
import numpy as np

from unisono._errors import InvalidArgumentError
from unisono._types import PyTree
from unisono.step._dispatch import Started
from unisono.step._keras_internals import empty_variables, mark_synced, set_training_state, training_state
from unisono.step._layout import StateLayout, VariableLayout
from unisono.step._value_handle import AgreedHandle, VariableValue, in_parts
from unisono.training.trainer._protocol import State
from unisono.training.trainer._trainer_step import TrainerTask, in_lists, variables_of

if TYPE_CHECKING:
    from unisono.step._replicas import Replicas


#: Keras' names of the lists of variables in a state, in its order.
LISTS = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")


# Keras empties the variables while its loop runs, and each step donates the state that it was given. At
# any moment the newest state is where Keras looks for it when the loop ends.
def hold_state(model: keras.Model, names: Sequence[str], state: Sequence[Sequence[jax.Array]]) -> None:
    """Note the newest state where Keras looks for it."""
    set_training_state(model, dict(zip(names, state, strict=True)))


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
    with in_parts():
        state = original(model, **{**wanted, "purge_model_variables": False})
    hold_state(model, [name for name in LISTS if wanted.get(name)], state)
    mark_synced(model, False)
    lists = {name: wanted[name] for name in LISTS if name in wanted}
    if wanted.get("purge_model_variables"):
        empty_variables(model, lists)
    return state


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


#: Numbers of train functions, alike on workers that make the same ones.
_NUMBERS = itertools.count()


#: From `(state, batch)` to `(logs, state)`; traced.
PureStep = Callable[[State, PyTree], tuple[PyTree, State]]


class StatePart(Sequence[jax.Array]):
    """One list of a step's state, as Keras' loop carries it from step to step.

    Not a list: Keras tracks every list that is stored on a model, which takes 0.2 ms a step.

    Args:
        values: arrays, where the next step wants them; or what gives them where they are read.
        layouts: of their variables; they give what Keras and callbacks see.
    """

    def __init__(
        self, values: list[jax.Array] | Callable[[], list[jax.Array]], layouts: Sequence[VariableLayout]
    ) -> None:
        self._values = values
        self._layouts = layouts
        self._seen: dict[int, jax.Array] = {}

    @property
    def values(self) -> list[jax.Array]:
        """The arrays."""
        if callable(self._values):
            self._values = self._values()
        return self._values

    def __len__(self) -> int:
        return len(self._layouts)

    @overload
    def __getitem__(self, index: int) -> jax.Array: ...

    @overload
    def __getitem__(self, index: slice) -> list[jax.Array]: ...

    def __getitem__(self, index: int | slice) -> jax.Array | list[jax.Array]:
        numbers = range(len(self))[index]
        return [self._at(i) for i in numbers] if isinstance(numbers, range) else self._at(numbers)

    @property
    def is_read(self) -> bool:
        """Whether Keras or a callback has read an array."""
        return bool(self._seen)

    def _at(self, number: int) -> jax.Array:
        if number not in self._seen:
            self._seen[number] = self._layouts[number].hold(self.values[number])
        return self._seen[number]

    def places(self, kind: type[VariableLayout]) -> list[int]:
        """Return the places of the variables of a layout."""
        return [i for i, layout in enumerate(self._layouts) if isinstance(layout, kind)]

    def see(self, number: int, seen: jax.Array) -> None:
        """Note what Keras and callbacks have got for an array."""
        self._seen[number] = seen

    def behind(self, number: int, seen: jax.Array) -> jax.Array | None:
        """Return the array of which `seen` was given to Keras and callbacks; None for any other."""
        return self.values[number] if self._seen.get(number) is seen else None


class FitState:
    """The state between the steps of one train function."""

    def __init__(self, model: keras.Model, replicas: Replicas, task: TrainerTask) -> None:
        self._model, self._replicas, self._task = model, replicas, task
        self._layout: StateLayout = replicas.state_layout
        self._layouts: tuple[list[VariableLayout], ...] = ()
        #: How many variables each part has, and the version of the layout; none before a state was placed.
        self.sizes: tuple[int, ...] = ()
        self._returned: tuple[StatePart, ...] | None = None
        self._number, self._count = next(_NUMBERS), 0
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
        if self._returned is None or any(a is not b for a, b in zip(state, self._returned, strict=True)):
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
        self._returned = tuple(
            StatePart(list(self._layout.rest(part)), layouts)
            for part, layouts in zip(state, self._layouts, strict=True)
        )
        # Keras stores it when the function has returned. An interrupt in between must find it, too.
        set_training_state(self._model, dict(zip(self._task.value, self._returned, strict=True)))
        if self._task is TrainerTask.TRAIN:
            self._replicas.process_group.check_state(self._replicas.mesh, self, steps, self._compared)
        return self._returned

    def keep_unread(self, read: Callable[[], State]) -> State:
        """Return a state as Keras carries it, which is computed where Keras or a callback reads it."""

        def part_of(i: int) -> Callable[[], list[jax.Array]]:
            return lambda: list(self._layout.rest(read()[i]))

        self._returned = tuple(StatePart(part_of(i), layouts) for i, layouts in enumerate(self._layouts))
        hold_state(self._model, self._task.value, self._returned)
        return self._returned

    def is_returned(self, state: State) -> bool:
        """Return whether a state is the very one that the last step returned, and was not read."""
        return self._returned is not None and all(
            a is b and not b.is_read for a, b in zip(state, self._returned, strict=True)
        )

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
        if self._returned is not None and all(a is b for a, b in zip(state, self._returned, strict=True)):
            if not self._layout.rests_elsewhere:
                return tuple(list(part.values) for part in self._returned)
            return tuple(list(self._layout.fetch(part.values)) for part in self._returned)
        # What lies in parts is not sent: each worker has its own part of it.
        given: list[VariableValue] = [value for part in state for value in part]
        values = [value.token if isinstance(value, AgreedHandle) else value for value in given]
        # What the last step returned lies on the devices already.
        last: list[VariableValue | None] = [*self._last(state)]
        known = [array is not None for array in last]
        key = self._number, self._count
        found = self._replicas.same_on_all(values, self._task.name, known, key, batch)
        if found is not None:
            rows = zip(values, found, last, strict=True)
            last = [new if placed is None or new is not old else placed for old, new, placed in rows]
            last = [
                own.agreed(np.asarray(found[i])) if isinstance(own, AgreedHandle) else last[i]
                for i, own in enumerate(given)
            ]
        self._lay_out(state)
        flat = self._layout.place([one for part in self._layouts for one in part], last)
        return tuple(list(self._layout.fetch(part)) for part in in_lists(flat, state))

    def _lay_out(self, state: Sequence[Sequence[object]]) -> None:
        """Decide how the variables of a state lie, where it is the first one, or others are in it."""
        sizes = *map(len, state), self._layout.version
        if self.sizes != sizes:
            # Also after a layer was frozen: its weights move to another part of the state.
            self._layouts = self._layouts_of_state()
            self.sizes = sizes

    def in_step(self, step: PureStep) -> PureStep:
        """Return a step for the arrays of a program."""
        layouts, in_replica = self._layouts, self._replicas.mesh.num_replicas > 1

        def program(state: State, batch: PyTree) -> tuple[PyTree, State]:
            entered = tuple(
                [one.enter(x, in_replica) for one, x in zip(part, xs, strict=True)]
                for part, xs in zip(layouts, state, strict=True)
            )
            logs, new = step(entered, batch)
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
        pairs = zip(self._returned, state, strict=True)
        return [returned.behind(i, value) for returned, part in pairs for i, value in enumerate(part)]

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
