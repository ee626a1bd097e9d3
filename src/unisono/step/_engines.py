"""How a replica speaks with the others: one program on all devices, or replicas traced in turn.

Tests: tests/virtual/step/test_uneven.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from unisono._mesh import AXIS
from unisono._types import PyTree, Tree
from unisono._values import PerReplica, ReduceOp
from unisono.collectives._cross_device import CrossDeviceOps, reduce_in_step
from unisono.collectives._reduce import all_gather
from unisono.step._call_signature import per_replica
from unisono.step._program import ReplicaFrame

#: How an array lies on the replicas: split along its first axis, or whole on each.
SHARDED = jax.sharding.PartitionSpec(AXIS)
UNSHARDED = jax.sharding.PartitionSpec()


class SpmdEngine:
    """A replica inside `jax.shard_map`: collectives are XLA's."""

    #: Replicas of one program have equal numbers of rows.
    is_empty = False

    def __init__(self, num_replicas: int, cross_device_ops: CrossDeviceOps) -> None:
        self.num_replicas = num_replicas
        self._ops = cross_device_ops

    @property
    def replica_id(self) -> jax.Array:
        """The position on the mesh axis, traced."""
        return jax.lax.axis_index(AXIS)

    def all_reduce(self, op: ReduceOp, tree: Tree) -> Tree:
        """All-reduce by the strategy's algorithm."""
        return reduce_in_step(self._ops, op, tree, axis_name=AXIS, axis_size=self.num_replicas)

    def total(self, size: int) -> int:
        """All replicas run one program, so their sizes are equal."""
        return size * self.num_replicas

    def all_gather(self, tree: Tree, axis: int) -> Tree:
        """Concatenate along `axis`."""
        joined: Tree = jax.tree.map(
            lambda x: all_gather(x, axis, axis_name=AXIS, axis_size=self.num_replicas), tree
        )
        return joined

    def exchange(self, tree: PyTree) -> PyTree:
        """Give every replica all replicas' arrays."""
        return jax.tree.map(self._stack, tree)

    def _stack(self, leaf: object) -> object:
        # One program: its Python objects are the same in all replicas.
        if not isinstance(leaf, jax.Array):
            return leaf
        return PerReplica.from_stacked(self.all_gather(leaf[None], 0))


class TurnEngine:
    """A replica of unequal size, traced in turn with the others inside one program.

    Args:
        cross_device_ops: whose hooks reduce, where it has any.
        is_empty: whether the replica has no rows, and others have.
    """

    def __init__(
        self, frame: ReplicaFrame, cross_device_ops: CrossDeviceOps | None = None, is_empty: bool = False
    ) -> None:
        self._frame = frame
        self._ops = cross_device_ops
        self.is_empty = is_empty
        self.replica_id = frame.index
        self.num_replicas = len(frame.run.program.bodies)

    def all_reduce(self, op: ReduceOp, tree: Tree) -> Tree:
        """Meet the others and add up."""
        return self._frame.meet(tree, lambda _, operands: [self._reduce(op, operands)] * self.num_replicas)

    def _reduce(self, op: ReduceOp, operands: list[Tree]) -> Tree:
        if self._ops is None or not self._ops._has_implementation:
            return _reduce(op, operands)
        structure = jax.tree.structure(operands[0])
        # This program holds all replicas' values: the user's hook gets them without a gather.
        rows = zip(*map(jax.tree.leaves, operands), strict=True)
        reduced: Tree = jax.tree.unflatten(
            structure, self._ops.batch_reduce(op, [(PerReplica(r), None) for r in rows])
        )
        return reduced

    def total(self, size: int) -> int:
        """Meet the others and add up; a Python number again."""
        return int(self._frame.meet(size, lambda _, sizes: [sum(sizes)] * self.num_replicas))

    def all_gather(self, tree: Tree, axis: int) -> Tree:
        """Meet the others and concatenate; sizes may differ along `axis`."""

        def join(_: int, operands: list[Tree]) -> list[Tree]:
            joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=axis), *operands)
            return [joined] * self.num_replicas

        return self._frame.meet(tree, join)

    def exchange(self, tree: PyTree) -> PyTree:
        """Meet the others and see what they brought."""

        def gather(_: int, operands: list[PyTree]) -> list[PyTree]:
            return [jax.tree.map(together, *operands)] * self.num_replicas

        def together(*leaves: PyTree) -> object:
            return per_replica(leaves) if isinstance(leaves[0], jax.Array) else leaves[0]

        return self._frame.meet(tree, gather)


def _reduce(op: ReduceOp, operands: list[Tree]) -> Tree:
    """Sum or mean of pytrees, leaf by leaf."""
    total: Tree = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *operands)
    if op is ReduceOp.MEAN:
        total = jax.tree.map(lambda leaf: leaf / len(operands), total)
    return total
