"""Writing some rows of a variable: the operations behind `Variable.scatter_add` and the like. Pure.

Tests: tests/virtual/step/test_variable.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from unisono._errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from unisono._values import IndexedSlices
from unisono.step.variables._merge_rules import VariableAggregation, VariableSynchronization

#: Operations that have no meaning on a sum or a mean of the replicas' rows.
_NOT_AGGREGATED = ("min", "max", "update")


def check_scatter(how: str, sync: VariableSynchronization, agg: VariableAggregation, name: str) -> None:
    """Raise where tf.distribute forbids a scatter on a distributed variable.

    Args:
        how: `"add"`, `"sub"`, `"mul"`, `"div"`, `"min"`, `"max"` or `"update"`.
    """
    if sync is VariableSynchronization.ON_READ:
        raise UnsupportedError(
            f"An ON_READ variable cannot be scattered into. Received: `scatter_{how}` on {name!r}. Write "
            "`variable.assign(...)` in the replica, or create the variable with synchronization ON_WRITE."
        )
    if how in _NOT_AGGREGATED and agg in (VariableAggregation.SUM, VariableAggregation.MEAN):
        raise UnsupportedError(
            f"`scatter_{how}` needs a variable with aggregation NONE or ONLY_FIRST_REPLICA. "
            f"Received: {name!r} with {agg}. Create it with `aggregation='only_first_replica'`."
        )


def as_slices(
    delta: object, shape: tuple[int, ...], dtype: DTypeLike, batched: bool = False
) -> IndexedSlices:
    """Return rows to write as arrays that fit a variable.

    Args:
        delta: `IndexedSlices`, or any object with `values` and `indices`.
        batched: whether all dimensions of the indices but the last count along those of the variable.

    Raises:
        InvalidTypeError: for another object, and for indices that are not integers.
        InvalidArgumentError: when a shape or an index does not fit.
    """
    if not (hasattr(delta, "values") and hasattr(delta, "indices")):
        raise InvalidTypeError(
            f"Rows to write must be `IndexedSlices`. Received: {type(delta).__name__}. Write "
            "`variable.scatter_add(unisono.IndexedSlices(values=rows, indices=[0, 2]))`."
        )
    values, indices = jnp.asarray(delta.values, dtype), jnp.asarray(delta.indices)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise InvalidTypeError(f"Indices must be integers. Received: indices of type {indices.dtype}.")
    at = indices.ndim - 1 if batched else 0
    wanted = (*indices.shape, *shape[at + 1 :])
    if len(shape) <= at or shape[:at] != (indices.shape[:at] if batched else ()):
        raise InvalidArgumentError(
            f"Indices must fit the variable. Received: indices of shape {indices.shape} for shape {shape}."
        )
    if values.ndim and values.shape != wanted:
        raise InvalidArgumentError(
            f"Rows must have the shape of the indices and of a row of the variable, {wanted}, or be one "
            f"number. Received: values of shape {values.shape} for indices of shape {indices.shape}."
        )
    # In a trace the values are not known; there, JAX drops rows out of range.
    if not isinstance(indices, jax.core.Tracer):
        found = np.asarray(indices)
        if found.size and (found.min() < 0 or found.max() >= shape[at]):
            raise InvalidArgumentError(
                f"Indices must be from 0 to {shape[at] - 1}. Received: {found.min()} to {found.max()}."
            )
    return IndexedSlices(jnp.broadcast_to(values, wanted), indices, shape)


def scattered(how: str, old: jax.Array, slices: IndexedSlices, batched: bool = False) -> jax.Array:
    """Return `old` with rows written. In a compiled step, rows with an index out of range are dropped."""
    indices, values = slices.indices, slices.values
    at = indices.ndim - 1 if batched else 0
    # JAX counts negative indices from the end, TensorFlow has none.
    where = jnp.where(indices < 0, old.shape[at], indices)
    prefix = jnp.indices(indices.shape, sparse=True)[:at] if batched else ()
    rows = (*prefix, where)
    match how:
        case "add":
            return old.at[rows].add(values, mode="drop")
        case "sub":
            return old.at[rows].subtract(values, mode="drop")
        case "mul":
            return old.at[rows].multiply(values, mode="drop")
        case "div":
            # JAX's `.at[].divide` makes floats of integers.
            return jax.lax.div(old, jnp.ones_like(old).at[rows].multiply(values, mode="drop"))
        case "min":
            return old.at[rows].min(values, mode="drop")
        case "max":
            return old.at[rows].max(values, mode="drop")
    return old.at[rows].set(values, mode="drop")
