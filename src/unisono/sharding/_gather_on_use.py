"""Programs of whole arrays that lie in parts, each made whole where the program uses it.

A replica's code is traced with whole arrays as arguments. The trace is then evaluated step by step, and each
step that needs such an array gets it from a gather of its own: none is kept from the forward pass for the
backward pass. A gather waits for what its step needs besides, so that a compiler cannot move all of them to
the beginning, or find that two are the same.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning

from unisono._system._blocks import set_for_block

#: From a part to the whole array.
Gather: TypeAlias = Callable[[jax.Array], jax.Array]

#: By `id` of a whole array in a trace: the array, and this replica's part of it.
_PARTS: ContextVar[dict[int, tuple[jax.Array, jax.Array]] | None] = ContextVar("unisono_parts", default=None)

#: Bytes from which on a step with gathers counts as large: to add a bias takes too little time to hide the
#: next gather.
_LARGE = 1 << 16

#: Primitives of functions that JAX has compiled: their steps are looked at one by one.
_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2")


def part_of(value: Any) -> jax.Array | None:
    """Return this replica's part of a whole array in the trace, or None for any other value."""
    known = _PARTS.get()
    found = None if known is None else known.get(id(value))
    return None if found is None else found[1]


def note_part(whole: jax.Array, part: jax.Array) -> None:
    """Remember a part of a whole array until the trace ends; without effect outside of one."""
    known = _PARTS.get()
    if known is not None:
        known[id(whole)] = whole, part


def _knowing(wholes: Sequence[jax.Array], parts: Sequence[jax.Array]) -> AbstractContextManager[object]:
    pairs = zip(wholes, parts, strict=True)
    return set_for_block(_PARTS, {id(whole): (whole, part) for whole, part in pairs})


def gather_on_use(
    code: Callable[[list[jax.Array]], Any],
    parts: Sequence[jax.Array],
    wholes: Sequence[jax.ShapeDtypeStruct],
    gathers: Sequence[Gather],
    is_ahead: bool = False,
) -> list[jax.Array]:
    """Run code on whole arrays of which there are parts.

    Args:
        code: from whole arrays to a list of arrays; may use other arrays of the trace around it.
        is_ahead: whether a gather may start one large step before its own, to travel while that computes.

    >>> whole = jax.ShapeDtypeStruct((4,), "float32")
    >>> part = jnp.arange(2.0)
    >>> gather_on_use(lambda xs: [xs[0] * part.sum()], [part], [whole], [lambda p: jnp.tile(p, 2)])
    [Array([0., 1., 0., 1.], dtype=float32)]
    """

    def traced(wholes: list[jax.Array], parts: list[jax.Array]) -> Any:
        with _knowing(wholes, parts):
            return code(wholes)

    closed = jax.make_jaxpr(traced)(list(wholes), list(parts))
    count = len(wholes)
    lazy = {
        v: _Resting(part, gather)
        for v, part, gather in zip(closed.jaxpr.invars[:count], parts, gathers, strict=True)
    }
    known = dict(zip(closed.jaxpr.invars[count:], parts, strict=True))
    return _TraceEvaluation(closed, known, lazy, itertools.count(), _GatherOrder(is_ahead)).run()


# --- what is not computed yet -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Resting:
    """A whole array, to be gathered from a part."""

    part: jax.Array
    gather: Gather

    def value(self, after: jax.Array | None) -> jax.Array:
        """Return the whole array, not before another one is there."""
        return self.gather(self.part if after is None else _not_before(self.part, after))


@dataclasses.dataclass(frozen=True)
class _Postponement:
    """An output of a step that needs arrays of this kind alone; computed anew where it is used."""

    jaxpr: jex.Jaxpr
    equation: jex.JaxprEqn
    inputs: tuple[_Lazy, ...]
    place: int

    def value(self, after: jax.Array | None) -> jax.Array:
        """Return the output, from gathers of its own."""
        variables = [v for v in self.equation.invars if isinstance(v, jex.Var)]
        known = {v: x.value(after) for v, x in zip(variables, self.inputs, strict=True)}
        return _evaluated(self.jaxpr, [self.equation], known, [self.equation.outvars[self.place]])[0]


_Lazy: TypeAlias = "_Resting | _Postponement"


def _postponed(jaxpr: jex.Jaxpr, equation: jex.JaxprEqn, inputs: tuple[_Lazy, ...]) -> Iterator[_Lazy]:
    """What stands for the outputs of a step."""
    (first, *others) = inputs
    if equation.primitive.name == "convert_element_type" and isinstance(first, _Resting) and not others:
        # A conversion of each element: parts of half-precision weights are gathered in half the bytes.
        dtype = equation.params["new_dtype"]
        yield _Resting(first.part.astype(dtype), first.gather)
        return
    for place in range(len(equation.outvars)):
        yield _Postponement(jaxpr, equation, inputs, place)


# --- the evaluation -------------------------------------------------------------------------------------


class _TraceEvaluation:
    """One evaluation of a trace.

    Args:
        lazy: arguments that are gathered where they are used.
        clock: numbers of steps, in the order in which they are evaluated.
        order: of the gathers.
    """

    def __init__(
        self,
        closed: jex.ClosedJaxpr,
        known: Mapping[jex.Var, jax.Array],
        lazy: Mapping[jex.Var, _Lazy],
        clock: Iterator[int],
        order: _GatherOrder,
    ) -> None:
        self._jaxpr, self._clock, self._order = closed.jaxpr, clock, order
        constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        self._known: dict[jex.Var, Any] = {**known, **constants}
        self._lazy: dict[jex.Var, _Lazy] = dict(lazy)
        #: When each value was computed.
        self._when: dict[jex.Var, int] = {}
        self._steps = _used(closed.jaxpr)
        self._read = {v for step in self._steps for v in step.invars if isinstance(v, jex.Var)}
        self._read.update(v for v in closed.jaxpr.outvars if isinstance(v, jex.Var))
        #: Steps without such arrays, which are evaluated together.
        self._waiting: list[jex.JaxprEqn] = []

    def run(self) -> list[jax.Array]:
        """Return the outputs."""
        for equation in self._steps:
            inputs = [v for v in equation.invars if isinstance(v, jex.Var)]
            lazy = [self._lazy[v] for v in inputs if v in self._lazy]
            if not lazy:
                self._waiting.append(equation)
                self._note(equation)
            elif len(lazy) == len(inputs) and not equation.effects:
                self._lazy.update(
                    zip(equation.outvars, _postponed(self._jaxpr, equation, tuple(lazy)), strict=True)
                )
            else:
                self._flush()
                self._step(equation, inputs)
        self._flush()
        return [self._found(v, None) for v in self._jaxpr.outvars]

    def _step(self, equation: jex.JaxprEqn, inputs: Sequence[jex.Var]) -> None:
        """Evaluate a step that needs whole arrays."""
        if equation.primitive.name in _CALLS:
            self._call(equation)
            return
        there = [v for v in inputs if v not in self._lazy]
        # What was computed last: in a backward pass the derivative, and not what the forward pass has left.
        last = max(there, key=lambda v: self._when.get(v, -1), default=None)
        size = sum(_bytes_of(v.aval) for v in set(inputs) if v in self._lazy)
        after = self._order.awaited(None if last is None else self._known[last], size)
        values = {v: self._found(v, after) for v in dict.fromkeys(inputs)}
        self._evaluate([equation], values)
        self._note(equation)

    def _call(self, equation: jex.JaxprEqn) -> None:
        """Evaluate the steps of a compiled function one by one."""
        inner = next(x for x in equation.params.values() if isinstance(x, (jex.ClosedJaxpr, jex.Jaxpr)))
        if isinstance(inner, jex.Jaxpr):
            inner = jex.ClosedJaxpr(inner, [])
        known: dict[jex.Var, Any] = {}
        lazy: dict[jex.Var, _Lazy] = {}
        evaluation = _TraceEvaluation(inner, known, lazy, self._clock, self._order)
        for own, given in zip(inner.jaxpr.invars, equation.invars, strict=True):
            if isinstance(given, jex.Var) and given in self._lazy:
                evaluation._lazy[own] = self._lazy[given]
            else:
                evaluation._known[own] = self._found(given, None)
                if isinstance(given, jex.Var):
                    evaluation._when[own] = self._when.get(given, -1)
        if equation.params.get("differentiated"):
            evaluation._wait_for_last()
        self._known.update(zip(equation.outvars, evaluation.run(), strict=True))
        self._note(equation)

    def _wait_for_last(self) -> None:
        """Let all arguments wait for the last: steps that `jax.checkpoint` repeats are not the first ones."""
        last = max(self._when, key=lambda v: self._when[v], default=None)
        for v, value in self._known.items():
            is_float = jnp.issubdtype(getattr(value, "dtype", np.int32), jnp.floating)
            if last is not None and v is not last and is_float:
                self._known[v] = _not_before(value, self._known[last])
                self._when[v] = self._when[last]

    def _flush(self) -> None:
        """Evaluate the steps that wait."""
        self._evaluate(self._waiting, self._known)
        self._waiting = []

    def _evaluate(self, equations: Sequence[jex.JaxprEqn], known: Mapping[jex.Var, Any]) -> None:
        outputs = [v for equation in equations for v in equation.outvars if v in self._read]
        values = _evaluated(self._jaxpr, equations, known, outputs)
        self._known.update(zip(outputs, values, strict=True))

    def _note(self, equation: jex.JaxprEqn) -> None:
        now = next(self._clock)
        self._when.update(dict.fromkeys(equation.outvars, now))

    def _found(self, atom: Any, after: jax.Array | None) -> Any:
        if not isinstance(atom, jex.Var):
            return atom.val
        return self._lazy[atom].value(after) if atom in self._lazy else self._known[atom]


def _bytes_of(aval: Any) -> int:
    return int(aval.size * aval.dtype.itemsize)


def _used(jaxpr: jex.Jaxpr) -> list[jex.JaxprEqn]:
    """Return the steps on which the outputs depend, and those with effects."""
    needed = {v for v in jaxpr.outvars if isinstance(v, jex.Var)}
    found = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or any(v in needed for v in equation.outvars):
            found.append(equation)
            needed.update(v for v in equation.invars if isinstance(v, jex.Var))
    return found[::-1]


def _evaluated(
    jaxpr: jex.Jaxpr,
    equations: Sequence[jex.JaxprEqn],
    known: Mapping[jex.Var, Any],
    outputs: Sequence[jex.Var],
) -> list[jax.Array]:
    """Return what some steps of a trace give."""
    if not equations:
        return []
    made = {v for equation in equations for v in equation.outvars}
    read = (v for equation in equations for v in equation.invars if isinstance(v, jex.Var))
    inputs = list(dict.fromkeys(v for v in read if v not in made))
    program = jaxpr.replace(
        constvars=[],
        invars=inputs,
        outvars=list(outputs),
        eqns=list(equations),
        effects=frozenset().union(*(equation.effects for equation in equations)),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return list(jex.jaxpr_as_fun(jex.ClosedJaxpr(program, []))(*[known[v] for v in inputs]))


# --- order --------------------------------------------------------------------------------------------


class _GatherOrder:
    """The value for which the gathers of each step of a trace wait.

    By default a gather waits for the other input of its own step, so that little computes while it travels:
    of 6.5 MiB that a transformer's step gathers on a GPU, 3.0 had computation beside them. With the input of
    the large step before it was 4.3, for the memory of one more array (`benchmarks/mock_gpus.py`).
    """

    def __init__(self, is_ahead: bool) -> None:
        self._is_ahead = is_ahead
        #: The other inputs of the last two large steps.
        self._needed: collections.deque[jax.Array | None] = collections.deque(maxlen=2)

    def awaited(self, needed: jax.Array | None, nbytes: int) -> jax.Array | None:
        """Return the value for which the gathers of the next step wait; None for nothing.

        Args:
            needed: the other input of the step.
            nbytes: of the whole arrays that it gathers.
        """
        if not self._is_ahead:
            return needed
        if nbytes < _LARGE:
            return self._needed[-1] if self._needed else needed
        self._needed.append(needed)
        return self._needed[0] if len(self._needed) == 2 else None


def _not_before(part: jax.Array, other: jax.Array) -> jax.Array:
    """Return a part, bit for bit, as a value that depends on another one.

    XLA removes its own barriers before it decides on the order of operations, and then starts all gathers
    at the beginning, or uses one again: 8 layers of equal size needed the memory of 8, and not of 3.
    """
    dtype = getattr(other, "dtype", None)
    if dtype is None or not np.size(other) or not jnp.issubdtype(dtype, jnp.number):
        return part
    if len(jax.sharding.get_abstract_mesh().axis_names) > 1:
        return _raised_on_device(np.ndim(part), np.ndim(other))(part, other)
    return _raised(part, other)


def _raised(part: jax.Array, other: jax.Array) -> jax.Array:
    """Return a part, raised by a zero that is made of another array."""
    first = lax.squeeze(lax.slice(other, (0,) * other.ndim, (1,) * other.ndim), range(other.ndim))
    if jnp.issubdtype(other.dtype, jnp.complexfloating):
        first = jnp.real(first)
    is_float = jnp.issubdtype(first.dtype, jnp.floating)
    bits = lax.bitcast_convert_type(first.astype(jnp.float32), jnp.uint32) if is_float else first
    # Zero, in a way that is not seen to be: 32 bits, shifted by 32 in two steps.
    half = np.uint32(16)
    nothing = lax.shift_right_logical(lax.shift_right_logical(bits.astype(jnp.uint32), half), half)
    unsigned = jnp.dtype(f"uint{8 * part.dtype.itemsize}")
    raised = lax.bitcast_convert_type(part, unsigned) + nothing.astype(unsigned)
    return lax.bitcast_convert_type(raised, part.dtype)


@functools.cache
def _raised_on_device(part_rank: int, other_rank: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return `_raised` for the devices of a replica of several: each uses an element that it has.

    The first element of all would be sent from the device that has it to the others.
    """
    mine = " ".join(f"a{i}" for i in range(part_rank))
    others = " ".join(f"b{i}" for i in range(other_rank))
    raised = custom_partitioning(_raised)
    raised.def_partition(
        partition=lambda mesh, given, _: (mesh, _raised, given[0].sharding, tuple(x.sharding for x in given)),
        infer_sharding_from_operands=lambda mesh, given, _: given[0].sharding,
        sharding_rule=f"{mine}, {others} -> {mine}",
    )
    on_device: Callable[[jax.Array, jax.Array], jax.Array] = raised
    return on_device
