"""The loop of a constant number of steps, for GPUs: it carries its scalars in one array.

A loop carries the sums of each metric, and stores a step's logs, each a scalar of its own: on a GPU a kernel
each. As entries of one array they are a kernel together.

Tests: tests/virtual/training/test_kernels.py.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp

from unisono._types import PyTree
from unisono.training.groups._multi_step import Program, entry_at, repeated


class ScalarPacking:
    """Puts the scalars of a structure into one array for each type.

    Args:
        like: pytree of arrays, in whose structure and types others are packed.

    >>> packing = ScalarPacking({"a": jnp.ones(()), "b": jnp.zeros(()), "c": jnp.ones(2)})
    >>> others, packed = packing.pack({"a": 3.0, "b": jnp.ones(()), "c": jnp.ones(2)})
    >>> len(others), packed[0].tolist(), float(packing.unpack((others, packed))["a"])
    (1, [3.0, 1.0], 3.0)
    """

    def __init__(self, like: PyTree) -> None:
        leaves, self._structure = jax.tree.flatten(like)
        scalars = defaultdict(list)
        for place, leaf in enumerate(leaves):
            # Keys of random numbers have types of their own.
            is_key = jnp.issubdtype(getattr(leaf, "dtype", float), jax.dtypes.prng_key)
            if jnp.ndim(leaf) == 0 and not is_key:
                scalars[jnp.asarray(leaf).dtype].append(place)
        #: For each type the places of its scalars; one alone stays as it is.
        self._packs = {dtype: places for dtype, places in scalars.items() if len(places) > 1}
        packed = {place for places in self._packs.values() for place in places}
        self._others = [place for place in range(len(leaves)) if place not in packed]

    def pack(self, tree: PyTree) -> tuple[list[Any], list[jax.Array]]:
        """Return the leaves that are not packed, and the arrays of scalars."""
        leaves = jax.tree.leaves(tree)
        packed = [
            jnp.stack([jnp.asarray(leaves[place], dtype) for place in places])
            for dtype, places in self._packs.items()
        ]
        return [leaves[place] for place in self._others], packed

    def unpack(self, parts: tuple[list[Any], list[jax.Array]]) -> PyTree:
        """Return the structure again; where scalars were stacked, each has its part of all stacks."""
        others, packed = parts
        leaves = dict(zip(self._others, others, strict=True))
        for places, every in zip(self._packs.values(), packed, strict=True):
            leaves |= {place: every[..., number] for number, place in enumerate(places)}
        return jax.tree.unflatten(self._structure, [leaves[place] for place in range(len(leaves))])


def constant_loop(step: Program, slots: int, is_masked: bool = False) -> Program:
    """Return a program as `multi_step_program` does, whose loop carries scalars in few arrays.

    Args:
        step: from `(state, batch)` to `(logs, state)`; pure.
        slots: how many batches there is room for.
        is_masked: whether all slots are computed, and those behind the first `count` change nothing.
    """

    def program(state: PyTree, several: tuple[int | jax.Array, PyTree]) -> tuple[PyTree, PyTree]:
        count, batches = several
        of_state = ScalarPacking(state)
        of_logs: list[ScalarPacking] = []

        # Traced once: for its shapes first, and from jit's cache in the loop.
        @jax.jit
        def one(carried: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
            logs, new = step(of_state.unpack(carried), batch)
            logs = jax.tree.map(jnp.asarray, logs)
            of_logs[:] = [ScalarPacking(logs)]
            # A loop carries fixed types: a weak type from a Python number must not change one.
            new = jax.tree.map(lambda old, x: jnp.asarray(x, old.dtype), carried, of_state.pack(new))
            return of_logs[0].pack(logs), new

        def at(i: jax.Array, carried: PyTree) -> tuple[PyTree, PyTree]:
            logs, new = one(carried, entry_at(i, batches))
            if is_masked:
                new = jax.tree.map(lambda old, x: jnp.where(i < count, x, old), carried, new)
            return logs, new

        first = of_state.pack(state)
        shapes, _ = jax.eval_shape(lambda carried: one(carried, entry_at(0, batches)), first)
        logs, carried = repeated(slots, slots, shapes, at, first)
        return of_logs[0].unpack(logs), of_state.unpack(carried)

    return program
