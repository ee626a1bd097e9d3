"""The variables of one server: dense ones, which an update replaces, and tables, whose rows it changes.

Tests: tests/unit/parameter_server/test_store.py.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import ml_dtypes  # noqa: F401 (NumPy then knows the names of bfloat16 and the float8 types)
import numpy as np

from unisono._checks import whole_numbers
from unisono._errors import InvalidArgumentError
from unisono._types import Json
from unisono.parameter_server.server._programs import to_device
from unisono.parameter_server.state._checksums import row_checksums
from unisono.parameter_server.state._push import Array
from unisono.rpc._fields import listed, text

#: Kinds of variables.
DENSE, TABLE = "dense", "table"
#: To what values of float32 may be rounded before they are sent.
ROUNDED = ("bfloat16", "float16")
#: What variables are for: workers pull values and not slots.
VALUE, SLOT = "value", "slot"


@dataclasses.dataclass(frozen=True)
class StoredSpec:
    """What a server must know of a variable.

    Args:
        shape: of the variable, or of the shard that lies here.
        kind: `"dense"` or `"table"`, of which steps use some rows.
        role: `"value"` or `"slot"`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str = DENSE
    role: str = VALUE

    @property
    def nbytes(self) -> int:
        """The size of the value."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def encode(self) -> dict[str, Json]:
        """Return what `decode` reads."""
        # Not `asdict`, which copies deeply: an image of a small model is written every 20 pushes.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def decode(cls, meta: Json) -> StoredSpec:
        """Return the variable that a client has described."""
        if not isinstance(meta, dict):
            raise InvalidArgumentError(f"Each of `variables` must be an object. Received: {meta!r}.")
        name, shape = text(meta, "name"), tuple(listed(meta, "shape"))
        kind, role = meta.get("kind", DENSE), meta.get("role", VALUE)
        if whole_numbers(shape, 0) is None or len(shape) > 16:
            raise InvalidArgumentError(f"A shape must be a list of sizes. Received: {shape} for {name!r}.")
        if kind not in (DENSE, TABLE) or role not in (VALUE, SLOT) or (kind == TABLE and not shape):
            raise InvalidArgumentError(
                f"A variable must be of kind 'dense' or 'table' (with rows), and have the role 'value' or "
                f"'slot'. Received: {kind!r}, {role!r} and shape {shape} for {name!r}."
            )
        return cls(name, shape, _dtype_name(text(meta, "dtype"), name), kind, role)


def _dtype_name(given: str, name: str) -> str:
    try:
        dtype = np.dtype(given)
    except TypeError as error:
        raise InvalidArgumentError(f"Unknown dtype. Received: {given!r} for {name!r}.") from error
    if dtype.hasobject or dtype.fields is not None or dtype.kind in "SUMm":
        raise InvalidArgumentError(f"A variable holds numbers. Received: dtype {given!r} for {name!r}.")
    return dtype.name


class DenseVariable:
    """A variable whose updates replace the whole value.

    A value that was handed out never changes; it lies in memory of JAX or NumPy, whichever wrote it last.

    Args:
        value: taken over, not copied.
    """

    def __init__(self, spec: StoredSpec, value: Array, version: int = 0) -> None:
        self.spec = spec
        self.version = version
        #: No property: a push asks for it several times for each variable.
        self.shape = spec.shape
        #: That of NumPy.
        self.dtype: Any = value.dtype
        self._array: Array | jax.Array = value
        #: The value, rounded for the first worker that has pulled it so.
        self._rounded: Array | None = None

    def sent(self, dtype: str | None) -> Array:
        """Return the value as it is pulled, without a copy."""
        if dtype is None:
            return self.host()
        if self._rounded is None or self._rounded.dtype.name != dtype:
            self._rounded = rounded(self.host(), dtype)
        return self._rounded

    def host(self) -> Array:
        """Return the value, without a copy; must not be written to."""
        return np.asarray(self._array)

    def device(self) -> jax.Array:
        """Return the value for a program, which may use up its memory: replace it after that."""
        if not isinstance(self._array, jax.Array):
            self._array = to_device(self._array)
        return self._array

    @property
    def is_gone(self) -> bool:
        """Whether a program has used up the value's memory."""
        return isinstance(self._array, jax.Array) and self._array.is_deleted()

    def write(self, value: Array, indices: Array | None) -> None:
        """Take a copy of another value, or of some rows."""
        if indices is None:
            self.replace(np.array(value))
        else:
            changed = np.array(self.host())
            changed[indices] = value
            self.replace(changed)

    def replace(self, value: Array | jax.Array) -> None:
        """Take another value.

        Args:
            value: of the same shape and dtype; taken over, not copied.
        """
        self._array, self._rounded = value, None
        self.version += 1


class Table:
    """A variable of which steps use some rows, which are changed in place.

    Args:
        memory: where its rows lie, of the variable's shape and dtype.
        checksums: of the rows, one for each, kept beside them; None for none.
    """

    def __init__(
        self, spec: StoredSpec, memory: Array, version: int = 0, checksums: Array | None = None
    ) -> None:
        self.spec = spec
        self.memory = memory
        self._checksums = checksums
        self.version = version
        #: The rows that have changed since a snapshot began to copy them; None while none does.
        self.changed: list[Array] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self.spec.shape

    @property
    def dtype(self) -> Any:
        """The dtype of NumPy."""
        return self.memory.dtype

    def sent(self, dtype: str | None) -> Array:
        """Return a copy of all rows."""
        return self.memory.copy() if dtype is None else rounded(self.memory, dtype)

    def host(self) -> Array:
        """Return all rows, without a copy; they will change."""
        return self.memory

    def write(self, value: Array, indices: Array | None) -> None:
        """Replace all rows, or some."""
        which = ... if indices is None else indices
        self.memory[which] = value
        if self._checksums is not None:
            self._checksums[which] = row_checksums(value)
        self.version += 1
        if self.changed is not None:
            self.changed.append(np.arange(len(self.memory)) if indices is None else indices)

    def seal(self) -> None:
        """Compute the checksums of all rows, which were written to `memory`."""
        if self._checksums is not None:
            self._checksums[...] = row_checksums(self.memory)

    def damaged_rows(self) -> Array:
        """Return the numbers of the rows that do not have their checksums."""
        if self._checksums is None:
            return np.empty(0, np.int64)
        return np.flatnonzero(row_checksums(self.memory) != self._checksums)

    def touched_rows(self) -> tuple[Array, Array]:
        """Return the rows that have changed since `changed` was set to a list, and their numbers."""
        indices = np.unique(np.concatenate([np.empty(0, np.int64), *(self.changed or ())]))
        return indices, self.memory[indices]

    def rows(self, indices: Array) -> Array:
        """Return a copy of some rows."""
        return self.memory.take(indices, axis=0)

    def check_rows(self, indices: Array) -> Array:
        """Return the indices as NumPy uses them."""
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            raise InvalidArgumentError(
                f"Rows of {self.spec.name!r} must be named by a list of whole numbers. Received: indices of "
                f"shape {indices.shape} and dtype {indices.dtype}."
            )
        if indices.size and not (indices.min() >= 0 and indices.max() < self.shape[0]):
            raise InvalidArgumentError(
                f"Rows of {self.spec.name!r} are numbered from 0 to {self.shape[0] - 1}. Received: indices "
                f"from {indices.min()} to {indices.max()}."
            )
        return indices.astype(np.intp, copy=False)


def rounded(value: Array, dtype: str) -> Array:
    """Return a value of float32 in 16 bits; in float16, what is beyond its largest number is infinite.

    >>> rounded(np.array([1.001, -1e6], np.float32), "float16").tolist()
    [1.0009765625, -inf]
    """
    if dtype not in ROUNDED or value.dtype != np.float32:
        raise InvalidArgumentError(
            f"Values of float32 can be rounded to one of {', '.join(ROUNDED)}. Received: values of "
            f"{value.dtype}, and {dtype[:50]!r}."
        )
    with np.errstate(over="ignore"):
        return value.astype(dtype)


def combine_rows(indices: Array, gradients: list[Array]) -> tuple[Array, list[Array]]:
    """Return each index once, in ascending order, and the sums of the gradients that belong to it.

    >>> indices, (rows,) = combine_rows(np.array([7, 2, 7]), [np.array([[1.0], [2.0], [3.0]])])
    >>> indices.tolist(), rows.tolist()
    ([2, 7], [[2.0], [4.0]])
    """
    if indices.size < 2 or (indices[1:] > indices[:-1]).all():
        return indices, gradients
    # Stable: gradients of one row are added in the order of the batch.
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    return ordered[begins], [
        # Sums in 16 bits lose what is added last.
        np.add.reduceat(
            g[order], begins, axis=0, dtype=g.dtype if g.dtype.itemsize > 2 else np.float32
        ).astype(g.dtype, copy=False)
        for g in gradients
    ]
