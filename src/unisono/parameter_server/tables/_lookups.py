"""Which tables a step uses by rows, and its two programs: numbers of rows, and all else with the rows."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.export
import jax.extend.core as jex
import jax.numpy as jnp
import keras
import numpy as np

from unisono.parameter_server.tables._row_program import GatheredRows, RowProgram
from unisono.parameter_server.tables._row_values import NotByRowsError, RowGroup, aval_of, inlined
from unisono.step._keras_internals import stored_dtype
from unisono.training._jaxprs import exported

_LOG = logging.getLogger("unisono")


@dataclasses.dataclass(frozen=True, eq=False)
class TableGroup:
    """Tables of which a step uses the same rows."""

    size: int
    tables: tuple[keras.Variable, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class TableLookups:
    """What a worker does before a step, to have the rows that it looks up.

    The step's own program takes, after all else: of each group the rows of its tables, and how many they are;
    then of each lookup the places of its rows among these. All programs have one argument for each array.

    Args:
        blob: the program that computes the numbers of rows, one array for each lookup; serialized.
        takes: which of the step's arguments it takes.
        sites: for each lookup the number of its group, and whether a number that is none of a row stands for
            the nearest one.
    """

    blob: bytes
    takes: tuple[int, ...]
    groups: tuple[TableGroup, ...]
    sites: tuple[tuple[int, bool], ...]


class RowStep:
    """A step in which some tables are used by rows."""

    def __init__(self, program: RowProgram, tables: Mapping[int, tuple[keras.Variable, RowGroup]]) -> None:
        self._program, self._tables = program, dict(tables)
        self._roots: list[RowGroup] = list(
            {id(group.root): group.root for _, group in self._tables.values()}.values()
        )

    @classmethod
    def of(
        cls,
        closed: jex.ClosedJaxpr,
        candidates: Mapping[int, keras.Variable],
        gradients: Mapping[int, keras.Variable],
    ) -> RowStep | None:
        """Return the step with all tables that it uses by rows; None where there is none.

        Args:
            candidates: by number of an argument: the tables that may be used by rows.
            gradients: by number of a result: the variables whose gradients they are.
        """

        def attempt(numbers: Sequence[int]) -> RowStep:
            groups = {i: RowGroup(candidates[i].shape[0]) for i in numbers}
            of_table = {id(candidates[i]): group for i, group in groups.items()}
            in_rows = {n: of_table[id(v)] for n, v in gradients.items() if id(v) in of_table}
            program = RowProgram(closed, groups, in_rows)
            program.numbers_program()
            return cls(program, {i: (candidates[i], group) for i, group in groups.items()})

        if not candidates:
            return None
        try:
            # Together: one may be combined with another, as those of a low-rank update are.
            return attempt(list(candidates))
        except NotByRowsError:
            pass
        usable = []
        for i in candidates:
            try:
                attempt([i])
                usable.append(i)
            except NotByRowsError as error:
                if _is_looked_up(closed, i):
                    _warn_of_whole(candidates[i], str(error))
        return attempt(usable) if usable else None

    @property
    def arguments(self) -> list[int]:
        """The numbers of the arguments that are tables."""
        return list(self._tables)

    def specs(self) -> list[jax.ShapeDtypeStruct]:
        """Return shapes and types of what the step takes of tables, with sizes that are open."""
        names = ", ".join(f"rows{i}" for i in range(len(self._roots)))
        sizes = jax.export.symbolic_shape(names)
        found = []
        for root, size in zip(self._roots, sizes, strict=True):
            for i, _ in self._of(root):
                aval = aval_of(self._program.jaxpr.invars[i])
                found.append(jax.ShapeDtypeStruct((size, *aval.shape[1:]), aval.dtype))
            found.append(jax.ShapeDtypeStruct((), jnp.int32))
        found += [
            jax.ShapeDtypeStruct(aval_of(site.numbers).shape, jnp.int32) for site in self._program.sites
        ]
        return found

    def runner(
        self, place: Mapping[int, int], count: int
    ) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
        """Return the step as a function of its other arguments, and of what `specs` describes."""

        def run(values: Sequence[jax.Array]) -> list[jax.Array]:
            arguments = {at: values[i] for at, i in place.items()}
            left = iter(values[count:])
            hands: dict[int, GatheredRows] = {}
            for root in self._roots:
                own = [i for i, _ in self._of(root)]
                arguments.update((i, next(left)) for i in own)
                hands[id(root)] = GatheredRows(arguments[own[0]].shape[0], next(left))
            ordered = [arguments[i] for i in range(len(self._program.jaxpr.invars))]
            return self._program.evaluate(ordered, lambda root: hands[id(root)], list(left))

        return run

    def lookups(
        self,
        place: Mapping[int, int],
        specs: Sequence[jax.ShapeDtypeStruct],
        platforms: Sequence[str] = ("cpu",),
    ) -> TableLookups:
        """Return what a worker does before the step."""
        closed, used = self._program.numbers_program()
        takes = [place[i] for i in used]
        sites = self._program.sites
        blob = b""
        if sites:
            blob = exported(jex.jaxpr_as_fun(closed), [specs[i] for i in takes], platforms)
        return TableLookups(
            blob,
            tuple(takes),
            tuple(TableGroup(root.size, tuple(v for _, v in self._of(root))) for root in self._roots),
            tuple((self._roots.index(site.group.root), site.clamps) for site in sites),
        )

    def _of(self, root: RowGroup) -> list[tuple[int, keras.Variable]]:
        return [(i, v) for i, (v, group) in self._tables.items() if group.root is root]


def _warn_of_whole(variable: keras.Variable, why: str) -> None:
    nbytes = np.dtype(jnp.dtype(stored_dtype(variable))).itemsize * math.prod(variable.shape)
    _LOG.warning(
        "A step uses all of the table %s (%.0f MB), not the rows of its lookups alone: %s.",
        variable.path,
        nbytes / 1e6,
        why,
    )


def _is_looked_up(closed: jex.ClosedJaxpr, argument: int) -> bool:
    """Return whether a program takes rows of an argument, besides what else it does with it."""
    flat = inlined(closed, lambda avals: True).jaxpr
    return any(e.primitive.name == "gather" and e.invars[0] is flat.invars[argument] for e in flat.eqns)
