"""An optimizer's update of one table, for some of its rows: what a server runs on the rows that were pushed.

It is read from the update of the whole table, and exists where each row is updated by its own values and by
numbers that all rows share. Rows without a gradient stay as they are, with their slots. For SGD or Adagrad
that is what the whole update does; Adam or a momentum would move them, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.export
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from unisono.parameter_server.tables._row_program import GatheredRows, RowProgram
from unisono.parameter_server.tables._row_values import NotByRowsError, RowGroup
from unisono.training._jaxprs import exported, pruned

#: Rows with which an update without a gradient is tried.
_PROBED = 16


@dataclasses.dataclass(frozen=True)
class RowUpdate:
    """The update of rows.

    Args:
        blob: serialized; a function of lists (values, no slots, gradients) that returns new values and no
            slots, for any number of rows.
        values: the numbers of the variables that it takes and gives.
        flags: the numbers of the other arguments that it takes, after the gradient: each of them as an array
            with one entry for each row.
        is_whole: whether the update of the whole table leaves rows without a gradient as they are, too.
    """

    blob: bytes
    values: tuple[int, ...]
    flags: tuple[int, ...]
    is_whole: bool


def row_update(
    closed: jex.ClosedJaxpr,
    specs: Sequence[jax.ShapeDtypeStruct],
    table: int,
    slots: Sequence[int],
    gradient: int,
    variables: int,
) -> RowUpdate:
    """Return the update of rows of one table.

    Raises:
        NotByRowsError: the update of a row needs other rows.
    """
    rows = [table, *(i for i in slots if specs[i].shape[:1] == specs[table].shape[:1])]
    others = [i for i in slots if i not in rows]
    outputs = closed.jaxpr.outvars
    if any(outputs[i] is not closed.jaxpr.invars[i] for i in others):
        raise NotByRowsError("what its update keeps does not belong to single rows")
    part, used = pruned(closed, [i in rows for i in range(len(outputs))])
    group = RowGroup(specs[table].shape[0])
    program = RowProgram(
        part,
        {at: group for at, i in enumerate(used) if i in rows or i == gradient},
        dict.fromkeys(range(len(rows)), group),
    )
    if program.sites:
        raise NotByRowsError("its update looks up rows")
    values = [*sorted(rows), *(i for i in used if i < variables and i not in rows)]
    flags = [i for i in used if i >= variables and i != gradient]
    if any(specs[i].shape for i in flags):
        raise NotByRowsError("its update takes the gradients of other variables")

    def compute(
        given: list[jax.Array], _: list[jax.Array], pushed: list[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        named = dict(zip(values, given, strict=True))
        named[gradient] = pushed[0]
        named.update({i: flag[0] for i, flag in zip(flags, pushed[1:], strict=True)})
        hand = GatheredRows(given[0].shape[0], given[0].shape[0])
        found = program.evaluate([named[i] for i in used], lambda _: hand)
        named.update(zip(sorted(rows), found, strict=True))
        return [named[i] for i in values], []

    (size,) = jax.export.symbolic_shape("rows")

    def sized(i: int) -> jax.ShapeDtypeStruct:
        is_row = i in rows or i == gradient
        return jax.ShapeDtypeStruct((size, *specs[i].shape[1:]) if is_row else specs[i].shape, specs[i].dtype)

    pushed = [sized(gradient), *(jax.ShapeDtypeStruct((size,), specs[i].dtype) for i in flags)]
    blob = exported(compute, [[sized(i) for i in values], [], pushed])
    return RowUpdate(blob, tuple(values), tuple(flags), _is_whole(compute, values, rows, pushed, specs))


def _is_whole(
    compute: Callable[..., tuple[list[jax.Array], list[jax.Array]]],
    values: Sequence[int],
    rows: Sequence[int],
    pushed: Sequence[jax.ShapeDtypeStruct],
    specs: Sequence[jax.ShapeDtypeStruct],
) -> bool:
    """Return whether rows without a gradient stay as they are, tried with positive numbers."""
    rng = np.random.default_rng(0)

    def tried(i: int) -> jax.Array:
        shape = (_PROBED, *specs[i].shape[1:]) if i in rows else specs[i].shape
        return jnp.asarray(rng.uniform(0.1, 0.9, shape)).astype(specs[i].dtype)

    given = [tried(i) for i in values]
    zeros = [jnp.zeros((_PROBED, *p.shape[1:]), p.dtype) for p in pushed[:1]]
    found, _ = jax.jit(compute)(given, [], [*zeros, *(jnp.ones(_PROBED, p.dtype) for p in pushed[1:])])
    return all(
        bool((jnp.asarray(one) == two).all())
        for i, one, two in zip(values, given, found, strict=True)
        if i in rows
    )
