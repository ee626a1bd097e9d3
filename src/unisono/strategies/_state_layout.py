"""State layouts by what strategies are given.

Tests: tests/virtual/strategies/test_sharded_state.py, tests/virtual/strategies/test_local_updates.py.
"""

from __future__ import annotations

from unisono._checks import check_instance
from unisono._errors import InvalidArgumentError
from unisono._features import load
from unisono._mesh import ReplicaMesh
from unisono.collectives._cross_device import CrossDeviceOps
from unisono.collectives._process_group import ProcessGroup
from unisono.step._layout import StateLayout, Synchronization

#: The names of state layouts; the first is that of strategies by default.
LAYOUTS = ("mirrored", "sharded", "fully_sharded")


def layout_of(
    name: str, ops: CrossDeviceOps, sync: Synchronization | None, mesh: ReplicaMesh, group: ProcessGroup
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
    if sync is not None:
        hint = "Write `sync=unisono.LocalUpdates(every=50)`, or leave it out."
        check_instance(sync, "sync", load("class LocalUpdates"), hint)
    is_mirrored = name == LAYOUTS[0]
    layout = StateLayout(mesh) if is_mirrored else load(f"{name.replace('_', ' ')} layout")(mesh, group)
    layout = ops.layout(layout, mesh, group)
    return layout if sync is None else sync.layout(layout, mesh, group)
