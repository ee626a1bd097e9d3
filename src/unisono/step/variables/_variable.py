"""`unisono.Variable`: a Keras variable with tf.distribute's synchronization and aggregation."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.typing import DTypeLike

from unisono._context import ReplicaContext, check_holder, creator_of, current
from unisono._errors import InvalidArgumentError, UnsupportedError
from unisono._types import ArrayLike
from unisono._values import DistributedValues, IndexedSlices, PerReplica, ReduceOp
from unisono.step._keras_internals import stored_dtype, stored_value
from unisono.step._program import current_frame
from unisono.step._scope import StateScope, current_stateless_scope
from unisono.step.variables._merge_rules import (
    Merge,
    VariableAggregation,
    VariableKind,
    VariableSynchronization,
    merge_rule,
    read_copies,
    spread_copies,
)
from unisono.step.variables._recorders import not_recorded, read_as
from unisono.step.variables._scatter import as_slices, check_scatter, scattered
from unisono.step.variables._variable_store import current_store

if TYPE_CHECKING:
    from unisono._system._literals import AggregationName, SynchronizationName
    from unisono.strategies._base import Strategy


class UnknownInitialValueError(InvalidArgumentError):
    """A variable's initial value is computed by a function that is being traced."""


New = TypeVar("New")
Kind = TypeVar("Kind", bound=enum.Enum)


class Variable(keras.Variable, DistributedValues):
    """A variable that says how the values of several replicas become one.

    An assignment in a replica does what tf.distribute does:

    - `ON_WRITE` (the default) with SUM, MEAN or ONLY_FIRST_REPLICA: the *argument* is reduced
      over the replicas, then applied to every copy.
    - `ON_READ`: each replica writes its own copy; the copies are aggregated when cross-replica
      code reads the variable.
    - aggregation NONE: each replica writes its own copy, and the copies may differ. Here they
      are really kept apart (one value per replica, also between steps), and cross-replica code
      reads the first.

    Args:
        initial_value: array, number, or a function without arguments that returns one.
        trainable: whether `trainable_variables` of a layer lists it; False by default for ON_READ.
        name: letters without `/`.
        dtype: data type; that of `initial_value` by default.
        shape: of the variable, which `initial_value` must have; None in it stands for any size. The
            shape stays as it is: compiled programs depend on it.
        validate_shape: accepted for tf.Variable's signature.
        caching_device: accepted for it; each replica has its copy on its device anyway.
        constraint: a function of the value that optimizers apply after an update.
        synchronization: a `VariableSynchronization` or its name.
        aggregation: a `VariableAggregation` or its name.

    Raises:
        InvalidArgumentError: for synchronization NONE under a strategy, an unknown name, or
            aggregation MEAN of an integer variable.
        UnsupportedError: for `per_worker_variable=True`.

    >>> v = Variable(1.0)
    >>> float(v.assign_add(2.0))
    3.0
    """

    def __init__(
        self,
        initial_value: ArrayLike | Callable[[], ArrayLike],
        trainable: bool | None = None,
        name: str | None = None,
        dtype: DTypeLike | None = None,
        synchronization: VariableSynchronization | SynchronizationName = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | AggregationName = VariableAggregation.NONE,
        *,
        shape: Sequence[int | None] | None = None,
        validate_shape: bool = True,
        caching_device: object = None,
        constraint: Callable[[jax.Array], jax.Array] | None = None,
        **kwargs: object,
    ) -> None:
        if kwargs.pop("per_worker_variable", False):
            raise UnsupportedError(
                "A variable has one value for all workers. Received: `per_worker_variable=True`. Make one "
                "with a row for each worker, and write the row `coordinator.get_current_worker_index()`."
            )
        store = current_store()
        # An earlier run of this code has made it.
        if store is not None and store.is_made(self):
            return
        sync: VariableSynchronization = _parse(VariableSynchronization, synchronization, "synchronization")
        agg: VariableAggregation = _parse(VariableAggregation, aggregation, "aggregation")
        initial = _initial(initial_value() if callable(initial_value) else initial_value)
        _check_shape(shape, initial.shape)
        # "int64" is what JAX makes of it, as TensorFlow's programs ask for it often.
        dtype = str(jax.dtypes.canonicalize_dtype(dtype or initial.dtype))
        context = current()
        strategy = context.strategy if context else None
        _check_declaration(sync, agg, dtype, strategy)
        if sync is VariableSynchronization.AUTO:
            sync = VariableSynchronization.ON_WRITE
        self._sync, self._agg = sync, agg
        # Until a step gives each replica a value of its own, one value stands for all copies.
        self.stored_copies: jax.Array | None = None
        self.num_copies = strategy.num_replicas_in_sync if strategy else 1
        on_read = sync is VariableSynchronization.ON_READ
        super().__init__(
            # A function, because Keras creates variables with ready values in eager code alone.
            lambda shape, dtype: jnp.asarray(initial, dtype),
            shape=initial.shape,
            dtype=dtype,
            trainable=not on_read if trainable is None else trainable,
            aggregation=agg.value,
            synchronization=sync.value,
            name=name,
            **kwargs,
        )
        if constraint is not None:
            self.constraint = constraint
        if on_read and self.num_copies > 1:
            # Also where the first call of a step creates the variable, while it is traced.
            with jax.ensure_compile_time_eval():
                shape = (self.num_copies, *initial.shape)
                self.stored_copies = jnp.broadcast_to(jnp.asarray(initial, dtype), shape)

    @property
    def _kind(self) -> VariableKind:
        """What the variable's rule depends on."""
        return VariableKind(self._sync, self._agg, _is_float(stored_dtype(self)), owns_copies=True)

    @property
    def value(self) -> jax.Array:
        """The value here: this replica's copy in a replica, the aggregated value elsewhere."""
        copies = self._copies() if _replica() is None else None
        if copies is None:
            return super().value  # type: ignore[no-any-return]
        with not_recorded():
            value = self._of_copies(copies)
        return read_as(self, value)

    def _of_copies(self, copies: jax.Array) -> jax.Array:
        # Only on reading: between reads each replica keeps its own copy.
        if self._sync is VariableSynchronization.ON_READ:
            return read_copies(self._agg, copies, self.path)
        # The primary copy, as in TensorFlow.
        return copies[0]

    @property
    def values(self) -> tuple[jax.Array, ...]:
        """The copy of each replica, as `DistributedVariable.values` in tf.distribute."""
        copies = self._copies()
        if copies is None:
            return (super().value,) * self.num_copies
        return tuple(copies[i] for i in range(copies.shape[0]))

    def read_value(self) -> jax.Array:
        """A copy of the value, which later steps do not change; tf.Variable's name for `value`."""
        value = self.value
        # Steps donate what a variable holds, and their own values are not read twice.
        is_held = current_frame() is None and isinstance(value, jax.Array)
        return jax.device_put(value, may_alias=False) if is_held else value

    def assign(self, value: ArrayLike) -> jax.Array:
        """Set the variable; see the class for what a replica's assignment does."""
        return self._update(value, _replaced)

    def assign_add(self, value: ArrayLike) -> jax.Array:
        """Add `value`; in a replica, the value aggregated over the replicas is added once."""
        self._forbid_sum("assign_add")
        return self._update(self._array_of(value), lambda old, delta: old + delta)

    def assign_sub(self, value: ArrayLike) -> jax.Array:
        """Subtract `value`; in a replica, the value aggregated over the replicas, once."""
        self._forbid_sum("assign_sub")
        return self._update(self._array_of(value), lambda old, delta: old - delta)

    def _update(self, value: ArrayLike, combine: Callable[[Any, Any], Any]) -> jax.Array:
        replica = _replica()
        if replica is None:
            return self._assign_everywhere(value, combine)
        own_copy = merge_rule(self._kind) is Merge.STACK
        # Nothing to aggregate: the copy is this replica's own.
        if own_copy or replica.num_replicas_in_sync == 1:
            return super().assign(self._combined(combine, value))  # type: ignore[no-any-return]
        if isinstance(value, IndexedSlices):
            reduced: jax.Array | IndexedSlices = self._aggregate_rows(value, replica)
        else:
            reduced = self._aggregate(self._checked(value), replica)
        frame = current_frame()
        new = combine(super().value, reduced)
        if frame is None:
            return super().assign(new)  # type: ignore[no-any-return]
        # Equal on all replicas by now: the end of the step must not merge it again.
        with frame.scope.synced():
            return super().assign(new)  # type: ignore[no-any-return]

    def _combined(self, combine: Callable[[Any, Any], Any], value: ArrayLike) -> ArrayLike:
        # Keras' `fit` takes the values away from variables, and assigns them afterwards: none can be read.
        return value if combine is _replaced else combine(super().value, value)

    def _array_of(self, value: ArrayLike) -> ArrayLike:
        # TensorFlow takes lists of numbers.
        return jnp.asarray(value, stored_dtype(self)) if isinstance(value, (list, tuple)) else value

    def _checked(self, value: ArrayLike) -> jax.Array:
        """The argument of an aggregated assignment as an array."""
        if self._agg is VariableAggregation.SUM and isinstance(value, (bool, int, float)):
            raise InvalidArgumentError(
                "A number that is the same on every replica cannot be summed into a SUM variable: it is not "
                f"clear whether it counts once or once per replica. Received: {value!r} for {self.path}. "
                "Assign an array computed in the replica, or use aggregation MEAN or ONLY_FIRST_REPLICA."
            )
        return jnp.asarray(value, stored_dtype(self))

    def _aggregate(self, value: jax.Array, replica: ReplicaContext) -> jax.Array:
        if self._agg is VariableAggregation.SUM:
            return replica.all_reduce(ReduceOp.SUM, value)
        if self._agg is VariableAggregation.MEAN:
            return replica.all_reduce(ReduceOp.MEAN, value)
        # A broadcast as a sum; `where` and not a product, because NaN times zero is NaN.
        is_first = jnp.equal(replica.replica_id_in_sync_group, 0)
        return replica.all_reduce(ReduceOp.SUM, jnp.where(is_first, value, jnp.zeros_like(value)))

    def _aggregate_rows(self, slices: IndexedSlices, replica: ReplicaContext) -> IndexedSlices:
        """The rows of all replicas one after the other, or the first replica's."""
        if self._agg is VariableAggregation.ONLY_FIRST_REPLICA:
            every = replica._engine.exchange(slices)
            return IndexedSlices(every.values.values[0], every.indices.values[0])
        op = ReduceOp.MEAN if self._agg is VariableAggregation.MEAN else ReduceOp.SUM
        rows: IndexedSlices = replica.all_reduce(op, slices)
        return rows

    def scatter_add(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Add rows; in a replica, those of all replicas (their n-th part with aggregation MEAN).

        Args:
            sparse_delta: `IndexedSlices`.
            use_locking: accepted for tf.Variable's signature, as `name`; likewise below.
            name: likewise.

        Raises:
            UnsupportedError: for ON_READ variables.
        """
        return self._scatter("add", sparse_delta)

    def scatter_sub(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Subtract rows; as `scatter_add`."""
        return self._scatter("sub", sparse_delta)

    def scatter_mul(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Multiply by rows; as `scatter_add`."""
        return self._scatter("mul", sparse_delta)

    def scatter_div(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Divide by rows; as `scatter_add`."""
        return self._scatter("div", sparse_delta)

    def scatter_min(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Take the smaller of what is there and given rows; not with aggregation SUM or MEAN."""
        return self._scatter("min", sparse_delta)

    def scatter_max(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Take the larger of what is there and given rows; not with aggregation SUM or MEAN."""
        return self._scatter("max", sparse_delta)

    def scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Replace rows; not with aggregation SUM or MEAN."""
        return self._scatter("update", sparse_delta)

    def batch_scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Replace rows: `variable[i, indices[i, j]] = values[i, j]`; not with aggregation SUM or MEAN."""
        return self._scatter("update", sparse_delta, batched=True)

    def _scatter(self, how: str, sparse_delta: IndexedSlices, batched: bool = False) -> jax.Array:
        # TensorFlow forbids this for distributed variables only.
        if creator_of(self) is not None:
            check_scatter(how, self._sync, self._agg, self.path)
        slices = as_slices(sparse_delta, tuple(self.shape), stored_dtype(self), batched)
        return self._update(slices, lambda old, rows: scattered(how, old, rows, batched))

    def _assign_everywhere(self, value: ArrayLike, combine: Callable[[Any, Any], Any]) -> jax.Array:
        if isinstance(value, PerReplica):
            return self._assign_per_replica(value, combine)
        copies = self._copies()
        if copies is None:
            return super().assign(self._combined(combine, value))  # type: ignore[no-any-return]
        if self._sync is VariableSynchronization.ON_READ:
            new = jnp.asarray(combine(read_copies(self._agg, copies, self.path), value), stored_dtype(self))
            self._set_copies(spread_copies(self._agg, new, copies.shape[0], self.path))
        else:
            # Each copy by itself: they may differ, and the first must not overwrite the others.
            new = jax.vmap(lambda copy: jnp.asarray(combine(copy, value), stored_dtype(self)))(copies)
            self._set_copies(new)
        return self.value

    def _assign_per_replica(self, value: PerReplica, combine: Callable[[Any, Any], Any]) -> jax.Array:
        """Cross-replica assignment of one value per replica."""
        if merge_rule(self._kind) is not Merge.STACK or self._sync is VariableSynchronization.ON_READ:
            raise InvalidArgumentError(
                "A PerReplica can be assigned only to an ON_WRITE variable with aggregation NONE, whose "
                f"copies may differ. Received: {self.path} with {self._sync} and {self._agg}. Reduce the "
                "value first: `variable.assign(strategy.reduce('MEAN', value, axis=None))`."
            )
        new = jnp.stack([combine(old, v) for old, v in zip(self.values, value.values, strict=True)])
        self._set_copies(new.astype(stored_dtype(self)))
        return self.value

    def _forbid_sum(self, what: str) -> None:
        # As in TensorFlow, which raises a ValueError here.
        on_read_sum = (VariableSynchronization.ON_READ, VariableAggregation.SUM)
        if (self._sync, self._agg) == on_read_sum and _replica() is None and self._copies() is not None:
            raise InvalidArgumentError(
                f"`{what}` on an ON_READ variable with aggregation SUM must be called inside a replica: "
                f"across replicas it has no one meaning. Received: {self.path} in cross-replica context. "
                f"Write `variable.assign(variable.value + delta)`, or call `{what}` in `strategy.run`."
            )

    def _copies(self) -> jax.Array | None:
        check_holder(self)
        scope = _scope()
        if (replica := self._merging_replica()) is not None:
            merged: PerReplica = replica._engine.exchange(super().value)
            return merged.stacked
        if scope is not None:
            return scope.get_copies(self)
        # Where Keras traces a layer to build it, or a user a pure function, there is one value.
        return None if current_stateless_scope() is not None else self.stored_copies

    def _merging_replica(self) -> ReplicaContext | None:
        """The replica whose `merge_call` runs this code, and which has its own copy."""
        context = current()
        replica = None if context is None else context.merging
        if replica is None or replica.num_replicas_in_sync == 1 or merge_rule(self._kind) is not Merge.STACK:
            return None
        return replica

    def _set_copies(self, copies: jax.Array) -> None:
        scope = _scope()
        if (replica := self._merging_replica()) is not None:
            super().assign(replica._own_part(PerReplica.from_stacked(copies)))
        elif scope is None:
            self.stored_copies = copies
        else:
            scope.set_copies(self, copies)

    def _promote(self, replicas: int) -> jax.Array:
        """Keep one copy per replica from now on; return the copies."""
        # Once: after that the copies are the variable's state, and `stored_value` is old.
        if self.stored_copies is None:
            self.num_copies = replicas
            self.stored_copies = jnp.broadcast_to(stored_value(self), (replicas, *self.shape))
        return self.stored_copies

    def __repr__(self) -> str:
        kind = "SyncOnReadVariable" if self._sync is VariableSynchronization.ON_READ else "MirroredVariable"
        if self.num_copies == 1:
            return self._describe(self.name, self.value)
        names = [self.name] + [f"{self.name}/replica_{i}" for i in range(1, self.num_copies)]
        copies = zip(names, self.values, strict=True)
        lines = ",\n".join(f"  {i}: {self._describe(n, v)}" for i, (n, v) in enumerate(copies))
        return f"{kind}:{{\n{lines}\n}}"

    def _describe(self, name: str, value: jax.Array) -> str:
        shown = "" if isinstance(value, jax.core.Tracer) else f", numpy={np.asarray(value)}"
        return f"<unisono.Variable {name!r} shape={self.shape} dtype={stored_dtype(self)}{shown}>"


def _replaced(_: object, new: New) -> New:
    """How `assign` combines a variable's value and the new one."""
    return new


def _parse(kind: type[Kind], value: enum.Enum | str, name: str) -> Kind:
    try:
        return value if isinstance(value, kind) else kind(str(value).lower())
    except ValueError:
        raise InvalidArgumentError(
            f"`{name}` must be one of {[m.name for m in kind]}. Received: {name}={value!r}. "
            f"Write `unisono.{kind.__name__}.{next(iter(kind)).name}`, for example."
        ) from None


def _initial(value: ArrayLike) -> np.ndarray:
    if isinstance(value, jax.core.Tracer):
        raise UnknownInitialValueError(
            "The initial value of a variable must be known where it is created. Received: what a function "
            f"computes while it is traced, {value.aval.str_short()}. Create the variable outside of the "
            "function, or write a value of NumPy."
        )
    return np.asarray(value)


def _check_declaration(
    synchronization: VariableSynchronization,
    aggregation: VariableAggregation,
    dtype: str,
    strategy: Strategy | None,
) -> None:
    if synchronization is VariableSynchronization.NONE and strategy is not None and not strategy._is_default:
        raise InvalidArgumentError(
            "A variable of a strategy must be synchronized on write or on read. Received: "
            "synchronization=NONE. Write `VariableSynchronization.ON_READ` for one value per replica."
        )
    if aggregation is VariableAggregation.MEAN and not _is_float(dtype):
        raise InvalidArgumentError(
            "The mean of an integer variable would need rounding, so a MEAN variable must be of a floating "
            f"type. Received: dtype={dtype}. Use aggregation SUM or ONLY_FIRST_REPLICA, or `dtype='float32'`."
        )


def _check_shape(shape: Sequence[int | None] | None, found: tuple[int, ...]) -> None:
    if shape is None:
        return
    if len(shape) != len(found) or any(s not in (None, f) for s, f in zip(shape, found, strict=True)):
        raise InvalidArgumentError(
            f"`initial_value` must have the shape that is given. Received: shape={tuple(shape)} and a value "
            f"of shape {found}. Leave `shape` out, or give the value that shape."
        )


def _is_float(dtype: str) -> bool:
    return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.inexact))


def _replica() -> ReplicaContext | None:
    """The replica that runs this code, if one does; eager default code is none."""
    context = current()
    return context.replica if context is not None else None


def _scope() -> StateScope | None:
    frame = current_frame()
    return frame.scope if frame is not None else None
