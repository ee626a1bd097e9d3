"""What a variable holds whose value lies on servers: where it is, and how the chief reads and writes it.

Tests: tests/virtual/training/remote_step/test_remote_array.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono.step._keras_internals import stored_dtype
from unisono.step._value_handle import RowsHandle

if TYPE_CHECKING:
    from unisono.training.remote_step._remote_variables import RemoteVariables


class RemoteArray(RowsHandle):
    """Stands for a variable's array that lies on servers.

    Each read asks the servers, each assignment goes to them: no copy here can be out of date.
    """

    def __init__(self, variable: keras.Variable, servers: RemoteVariables) -> None:
        super().__init__(tuple(variable.shape), jnp.dtype(stored_dtype(variable)))
        self._variable, self._servers = variable, servers

    def whole(self) -> jax.Array:
        """Return the value that the servers hold now."""
        return jnp.asarray(self._servers.read(self._variable), self.dtype)

    def is_deleted(self) -> bool:
        """Return False: no step is given the servers' arrays."""
        return False

    def assigned(self, value: jax.Array) -> RemoteArray:
        """Send a value to the servers; the variable holds what it held."""
        self._servers.write(self._variable, value)
        return self

    def rows(self, begin: int, end: int) -> np.ndarray:
        """Return rows from the servers that hold them."""
        return self._servers.read_rows(self._variable, begin, end)

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Return rows from the servers that hold them."""
        return self._servers.take(self._variable, indices)

    def write_rows(self, begin: int, value: jax.Array) -> None:
        """Send rows to the servers that hold them."""
        self._servers.write_rows(self._variable, begin, value)

    def __deepcopy__(self, memo: dict[int, object]) -> jax.Array:
        # A copied variable is another one, which no server knows.
        return self.whole()

    def __repr__(self) -> str:
        return f"<on servers: {self._variable.path!r} {self.dtype}{list(self.shape)}>"
