"""`unisono.ShardedVariable`: how a variable looks whose rows are divided over parameter servers.

It is the Keras variable that it would be without servers: layers, optimizers, checkpoints and arithmetic see
one array. Keras makes it, and it becomes a `ShardedVariable` in the scope of a strategy with a partitioner.
"""

from __future__ import annotations

import copyreg
import functools
import operator
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, SupportsIndex

import jax.numpy as jnp
import keras
import numpy as np

from unisono._context import check_holder
from unisono._types import ArrayLike
from unisono.step._keras_internals import stored_dtype
from unisono.training._variable_calls import rows_handle_of

if TYPE_CHECKING:
    import jax
    from jax.typing import DTypeLike


#: The attribute of a divided variable that holds the bounds of its parts.
_BOUNDS = "_unisono_bounds"

#: Variables of more elements are printed without their values, which lie on servers.
_PRINTED = 1000


class ShardedVariable:
    """A variable whose rows are divided over parameter servers.

    In the scope of a `ParameterServerStrategy` with a `variable_partitioner`, `unisono.Variable` and Keras'
    layers make such variables. Indexing reads only the rows that it needs. `variables` has the parts, over
    which iteration goes, as in TensorFlow.

    >>> import unisono
    >>> from unisono.partitioners import FixedShardsPartitioner
    >>> strategy = unisono.ParameterServerStrategy(variable_partitioner=FixedShardsPartitioner(2))
    >>> with strategy.scope():  # without a cluster there are no servers that could share it
    ...     table = unisono.Variable([[1.0], [2.0], [3.0]])
    >>> isinstance(table, ShardedVariable)
    False
    """

    # Of the variable's own class.
    value: jax.Array
    shape: tuple[int, ...]

    @property
    def variables(self) -> tuple[VariableShard, ...]:
        """The parts, in the order of rows."""
        return tuple(VariableShard(self, *rows) for rows in bounds_of(self))

    def read_value(self) -> jax.Array:
        """The whole value as one array."""
        return self.value

    def __iter__(self) -> Iterator[VariableShard]:
        return iter(self.variables)

    def __getitem__(self, index: object) -> jax.Array:
        """Return a part of the value, as of an array.

        Args:
            index: what NumPy takes: numbers, slices with any step, `...`, None, arrays.
        """
        needed = needed_rows(index, self.shape[0])
        held = rows_handle_of(self) if needed is not None else None
        if needed is None or held is None:
            part: jax.Array = super().__getitem__(index)  # type: ignore[misc]
            return part
        begin, end, left = needed
        return jnp.asarray(held.rows(begin, end))[left]

    def __repr__(self) -> str:
        parts = ",\n".join(f"  {i}: {part!r}" for i, part in enumerate(self.variables))
        return f"ShardedVariable:{{\n{parts}\n}}"

    def __reduce_ex__(
        self, protocol: SupportsIndex
    ) -> tuple[Callable[..., object], tuple[type, ...], dict[str, object]]:
        # The class was made here, and cannot be found by its name.
        return _made_again, (type(self).__mro__[2],), dict(vars(self))


class VariableShard:
    """Rows of a `ShardedVariable`, which lie on one server; one of its `variables`.

    Args:
        end: one past the last row.
    """

    def __init__(self, variable: keras.Variable, begin: int, end: int) -> None:
        self._variable, self.rows = variable, (begin, end)

    @property
    def whole(self) -> keras.Variable:
        """The variable whose rows these are."""
        return self._variable

    @property
    def name(self) -> str:
        """The variable's, with the number of the part."""
        return f"{self._variable.name}/part_{bounds_of(self._variable).index(self.rows)}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        begin, end = self.rows
        return (end - begin, *self._variable.shape[1:])

    @property
    def dtype(self) -> str:
        """The variable's."""
        return str(self._variable.dtype)

    @property
    def value(self) -> jax.Array:
        """The rows as an array."""
        rows: jax.Array = self._variable[self.rows[0] : self.rows[1]]
        return rows

    def read_value(self) -> jax.Array:
        """The rows as an array; tf.Variable's name for `value`."""
        return self.value

    def numpy(self) -> np.ndarray:
        """Return the rows as an array of NumPy."""
        return np.asarray(self.value)

    def assign(self, value: ArrayLike) -> jax.Array:
        """Replace the rows."""
        begin, end = self.rows
        new = jnp.broadcast_to(jnp.asarray(value, stored_dtype(self._variable)), self.shape)
        held = rows_handle_of(self._variable)
        if held is None:
            self._variable.assign(jnp.asarray(self._variable.value).at[begin:end].set(new))
        else:
            check_holder(self._variable)
            held.write_rows(begin, new)
        return new

    def assign_add(self, value: ArrayLike) -> jax.Array:
        """Add to the rows."""
        return self.assign(self.value + value)

    def assign_sub(self, value: ArrayLike) -> jax.Array:
        """Subtract from the rows."""
        return self.assign(self.value - value)

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.value)

    def __getitem__(self, index: object) -> jax.Array:
        return self.value[index]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.value, dtype)

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.value)

    def __repr__(self) -> str:
        shown = f", numpy={self.numpy()}" if np.prod(self._variable.shape) <= _PRINTED else ""
        return f"<VariableShard {self.name!r} shape={self.shape} dtype={self.dtype}{shown}>"


def _operator(name: str) -> Callable[..., jax.Array]:
    """Return the method of a part that computes with its value."""

    def method(self: VariableShard, *others: ArrayLike) -> jax.Array:
        operator: Callable[..., jax.Array] = getattr(jnp.asarray(self.value), name)
        return operator(*(jnp.asarray(other) for other in others))

    return method


for _name in (
    *(f"__{r}{op}__" for op in ("add", "sub", "mul", "truediv", "pow", "matmul") for r in ("", "r")),
    *("__neg__", "__abs__", "__lt__", "__le__", "__gt__", "__ge__"),
):
    setattr(VariableShard, _name, _operator(_name))


def divide(variable: keras.Variable, bounds: list[tuple[int, int]]) -> None:
    """Let a variable that was just made be a `ShardedVariable`.

    Args:
        bounds: of the parts: the first row, and one past the last.
    """
    setattr(variable, _BOUNDS, bounds)
    base: type = type(variable)
    variable.__class__ = _sharded(base)


def bounds_of(variable: keras.Variable) -> list[tuple[int, int]]:
    """Return the bounds of a variable's parts; none for one that is not divided."""
    bounds: list[tuple[int, int]] = getattr(variable, _BOUNDS, [])
    return bounds


def needed_rows(index: object, rows: int) -> tuple[int, int, tuple[Any, ...]] | None:
    """Return which rows an index needs, and how it is applied to them; None where that is not plain.

    >>> needed_rows((slice(8, 2, -3), 0), 10)
    (5, 9, (slice(None, None, -3), 0))
    >>> needed_rows(slice(5, 5), 10)
    (0, 0, (slice(None, None, 1),))
    >>> needed_rows((Ellipsis, 0), 10) is None
    True
    """
    first, *rest = index if isinstance(index, tuple) else (index,)
    if isinstance(first, slice):
        try:
            chosen = range(rows)[first]
        except TypeError:  # bounds that are no numbers
            return None
        ends = sorted((chosen[0], chosen[-1])) if chosen else (0, -1)
        return ends[0], ends[1] + 1, (slice(None, None, chosen.step), *rest)
    if isinstance(first, (int, np.integer)) and not isinstance(first, bool):
        number = operator.index(first) + (rows if first < 0 else 0)
        return (number, number + 1, (0, *rest)) if 0 <= number < rows else None
    return None


@functools.cache
def _sharded(base: type) -> type:
    return types.new_class("ShardedVariable", (ShardedVariable, base))


def _made_again(base: type) -> keras.Variable:
    """Return an object for the state of a copied variable."""
    return copyreg.__newobj__(_sharded(base))  # type: ignore[attr-defined]
