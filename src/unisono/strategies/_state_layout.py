"""State layouts by the names that strategies take.

Tests: tests/virtual/strategies/test_sharded_state.py.
"""

from __future__ import annotations

from unisono._errors import InvalidArgumentError
from unisono._mesh import ReplicaMesh
from unisono.cluster._process_group import ProcessGroup
from unisono.step._layout import MirroredLayout, StateLayout
from unisono.step._sharded_layout import ShardedLayout
from unisono.step.variables._fully_sharded_layout import FullyShardedLayout
from unisono.training.replica._elementwise import why_whole

#: The names of state layouts; the first is that of strategies by default.
LAYOUTS = ("mirrored", "sharded", "fully_sharded")


def layout_named(name: str, mesh: ReplicaMesh, group: ProcessGroup) -> StateLayout:
    """Return a state layout."""
    if name == "mirrored":
        return MirroredLayout(mesh)
    if name == "sharded":
        return ShardedLayout(mesh, why_whole, group)
    if name == "fully_sharded":
        return FullyShardedLayout(mesh, why_whole, group)
    raise InvalidArgumentError(
        f'`state_layout` must be "mirrored", "sharded" or "fully_sharded". Received: state_layout={name!r}. '
        'Write `state_layout="sharded"` for optimizer state in parts on the devices, "fully_sharded" for '
        "weights in parts, too."
    )
