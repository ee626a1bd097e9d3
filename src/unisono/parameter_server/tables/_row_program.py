"""A traced program that uses tables by rows, as two programs: which rows, and the same with these alone.

A table may be looked up along its first axis, and combined element by element with what has a row for each of
its rows; gradients of lookups may be added up, scaled, clipped, and reduced to numbers such as a norm. The
second program computes all of that for the rows that are looked up. What needs other rows is found here, and
the table is then used as a whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from unisono.parameter_server.tables._row_values import (
    ELEMENTWISE,
    NEUTRAL,
    NotByRowsError,
    Operand,
    RowGroup,
    RowKnowledge,
    Rows,
    Spread,
    aval_of,
    bound,
    inlined,
    literal_of,
    random_rows,
    rest_of,
)
from unisono.step._value_handle import DeferredValue
from unisono.training._jaxprs import exported, pruned

#: Modes of lookups that take the nearest row for a number that is none.
_CLAMPING = ("CLIP", "PROMISE_IN_BOUNDS")

#: A server makes rows of this many bytes at once.
_PIECE = 4 << 20

#: An array of numbers, whether numbers that are none of a row are clamped, and how many rows there are.
_SiteKey = tuple[Operand, bool, int]


@dataclasses.dataclass(frozen=True, eq=False)
class GatherSite:
    """One array of numbers of rows.

    Args:
        numbers: what has computed it.
        clamps: whether a number that is none of a row stands for the nearest one; else for no row.
    """

    group: RowGroup
    numbers: Operand
    clamps: bool


@dataclasses.dataclass(frozen=True, eq=False)
class GatheredRows:
    """The rows of a group with which a program is evaluated.

    Args:
        count: how many places there are for rows.
        used: how many of these are rows; the others hold nothing.
        numbers: the rows' numbers; None where only lookups need them, which have places of their own.
    """

    count: Any
    used: Any
    numbers: Any = None


class RowProgram:
    """A program that uses tables by rows.

    Args:
        tables: by number of an argument, which is a table or has a row for each row of one, its group.
        in_rows: the numbers of results that are wanted by rows, with their groups; all others must not have
            a row for each row of a table.
        created: a group whose values the program makes, of its numbers of rows or of random numbers.

    Raises:
        NotByRowsError: the program needs other rows than those that it looks up.
    """

    def __init__(
        self,
        closed: jex.ClosedJaxpr,
        tables: Mapping[int, RowGroup],
        in_rows: Mapping[int, RowGroup],
        created: RowGroup | None = None,
    ) -> None:
        groups = [*tables.values(), *in_rows.values(), *([] if created is None else [created])]
        self._sizes = {group.size for group in groups}
        #: The program, without the calls in it, and its results by rows.
        self.closed, self.in_rows = inlined(closed, self._has_rows), dict(in_rows)
        self._tables, self._created = dict(tables), created
        self._known: dict[jex.Var, RowKnowledge] = {}
        #: By variable, mode and number of rows: an array of numbers may be used several times.
        self._sites: dict[_SiteKey, GatherSite] = {}
        for number, group in tables.items():
            self._known[self.jaxpr.invars[number]] = Rows(group)
        for eqn in self.jaxpr.eqns:
            self._known.update(zip(eqn.outvars, self._learn(eqn), strict=True))
        self._check_results()

    @property
    def sites(self) -> list[GatherSite]:
        """The arrays of numbers of rows, in the order of their first use."""
        return list(self._sites.values())

    def numbers_program(self) -> tuple[jex.ClosedJaxpr, list[int]]:
        """Return the program that computes the numbers of rows of all sites, and which arguments it takes."""
        results = [site.numbers for site in self.sites]
        closed = jex.ClosedJaxpr(self.jaxpr.replace(outvars=results, debug_info=None), self.closed.consts)
        found, used = pruned(closed, [True] * len(results))
        if any(i in self._tables for i in used):
            raise NotByRowsError("the numbers of rows of a lookup depend on rows of a table")
        return found, used

    # --- what is known of each value -------------------------------------------------------------

    def _has_rows(self, avals: Sequence[jax.core.ShapedArray]) -> bool:
        return any(getattr(aval, "shape", ())[:1] and aval.shape[0] in self._sizes for aval in avals)

    def state(self, atom: Operand) -> RowKnowledge:
        """Return what is known of a value."""
        return self._known.get(atom) if isinstance(atom, jex.Var) else None

    def _learn(self, eqn: jex.JaxprEqn) -> list[RowKnowledge]:
        states = [self.state(atom) for atom in eqn.invars]
        name = eqn.primitive.name
        if not any(isinstance(s, Rows) for s in states):
            if name == "scatter-add" and isinstance(states[0], Spread) and self._key(eqn) in self._sites:
                return [self._learn_scatter(eqn, states)]
            return self._learn_made(eqn, states)
        if name in ELEMENTWISE:
            return [self._learn_elementwise(eqn, states)]
        rule = _RULES.get(name)
        if rule is None:
            raise NotByRowsError(f"`{name}` needs all of its rows")
        return [rule(self, eqn, states)]

    def _learn_made(self, eqn: jex.JaxprEqn, states: list[RowKnowledge]) -> list[RowKnowledge]:
        """Of an operation without rows: it may give a value whose rows are equal, or create rows."""
        plain: list[RowKnowledge] = [None] * len(eqn.outvars)
        if len(eqn.outvars) > 1 or not self._has_rows([aval_of(eqn.outvars[0])]):
            return plain
        name, operands = eqn.primitive.name, eqn.invars
        if name == "broadcast_in_dim" and _repeats_rows(eqn):
            return [Spread(literal_of(operands[0]))]
        if name == "iota" and eqn.params["dimension"] != 0:
            return [Spread()]
        if self._created is not None and name in ("iota", "random_bits"):
            return [Rows(self._created)]
        sized = [s for s, atom in zip(states, operands, strict=True) if aval_of(atom).shape]
        if name in ELEMENTWISE and sized and all(isinstance(s, Spread) for s in sized):
            return [Spread(rest_of(eqn, states))]
        return plain

    def _learn_elementwise(self, eqn: jex.JaxprEqn, states: list[RowKnowledge]) -> RowKnowledge:
        group = _joined([s.group for s in states if isinstance(s, Rows)])
        for atom, state in zip(eqn.invars, states, strict=True):
            if state is None and aval_of(atom).shape and aval_of(atom).shape[0] != 1:
                raise NotByRowsError(f"`{eqn.primitive.name}` combines it with a value for all of its rows")
        return Rows(group, rest_of(eqn, states))

    def _learn_gather(self, eqn: jex.JaxprEqn, states: list[RowKnowledge]) -> RowKnowledge:
        dims, operand = eqn.params["dimension_numbers"], aval_of(eqn.invars[0])
        is_of_rows = (
            isinstance(states[0], Rows)
            and dims.collapsed_slice_dims == (0,)
            and dims.start_index_map == (0,)
            and not dims.operand_batching_dims
            and eqn.params["slice_sizes"] == (1, *operand.shape[1:])
        )
        if not is_of_rows or states[1] is not None:
            raise NotByRowsError("a lookup is not along its first axis")
        if isinstance(eqn.invars[1], jex.Literal):
            raise NotByRowsError("a lookup has a constant number of a row")
        key, group = self._key(eqn), states[0].group  # type: ignore[union-attr]
        # Tables that are looked up with one array share their rows.
        self._sites.setdefault(key, GatherSite(group, eqn.invars[1], key[1])).group.join(group)
        return None

    def _learn_scatter(self, eqn: jex.JaxprEqn, states: list[RowKnowledge]) -> RowKnowledge:
        """Of what is added to the rows that a lookup has taken before: its gradient."""
        dims = eqn.params["dimension_numbers"]
        is_of_rows = (
            dims.inserted_window_dims == (0,)
            and dims.scatter_dims_to_operand_dims == (0,)
            and not dims.operand_batching_dims
            and len(dims.update_window_dims) == len(aval_of(eqn.invars[0]).shape) - 1
        )
        site, state = self._sites.get(self._key(eqn)), states[0]
        if site is None or not is_of_rows or any(s is not None for s in states[1:]):
            raise NotByRowsError("something is added to it that does not go to rows of a lookup")
        if isinstance(state, Rows):
            state.group.join(site.group)
        return Rows(site.group, None if state is None else state.rest)

    def _key(self, eqn: jex.JaxprEqn) -> _SiteKey:
        numbers = eqn.invars[1]
        mode = eqn.params["mode"]
        return numbers, mode is None or mode.name in _CLAMPING, aval_of(eqn.invars[0]).shape[0]

    def _learn_reduction(self, eqn: jex.JaxprEqn, states: list[RowKnowledge]) -> RowKnowledge:
        (state,) = states
        if not isinstance(state, Rows):
            return None
        if 0 not in eqn.params["axes"]:
            return Rows(state.group, state.rest if state.rest is not None and state.rest == 0 else None)
        neutral = NEUTRAL.get(eqn.primitive.name)
        if neutral is None or state.rest is None or bool(state.rest != neutral):
            raise NotByRowsError(f"`{eqn.primitive.name}` goes over all of its rows")
        return None

    def _learn_same_first(self, eqn: jex.JaxprEqn, states: list[RowKnowledge]) -> RowKnowledge:
        """Of an operation that keeps rows, and moves elements within each."""
        state = states[0]
        if not isinstance(state, Rows) or not _keeps_rows(eqn):
            raise NotByRowsError(f"`{eqn.primitive.name}` moves its rows")
        return Rows(state.group, state.rest)

    def _learn_dot(self, eqn: jex.JaxprEqn, states: list[RowKnowledge]) -> RowKnowledge:
        (left, right), (batch, _) = eqn.params["dimension_numbers"]
        one, two = states
        if batch or isinstance(one, Spread) or isinstance(two, Spread):
            raise NotByRowsError("a product needs all of its rows")
        if isinstance(one, Rows) and isinstance(two, Rows) and left == (0,) and right == (0,):
            if not any(s.rest is not None and s.rest == 0 for s in (one, two)):
                raise NotByRowsError("a product goes over all of its rows")
            one.group.join(two.group)
            return None
        if isinstance(one, Rows) and two is None and 0 not in left:
            return Rows(one.group, one.rest if one.rest is not None and one.rest == 0 else None)
        raise NotByRowsError("a product needs all of its rows")

    def _check_results(self) -> None:
        for number, atom in enumerate(self.jaxpr.outvars):
            state, group = self.state(atom), self.in_rows.get(number)
            if group is None:
                if isinstance(state, Rows):
                    raise NotByRowsError("its whole value is a result")
            elif isinstance(state, Rows):
                state.group.join(group)
            elif not isinstance(state, Spread):
                raise NotByRowsError("a result is a value for all of its rows")

    # --- evaluation ------------------------------------------------------------------------------

    def evaluate(
        self,
        given: Sequence[jax.Array],
        hand: Callable[[RowGroup], GatheredRows],
        places: Sequence[jax.Array] = (),
    ) -> list[jax.Array]:
        """Return the results, of which those by rows have as many rows as there are at hand; traced.

        Args:
            given: the arguments; of tables, the rows at hand.
            hand: returns the rows at hand of a group, by its root.
            places: for each site, where among the rows at hand those with its numbers are.
        """
        return _RowEvaluation(self, hand, places).run(given)

    @property
    def jaxpr(self) -> jex.Jaxpr:
        """The program, without the calls in it."""
        jaxpr: jex.Jaxpr = self.closed.jaxpr
        return jaxpr

    def place_of(self, eqn: jex.JaxprEqn) -> int:
        """Return the number of the site of a lookup, or of an addition to rows."""
        return list(self._sites).index(self._key(eqn))


def _keeps_rows(eqn: jex.JaxprEqn) -> bool:
    """Return whether each row of a result has the elements of the same row of the operand."""
    shape, params = aval_of(eqn.invars[0]).shape, eqn.params
    match eqn.primitive.name:
        case "broadcast_in_dim":
            return params["broadcast_dimensions"][:1] == (0,) and bool(params["shape"][0] == shape[0])
        case "reshape":
            return bool(aval_of(eqn.outvars[0]).shape[:1] == shape[:1])
        case "squeeze":
            return 0 not in params["dimensions"]
    return bool(params["permutation"][0] == 0)


def _repeats_rows(eqn: jex.JaxprEqn) -> bool:
    """Return whether a broadcast gives equal rows."""
    dimensions = eqn.params["broadcast_dimensions"]
    return 0 not in dimensions or aval_of(eqn.invars[0]).shape[dimensions.index(0)] == 1


def _joined(groups: Sequence[RowGroup]) -> RowGroup:
    first, *others = groups
    for other in others:
        if other.size != first.size:
            raise NotByRowsError("tables of several sizes are combined")
        first.join(other)
    return first


_RULES: dict[str, Callable[[RowProgram, jex.JaxprEqn, list[RowKnowledge]], RowKnowledge]] = {
    "gather": RowProgram._learn_gather,
    "scatter-add": RowProgram._learn_scatter,
    "dot_general": RowProgram._learn_dot,
    **dict.fromkeys(
        ("reduce_sum", "reduce_and", "reduce_or", "reduce_max", "reduce_min"), RowProgram._learn_reduction
    ),
    **dict.fromkeys(("broadcast_in_dim", "reshape", "squeeze", "transpose"), RowProgram._learn_same_first),
}


class _RowEvaluation:
    """One evaluation of a program with the rows at hand; traced."""

    def __init__(
        self, program: RowProgram, hand: Callable[[RowGroup], GatheredRows], places: Sequence[jax.Array]
    ) -> None:
        self._program, self._hand, self._places = program, hand, places
        #: Arrays; of values whose rows are equal, what makes them for a number of rows.
        self._values: dict[jex.Var, Any] = {}

    def run(self, given: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the results."""
        jaxpr = self._program.jaxpr
        self._values.update(zip(jaxpr.constvars, self._program.closed.consts, strict=True))
        self._values.update(zip(jaxpr.invars, given, strict=True))
        for eqn in jaxpr.eqns:
            self._compute(eqn)
        results = []
        for number, atom in enumerate(jaxpr.outvars):
            group = self._program.in_rows.get(number)
            results.append(self._whole(atom) if group is None else self._of(atom, self._at(group).count))
        return results

    def _at(self, group: RowGroup) -> GatheredRows:
        return self._hand(group.root)

    def _of(self, atom: Operand, count: Any) -> Any:
        """Return a value; one whose rows are equal, with as many rows as these."""
        value = atom.val if isinstance(atom, jex.Literal) else self._values[atom]
        return value(count) if isinstance(self._program.state(atom), Spread) else value

    def _whole(self, atom: Operand) -> Any:
        return self._of(atom, aval_of(atom).shape[0] if aval_of(atom).shape else None)

    def _compute(self, eqn: jex.JaxprEqn) -> None:
        result = self._program.state(eqn.outvars[0])
        states = [self._program.state(atom) for atom in eqn.invars]
        group = next((s.group for s in (*states, result) if isinstance(s, Rows)), None)
        if group is not None:
            self._values[eqn.outvars[0]] = self._by_rows(eqn, self._at(group), states)
        elif isinstance(result, Spread):
            self._values[eqn.outvars[0]] = lambda count: self._spread(eqn, count)
        else:
            found = bound(eqn, [self._whole(atom) for atom in eqn.invars])
            self._values.update(zip(eqn.outvars, found, strict=True))

    def _spread(self, eqn: jex.JaxprEqn, count: Any) -> jax.Array:
        operands = [self._of(atom, count) for atom in eqn.invars]
        change = {"shape": (count, *eqn.params["shape"][1:])} if "shape" in eqn.params else {}
        return bound(eqn, operands, **change)[0]

    def _by_rows(self, eqn: jex.JaxprEqn, hand: GatheredRows, states: Sequence[RowKnowledge]) -> jax.Array:
        name, params = eqn.primitive.name, eqn.params
        operands = [self._of(atom, hand.count) for atom in eqn.invars]
        change: dict[str, object] = {}
        if name in ("gather", "scatter-add"):
            operands[1] = self._places[self._program.place_of(eqn)]
            # Numbers that are none of a row all have one place, behind the last.
            change = {"indices_are_sorted": False, "unique_indices": False}
        elif name in NEUTRAL and 0 in params["axes"]:
            operands = [self._masked(operands[0], hand, NEUTRAL[name])]
        elif name == "dot_general" and all(isinstance(s, Rows) for s in states):
            operands = [self._masked(x, hand, 0) for x in operands]
        elif name == "broadcast_in_dim":
            change = {"shape": (hand.count, *params["shape"][1:])}
        elif name == "reshape":
            change = {"new_sizes": (hand.count, *params["new_sizes"][1:])}
        elif name == "iota":
            numbers = hand.numbers.astype(params["dtype"])
            return jax.lax.broadcast_in_dim(numbers, (hand.count, *params["shape"][1:]), (0,))
        elif name == "random_bits":
            return random_rows(operands[0], hand.numbers, params["shape"], params["bit_width"])
        return bound(eqn, operands, **change)[0]

    @staticmethod
    def _masked(rows: jax.Array, hand: GatheredRows, neutral: float) -> jax.Array:
        """Return rows with those that are none replaced, whatever they hold."""
        is_row = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0) < hand.used
        return jnp.where(is_row, rows, jnp.asarray(neutral, rows.dtype))


def rows_of(value: DeferredValue) -> Callable[[int], bytes] | None:
    """Return what makes programs for rows of a large variable's first value; None where they need each other.

    Keras' initializers are traced. Where the elements of a row follow from the row's number, as those of all
    its random initializers do, a server makes its own rows; they have the bits of the whole value.

    Each gets a number and returns some rows from there on, counted from that with which it was made.
    """
    group = RowGroup(value.shape[0])
    try:
        program = RowProgram(jax.make_jaxpr(value.whole)(), {}, {0: group}, group)
    except NotByRowsError:
        return None
    row = math.prod(value.shape[1:]) * np.dtype(value.dtype).itemsize
    count = min(value.shape[0], max(1, _PIECE // max(row, 1)))

    def program_from(begin: int) -> bytes:
        def rows(first: jax.Array) -> list[jax.Array]:
            numbers = first + begin + jnp.arange(count, dtype=jnp.int32)
            return program.evaluate([], lambda _: GatheredRows(count, count, numbers))

        return exported(rows, [jax.ShapeDtypeStruct((), jnp.int32)])

    return program_from
