"""How N copies of a variable become one: the table, and the arithmetic for each rule. Pure.

A variable has one logical value between steps. During a step each replica has its own copy;
at the end the copies are merged by the variable's one rule. Two facts decide the rule: how
the variable is declared (synchronization, aggregation) and, where Keras declares nothing,
what the variable is.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._context import ReplicaEngine
from unisono._errors import InvalidArgumentError
from unisono._types import ArrayLike
from unisono._values import ReduceOp

#: Distance between the random streams of two replicas: 2**32 / golden ratio, an odd number, so
#: that the multiples of it visit every 32-bit seed before one repeats (Knuth, TAOCP 3, 6.4).
_STREAM_STEP = 0x9E3779B9


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are made equal: at each write, or when it is read.

    >>> [each.name for each in VariableSynchronization]
    ['AUTO', 'NONE', 'ON_WRITE', 'ON_READ']
    """

    AUTO = "auto"
    NONE = "none"
    ON_WRITE = "on_write"
    ON_READ = "on_read"


class VariableAggregation(enum.Enum):
    """How the values of several replicas become one.

    >>> [each.name for each in VariableAggregation]
    ['NONE', 'SUM', 'MEAN', 'ONLY_FIRST_REPLICA']
    """

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"


class Merge(enum.Enum):
    """What happens to the copies of a variable at the end of a step."""

    KEEP = "the copies are already equal: take this replica's"
    MEAN = "the mean over the replicas"
    SUM = "the first replica starts with the value, the others with zero; summed at the end"
    FIRST = "the first replica's copy"
    SEED = "a random stream per replica; the first replica's is the variable's"
    STACK = "every replica keeps its own copy between steps"
    TOTAL = "the sum over the replicas"
    CHANGE = "the value before the step, and the changes of all replicas"
    LARGEST = "the largest of the replicas' values"
    SMALLEST = "the smallest of the replicas' values"


@dataclasses.dataclass(frozen=True)
class VariableKind:
    """What the rule of a variable depends on.

    Args:
        is_float: whether a mean of values has the variable's type.
        is_seed: whether it is the state of a random generator.
        owns_copies: whether it can hold one value per replica between steps (`unisono.Variable`).
    """

    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    is_float: bool
    is_seed: bool = False
    owns_copies: bool = False


def merge_rule(kind: VariableKind) -> Merge:
    """Return how the copies of a variable that a replica wrote itself become one.

    Writes of an optimizer are not the replica's own: gradients are aggregated before, so the
    copies are equal and the rule is `Merge.KEEP` whatever the kind.

    >>> on_read = VariableKind(VariableSynchronization.ON_READ, VariableAggregation.SUM, True)
    >>> merge_rule(on_read).name
    'SUM'
    """
    if kind.is_seed:
        return Merge.SEED
    if kind.owns_copies:
        on_read = kind.synchronization is VariableSynchronization.ON_READ
        unmerged = kind.aggregation is VariableAggregation.NONE
        return Merge.STACK if on_read or unmerged else Merge.KEEP
    match kind.aggregation:
        case VariableAggregation.SUM:
            return Merge.SUM
        case VariableAggregation.MEAN:
            return Merge.MEAN
        case VariableAggregation.ONLY_FIRST_REPLICA:
            return Merge.FIRST
    # Keras marks layers' state at none: moving statistics are means, counters are all equal.
    return Merge.MEAN if kind.is_float else Merge.FIRST


def localize(rule: Merge, value: ArrayLike, engine: ReplicaEngine) -> Any:
    """Return the copy of `value` with which this replica starts a step.

    Args:
        value: the variable's value between steps; for `STACK`, already this replica's own.
    """
    if engine.num_replicas == 1:
        return value
    if rule is Merge.SUM:
        return jnp.where(jnp.equal(engine.replica_id, 0), value, jnp.zeros_like(value))
    if rule is Merge.SEED:
        return value + _stream_offset(value, engine)
    return value


def merge_all(
    rules: list[Merge], copies: list[Any], engine: ReplicaEngine, before: Sequence[Any] | None = None
) -> list[Any]:
    """Return the values between steps from this replica's `copies` at the end of one.

    All sums travel in one all-reduce call and all means in another, so that a strategy can
    pack them.

    Args:
        before: the copies at the beginning of the step, which `Merge.CHANGE` needs.
    """
    if engine.num_replicas == 1:
        return list(copies)
    merged = list(copies)
    is_first = jnp.equal(engine.replica_id, 0)
    summed: dict[int, jax.Array] = {}
    averaged: dict[int, jax.Array] = {}
    for i, (rule, copy) in enumerate(zip(rules, copies, strict=True)):
        if rule is Merge.SUM:
            summed[i] = copy
        elif rule is Merge.FIRST:
            summed[i] = jnp.where(is_first, copy, jnp.zeros_like(copy))
        elif rule is Merge.MEAN:
            averaged[i] = copy
        elif rule is Merge.TOTAL:
            summed[i] = copy
        elif rule is Merge.CHANGE and before is not None:
            summed[i] = copy - before[i]
        elif rule in (Merge.LARGEST, Merge.SMALLEST):
            merged[i] = extreme_of_all(copy, engine, rule is Merge.LARGEST)
        elif rule is Merge.SEED:
            merged[i] = copy - _stream_offset(copy, engine)
    for op, group in ((ReduceOp.SUM, summed), (ReduceOp.MEAN, averaged)):
        if group:
            for i, value in zip(group, _reduce(op, list(group.values()), engine), strict=True):
                merged[i] = value + before[i] if rules[i] is Merge.CHANGE and before is not None else value
    return merged


def extreme_of_all(value: jax.Array, engine: ReplicaEngine, is_largest: bool = True) -> jax.Array:
    """Return the largest or the smallest of all replicas' values, place by place."""
    # An engine adds, and gathers: such states are small.
    sent = value.astype(jnp.int32) if value.dtype == jnp.bool_ else value
    every = engine.all_gather(sent[None], 0)
    return (jnp.max if is_largest else jnp.min)(every, axis=0).astype(value.dtype)


def merge_in_turn(rule: Merge, copies: list[Any], present: list[bool]) -> Any:
    """Return the value between steps from all replicas' copies, where one program holds them all.

    Args:
        copies: an array for each replica; the result of `STACK` has them as rows.
        present: for each replica, whether it had rows; the copies of others are as they were.
    """
    if rule is Merge.STACK:
        return jnp.stack(copies)
    if rule is Merge.SUM:
        return sum(copies[1:], copies[0])
    # Where no replica has rows, none is left out: the copies are as they were.
    counted = [c for c, there in zip(copies, present, strict=True) if there] or copies
    if rule is Merge.MEAN:
        return (sum(counted[1:], counted[0]) / len(counted)).astype(copies[0].dtype)
    # The random stream of a variable is the first replica's, with rows or without.
    return copies[0] if rule is Merge.SEED else counted[0]


def kind_of(variable: keras.Variable) -> VariableKind:
    """Return what decides the rule of a variable that Keras or the user created."""
    own = getattr(variable, "_kind", None)
    if isinstance(own, VariableKind):
        return own
    return VariableKind(
        VariableSynchronization(variable.synchronization),
        VariableAggregation(variable.aggregation),
        is_float=bool(jnp.issubdtype(jnp.dtype(variable.dtype), jnp.inexact)),
        is_seed=variable.name == "seed_generator_state",
    )


#: Marks a variable that holds a mean over rows, as its layer says.
_IS_MEAN = "_unisono_is_mean"


def note_mean(variable: keras.Variable) -> None:
    """Note that a variable holds a mean over rows: one of BatchNormalization's statistics."""
    object.__setattr__(variable, _IS_MEAN, True)


def is_guess(variable: keras.Variable) -> bool:
    """Return whether neither Keras nor the user has said how copies of a variable become one."""
    kind = kind_of(variable)
    is_declared = kind.is_seed or kind.owns_copies or kind.aggregation is not VariableAggregation.NONE
    return not is_declared and not hasattr(variable, _IS_MEAN)


def _reduce(op: ReduceOp, values: list[jax.Array], engine: ReplicaEngine) -> list[jax.Array]:
    """All-reduce values; truth values travel as integers."""
    sent = [v.astype(jnp.int32) if v.dtype == jnp.bool_ else v for v in values]
    received = engine.all_reduce(op, sent)
    return [r.astype(v.dtype) for r, v in zip(received, values, strict=True)]


def _stream_offset(state: jax.Array, engine: ReplicaEngine) -> jax.Array:
    """How far this replica's random stream lies from the first one's; 0 for the first."""
    # Added to the seed word alone; the second word counts draws. Unsigned arithmetic wraps, so
    # taking the offset away at the end gives the first replica's state exactly.
    step = jnp.asarray([_STREAM_STEP] + [0] * (state.shape[0] - 1), dtype=jnp.uint32)
    return (jnp.asarray(engine.replica_id, jnp.uint32) * step).astype(state.dtype)


def read_copies(aggregation: VariableAggregation, copies: jax.Array, name: str) -> jax.Array:
    """Return what cross-replica code sees of a variable whose replicas hold `copies`."""
    match aggregation:
        case VariableAggregation.SUM:
            return jnp.sum(copies, axis=0).astype(copies.dtype)
        case VariableAggregation.MEAN:
            return jnp.mean(copies, axis=0).astype(copies.dtype)
        case VariableAggregation.ONLY_FIRST_REPLICA:
            return copies[0]
    raise InvalidArgumentError(
        "An ON_READ variable must have an aggregation to be read in cross-replica context. "
        f"Received: {name} with aggregation NONE. Write "
        "`aggregation=unisono.VariableAggregation.SUM` (or MEAN, ONLY_FIRST_REPLICA), or read it inside."
    )


def spread_copies(aggregation: VariableAggregation, value: ArrayLike, replicas: int, name: str) -> jax.Array:
    """Return the copies that a cross-replica assignment of `value` makes; the inverse of a read.

    A sum is divided over the replicas, so that reading it gives `value` back.
    """
    if aggregation is VariableAggregation.NONE:
        raise InvalidArgumentError(
            "An ON_READ variable must have an aggregation to be assigned in cross-replica context. "
            f"Received: {name} with aggregation NONE. Assign it inside a replica."
        )
    if aggregation is not VariableAggregation.SUM:
        return jnp.broadcast_to(value, (replicas, *np.shape(value)))
    value = jnp.asarray(value)
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return jnp.broadcast_to(value / replicas, (replicas, *value.shape)).astype(value.dtype)
    # Integers do not divide: the first replica takes all, so that the sum stays exact.
    return jnp.zeros((replicas, *value.shape), value.dtype).at[0].set(value)
