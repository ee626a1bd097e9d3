"""The state and the update of an optimizer whose gradients are compressed between the replicas.

What a replica's gradients lack in the sum is its error, which it adds to its gradients of the next step
(error feedback; Karimireddy et al., 2019, https://arxiv.org/abs/1901.09847). Errors are variables of the
optimizer, of shape `(replicas, *weight)`, and lie in parts: each device has its own row. They are in the unit
of what the optimizer applies, so their sum means the same for any number of replicas.

Tests: tests/virtual/strategies/test_compressed_gradients.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax

from unisono._context import current
from unisono._mesh import AXIS, ReplicaMesh
from unisono._types import PyTree
from unisono._values import ReduceOp
from unisono.collectives._process_group import ProcessGroup
from unisono.sharding._sharded_layout import PartsLayout, updated_parts
from unisono.sharding._shards import ShardedVariableLayout, Shards
from unisono.step._keras_internals import trained_variables
from unisono.step._layout import (
    FittedLayout,
    GradientReducer,
    Gradients,
    PureUpdate,
    ReplicaCode,
    StateLayout,
    lie_as,
    mark_added,
)
from unisono.step._value_handle import DeferredValue, ValueHandle

if TYPE_CHECKING:
    from unisono.compression._compressed_all_reduce import CompressedAllReduce

#: The attribute of an optimizer's variable that says what it is for: a `_Use`.
_USE = "_unisono_compression"


class _Use(NamedTuple):
    """What a variable is for.

    Args:
        role: `"error"`, or `"basis"` of PowerSGD.
        weight: the number of the weight among those that the optimizer trains.
    """

    role: str
    weight: int


def is_of_compression(variable: keras.Variable) -> bool:
    """Return whether an optimizer's variable belongs to the compression of gradients."""
    return hasattr(variable, _USE)


def fitted_errors(shape: tuple[int, ...], saved: np.ndarray) -> np.ndarray:
    """Return saved errors for another number of replicas, with the same sum; any others unchanged.

    >>> fitted_errors((2, 1), np.array([[1], [2], [4]])).tolist()
    [[5], [2]]
    """
    if saved.shape == shape or saved.shape[1:] != shape[1:]:
        return saved
    rows = np.zeros(shape, saved.dtype)
    for number, row in enumerate(saved):
        rows[number % len(rows)] += row
    return rows


class ErrorLayout(ShardedVariableLayout):
    """How the errors of a weight lie: a row on each replica."""

    def from_file(self, saved: np.ndarray) -> np.ndarray:
        """Return errors for this number of replicas."""
        return fitted_errors(self.shape, saved)


class CompressedLayout(PartsLayout):
    """Errors of compressed gradients lie in parts; everything else as in another layout."""

    def __init__(
        self, inner: StateLayout, ops: CompressedAllReduce, mesh: ReplicaMesh, group: ProcessGroup
    ) -> None:
        super().__init__(mesh, group)
        self._inner, self._ops = inner, ops

    @property
    def version(self) -> int:
        """That of the other layout."""
        return self._inner.version

    @property
    def keeps_weights(self) -> bool:
        """Whether each replica has all weights, by the other layout."""
        return self._inner.keeps_weights

    def run_replica(
        self, variables: Sequence[keras.Variable], values: Sequence[Any], code: ReplicaCode
    ) -> tuple[PyTree, list[Any]]:
        """Run a replica's code as the other layout does."""
        return self._inner.run_replica(variables, values, code)

    def extend(self, optimizer: keras.Optimizer, weights: Sequence[keras.Variable]) -> None:
        """Add errors and bases to an optimizer that is being built; see `StateLayout.extend`."""
        compression, replicas = self._ops.compression, self._mesh.num_replicas
        for number, weight in enumerate(weights):
            shape = tuple(weight.shape)
            if getattr(weight, "overwrite_with_gradient", False):
                continue
            if not compression.applies_to(shape, weight.dtype):
                continue
            # As Keras names slots.
            name, rows = f"{weight.path.replace('/', '_')}_compression", (replicas, *shape)
            error = optimizer.add_variable(rows, dtype="float32", name=f"{name}_error")
            object.__setattr__(error, _USE, _Use("error", number))
            mark_added(error)
            in_parts = ErrorLayout(self._mesh, rows, self._group)
            lie_as(error, in_parts if replicas > 1 else FittedLayout(self._mesh, in_parts.from_file))
            if (wanted := compression.basis_shape(shape)) is not None:
                basis = optimizer.add_variable(wanted, _numbers(number), "float32", name=f"{name}_basis")
                object.__setattr__(basis, _USE, _Use("basis", number))
                mark_added(basis)

    def first(self, variable: keras.Variable, value: DeferredValue) -> ValueHandle | None:
        """Return what a variable begins with as the other layout does."""
        return self._inner.first(variable, value)

    def prepare(self, optimizer: keras.Optimizer | None, variables: Sequence[keras.Variable] = ()) -> bool:
        """Return whether gradients of the optimizer are compressed, or lie in parts by the other layout."""
        if optimizer is None or not optimizer.built:
            return False
        return self._inner.prepare(optimizer, variables) or any(map(is_of_compression, optimizer.variables))

    def update(
        self,
        optimizer: keras.Optimizer,
        values: Sequence[Any],
        weights: Sequence[jax.Array],
        aggregate: Callable[[GradientReducer | None], Gradients],
        apply: PureUpdate,
    ) -> tuple[list[jax.Array], list[jax.Array]] | None:
        """Update all weights by compressed gradients; see `StateLayout.update`."""
        is_sharded = self._inner.prepare(optimizer)
        places = {getattr(v, _USE): i for i, v in enumerate(optimizer.variables) if is_of_compression(v)}
        errors = [values[i] for use, i in places.items() if use.role == "error"]
        # Where one program has all replicas nothing is sent, and nothing is compressed.
        if not errors or not (self._mesh.num_replicas == 1 or _in_replica(errors[0])):
            return self._inner.update(optimizer, values, weights, aggregate, apply) if is_sharded else None
        step = _CompressedStep(self._ops, self._mesh, self._group, optimizer, places, values, is_sharded)

        def compressed(reduce: GradientReducer | None) -> Gradients:
            return step.alone(aggregate(functools.partial(step.reduce, reduce)))

        if is_sharded:
            found = self._inner.update(optimizer, values, weights, compressed, apply)
        else:
            found = updated_parts(apply, optimizer, values, compressed(None), weights)
        if found is None:
            return None
        new, kept = found
        for use, place in places.items():
            kept[place] = step.left.get(use, values[place])
        return new, kept


def _in_replica(value: Any) -> bool:
    return isinstance(value, Shards) and value.in_replica


def _numbers(seed: int) -> Callable[..., jax.Array]:
    """Return an initializer of random numbers, the same on all workers."""

    def make(shape: Sequence[int], dtype: Any = None) -> jax.Array:
        return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)

    return make


class _CompressedStep:
    """One trace of an update: what its gradients leave behind.

    Args:
        places: of errors and bases among the optimizer's variables.
        is_sharded: whether each replica updates a part of the weights.
    """

    def __init__(
        self,
        ops: CompressedAllReduce,
        mesh: ReplicaMesh,
        group: ProcessGroup,
        optimizer: keras.Optimizer,
        places: dict[_Use, int],
        values: Sequence[Any],
        is_sharded: bool,
    ) -> None:
        self._ops, self._mesh, self._group, self._is_sharded = ops, mesh, group, is_sharded
        self._numbers = {id(v): i for i, v in enumerate(trained_variables(optimizer))}
        self._before = {use: values[place] for use, place in places.items()}
        #: What a loss, and so its gradients, is multiplied by, but not what is left of them; None for one.
        self._scale: Any = None
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            scale = optimizer.dynamic_scale
            self._scale = next(x for v, x in zip(optimizer.variables, values, strict=True) if v is scale)
        #: The new values of errors and bases.
        self.left: dict[_Use, Any] = {}

    def _error(self, weight: int, like: jax.Array) -> jax.Array:
        """Return what this replica has not sent yet of a weight's gradients."""
        error = _array(self._before[_Use("error", weight)]).reshape(like.shape)
        return error if self._scale is None else error * self._scale

    def alone(self, grads: Gradients) -> Gradients:
        """Return gradients of the only replica, with the errors that a checkpoint of several has left."""
        if self._mesh.num_replicas > 1:
            return grads
        found = list(grads)
        for use, held in self._before.items():
            grad = found[use.weight]
            if use.role == "error" and isinstance(grad, jax.Array):
                found[use.weight] = grad + self._error(use.weight, grad)
                self.left[use] = jnp.zeros_like(held)
        return found

    def reduce(
        self,
        exact: GradientReducer | None,
        op: ReduceOp,
        grads: list[Any],
        variables: Sequence[keras.Variable],
    ) -> list[Any]:
        """Sum or average gradients, compressed where their weights have errors."""
        weights = [self._numbers.get(id(v), -1) for v in variables]
        chosen = [
            i
            for i, w in enumerate(weights)
            if _Use("error", w) in self._before and isinstance(grads[i], jax.Array)
        ]
        others = [i for i in range(len(grads)) if i not in chosen]
        reduced: dict[int, Any] = {}
        if others:
            given = op, [grads[i] for i in others], [variables[i] for i in others]
            reduced = dict(zip(others, (exact or _all_reduce)(*given), strict=True))
        if chosen:
            divisor = self._mesh.num_replicas if op is ReduceOp.MEAN else 1
            own = [grads[i] / divisor + self._error(weights[i], grads[i]) for i in chosen]
            sums = self._sums(own, [weights[i] for i in chosen], list(reduced.values()))
            reduced |= dict(zip(chosen, sums, strict=True))
        return [reduced[i] for i in range(len(grads))]

    def _sums(self, own: list[jax.Array], weights: list[int], others: list[Any]) -> list[Any]:
        """Return the sums over the replicas of what they have to send, and note what is left.

        Args:
            others: gradients that are reduced already.
        """
        compression = self._ops.compression
        in_parts = self._is_sharded and compression.has_parts
        bases = [self._before[use] for w in weights if (use := _Use("basis", w)) in self._before]
        sums, errors, after = compression.sums(
            own, bases, self._ops, axis_name=AXIS, axis_size=self._mesh.num_replicas, in_parts=in_parts
        )
        left = {_Use("error", w): e.reshape(-1) for w, e in zip(weights, errors, strict=True)}
        left |= {_Use("basis", w): b for w, b in zip(weights, after, strict=False)}
        if self._scale is not None:
            # A step that the optimizer leaves out leaves nothing behind.
            kept = self._are_finite([*sums, *others])
            for use, value in left.items():
                new = value / self._scale if use.role == "error" else value
                left[use] = jnp.where(kept, new, _array(self._before[use]))
        for use, value in left.items():
            held = self._before[use]
            self.left[use] = Shards(value, held.layout, True) if isinstance(held, Shards) else value
        if not in_parts:
            return sums
        return [
            Shards(s, ShardedVariableLayout(self._mesh, x.shape, self._group), True)
            for s, x in zip(sums, own, strict=True)
        ]

    def _are_finite(self, sums: list[Any]) -> jax.Array:
        """Return whether all gradients of all replicas are finite."""
        found = jnp.stack([jnp.all(jnp.isfinite(_array(s))) for s in sums]).all()
        # Replicas that have parts of the sums must agree.
        return lax.pmin(found.astype(jnp.int32), AXIS).astype(bool) if self._is_sharded else found


def _array(value: Any) -> jax.Array:
    return value.parts if isinstance(value, Shards) else jnp.asarray(value)


def _all_reduce(op: ReduceOp, grads: list[Any], _: Sequence[keras.Variable]) -> list[Any]:
    """Sum or average gradients exactly, in the replica that runs."""
    # A reducer is called in a replica.
    reduced: list[Any] = current().replica.all_reduce(op, grads)  # type: ignore[union-attr]
    return reduced
