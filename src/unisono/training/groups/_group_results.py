"""What the steps of a group have returned; predictions on their way to host memory.

Keras' `predict` keeps what each step returns, and concatenates at the end. A group's predictions are copied
to the host when its program is done and others are in flight: no step waits for a transfer.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np

from unisono._types import PyTree
from unisono.step._call_signature import LazyArray


@dataclasses.dataclass(frozen=True)
class GroupResult:
    """What the steps of one program have returned: logs, or predictions.

    Args:
        value: pytree of arrays.
        is_stacked: whether the arrays have a first dimension for the steps.
    """

    value: PyTree
    count: int
    is_stacked: bool

    def newest(self) -> PyTree:
        """Return the last step's."""
        return jax.tree.map(lambda x: x[self.count - 1], self.value) if self.is_stacked else self.value

    def rows(self) -> PyTree:
        """Return the rows of all steps, on the host."""
        if not self.is_stacked:
            return jax.tree.map(np.asarray, self.value)
        return jax.tree.map(lambda x: np.asarray(x)[: self.count].reshape(-1, *x.shape[2:]), self.value)


class GroupPredictions:
    """The predictions of the steps of one program.

    Args:
        outputs: pytree of arrays `(slots, rows, ...)`, of which the first `count` slots are used.

    >>> import jax.numpy as jnp
    >>> group = GroupPredictions({"y": jnp.array([[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]])}, count=2)
    >>> group.fetch()
    >>> np.concatenate([step["y"] for step in group.steps()]).tolist()
    [1.0, 2.0, 3.0, 4.0]
    """

    def __init__(self, outputs: PyTree, count: int) -> None:
        self._devices: list[jax.Array]
        self._devices, self._structure = jax.tree.flatten(outputs)
        self._num_leaves = len(self._devices)
        self._host: list[np.ndarray] = []
        self._count = count

    def steps(self) -> list[PyTree]:
        """Return the predictions of each step: pytrees of what NumPy takes as arrays."""
        return [
            jax.tree.unflatten(
                self._structure,
                [LazyArray(functools.partial(self._rows, leaf), i) for leaf in range(self._num_leaves)],
            )
            for i in range(self._count)
        ]

    def fetch(self) -> None:
        """Copy the predictions to the host, and free those on the devices."""
        if self._devices:
            self._host = [_on_host(x, self._count) for x in self._devices]
            self._devices = []

    def _rows(self, leaf: int) -> np.ndarray:
        """Return one array of all steps."""
        self.fetch()
        return self._host[leaf]


def _on_host(array: jax.Array, count: int) -> np.ndarray:
    """Return the first slots of an array whose parts lie on several devices, without a copy of the others."""
    host = np.empty((count, *array.shape[1:]), array.dtype)
    for shard in array.addressable_shards:
        host[(slice(None), *shard.index[1:])] = np.asarray(shard.data)[:count]
        if array.is_fully_replicated:
            break
    return host
