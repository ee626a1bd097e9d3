"""Programs that choose the rows of their batches on the devices.

Tests: tests/virtual/training/test_resident.py.
"""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding

from unisono._types import PyTree
from unisono.step._engines import UNSHARDED
from unisono.training.groups._multi_step import Program, entry_at


def choosing_program(
    program: Program, spec: PyTree, slots: int, sharding: NamedSharding | None = None
) -> tuple[Program, PyTree]:
    """Return a program of batches that are numbers of rows, and how its arguments lie on the replicas.

    Args:
        program: of batches that hold their rows.
        spec: how these lie on the replicas.
        slots: how many batches there is room for; 1 for a program without a loop.
        sharding: of the rows, where XLA divides the program; None for a program of one replica.

    Returns:
        A function of `(state, (arrays, numbers))`, or of `(state, (count, (arrays, numbers)))`.
    """

    def rows_at(arrays: PyTree, numbers: jax.Array) -> PyTree:
        rows = jax.tree.map(lambda x: x.at[numbers].get(mode="promise_in_bounds"), arrays)
        if sharding is not None:
            rows = jax.lax.with_sharding_constraint(rows, sharding)
        # XLA compiles what follows as if the rows were arguments, so that the bits are the same.
        return jax.lax.optimization_barrier(rows)

    def one(state: PyTree, data: PyTree) -> tuple[PyTree, PyTree]:
        return program(state, rows_at(*data))

    def several(state: PyTree, data: PyTree) -> tuple[PyTree, PyTree]:
        count, (arrays, numbers) = data
        return program(state, (count, lambda i: rows_at(arrays, entry_at(i, numbers))))

    if slots == 1:
        return one, (UNSHARDED, spec)
    return several, (spec[0], (UNSHARDED, spec[1]))
