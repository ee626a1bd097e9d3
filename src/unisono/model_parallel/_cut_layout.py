"""Variables in parts on the devices of a replica, as a layout map says; XLA divides the computation.

Source: Shoeybi et al., "Megatron-LM", 2019 (https://arxiv.org/abs/1909.08053); Xu et al., "GSPMD", 2021
(https://arxiv.org/abs/2105.04663).

Tests: tests/virtual/strategies/test_model_parallel.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
from jax.sharding import NamedSharding, PartitionSpec

from unisono._mesh import AXIS
from unisono._values import ReduceOp
from unisono.collectives._cross_device import CrossDeviceOps, reduce_in_step
from unisono.model_parallel._replica_grid import MODEL_AXIS, ReplicaGrid
from unisono.step._layout import (
    GradientReducer,
    Gradients,
    PureUpdate,
    StateLayout,
    VariableLayout,
    lie_as,
    own_layout,
)
from unisono.step._value_handle import DeferredValue, VariableValue

#: From a variable to the mesh axis along which each of its axes is cut; None for one that stays whole.
LayoutRule = Callable[[keras.Variable], Sequence[str | None] | None]


@dataclasses.dataclass(frozen=True)
class CutLayout(VariableLayout):
    """How a variable lies on the devices of each replica: the same on all replicas.

    Args:
        cut: the mesh axis along which each of its axes is cut.
    """

    cut: PartitionSpec = PartitionSpec()

    @property
    def holds_arrays(self) -> bool:
        return True

    @property
    def sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh.mesh, self.cut)

    def enter(self, array: jax.Array, in_replica: bool) -> jax.Array:
        return self.pinned(array, in_replica)

    def leave(self, value: jax.Array, in_replica: bool) -> jax.Array:
        return self.pinned(value, in_replica)

    def pinned(self, value: jax.Array, in_replica: bool) -> jax.Array:
        """Return a value of a program that lies so: XLA might choose another way, and gather weights for it."""
        # In a replica its own axis is not XLA's to choose, and the mesh is that of the context.
        return jax.lax.with_sharding_constraint(value, self.cut if in_replica else self.sharding)


class CutStateLayout(StateLayout):
    """State in parts on the devices of each replica, and the same on all replicas.

    Args:
        mesh: the devices of all replicas.
        rule: how each variable lies.
        ops: how gradients are reduced.
    """

    def __init__(self, mesh: ReplicaGrid, rule: LayoutRule, ops: CrossDeviceOps) -> None:
        super().__init__(mesh)
        self._rule, self._ops = rule, ops
        self._whole = CutLayout(mesh)

    def of(self, variable: keras.Variable, is_stacked: bool = False) -> VariableLayout:
        layout = own_layout(variable)
        if isinstance(layout, CutLayout) and layout.mesh is self._mesh and not is_stacked:
            return layout
        return super().of(variable, is_stacked)

    def first(self, variable: keras.Variable, value: DeferredValue) -> Any:
        axes = self._rule(variable)
        if axes is None or not any(axes):
            return None
        layout = CutLayout(self._mesh, PartitionSpec(*axes))
        lie_as(variable, layout)
        return jax.jit(value.whole, out_shardings=layout.sharding)()

    def place(self, layouts: Sequence[VariableLayout], values: Sequence[VariableValue]) -> list[jax.Array]:
        return [layout.place(value) for layout, value in zip(layouts, values, strict=True)]

    def prepare(self, optimizer: keras.Optimizer | None, variables: Sequence[keras.Variable] = ()) -> bool:
        """Return True: gradients are reduced in the parts in which their weights lie."""
        return optimizer is not None and optimizer.built and self._mesh.num_replicas > 1

    def update(
        self,
        optimizer: keras.Optimizer,
        values: Sequence[jax.Array],
        weights: Sequence[jax.Array],
        aggregate: Callable[[GradientReducer | None], Gradients],
        apply: PureUpdate,
    ) -> tuple[list[jax.Array], list[jax.Array]] | None:
        if self._mesh.num_replicas == 1:
            return None
        return apply(list(values), aggregate(self._reduce), list(weights))

    def _reduce(
        self, op: ReduceOp, grads: list[jax.Array], variables: Sequence[keras.Variable]
    ) -> list[jax.Array]:
        """Reduce gradients over the replicas, part by part: to pack whole ones, XLA would gather them."""
        lies = [self.of(v).cut for v in variables]

        def parts(grads: list[jax.Array]) -> list[jax.Array]:
            return reduce_in_step(self._ops, op, grads, axis_name=AXIS, axis_size=self._mesh.num_replicas)

        in_parts = jax.shard_map(
            parts, in_specs=(lies,), out_specs=lies, axis_names={MODEL_AXIS}, check_vma=False
        )
        return in_parts(grads)
