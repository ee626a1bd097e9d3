"""What is known of a value of a traced function, and one operation in two traces. Pure.

Tests: tests/unit/training/test_row_analysis.py.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

#: One operation of a trace, a `jax.extend.core.JaxprEqn`. JAX declares its arguments and results as abstract
#: values, which need not have a shape and a type; those of a trace always have.
Equation: TypeAlias = Any


@dataclasses.dataclass(frozen=True)
class Constant:
    """Not of the rows: equal in both traces but for a power of the number of rows.

    Along an axis that counts rows all entries are equal. `known` are both traces' values: small
    arrays, or a scalar that fills an array of any shape.
    """

    power: int = 0
    known: tuple[np.ndarray, np.ndarray] | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class RowWise:
    """Along `axis`, whose size is a multiple of the rows, entries depend on their own row alone."""

    axis: int
    power: int = 0


@dataclasses.dataclass(frozen=True)
class Reduced:
    """A sum over all rows, times a power of their number."""

    power: int = 0


class Mixed:
    """Anything."""


RowState = Constant | RowWise | Reduced | Mixed
MIXED = Mixed()


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation in both traces."""

    eqn: Equation
    other: Equation
    ratio: Fraction

    @property
    def params(self) -> dict[str, Any]:
        """The operation's parameters, in the first trace."""
        return dict(self.eqn.params)

    def same(self, *names: str) -> bool:
        """Whether these parameters are equal in both traces."""
        return all(self.eqn.params[n] == self.other.params[n] for n in names)

    def shape(self, number: int = 0) -> tuple[int, ...]:
        """The shape of an operand, in the first trace."""
        return tuple(self.eqn.invars[number].aval.shape)

    def out_shape(self, number: int = 0) -> tuple[int, ...]:
        """The shape of a result, in the first trace."""
        return tuple(self.eqn.outvars[number].aval.shape)

    def counting(self, number: int = 0) -> set[int]:
        """The axes of an operand that count rows."""
        shapes = (e.invars[number].aval.shape for e in (self.eqn, self.other))
        return {i for i, (few, many) in enumerate(zip(*shapes, strict=True)) if few != many}

    @property
    def is_plain(self) -> bool:
        """Whether no operand and no result has an axis that counts rows."""
        mine, theirs = (
            [v.aval.shape for v in (*e.invars, *e.outvars) if hasattr(v.aval, "shape")]
            for e in (self.eqn, self.other)
        )
        return mine == theirs


def is_fill(state: RowState) -> bool:
    """Whether a state is that of an array filled with one known number."""
    return isinstance(state, Constant) and state.known is not None and np.ndim(state.known[0]) == 0
