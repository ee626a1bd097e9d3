"""From the parts of a variable on devices of several processes to parts of these on each replica.

Where a replica has devices of several processes, a weight that was read from a file before the first program
lies in parts on them, and then in parts on the replicas, too. No device has the whole in between.

Tests: tests/virtual/strategies/test_spanning_workers.py, which tests/cluster/test_contract.py starts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax

from unisono.model_parallel._spanning_layout import SpannedParts
from unisono.sharding._shards import ShardedVariableLayout
from unisono.step._engines import SHARDED, UNSHARDED
from unisono.step._layout import VariableLayout
from unisono.step._value_handle import VariableValue


def divided_over_replicas(
    layouts: Sequence[VariableLayout], values: Sequence[VariableValue]
) -> list[VariableValue]:
    """Return values of variables, as arrays of all parts where they lie in parts on the replicas.

    All processes must call it.

    Args:
        layouts: how the variables lie.
        values: what they hold, or were assigned.
    """
    return [
        _divided(value, layout)
        if isinstance(value, SpannedParts) and isinstance(layout, ShardedVariableLayout)
        else value
        for layout, value in zip(layouts, values, strict=True)
    ]


def _divided(value: SpannedParts, layout: ShardedVariableLayout) -> jax.Array:
    if value.layout.cut != layout.cut:
        # Read from a file before it was decided how the variable is cut.
        value.lie_as(dataclasses.replace(value.layout, cut=layout.cut))
    with layout.group.collective():
        return _dividing(layout)(value.array).block_until_ready()


@functools.lru_cache(maxsize=64)
def _dividing(layout: ShardedVariableLayout) -> Callable[[jax.Array], jax.Array]:
    own = layout.mesh.on_replicas(layout.own_part, UNSHARDED, SHARDED)
    return jax.jit(own, out_shardings=layout.sharding)
