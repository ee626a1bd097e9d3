"""Predictions of several steps in one program, on their way to host memory.

Keras' `predict` keeps what each step returns, and concatenates at the end. A group's predictions are copied
to the host when its program is done and others are in flight: no step waits for a transfer.

Tests: tests/unit/training/test_predictions.py.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from unisono._types import PyTree


class GroupPredictions:
    """The predictions of the steps of one program.

    Args:
        outputs: pytree of arrays `(slots, rows, ...)`, of which the first `count` slots are used.
        count: how many steps.

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
                self._structure, [StepPrediction(self, leaf, i) for leaf in range(self._num_leaves)]
            )
            for i in range(self._count)
        ]

    def fetch(self) -> None:
        """Copy the predictions to the host, and free those on the devices."""
        if self._devices:
            self._host = [_on_host(x, self._count) for x in self._devices]
            self._devices = []

    def at(self, leaf: int, step: int) -> np.ndarray:
        """Return one array of a step.

        Args:
            leaf: its number in the pytree.
            step: the step's number in the group.
        """
        self.fetch()
        rows: np.ndarray = self._host[leaf][step]
        return rows


@dataclasses.dataclass(frozen=True, eq=False)
class StepPrediction:
    """An array of one step's predictions; read where NumPy needs it.

    Args:
        group: which holds it.
        leaf: its number in the group.
        step: the number of the step.
    """

    group: GroupPredictions
    leaf: int
    step: int

    def __array__(self, dtype: np.typing.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        array: np.ndarray = np.asarray(self.group.at(self.leaf, self.step), dtype)
        return array


def _on_host(array: jax.Array, count: int) -> np.ndarray:
    """Return the first slots of an array whose parts lie on several devices, without a copy of the others."""
    host = np.empty((count, *array.shape[1:]), array.dtype)
    for shard in array.addressable_shards:
        host[(slice(None), *shard.index[1:])] = np.asarray(shard.data)[:count]
        if array.is_fully_replicated:
            break
    return host
