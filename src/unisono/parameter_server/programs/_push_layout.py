"""The state of a strategy whose variables lie on servers: an optimizer's update becomes a push of gradients.

While a program of a worker is traced, `PushLayout.update` notes the gradients and leaves weights and slots as
they are. The notes are variables of the step, one for each gradient: a step may be traced several times,
to learn what it touches or to differentiate it, and what the last trace has written counts, as for any
variable.

What code reads of weights and slots after the update is on no worker. In a first trace these values are
arguments of their own, which the finished program does not need in most cases. Where it does, the step is
traced again, and the worker computes the update for itself, too. So it does where an optimizer is called
several times in a step, as for the critic of a WGAN: each call has notes of its own, and the servers update
as often, in one push.

Tests: tests/virtual/parameter_server/chief/test_worker_step.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import keras

from unisono._errors import UnsupportedError
from unisono._mesh import ReplicaMesh
from unisono._system._blocks import set_for_block
from unisono.parameter_server.programs._preparation import extras_of, prepare_gradients, rounded_to
from unisono.step._keras_internals import stored_dtype, trained_variables
from unisono.step._layout import GradientReducer, Gradients, PureUpdate, StateLayout
from unisono.step._program import current_frame
from unisono.step.variables._variable_store import without_store

if TYPE_CHECKING:
    from unisono.step._value_handle import DeferredValue, ValueHandle

#: The first values of variables with more bytes are made on servers.
MADE_LATER = 16 << 20


class UpdateCall(NamedTuple):
    """One of the updates of an optimizer in a step.

    Args:
        optimizer: built.
        call: 0 for the first update in the step.
    """

    optimizer: keras.Optimizer
    call: int


@dataclasses.dataclass(frozen=True, eq=False)
class GradientNotes:
    """The variables in which a trace notes what an optimizer's update was given.

    Args:
        update: whose gradients these are.
        gradients: one for each variable that it trains. They hold no value and have no shape of their own.
        extras: what goes to every server, by name.
        before: of a tuple: the values that the update was given, of weights and slots.
        after: of a tuple: the values that it computed, where a worker does.
    """

    update: UpdateCall
    gradients: tuple[keras.Variable, ...]
    extras: Mapping[str, keras.Variable]
    before: keras.Variable
    after: keras.Variable

    @classmethod
    def of(cls, update: UpdateCall) -> GradientNotes:
        """Make the variables."""
        optimizer = update.optimizer
        trained = trained_variables(optimizer)
        extras = {name: _note(f"{optimizer.name}_{name}") for name in extras_of(optimizer)}
        before, after = (_note(f"{optimizer.name}_{when}") for when in ("before", "after"))
        gradients = tuple(_note(f"{v.name}_gradient") for v in trained)
        return cls(update, gradients, extras, before, after)

    @property
    def variables(self) -> list[keras.Variable]:
        """All of them."""
        return [*self.gradients, *self.extras.values(), self.before, self.after]

    @property
    def updated(self) -> list[keras.Variable]:
        """What the update changes: weights and slots."""
        return _updated(self.update.optimizer)


def _updated(optimizer: keras.Optimizer) -> list[keras.Variable]:
    return [*trained_variables(optimizer), *optimizer.variables]


def _note(name: str) -> keras.Variable:
    # A function as initial value: Keras takes no other inside a trace.
    return keras.Variable(jnp.zeros, shape=(), trainable=False, name=name)


@dataclasses.dataclass(eq=False)
class PushTrace:
    """What one trace of a worker's program notes about optimizers.

    Args:
        after: by `id` of a variable, what stands for its value after the update; a variable that is not in
            it keeps the value that it has. None to compute these values.
        notes: of the updates of optimizers, in this order.
    """

    after: Mapping[int, jax.Array] | None = dataclasses.field(default_factory=dict)
    notes: list[GradientNotes] = dataclasses.field(default_factory=list)


_TRACE: ContextVar[PushTrace | None] = ContextVar("unisono_push_trace", default=None)


@contextlib.contextmanager
def pushing(trace: PushTrace) -> Iterator[PushTrace]:
    """Let updates of optimizers be noted in a block, in which a worker's program is traced."""
    with set_for_block(_TRACE, trace):
        yield trace


class PushLayout(StateLayout):
    """Variables lie on servers, which update them; a worker's program sends gradients.

    Args:
        mesh: the device of a worker.
        push_dtype: the type in which large gradients are pushed; None for that of their variables.
    """

    def __init__(self, mesh: ReplicaMesh, push_dtype: str | None = None) -> None:
        super().__init__(mesh)
        self._push_dtype = push_dtype
        #: By the `id`s of all that an optimizer changes: of its first update in a step, its second, ...
        self._notes: dict[tuple[int, ...], list[GradientNotes]] = {}

    @property
    def notes_updates(self) -> bool:
        """True while a program for workers is traced."""
        return _TRACE.get() is not None

    def first(self, variable: keras.Variable, value: DeferredValue) -> ValueHandle | None:
        """Return the value itself, where it is so large that servers make it; see `StateLayout.first`."""
        nbytes = math.prod(value.shape) * value.dtype.itemsize
        return value if nbytes > MADE_LATER and value.is_repeatable else None

    def prepare(self, optimizer: keras.Optimizer | None, variables: Sequence[keras.Variable] = ()) -> bool:
        """Build the optimizer where a worker's program is traced; return whether `update` notes gradients."""
        if optimizer is None or not variables or not self.notes_updates:
            return False
        if not optimizer.built:
            # Keras would build it in `apply`, which updates at once.
            with keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(list(variables))
        return True

    def notes_of(self, optimizer: keras.Optimizer, call: int = 0) -> GradientNotes:
        """Return where the gradients of an optimizer are noted, the same in each trace.

        Optimizers around the same variables are one: a model_fn makes another object in each run.
        """
        key = tuple(map(id, _updated(optimizer)))
        notes = self._notes.setdefault(key, [])
        # Keras allows to build an optimizer again, for other variables.
        if notes and tuple(map(id, notes[0].updated)) != key:
            notes.clear()
        with without_store():
            while len(notes) <= call:
                first = notes[0].update.optimizer if notes else optimizer
                notes.append(GradientNotes.of(UpdateCall(first, len(notes))))
        return notes[call]

    def forget(self, variables: Sequence[keras.Variable]) -> None:
        """Forget where gradients of variables are noted, of which no program is run any more."""
        gone = {id(variable) for variable in variables}
        self._notes = {key: notes for key, notes in self._notes.items() if gone.isdisjoint(key)}

    def update(
        self,
        optimizer: keras.Optimizer,
        values: Sequence[jax.Array],
        weights: Sequence[jax.Array],
        aggregate: Callable[[GradientReducer | None], Gradients],
        apply: PureUpdate,
    ) -> tuple[list[jax.Array], list[jax.Array]] | None:
        """Note gradients, prepared for the servers; see `StateLayout.update`."""
        trace, frame = _TRACE.get(), current_frame()
        if trace is None or frame is None:
            return None
        grads, trained = list(aggregate(None)), trained_variables(optimizer)
        # Of wrong numbers Keras has its own errors.
        if not (len(grads) == len(weights) == len(trained) and len(values) == len(optimizer.variables)):
            return apply(list(values), grads, list(weights))
        calls = (self.notes_of(optimizer, call) for call in itertools.count())
        notes = next(notes for notes in calls if not frame.scope.is_written(notes.before))
        given, extras = prepare_gradients(optimizer, grads, values)
        # To the type of the variable, as an optimizer's update does first.
        given = [
            None if g is None else keras.ops.cast(g, rounded_to(v, self._push_dtype) or stored_dtype(v))
            for g, v in zip(given, trained, strict=True)
        ]
        pairs: list[tuple[keras.Variable, Any]] = [*zip(notes.gradients, given, strict=True)]
        pairs += [(notes.extras[name], value) for name, value in extras.items()]
        pairs.append((notes.before, (*weights, *values)))
        if trace.after is None:
            new, kept = apply(list(values), grads, list(weights))
            pairs.append((notes.after, (*new, *kept)))
        else:
            new = [trace.after.get(id(v), value) for v, value in zip(trained, weights, strict=True)]
            slots = zip(optimizer.variables, values, strict=True)
            kept = [trace.after.get(id(v), value) for v, value in slots]
        for note, value in pairs:
            if value is not None:
                frame.scope.add_update((note, value))
        if notes not in trace.notes:
            trace.notes.append(notes)
        return new, kept


def push_layout_of(strategy: Any) -> PushLayout:
    """Return the layout of a strategy whose variables lie on servers.

    Raises:
        UnsupportedError: for another strategy.
    """
    layout = strategy.state_layout
    if not isinstance(layout, PushLayout) or strategy.num_replicas_in_sync != 1:
        raise UnsupportedError(
            "Programs for workers need a strategy of one replica whose variables lie on servers. "
            f"Received: {strategy!r}."
        )
    return layout
