"""What is known, in a traced program, of values that have one row for each row of a table. Pure.

Such a value is computed for some rows of the table alone. `Rows` says what all others hold, where that is one
number: zero, in the gradient of a lookup. A value that was made of something smaller, as the zeros to which a
gradient is added, is `Spread` along the rows: it can be made with any number of them.

Tests: tests/virtual/parameter_server/tables/test_row_program.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.extend.core as jex
import jax.extend.random
import jax.numpy as jnp
import numpy as np

from unisono.training._jaxprs import called_by, inner_programs
from unisono.training.rows._row_rules import SIMPLE_ELEMENTWISE

#: An argument or result of an operation in a trace.
Operand = jex.Var | jex.Literal


class NotByRowsError(Exception):
    """A program needs all rows of a table; the text says for what."""


class RowGroup:
    """Tables, and values like them, of which a program uses the same rows."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._joined: RowGroup | None = None

    @property
    def root(self) -> RowGroup:
        """The group that this one is a part of; itself where it was not joined."""
        return self if self._joined is None else self._joined.root

    def join(self, other: RowGroup) -> RowGroup:
        """Let two groups be one, and return it."""
        one, two = self.root, other.root
        if one is not two:
            two._joined = one
        return one


@dataclasses.dataclass(frozen=True)
class Rows:
    """A value with one row for each row of a table.

    Args:
        rest: what each element of the rows holds that are not computed; None where that is not known.
    """

    group: RowGroup
    rest: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Spread:
    """A value whose rows are equal.

    Args:
        rest: what each element holds; None where they differ, or that is not known.
    """

    rest: np.ndarray | None = None


#: What is known of a value; None of one that has nothing to do with tables.
RowKnowledge = Rows | Spread | None

#: Operations on elements, each of which looks at one element of each operand.
ELEMENTWISE = {
    *SIMPLE_ELEMENTWISE.split(),
    *"add add_any convert_element_type copy copy_p div imag mul neg real select_n stop_gradient sub".split(),  # noqa: SIM905
}

#: What a row that is not computed must hold, so that a reduction over the rows can leave it out.
NEUTRAL = {"reduce_sum": 0, "reduce_and": True, "reduce_or": False}


def rest_of(eqn: jex.JaxprEqn, states: Sequence[RowKnowledge]) -> np.ndarray | None:
    """Return what an operation on elements gives for the rows that are not computed; None if not known."""
    rests = [
        literal_of(atom) if state is None else state.rest
        for atom, state in zip(eqn.invars, states, strict=True)
    ]
    name = eqn.primitive.name
    dtype = aval_of(eqn.outvars[0]).dtype
    if name == "mul" and any(r is not None and r == 0 for r in rests):
        # Of finite numbers: where plain Keras multiplies all rows by infinity, these stay as they are.
        return np.zeros((), dtype)
    if name == "div" and rests[0] is not None and rests[0] == 0 and not isinstance(states[1], Rows):
        return np.zeros((), dtype)
    if name == "select_n":
        cases = rests[1:]
        return cases[0] if all(r is not None and r == cases[0] for r in cases) else None
    if any(r is None for r in rests):
        return None
    with jax.ensure_compile_time_eval():
        return np.asarray(eqn.primitive.bind(*rests, **eqn.params))


def literal_of(atom: Operand) -> np.ndarray | None:
    """Return the number that a program has as an operand; None for anything else."""
    if isinstance(atom, jex.Literal) and np.ndim(atom.val) == 0:
        return np.asarray(atom.val, aval_of(atom).dtype)
    return None


def inlined(
    closed: jex.ClosedJaxpr, is_wanted: Callable[[Sequence[jax.core.ShapedArray]], bool]
) -> jex.ClosedJaxpr:
    """Return a program whose calls are replaced by what they call."""

    def run(*given: jax.Array) -> list[jax.Array]:
        return _run(closed, given, is_wanted)

    return jax.make_jaxpr(run)(
        *(
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))
            for aval in closed.in_avals
        )
    )


def _run(
    closed: jex.ClosedJaxpr,
    given: Sequence[Any],
    is_wanted: Callable[[Sequence[jax.core.ShapedArray]], bool],
) -> list[Any]:
    jaxpr = closed.jaxpr
    known: dict[jex.Var, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    known.update(zip(jaxpr.invars, given, strict=True))

    def value(atom: Operand) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        operands = [value(atom) for atom in eqn.invars]
        called, name = called_by(eqn), eqn.primitive.name
        if called is not None and is_wanted(list(avals_in(called.jaxpr))):
            results = _run(called, operands, is_wanted)
        elif name == "cond" and is_wanted([a for b in eqn.params["branches"] for a in avals_in(b.jaxpr)]):
            branches = [_run(b, operands[1:], is_wanted) for b in eqn.params["branches"]]
            # Of elements, so that all branches may be computed. `select_n` takes truth values for two.
            index = operands[0]
            which = jax.lax.convert_element_type(index, bool) if len(branches) == 2 else index
            results = [jax.lax.select_n(which, *r) for r in zip(*branches, strict=True)]
        elif name == "optimization_barrier" and is_wanted([aval_of(atom) for atom in eqn.invars]):
            results = operands
        else:
            results = bound(eqn, operands)
        known.update(zip(eqn.outvars, results, strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def aval_of(atom: Operand) -> jax.core.ShapedArray:
    """Return shape and type of a value."""
    return cast("jax.core.ShapedArray", atom.aval)


def avals_in(jaxpr: jex.Jaxpr) -> Iterator[jax.core.ShapedArray]:
    """Yield shapes and types of all values of a program, also of what it calls."""
    for atom in (*jaxpr.invars, *jaxpr.outvars):
        yield aval_of(atom)
    for eqn in jaxpr.eqns:
        for atom in eqn.outvars:
            yield aval_of(atom)
        for inner in inner_programs(eqn):
            yield from avals_in(inner.jaxpr if isinstance(inner, jex.ClosedJaxpr) else inner)


def bound(eqn: jex.JaxprEqn, operands: Sequence[Any], **change: object) -> list[jax.Array]:
    """Return the results of an operation."""
    if change:
        return [eqn.primitive.bind(*operands, **{**eqn.params, **change})]
    # By way of a program of this one operation: how calls are bound differs between releases of JAX.
    given = {a: x for a, x in zip(eqn.invars, operands, strict=True) if isinstance(a, jex.Var)}
    outputs = [jex.Var(atom.aval) for atom in eqn.outvars]
    alone = jex.Jaxpr((), list(given), outputs, [eqn.replace(outvars=outputs)], eqn.effects)
    return list(jex.jaxpr_as_fun(jex.ClosedJaxpr(alone, ()))(*given.values()))


def random_rows(key: jax.Array, numbers: jax.Array, shape: Sequence[int], bit_width: int) -> jax.Array:
    """Return rows of random bits, those that JAX's generator gives them in the whole array.

    The generator computes the bits of an element of its key and its position alone.

    Raises:
        NotByRowsError: for a generator whose bits depend on more than that.

    >>> rows = random_rows(jax.random.key(3), jnp.array([2, 0]), (4, 5), 32)
    >>> bool((rows == jax.random.bits(jax.random.key(3), (4, 5))[jnp.array([2, 0])]).all())
    True
    """
    if (
        str(jax.random.key_impl(key)) not in ("fry", "threefry2x32")
        or not jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    ):
        raise NotByRowsError("its random numbers depend on its shape")
    width = math.prod(shape[1:])
    high, low = _times(numbers.astype(jnp.uint32), width)
    columns = jnp.arange(width, dtype=jnp.uint32)
    lows = low[:, None] + columns
    highs = high[:, None] + (lows < columns).astype(jnp.uint32)
    counts = jnp.concatenate([highs.reshape(-1), lows.reshape(-1)])
    bits = jax.extend.random.threefry_2x32(jax.random.key_data(key), counts)
    ones, others = jnp.split(bits, 2)
    dtype = jnp.dtype(f"uint{bit_width}")
    if bit_width == 64:
        found = ones.astype(dtype) << 32 | others.astype(dtype)
    else:
        found = (ones ^ others).astype(dtype)
    return found.reshape(numbers.shape[0], *shape[1:])


def _times(numbers: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """Return the upper and lower 32 bits of a product, without types of 64 bits."""
    half: Any = jnp.uint32(0xFFFF)
    ones = [numbers & half, numbers >> 16]
    others = [jnp.uint32(factor & 0xFFFF), jnp.uint32(factor >> 16 & 0xFFFF)]
    low, middle = ones[0] * others[0], ones[1] * others[0]
    carried = (low >> 16) + (middle & half)
    across = ones[0] * others[1]
    carried2 = carried + (across & half)
    high = ones[1] * others[1] + (middle >> 16) + (across >> 16) + (carried2 >> 16)
    return high, (carried2 << 16) | (low & half)
