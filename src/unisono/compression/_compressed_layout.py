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
from unisono._types import PyTree, Tree
from unisono._values import ReduceOp
from unisono.collectives._cross_device import CrossDeviceOps
from unisono.collectives._process_group import ProcessGroup
from unisono.sharding._sharded_layout import PartsLayout, updated_parts
from unisono.sharding._shards import ShardedVariableLayout, Shards, on_devices
from unisono.step._engines import UNSHARDED
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
        #: True while variables are added to an optimizer.
        self._adds = False

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
            self._adds = True
            try:
                error = optimizer.add_variable(rows, dtype="float32", name=f"{name}_error")
            finally:
                self._adds = False
            object.__setattr__(error, _USE, _Use("error", number))
            mark_added(error)
            self._lay_error(error, weight)
            if (wanted := compression.basis_shape(shape)) is not None:
                basis = optimizer.add_variable(wanted, _numbers(number), "float32", name=f"{name}_basis")
                object.__setattr__(basis, _USE, _Use("basis", number))
                mark_added(basis)

    def _lay_error(self, error: keras.Variable, weight: keras.Variable) -> None:
        """Let the errors of a weight lie as a row on each replica."""
        in_parts = ErrorLayout(self._mesh, tuple(error.shape), self._group)
        is_alone = self._mesh.num_replicas == 1
        lie_as(error, FittedLayout(self._mesh, in_parts.from_file) if is_alone else in_parts)

    def _has_parts(self, optimizer: keras.Optimizer) -> bool:
        """Say if each replica updates its part of the weights."""
        return self._inner.prepare(optimizer)

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
        in_parts = self._has_parts(optimizer)
        step = _CompressedStep(self._ops, self._mesh, self._group, optimizer, places, values, in_parts)

        def compressed(reduce: GradientReducer | None) -> Gradients:
            return step.alone(aggregate(functools.partial(step.reduce, reduce)))

        def applied(
            values: list[Any], grads: Gradients, weights: list[jax.Array]
        ) -> tuple[list[jax.Array], list[Any]]:
            # Errors reach the optimizer as the arrays that they are.
            return updated_parts(apply, optimizer, values, grads, weights)

        if is_sharded:
            found = self._inner.update(optimizer, values, weights, compressed, applied)
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
        held = self._before[_Use("error", weight)]
        if isinstance(held, Shards):
            lies = self._lies(weight)
            shape = lies.of_device.shape
            whole = on_devices(self._mesh, lambda e: e.reshape(shape), lies.part_cut, lies.cut)
            error: jax.Array = whole(held.parts)
        else:
            error = jnp.asarray(held).reshape(like.shape)
        return error if self._scale is None else error * self._scale

    def _lies(self, weight: int) -> ShardedVariableLayout:
        """Return how a weight lies in parts whose errors are on several replicas."""
        rows = self._before[_Use("error", weight)].layout
        axis = None if rows.axis is None else rows.axis - 1
        return ShardedVariableLayout(self._mesh, rows.shape[1:], self._group, axis)

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
        in_parts = self._is_sharded and self._ops.compression.has_parts
        lies = [self._lies(w) for w in weights]
        sums, errors, after = self._exchanged(own, weights, lies, in_parts)
        left = {_Use("error", w): e for w, e in zip(weights, errors, strict=True)}
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
        return [Shards(s, one, True) for s, one in zip(sums, lies, strict=True)]

    def _exchanged(
        self,
        own: list[jax.Array],
        weights: list[int],
        lies: list[ShardedVariableLayout],
        in_parts: bool,
    ) -> tuple[list[Any], list[Any], list[jax.Array]]:
        """Return the sums, or this replica's parts of them, its errors, flat, and new bases.

        What the devices of a replica share, each sends of its own part. What each has whole travels by
        itself: blocks, and the largest numbers, would otherwise differ between devices that must stay equal.
        """
        compression, replicas = self._ops.compression, self._mesh.num_replicas

        def flat(errors: list[jax.Array]) -> list[jax.Array]:
            return [e.reshape(-1) for e in errors]

        cuts, parts = [one.cut for one in lies], [one.part_cut for one in lies]
        if not compression.can_divide:
            bases = [self._before[_Use("basis", w)] for w in weights]
            sums, errors, after = compression.sums(
                own,
                bases,
                _OnEachDevice(self._mesh, self._ops),
                axis_name=AXIS,
                axis_size=replicas,
                in_parts=False,
            )
            return sums, on_devices(self._mesh, flat, (cuts,), parts)(errors), after

        def summed_parts(arrays: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            sums, errors, _ = compression.sums(
                arrays, [], self._ops, axis_name=AXIS, axis_size=replicas, in_parts=in_parts
            )
            return sums, flat(errors)

        results: dict[int, tuple[jax.Array, jax.Array]] = {}
        for is_cut in (False, True):
            places = [i for i, one in enumerate(lies) if (one.axis is not None) == is_cut]
            if not places:
                continue
            to = [cuts[i] for i in places], [parts[i] for i in places]
            outs = to[1] if in_parts else to[0], to[1]
            pair = on_devices(self._mesh, summed_parts, (to[0],), outs)([own[i] for i in places])
            results |= dict(zip(places, zip(*pair, strict=True), strict=True))
        return [results[i][0] for i in range(len(own))], [results[i][1] for i in range(len(own))], []

    def _are_finite(self, sums: list[Any]) -> jax.Array:
        """Return whether all gradients of all replicas are finite."""
        found = jnp.stack([jnp.all(jnp.isfinite(_array(s))) for s in sums]).all()
        # Replicas that have parts of the sums must agree.
        return lax.pmin(found.astype(jnp.int32), AXIS).astype(bool) if self._is_sharded else found


class _OnEachDevice(CrossDeviceOps):
    """Sums thin matrices, which each device of a replica sends whole: to pack parts, XLA gathers them."""

    def __init__(self, mesh: ReplicaMesh, ops: CrossDeviceOps) -> None:
        super().__init__()
        self._mesh, self._ops = mesh, ops

    def all_reduce(self, reduce_op: ReduceOp, tree: Tree, *, axis_name: str, axis_size: int) -> Tree:
        """Combine arrays over the replicas, of each the whole."""
        sums = functools.partial(self._ops.all_reduce, reduce_op, axis_name=axis_name, axis_size=axis_size)
        combined: Tree = on_devices(self._mesh, sums, (UNSHARDED,), UNSHARDED)(tree)
        return combined


def _array(value: Any) -> jax.Array:
    return value.parts if isinstance(value, Shards) else jnp.asarray(value)


def _all_reduce(op: ReduceOp, grads: list[Any], _: Sequence[keras.Variable]) -> list[Any]:
    """Sum or average gradients exactly, in the replica that runs."""
    # A reducer is called in a replica.
    reduced: list[Any] = current().replica.all_reduce(op, grads)  # type: ignore[union-attr]
    return reduced
