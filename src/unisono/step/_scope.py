"""The state of one execution of a step: which variables it reads and writes, and their values.

Tests: tests/virtual/step/test_variable.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras

from unisono._system._blocks import set_for_block
from unisono.step._keras_internals import stored_dtype, stored_value

if TYPE_CHECKING:
    from unisono.step._replicas import Replicas
    from unisono.step._value_handle import VariableValue

#: Whether steps run to learn what they touch; values do not matter then.
_DISCOVERING: ContextVar[bool] = ContextVar("unisono_discovering", default=False)


def discovering() -> AbstractContextManager[object]:
    """Give code stand-ins for the values of variables outside of every step."""
    return set_for_block(_DISCOVERING, True)


def is_discovering() -> bool:
    """Return whether a step runs to learn what it touches: the variables that it creates now are kept."""
    return _DISCOVERING.get()


def _stored(variable: keras.Variable) -> Any:
    """The value that a variable itself holds; a stand-in for it while steps are discovered."""
    if not _DISCOVERING.get():
        return stored_value(variable)
    # Not the array itself: it lies on a mesh, which a trace inside that mesh must not see. And there is
    # none yet where the step creates the variable: Keras initializes it after the trace.
    value = stored_value(variable)
    return jnp.zeros(variable.shape, stored_dtype(variable) if value is None else value.dtype)


def current_stateless_scope() -> keras.StatelessScope | None:
    """Return the innermost stateless scope around this code, which Keras or a user may have entered."""
    # The one way to the current scope that Keras offers: another scope remembers it.
    with keras.StatelessScope() as probe:
        return probe.original_scope


class StateScope(keras.StatelessScope):
    """A stateless scope that remembers every variable which the code in it touched.

    Variables that it holds no value for are looked up in the scope around it, and at last in
    the variable itself, so that a first execution can find out what a step reads.

    Args:
        copies: pairs of a variable and the array of its replicas' copies, of shape
            `(replicas, ...)`; for cross-replica code alone.
    """

    def __init__(
        self,
        values: Iterable[tuple[keras.Variable, VariableValue]] = (),
        copies: Iterable[tuple[keras.Variable, jax.Array]] = (),
        parent: StateScope | None = None,
    ) -> None:
        super().__init__(collect_losses=True)
        self.state_mapping = {id(v): value for v, value in values}
        self.copies = {id(v): value for v, value in copies}
        self.seen: dict[int, keras.Variable] = {}
        self.written: dict[int, keras.Variable] = {}
        self.written_by_replica: dict[int, keras.Variable] = {}
        #: Strategies whose `run` was called inside.
        self.replicas: set[Replicas] = set()
        self._parent = parent
        self._synced = 0

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Return the value of `variable` here, and note that it was read."""
        self.seen.setdefault(id(variable), variable)
        value = self.state_mapping.get(id(variable))
        if value is not None:
            return value
        return self._parent.get_current_value(variable) if self._parent else _stored(variable)

    def get_copies(self, variable: keras.Variable) -> jax.Array | None:
        """Return the replicas' copies of `variable` as cross-replica code has them, or None."""
        self.seen.setdefault(id(variable), variable)
        if id(variable) in self.copies:
            return self.copies[id(variable)]
        return self._parent.get_copies(variable) if self._parent else variable.stored_copies

    def set_copies(self, variable: keras.Variable, copies: jax.Array) -> None:
        """Replace the replicas' copies of `variable`."""
        self._note(variable)
        self.copies[id(variable)] = copies

    def add_update(self, update: tuple[keras.Variable, VariableValue]) -> None:
        """Keras' hook for `variable.assign`."""
        variable, value = update
        self._note(variable)
        self.state_mapping[id(variable)] = value

    def is_written(self, variable: keras.Variable) -> bool:
        """Return whether the code in this scope, or in one around it, has written `variable`."""
        return id(variable) in self.written or bool(self._parent and self._parent.is_written(variable))

    @property
    def is_innermost(self) -> bool:
        """Whether an assignment reaches this scope: in a stateless scope of the user it does not."""
        return current_stateless_scope() is self

    def _note(self, variable: keras.Variable) -> None:
        self.seen.setdefault(id(variable), variable)
        self.written[id(variable)] = variable
        if not self._synced:
            self.written_by_replica[id(variable)] = variable

    def merged(self, variable: keras.Variable, value: VariableValue) -> None:
        """Replace what the replica itself wrote by a value that is equal on all replicas."""
        self._note(variable)
        self.written_by_replica.pop(id(variable), None)
        self.state_mapping[id(variable)] = value

    @contextlib.contextmanager
    def synced(self) -> Iterator[None]:
        """Mark the writes in a block as equal on all replicas, such as those of an optimizer."""
        self._synced += 1
        try:
            yield
        finally:
            self._synced -= 1
