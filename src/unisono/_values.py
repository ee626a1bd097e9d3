"""Values that exist once per replica: `ReduceOp`, `DistributedValues`, `PerReplica`, `Mirrored`."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import jax

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono._types import ArrayLike

if TYPE_CHECKING:
    import numpy as np

    from unisono._system._literals import ReduceOpName


T = TypeVar("T")


class ReduceOp(enum.Enum):
    """How the values of several replicas are combined: as their sum or their mean.

    >>> ReduceOp.parse("mean")
    <ReduceOp.MEAN: 'MEAN'>
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def parse(cls, op: ReduceOp | ReduceOpName) -> ReduceOp:
        """Return `op` as a `ReduceOp`; the case of names does not matter.

        Args:
            op: a `ReduceOp`, or `"SUM"` or `"MEAN"` in any case.

        Raises:
            InvalidArgumentError: when `op` is neither.
        """
        if isinstance(op, cls):
            return op
        if isinstance(op, str) and op.upper() in cls.__members__:
            return cls[op.upper()]
        raise InvalidArgumentError(
            "`reduce_op` must be `ReduceOp.SUM`, `ReduceOp.MEAN`, 'SUM' or 'MEAN'. "
            f"Received: reduce_op={op!r}. Write `reduce(unisono.ReduceOp.SUM, value, axis=None)`."
        )


class DistributedValues:
    """Base class of values that exist for each replica: `PerReplica`, `Mirrored`, `Variable`.

    >>> isinstance(PerReplica((1, 2)), DistributedValues)
    True
    """

    __slots__ = ()


def _forbidden(what: str) -> Callable[..., NoReturn]:
    """Return a method that raises, and says how to get one number or array from a `PerReplica`."""

    def method(self: PerReplica, *others: object) -> NoReturn:
        raise InvalidTypeError(
            f"A value that differs between replicas cannot be used as one array. Received: {what} of a "
            f"PerReplica of {self.num_replicas} replicas. Combine the replicas first: "
            '`strategy.reduce("SUM", value, axis=None)`, `strategy.gather(value, axis=0)`; or get a tuple of '
            "the replicas' values with `strategy.local_results(value)`."
        )

    return method


class PerReplica(DistributedValues):
    """One value for each replica, in replica order.

    Arrays of equal shapes are held as one array with a leading replica axis (`stacked`), sharded
    over the replicas; unequal shapes, and values that are not arrays, as a tuple. A `PerReplica`
    supports no arithmetic: combine its values with `strategy.reduce` or `strategy.gather`, or get
    them as a tuple with `strategy.local_results`.

    >>> PerReplica((1, 2)).values
    (1, 2)
    """

    __slots__ = ("_stacked", "_values")

    def __init__(self, values: Iterable[object]) -> None:
        self._values: tuple[Any, ...] | None = tuple(values)
        # Not only `jax.Array`: `jax.tree` puts placeholders of any kind here.
        self._stacked: Any = None

    @classmethod
    def from_stacked(cls, stacked: object) -> PerReplica:
        """Return the value whose replica `i` has `stacked[i]`.

        Args:
            stacked: an array of shape `(replicas, ...)`.
        """
        made = cls.__new__(cls)
        # Not through `__init__`, which would split the array into a tuple.
        made._values, made._stacked = None, stacked
        return made

    @property
    def stacked(self) -> jax.Array | None:
        """The array of shape `(replicas, ...)`, or None where the values have unequal shapes."""
        stacked: jax.Array | None = self._stacked
        return stacked

    @property
    def num_replicas(self) -> int:
        """The number of values."""
        return len(self._values) if self._values is not None else int(self._stacked.shape[0])

    @property
    def values(self) -> tuple[Any, ...]:
        """The values in replica order, each on its replica's device where it has one."""
        if self._values is not None:
            return self._values
        shards = None if isinstance(self._stacked, jax.core.Tracer) else _shards(self._stacked)
        return shards or tuple(self._stacked[i] for i in range(self._stacked.shape[0]))

    def _flatten(self) -> tuple[tuple[object, ...], bool]:
        """Return JAX's children: the stacked array, or the values."""
        if self._values is None:
            return (self._stacked,), True
        return self._values, False

    @classmethod
    def _unflatten(cls, is_stacked: bool, children: tuple[object, ...]) -> PerReplica:
        """Return a value from its children: the inverse of `_flatten`."""
        return cls.from_stacked(children[0]) if is_stacked else cls(children)

    def __repr__(self) -> str:
        try:
            lines = "".join(f"\n  {i}: {v!r}," for i, v in enumerate(self.values))
        except (AttributeError, TypeError, IndexError):  # a placeholder of `jax.tree.map`, not an array
            return f"PerReplica({self._stacked!r})"
        return f"PerReplica:{{{lines.rstrip(',')}\n}}"

    # Without these, NumPy would make an array of one object, and `bool` would return True.
    __array_ufunc__ = None
    __array__ = __jax_array__ = _forbidden("an array")
    __bool__ = _forbidden("the truth value")
    __float__ = __int__ = __index__ = __complex__ = _forbidden("the number")
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _forbidden("arithmetic")
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _forbidden("arithmetic")
    __neg__ = __abs__ = __mod__ = __floordiv__ = _forbidden("arithmetic")
    __lt__ = __le__ = __gt__ = __ge__ = _forbidden("a comparison")

    def __format__(self, spec: str) -> str:
        # Without a format spec the value is only printed.
        return _forbidden(f"the format {spec!r}")(self) if spec else repr(self)


class IndexedSlices:
    """Some rows of an array: `values[i]` is row `indices[i]`; rows of equal indices are added.

    Args:
        values: array of shape `(n, ...)`.
        indices: integers of shape `(n,)`.
        dense_shape: the shape of the whole array, where it is known.

    >>> IndexedSlices([1.0, 2.0], [0, 3])
    IndexedSlices(values=[1.0, 2.0], indices=[0, 3])
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(
        self, values: ArrayLike, indices: ArrayLike, dense_shape: Sequence[int] | None = None
    ) -> None:
        self.values, self.indices, self.dense_shape = values, indices, dense_shape

    def _flatten(self) -> tuple[tuple[object, object], Sequence[int] | None]:
        """Return JAX's children: values and indices."""
        return (self.values, self.indices), self.dense_shape

    @classmethod
    def _unflatten(cls, dense_shape: Sequence[int] | None, children: tuple[object, object]) -> IndexedSlices:
        """Return a value from its children: the inverse of `_flatten`."""
        return cls(*children, dense_shape)

    def __repr__(self) -> str:
        return f"IndexedSlices(values={self.values!r}, indices={self.indices!r})"


def _shards(stacked: jax.Array | np.ndarray) -> tuple[jax.Array, ...] | None:
    """Return the replicas' values without a copy, None where each device does not hold just one of them."""
    shards = getattr(stacked, "addressable_shards", ())
    # As in tf.distribute, `values` are this process' replicas where an array belongs to several processes.
    is_whole = getattr(stacked, "is_fully_addressable", True)
    # By their place in the array, the replica's number; `start` is None where one shard is the whole array.
    # Of a replica of several devices, each may hold its values.
    first = {s.index[0].start or 0: s for s in reversed(shards)}
    if (is_whole and len(first) != stacked.shape[0]) or any(s.data.shape != _row(stacked) for s in shards):
        return None
    return tuple(first[i].data[0] for i in sorted(first))


def _row(stacked: jax.Array | np.ndarray) -> tuple[int, ...]:
    """Return the shape of a whole row of an array, as an array of one row."""
    return (1, *stacked.shape[1:])


class Mirrored(DistributedValues, Generic[T]):
    """A value that is equal on every replica, such as the parameters of a pure JAX model.

    `strategy.run` passes the bare value to the step. A step returns a `Mirrored` to state that all
    replicas computed the same value; `run` then returns one `Mirrored` instead of a `PerReplica`.

    >>> Mirrored({"w": 1.0}).value
    {'w': 1.0}
    """

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def _flatten(self) -> tuple[tuple[T], None]:
        """Return JAX's children: the value."""
        return (self.value,), None

    @classmethod
    def _unflatten(cls, _: None, children: tuple[T]) -> Mirrored[T]:
        """Return a value from its children: the inverse of `_flatten`."""
        made: Mirrored[T] = cls.__new__(cls)
        made.value = children[0]
        return made

    def __repr__(self) -> str:
        return f"Mirrored({self.value!r})"


_PYTREES: tuple[Any, ...] = (PerReplica, IndexedSlices, Mirrored)
for _each in _PYTREES:
    jax.tree_util.register_pytree_node(_each, _each._flatten, _each._unflatten)
