"""What a variable holds whose value lies on servers: where it is, and how the chief reads and writes it.

Tests: tests/virtual/training/pushed/test_held.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras

from unisono.step._held_value import HeldValue
from unisono.step._keras_internals import store_value, stored_dtype, stored_value

#: Returns the value that the servers hold of a variable.
Read = Callable[[keras.Variable], Any]

#: Replaces the value that the servers hold of a variable.
Write = Callable[[keras.Variable, Any], None]


class OnServers(HeldValue):
    """Stands for a variable's array that lies on servers.

    Each read asks the servers, each assignment goes to them: no copy here can be out of date.

    Args:
        variable: whose value.
        read: gets the variable, and returns an array of its shape.
        write: gets the variable, and an array of its shape and type.
    """

    def __init__(self, variable: keras.Variable, read: Read, write: Write) -> None:
        super().__init__(tuple(variable.shape), jnp.dtype(stored_dtype(variable)))
        self._variable, self._read, self._write = variable, read, write

    def whole(self) -> jax.Array:
        """Return the value that the servers hold now."""
        return jnp.asarray(self._read(self._variable), self.dtype)

    def is_deleted(self) -> bool:
        """Return False: no step is given the servers' arrays."""
        return False

    def assigned(self, value: jax.Array) -> OnServers:
        """Send a value to the servers; the variable holds what it held."""
        self._write(self._variable, value)
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> jax.Array:
        # A copied variable is another one, which no server knows.
        return self.whole()

    def __repr__(self) -> str:
        return f"<on servers: {self._variable.path!r} {self.dtype}{list(self.shape)}>"


def hold_on_servers(variable: keras.Variable, read: Read, write: Write) -> Any:
    """Let a variable's value lie on servers; return the array that it has held here.

    Args:
        variable: with a value.
        read: as for `OnServers`.
        write: likewise.
    """
    value = stored_value(variable)
    store_value(variable, OnServers(variable, read, write))
    return value


def bring_home(variable: keras.Variable) -> None:
    """Let a variable hold the array itself that the servers have of it, as at the end of a cluster.

    Args:
        variable: any.
    """
    held = stored_value(variable)
    if isinstance(held, OnServers):
        store_value(variable, held.whole())
