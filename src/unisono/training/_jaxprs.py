"""Traced programs: what their results depend on, the part that some results need, and their bytes.

Tests: tests/virtual/training/test_jaxprs.py.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.export
import jax.extend.core as jex
import numpy as np
from jax.interpreters import partial_eval

from unisono._errors import UnsupportedError
from unisono._types import PyTree

#: A set of arguments of a program: the n-th bit stands for the n-th argument.
Mask = int

#: What JAX traces a function to, with and without the arrays that it closes over.
Trace = jex.ClosedJaxpr | jex.Jaxpr

#: Operations that call a function, and under which name they hold it.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}


def called_by(eqn: Any) -> jex.ClosedJaxpr | None:
    """Return the program that an operation calls; None where it is no call."""
    called = eqn.params.get(CALLS.get(eqn.primitive.name, ""))
    return jex.ClosedJaxpr(called, ()) if isinstance(called, jex.Jaxpr) else called


def value_numbers(closed: jex.ClosedJaxpr) -> list[object]:
    """Return a number for each result of a program: results of one number are computed alike.

    >>> closed = jax.make_jaxpr(lambda x, y: (x * y + 1.0, x * y, x * y + 1.0))(2.0, 3.0)
    >>> a, b, c = value_numbers(closed)
    >>> a == c, a == b
    (True, False)
    """
    keys: dict[object, int] = {}
    return _numbered(closed, [("argument", i) for i in range(len(closed.jaxpr.invars))], keys)


def _numbered(closed: jex.ClosedJaxpr, given: Sequence[object], keys: dict[object, int]) -> list[object]:
    known: dict[jex.Var, object] = dict(zip(closed.jaxpr.invars, given, strict=True))
    known |= {v: ("constant", id(x)) for v, x in zip(closed.jaxpr.constvars, closed.consts, strict=True)}

    def number(atom: Any) -> object:
        return ("literal", str(atom)) if isinstance(atom, jex.Literal) else known[atom]

    for eqn in closed.jaxpr.eqns:
        operands = [number(atom) for atom in eqn.invars]
        called = called_by(eqn)
        if called is not None:
            found = _numbered(called, operands, keys)
        else:
            # The text of an array may be shortened, and that of a program leaves out its arrays.
            key = eqn.primitive.name, str(eqn.params), *operands
            has_text = not inner_programs(eqn) and not any(np.ndim(p) for p in jax.tree.leaves(eqn.params))
            place = keys.setdefault(key if has_text else object(), len(keys))
            found = [(place, i) for i in range(len(eqn.outvars))]
        known.update(zip(eqn.outvars, found, strict=True))
    return [number(atom) for atom in closed.jaxpr.outvars]


def inner_programs(eqn: Any) -> list[Trace]:
    """Return the programs that an operation holds, such as the branches of a condition."""
    leaves = jax.tree.leaves(
        [eqn.params[name] for name in sorted(eqn.params)],
        is_leaf=lambda x: isinstance(x, (jex.ClosedJaxpr, jex.Jaxpr)),
    )
    return [x for x in leaves if isinstance(x, (jex.ClosedJaxpr, jex.Jaxpr))]


def equations(program: Trace) -> Iterator[jex.JaxprEqn]:
    """Yield the operations of a program, each before those of the programs that it holds."""
    for eqn in program.eqns:
        yield eqn
        for inner in inner_programs(eqn):
            yield from equations(inner)


def dependencies(closed: jex.ClosedJaxpr) -> list[Mask]:
    """Return, for each result of a program, the arguments on which it may depend.

    Calls and branches are looked into; of loops, and of all other operations, each result is taken to
    depend on all operands.

    >>> [bin(mask) for mask in dependencies(jax.make_jaxpr(lambda x, y: (x + y, y, 1.0))(1.0, 2.0))]
    ['0b11', '0b10', '0b0']
    """
    return _masks(closed.jaxpr, [1 << i for i in range(len(closed.jaxpr.invars))])


def _masks(jaxpr: jex.Jaxpr, given: Sequence[Mask]) -> list[Mask]:
    known: dict[jex.Var, Mask] = dict(zip(jaxpr.invars, given, strict=True))

    def mask_of(atom: Any) -> Mask:
        return known.get(atom, 0) if isinstance(atom, jex.Var) else 0

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _of_equation(eqn, [mask_of(v) for v in eqn.invars]), strict=True))
    return [mask_of(v) for v in jaxpr.outvars]


def _of_equation(eqn: jex.JaxprEqn, given: list[Mask]) -> list[Mask]:
    name = eqn.primitive.name
    if name == "cond":
        chosen, *operands = given
        of_branches = [_masks(branch.jaxpr, operands) for branch in eqn.params["branches"]]
        return [functools.reduce(operator.or_, row, chosen) for row in zip(*of_branches, strict=True)]
    called = called_by(eqn)
    if (
        called is not None
        and len(called.in_avals) == len(given)
        and len(called.out_avals) == len(eqn.outvars)
    ):
        return _masks(called.jaxpr, given)
    return [functools.reduce(operator.or_, given, 0)] * len(eqn.outvars)


def pruned(closed: jex.ClosedJaxpr, wanted: Sequence[bool]) -> tuple[jex.ClosedJaxpr, list[int]]:
    """Return the part of a program that some of its results need.

    Args:
        wanted: for each result, whether it is kept.

    Returns:
        The program of these results, and the numbers of the arguments that it takes.
    """
    jaxpr, is_used = partial_eval.dce_jaxpr(closed.jaxpr, list(wanted))
    # Constants that are no longer needed would still be a part of the program's bytes.
    used_constants = {v for eqn in jaxpr.eqns for v in eqn.invars if isinstance(v, jex.Var)}
    used_constants.update(v for v in jaxpr.outvars if isinstance(v, jex.Var))
    pairs = [(v, c) for v, c in zip(jaxpr.constvars, closed.consts, strict=True) if v in used_constants]
    jaxpr = jaxpr.replace(constvars=[v for v, _ in pairs])
    return jex.ClosedJaxpr(jaxpr, [c for _, c in pairs]), [i for i, used in enumerate(is_used) if used]


def is_argument(closed: jex.ClosedJaxpr, result: int, argument: int) -> bool:
    """Return whether a result of a program is one of its arguments, unchanged."""
    return closed.jaxpr.outvars[result] is closed.jaxpr.invars[argument]


def operations(program: Trace) -> list[str]:
    """Return the names of a program's operations, with those of the programs that it holds.

    >>> operations(jax.make_jaxpr(lambda x: jax.jit(lambda y: y + 1)(x) * 2)(1.0))
    ['jit', 'add', 'mul']
    """
    return [eqn.primitive.name for eqn in equations(program)]


def has_groups(program: Trace) -> bool:
    """Return whether a program has a convolution of groups of channels."""
    return any(eqn.params.get("feature_group_count", 1) > 1 for eqn in equations(program))


def exported(
    function: Callable[..., Any], specs: Sequence[PyTree], platforms: Sequence[str] = ("cpu",)
) -> bytes:
    """Return a function as bytes, which a process without its code can run.

    Args:
        function: of arrays, or of structures of them.
        platforms: where it can run, as `jax.export` names them.

    Raises:
        UnsupportedError: for a function that calls Python code while it runs.
    """
    try:
        program = jax.export.export(jax.jit(function), platforms=tuple(platforms))(*specs)
        return bytes(program.serialize())
    except (NotImplementedError, ValueError) as error:
        if "callback" not in str(error) and "effect" not in str(error):
            raise
        raise UnsupportedError(
            "A step of a parameter-server cluster runs in processes that do not have its code, so that it "
            f"must not call Python while it runs. Received: {error}. Remove `jax.debug.print`, "
            "`jax.pure_callback` and the like from the step."
        ) from error
