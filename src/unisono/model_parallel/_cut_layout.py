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

from unisono.model_parallel._replica_grid import MODEL_AXIS, ReplicaGrid
from unisono.step._layout import StateLayout, VariableLayout, lie_as, own_layout
from unisono.step._value_handle import DeferredValue, VariableValue

#: From a variable to the mesh axis along which each of its axes is cut; None for one that stays whole.
LayoutRule = Callable[[keras.Variable], Sequence[str | None] | None]


@dataclasses.dataclass(frozen=True)
class CutLayout(VariableLayout):
    """How a variable lies that is cut over the devices of each replica.

    Args:
        cut: how; the replicas hold the same.
    """

    cut: PartitionSpec

    @property
    def holds_arrays(self) -> bool:
        return True

    @property
    def sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh.mesh, self.cut)


class CutStateLayout(StateLayout):
    """State in parts on the devices of each replica, and the same on all replicas.

    Args:
        mesh: the devices of all replicas.
        rule: how each variable lies.
    """

    def __init__(self, mesh: ReplicaGrid, rule: LayoutRule) -> None:
        super().__init__(mesh)
        self._rule = rule

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
