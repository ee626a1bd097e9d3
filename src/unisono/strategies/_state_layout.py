"""State layouts by what strategies are given.

Tests: tests/virtual/strategies/test_sharded_state.py, tests/virtual/strategies/test_local_updates.py.
"""

from __future__ import annotations

from unisono._checks import check_instance
from unisono._errors import InvalidArgumentError
from unisono._mesh import ReplicaMesh
from unisono.collectives._cross_device import CrossDeviceOps
from unisono.collectives._process_group import ProcessGroup
from unisono.compression._compressed_all_reduce import CompressedAllReduce
from unisono.compression._compressed_layout import CompressedLayout
from unisono.local_updates._local_layout import LocalLayout, LoneLayout
from unisono.local_updates._local_updates import LocalUpdates
from unisono.sharding._fully_sharded_layout import FullyShardedLayout
from unisono.sharding._sharded_layout import ShardedLayout
from unisono.step._layout import StateLayout
from unisono.training.replica._elementwise import why_whole

_IN_PARTS = {layout.name: layout for layout in (ShardedLayout, FullyShardedLayout)}

#: The names of state layouts; the first is that of strategies by default.
LAYOUTS = ("mirrored", *_IN_PARTS)


def layout_of(
    name: str, ops: CrossDeviceOps, sync: LocalUpdates | None, mesh: ReplicaMesh, group: ProcessGroup
) -> StateLayout:
    """Return the layout that a strategy's arguments ask for.

    Args:
        name: `state_layout`.
        ops: how the strategy reduces gradients, perhaps compressed.

    Raises:
        InvalidArgumentError: for another name, or one that does not go with `sync`.
        InvalidTypeError: when `sync` is something else than `LocalUpdates`.
        BackendError: where workers have no device for exchanges beside the steps.
    """
    if name not in LAYOUTS:
        raise InvalidArgumentError(
            '`state_layout` must be "mirrored", "sharded" or "fully_sharded". Received: '
            f'state_layout={name!r}. Write `state_layout="sharded"` for optimizer state in parts on the '
            'devices, "fully_sharded" for weights in parts, too.'
        )
    check_instance(
        sync, "sync", LocalUpdates, "Write `sync=unisono.LocalUpdates(every=50)`, or leave it out."
    )
    layout = _IN_PARTS[name](mesh, why_whole, group) if name in _IN_PARTS else StateLayout(mesh)
    if isinstance(ops, CompressedAllReduce):
        layout = CompressedLayout(layout, ops, mesh, group)
    if sync is None or sync.is_synchronous:
        return layout
    if type(layout) is not StateLayout:
        raise InvalidArgumentError(
            "With `LocalUpdates` each replica must hold its whole state, and no gradients are exchanged. "
            f"Received: {sync!r} and another `state_layout` or a `CompressedAllReduce`. Leave one out."
        )
    # A replica that is alone averages with none.
    return LoneLayout(mesh, sync) if mesh.num_replicas == 1 else LocalLayout(mesh, group, sync)
