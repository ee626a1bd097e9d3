"""Who trains: Unisono and what it is compared with.

Each module has a function `start(place, **arguments)` that returns a `Peer`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from workloads import BATCH

#: name: (module of this package, arguments of its `start`)
PEERS = {
    "unisono": ("keras_fit", {"who": "unisono"}),
    "plain Keras": ("keras_fit", {"who": "plain"}),
    "DataParallel": ("keras_fit", {"who": "data_parallel"}),
    "TF MirroredStrategy": ("keras_fit", {"who": "tensorflow"}),
    "unisono, fully sharded": ("keras_fit", {"who": "fully_sharded"}),
    "unisono loop": ("unisono_loop", {}),
    "TF loop": ("tf_loop", {}),
    "JAX by hand": ("jax_by_hand", {}),
    "JAX by hand with Keras' model": ("keras_by_hand", {}),
    "torch DDP": ("torch_ddp", {}),
    "torch FSDP2": ("torch_ddp", {"in_parts": True}),
    "torch eager": ("torch_ddp", {}),
    "torch.compile": ("torch_ddp", {"compiled": True}),
}

#: The package that a peer needs besides JAX and Keras.
NEEDS = {
    "TF MirroredStrategy": "tensorflow",
    "TF loop": "tensorflow",
    "JAX by hand": "optax",
    "torch DDP": "torch",
    "torch FSDP2": "torch",
    "torch eager": "torch",
    "torch.compile": "torch",
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a peer runs, and what.

    Args:
        workload: a `Workload`.
        devices: of a process; on CPUs virtual ones.
        processes: how many there are.
        rank: the number of this one.
        port: where process 0 listens.
        host: the address of process 0.
        platform: of the devices.
        rows: of a batch on each replica.
        policy: Keras' name of the precision.
        compress: a kind of `CompressedAllReduce`, or the same of torch; None for exact gradients.
        folder: for files, empty at the start, the same for all processes.
    """

    workload: Any
    devices: int
    processes: int
    rank: int
    port: int
    folder: str
    host: str = "127.0.0.1"
    platform: str = "cpu"
    rows: int = BATCH
    policy: str = "float32"
    compress: str | None = None

    @property
    def batch(self):
        """The rows of the global batch."""
        return self.rows * self.devices * self.processes

    @property
    def names(self):
        """The names of a process' devices."""
        return [f"{self.platform}:{i}" for i in range(self.devices)]

    def data(self):
        """The rows of an epoch, the same in every process."""
        return self.workload.data(self.workload.steps * self.batch)


@dataclasses.dataclass(frozen=True)
class Peer:
    """A model that is ready to be trained.

    Args:
        first: trains one step.
        actions: by name, what can be timed and the rows of its data.
        steps: the optimizer steps so far: the suite checks that all of an action were made.
        training: the actions that make steps, and how many.
        settle: is called with an action before its first turn, which does not count: does it until the peer
            has chosen how steps run.
    """

    first: Callable[[], Any]
    actions: dict[str, tuple[Callable[[], Any], int]]
    steps: Callable[[], int]
    training: dict[str, int]
    settle: Callable[[str], None] = lambda action: None
