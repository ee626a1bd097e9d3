"""Keys of operations by what they compute: equal keys mean equal programs.

A training step in a Python loop records the same operations each time, but JAX makes new objects for some of
them, such as the body of a loop (`scan`). The key of a jaxpr is made of its equations, so that the compiled
derivative is found again.
"""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np

from unisono.step._identity import IdentityKey

#: Of derivatives or not, by jaxpr: its number, or None where it holds functions, which have no key.
_NUMBERS: tuple[weakref.WeakKeyDictionary[jex.Jaxpr, int | None], ...] = (
    weakref.WeakKeyDictionary(),
    weakref.WeakKeyDictionary(),
)
#: Calls of functions with a rule for their derivative, which is a function.
_WITH_RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})
#: By structure: its number.
_BY_STRUCTURE: dict[Hashable, int] = {}
_COUNTER = itertools.count()
#: Structures of programs that are used no more are forgotten with all others.
_LIMIT = 10_000


class HasFunctionsError(Exception):
    """A parameter is a function that another object may stand for at the next call."""


def operation_key(
    primitive: jex.Primitive, params: Mapping[str, Any], is_derivative: bool = False
) -> Hashable:
    """Return what is equal for operations that compute the same, and have the same derivative.

    Raises:
        HasFunctionsError: a parameter is a function, or a program with one in it.
    """
    # JAX keeps the program of a function that is compiled: what it holds is the same at each call.
    is_kept = primitive.name == "jit"
    drops_rules = is_derivative and primitive.name in _WITH_RULES
    return primitive, tuple(
        (name, _key(value, is_kept, is_derivative))
        for name, value in params.items()
        if not (drops_rules and _is_rebuilt(value))
    )


def derivative_key(closed: jex.ClosedJaxpr) -> Hashable:
    """Return what is equal for derivatives that compute the same, without what they close over.

    Raises:
        HasFunctionsError: as for `operation_key`.
    """
    return _jaxpr_key(closed.jaxpr, False, True)


def _key(value: object, is_kept: bool, is_derivative: bool) -> Hashable:
    if isinstance(value, jex.ClosedJaxpr):
        consts = tuple(IdentityKey(c) for c in value.consts)
        return _jaxpr_key(value.jaxpr, is_kept, is_derivative), consts
    if isinstance(value, jex.Jaxpr):
        return _jaxpr_key(value, is_kept, is_derivative)
    if isinstance(value, (tuple, list)):
        return tuple(_key(v, is_kept, is_derivative) for v in value)
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if _is_rebuilt(value):
        raise HasFunctionsError
    try:
        hash(value)
    except TypeError:
        return IdentityKey(value)
    return value


def _is_rebuilt(value: object) -> bool:
    """Return whether a parameter is a function of which each call may have a new one."""
    if isinstance(value, type):
        return False
    if isinstance(value, types.FunctionType):
        return "<locals>" in value.__qualname__ or value.__name__ == "<lambda>"
    return isinstance(value, (functools.partial, types.MethodType)) or hasattr(value, "call_wrapped")


def _jaxpr_key(jaxpr: jex.Jaxpr, is_kept: bool, is_derivative: bool) -> Hashable:
    numbers = _NUMBERS[is_derivative]
    if jaxpr not in numbers:
        try:
            numbers[jaxpr] = _number((is_derivative, _structure(jaxpr, is_derivative)))
        except HasFunctionsError:
            numbers[jaxpr] = None
    number = numbers[jaxpr]
    if number is not None:
        return number
    if is_kept:
        return IdentityKey(jaxpr)
    raise HasFunctionsError


def _number(structure: Hashable) -> int:
    if structure not in _BY_STRUCTURE:
        if len(_BY_STRUCTURE) >= _LIMIT:
            _BY_STRUCTURE.clear()
        _BY_STRUCTURE[structure] = next(_COUNTER)
    return _BY_STRUCTURE[structure]


def _structure(jaxpr: jex.Jaxpr, is_derivative: bool) -> Hashable:
    """Return a jaxpr's equations with numbers for its variables."""
    numbers: dict[jex.Var, int] = {}

    def new(variables: Sequence[jex.Var]) -> Hashable:
        for variable in variables:
            numbers[variable] = len(numbers)
        return tuple(str(v.aval) for v in variables)

    def atom(x: jex.Var | jex.Literal) -> Hashable:
        if isinstance(x, jex.Literal):
            value = np.asarray(x.val)
            return str(x.aval), value.tobytes()
        return numbers[x]

    inputs = new([*jaxpr.constvars, *jaxpr.invars])
    equations = []
    for eqn in jaxpr.eqns:
        operation = operation_key(eqn.primitive, eqn.params, is_derivative)
        equations.append((operation, tuple(atom(v) for v in eqn.invars), new(eqn.outvars)))
    return inputs, tuple(equations), tuple(atom(v) for v in jaxpr.outvars)
