"""Weights in equal parts, too: each is made whole where a step uses it, in the forward and the backward pass.

Between steps, a replica holds a part of each weight and of each of the optimizer's variables. A step gathers
a weight for each operation that needs it (`_gather_on_use`), so that few are whole at once. Gradients
are reduce-scattered, each replica updates its parts, and nothing is gathered afterwards.

Sources: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020
(https://arxiv.org/abs/1910.02054); Zhao et al., "PyTorch FSDP", 2023 (https://arxiv.org/abs/2304.11277).

Tests: tests/virtual/strategies/test_fully_sharded_state.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._types import PyTree
from unisono._values import DistributedValues
from unisono.collectives._packing import PackingPlan, plan
from unisono.sharding._gather_on_use import gather_on_use, note_part, part_of
from unisono.sharding._sharded_layout import ShardedLayout
from unisono.sharding._shards import ShardedVariableLayout, Shards
from unisono.step._keras_internals import trained_variables
from unisono.step._layout import ReplicaCode, VariableLayout, is_slot, lie_as, lie_whole

#: Weights of fewer elements stay whole on every replica: a gather would cost more than they take.
SMALLEST = 1024

#: Gradients travel between workers in messages of about so many bytes for each replica: a message costs more
#: than few bytes, and all gradients in one would have to be whole at once.
_MESSAGE_BYTES = 2**22


class WeightLayout(ShardedVariableLayout):
    """How a weight lies that is gathered where a step uses it."""

    def enter(self, array: jax.Array, in_replica: bool) -> Any:
        """Return this replica's part, of which `FullyShardedLayout.run_replica` makes the whole."""
        return self.pinned(array, in_replica) if in_replica else super().enter(array, in_replica)

    def leave(self, value: Any, in_replica: bool) -> jax.Array:
        """Return the parts; in a replica its own."""
        part = part_of(value)
        if part is None and in_replica and self.is_part(value):
            part = value
        return super().leave(value, in_replica) if part is None else self.pinned(part, in_replica)

    def is_part(self, value: Any) -> bool:
        """Whether a value in a replica is its part; a whole value has other shapes."""
        return tuple(value.shape) == (self.part_size,) and not isinstance(value, Shards)


class FullyShardedLayout(ShardedLayout):
    """Weights and the optimizer's variables of their shapes lie in parts; everything else on every device."""

    name = "fully_sharded"

    @property
    def keeps_weights(self) -> bool:
        return False

    def of(self, variable: keras.Variable, is_stacked: bool = False) -> VariableLayout:
        """Return how a variable lies; see `StateLayout.of`."""
        layout = super().of(variable, is_stacked)
        # Known after the variable was made.
        is_weight = isinstance(layout, WeightLayout) and not is_gathered(variable)
        return self._whole if is_weight else layout

    def _first_layout(self, variable: keras.Variable) -> ShardedVariableLayout | None:
        if is_slot(variable) or isinstance(variable, DistributedValues):
            return super()._first_layout(variable)
        if not variable.trainable or not is_gathered(variable):
            return None
        # From the beginning: `evaluate` and `predict` of a model without an optimizer gather weights, too.
        layout = self._as_weight(variable)
        lie_as(variable, layout)
        return layout

    def _as_weight(self, variable: keras.Variable) -> WeightLayout:
        """Return how a weight lies that is gathered where a step uses it."""
        return WeightLayout(self._mesh, tuple(variable.shape), self._group, self._axis_of(variable))

    def _mark_weights(self, optimizer: keras.Optimizer) -> None:
        for weight in filter(is_gathered, trained_variables(optimizer)):
            if not isinstance(super().of(weight), WeightLayout):
                lie_as(weight, self._as_weight(weight))
                self._version += 1

    def _unmark_weights(self, optimizer: keras.Optimizer) -> None:
        for weight in trained_variables(optimizer):
            if isinstance(super().of(weight), WeightLayout):
                lie_whole(weight)
                self._version += 1

    def run_replica(
        self, variables: Sequence[keras.Variable], values: Sequence[Any], code: ReplicaCode
    ) -> tuple[PyTree, list[Any]]:
        """Run a replica's code on whole weights, each gathered where it is used."""
        places: dict[int, WeightLayout] = {}
        for i, variable in enumerate(variables):
            layout = self.of(variable)
            if isinstance(layout, WeightLayout) and layout.is_part(values[i]):
                places[i] = layout
        if not places:
            return code(list(values))
        results: list[tuple[Any, list[ShardedVariableLayout | None]]] = []

        def on_wholes(wholes: list[jax.Array]) -> list[jax.Array]:
            given = list(values)
            for i, whole in zip(places, wholes, strict=True):
                given[i] = whole
            result, new = code(given)
            leaves, structure = jax.tree.flatten(result)
            results.append((structure, [x.layout if isinstance(x, Shards) else None for x in new]))
            return [*leaves, *map(_as_array, new)]

        found = gather_on_use(
            on_wholes,
            [values[i] for i in places],
            [jax.ShapeDtypeStruct(one.shape, values[i].dtype) for i, one in places.items()],
            [one.whole for one in places.values()],
            # CPUs exchange and compute in turn: there it would take memory for nothing.
            is_ahead=self._mesh.platform != "cpu",
        )
        structure, layouts = results[-1]
        count = structure.num_leaves
        new = [
            x if one is None or isinstance(one, WeightLayout) else Shards(x, one, in_replica=True)
            for x, one in zip(found[count:], layouts, strict=True)
        ]
        return jax.tree.unflatten(structure, found[:count]), new

    def _whole_weights(
        self,
        trained: Sequence[keras.Variable],
        layouts: Sequence[ShardedVariableLayout | None],
        weights: Sequence[jax.Array],
    ) -> list[jax.Array]:
        """Make weights whole that rest so; of others too, in case the step reads them after its update."""
        small = [i for i, v in enumerate(trained) if not isinstance(self.of(v), WeightLayout)]
        found = super()._whole_weights(
            [trained[i] for i in small], [layouts[i] for i in small], [weights[i] for i in small]
        )
        new = list(weights)
        for i, whole in zip(small, found, strict=True):
            new[i] = whole
        for i, variable in enumerate(trained):
            layout = self.of(variable)
            if isinstance(layout, WeightLayout):
                new[i] = layout.whole(weights[i])
                note_part(new[i], weights[i])
        return new

    @property
    def _has_reduce_scatter(self) -> bool:
        # Within a process it is right, and needs no second array of a gradient's size.
        return not self._sends_over_gloo

    def _packing(self, arrays: Sequence[tuple[tuple[int, ...], np.dtype]]) -> PackingPlan:
        return plan(arrays, bytes_per_pack=_MESSAGE_BYTES if self._sends_over_gloo else 0)


def is_gathered(weight: keras.Variable) -> bool:
    """Whether a weight rests in parts."""
    # What float8 writes with gradients is no weight.
    if getattr(weight, "overwrite_with_gradient", False):
        return False
    return math.prod(weight.shape) >= SMALLEST and bool(jnp.issubdtype(weight.dtype, jnp.floating))


def _as_array(value: Any) -> Any:
    """This replica's part of what lies in parts; any other array as it is."""
    if isinstance(value, Shards):
        return value.parts
    part = part_of(value)
    return value if part is None else part
