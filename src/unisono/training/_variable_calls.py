"""Keras' variables in the scope of a strategy: where they are created, assigned and read.

Tests: tests/virtual/strategies/test_sharded_state.py and tests/virtual/training/test_failures.py.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TypeGuard

import jax
import keras
import numpy as np

from unisono._context import check_holder, creator_of, current
from unisono._mesh import on_device
from unisono._types import KerasWrap
from unisono.step._keras_internals import (
    in_stateless_scope,
    store_value,
    stored_dtype,
    stored_value,
    sync_methods,
)
from unisono.step._layout import StateLayout, note_slot, own_layout
from unisono.step._program import current_frame
from unisono.step._value_handle import DeferredValue, RowsHandle, ValueHandle, as_read, in_parts
from unisono.step.variables._recorders import note_read, read_as
from unisono.step.variables._variable_store import current_store
from unisono.training._binding import current_strategy, mark_creation
from unisono.training.trainer._fit_state import put_back

#: By thread: whether Keras gives variables the arrays of its loop, which nothing else uses.
_PUTTING_BACK = threading.local()


def wraps() -> list[KerasWrap]:
    """Return what is wrapped of `keras.Variable`, and where models and Keras' loop give variables values."""
    return [
        (keras.Variable, "__new__", _allocated),
        (keras.Variable, "__init__", _marked),
        (keras.Variable, "_initialize_with_initializer", _initialize),
        (keras.Variable, "_initialize", _initialize_given),
        (keras.Variable, "assign", _assign),
        (keras.Variable, "value", _value),
        (keras.Model, "__new__", _marked_model),
        # Keras 3.17 renames it, and keeps the old name for callers.
        *((keras.Model, name, _put_back) for name in sync_methods()),
    ]


def _allocated(
    original: Callable[[type], keras.Variable], cls: type, *args: object, **kwargs: object
) -> keras.Variable:
    """Let code whose variables are kept in a store get them from there."""
    store = current_store()
    # A copy is made without arguments.
    if store is None or not (args or kwargs):
        return original(cls)
    return store.allocate(cls, lambda: original(cls), (args, kwargs))


def _marked(original: Callable[..., None], self: keras.Variable, *args: object, **kwargs: object) -> None:
    """Create a variable, marked with the current strategy; or use one that a store holds."""
    store = current_store()
    if store is not None:
        if store.is_made(self):
            store.reuse(self, (args, kwargs))
            return
        args, kwargs = store.arguments(self, (args, kwargs))
    mark_creation(self)
    note_slot(self)
    original(self, *args, **kwargs)
    # The argument, or what its function returns, may be an array that something else holds, too. Two
    # references are the variable's and that of the call which counts.
    if sys.getrefcount(stored_value(self)) > 2:
        _own_array(self)
    if store is not None:
        store.made(self)
    if (strategy := current_strategy()) is not None:
        strategy._variable_created(self)


def _initialize(
    original: Callable[..., None], self: keras.Variable, initializer: Callable[..., jax.Array]
) -> None:
    """Let a variable begin with the value that its strategy's state layout chooses."""
    layout = _layout_for(self) if self.shape else None
    value = DeferredValue(initializer, tuple(self.shape), stored_dtype(self))
    held = None if layout is None else layout.first(self, value)
    if held is None:
        original(self, initializer)
    else:
        store_value(self, held)


def _initialize_given(original: Callable[..., None], self: keras.Variable, value: jax.Array) -> None:
    """Let a variable with a ready value, as `keras.Variable(array)`, lie in parts from here on."""
    original(self, value)
    layout = _layout_for(self) if self.shape and not isinstance(value, jax.core.Tracer) else None
    held = None if layout is None else layout.given(self, value)
    if held is not None:
        store_value(self, held)


def _layout_for(variable: keras.Variable) -> StateLayout | None:
    """Return the state layout of the strategy that holds a new variable, if it has replicas."""
    context = current()
    # What a step has made, such as an optimizer's variables, begins after it, where no strategy is current.
    strategy = creator_of(variable) if context is None else context.strategy
    replicated = None if strategy is None else strategy._replicated
    return None if replicated is None else replicated.state_layout


def _assign(
    original: Callable[..., jax.Array], self: keras.Variable, value: object
) -> jax.Array | ValueHandle:
    check_holder(self)
    if isinstance(value, ValueHandle):
        # Where Keras' loop ends, it puts back what the last step has left.
        store_value(self, value)
        return value
    held = stored_value(self)
    if type(value) in (int, float) and _is_number_of_step(self, held):
        # Placed as the last step has left it, so that the next one finds it there: Keras sets metrics to zero
        # before each `train_on_batch`.
        number = np.asarray(value, held.dtype)
        placed: jax.Array = jax.make_array_from_callback((), held.sharding, number.__getitem__)
        store_value(self, placed)
        return placed
    result = original(self, value)
    new = stored_value(self)
    # In a stateless scope the variable holds what it held, which may be what it is assigned.
    if new is held:
        return result
    if isinstance(held, ValueHandle):
        store_value(self, held)
        store_value(self, held.assigned(new))
    elif new is value and getattr(_PUTTING_BACK, "state", False):
        return result  # a step's own: the next step knows it again
    elif (layout := own_layout(self)) is not None and not isinstance(new, jax.core.Tracer):
        store_value(self, layout.assigned(new))
    elif new is (stored_value(value) if isinstance(value, keras.Variable) else value):
        _own_array(self)
    return result


def _is_number_of_step(variable: keras.Variable, held: object) -> TypeGuard[jax.Array]:
    """Return whether a strategy's variable holds a number that a program has returned."""
    if not isinstance(held, jax.Array) or isinstance(held, jax.core.Tracer) or held.shape:
        return False
    is_whole = creator_of(variable) is not None and own_layout(variable) is None
    return is_whole and held.committed and not in_stateless_scope()


def _own_array(variable: keras.Variable) -> None:
    """Store a copy of an array that another variable or the user holds, too.

    A step donates what its variables hold, and deletes it for all others that hold it, as after
    `target.assign(source)` or `keras.Variable(array)`.
    """
    stored = stored_value(variable)
    if not isinstance(stored, jax.Array) or isinstance(stored, jax.core.Tracer):
        return
    # A step's own results are new arrays.
    if current_frame() is None:
        # A trace around this code must not make a tracer of it, which would outlive the trace.
        with jax.ensure_compile_time_eval():
            store_value(variable, jax.device_put(stored, may_alias=False))


def _put_back(original: Callable[..., None], self: keras.Model) -> None:
    if put_back(self):
        return
    _PUTTING_BACK.state = True
    try:
        original(self)
    finally:
        _PUTTING_BACK.state = False


def _value(original: Callable[[keras.Variable], jax.Array], self: keras.Variable) -> jax.Array:
    """Read on its device what rests in host memory between steps: layers cannot compute with it there."""
    check_holder(self)
    note_read(self)
    held: jax.Array = as_read(on_device(original(self)))
    return held if isinstance(stored_value(self), jax.Array) else read_as(self, held)


def rows_handle_of(variable: keras.Variable) -> RowsHandle | None:
    """Return the handle from which single rows of a variable can be read; None without one."""
    if variable.dtype != stored_dtype(variable):
        return None  # a layer of mixed precision reads it
    with in_parts():
        held = variable.value
    return held if isinstance(held, RowsHandle) else None


def _marked_model(
    original: Callable[..., keras.Model], cls: type, *args: object, **kwargs: object
) -> keras.Model:
    """Note the scope in which a model is created: its variables may be created much later."""
    model = original(cls, *args, **kwargs)
    mark_creation(model)
    return model
