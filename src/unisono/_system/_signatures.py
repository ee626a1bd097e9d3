"""Names and parameters in the code of a class, read from it: `inspect.signature` takes ten times as long.

Tests: tests/unit/step/test_keras_internals.py.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Sequence
from typing import Any

from unisono._types import Wrapper


def unmet(cls: type, entries: Sequence[str]) -> list[str]:
    """Return the entries of the table that a class does not meet.

    An attribute of instances is in the code of the method that sets it, often `__init__`: so the check
    makes no object, which would start JAX.

    >>> class A:
    ...     def __init__(self):
    ...         self.size = 1
    ...
    ...     def scale(self, by):
    ...         return by
    >>> unmet(A, ["size", "width", "scale(by)", "scale(by, to)"])
    ['width', 'scale(by, to)']
    """
    left = {}
    for entry in entries:
        name, _, parameters = entry.rstrip(")").partition("(")
        found = getattr(cls, name, None)
        if found is None or not {*parameters.split(", ")} - {""} <= {*parameters_of(found)}:
            left[name] = entry
    return [entry for name, entry in left.items() if "(" in entry or not _is_mentioned(cls, name)]


def _is_mentioned(cls: type, name: str) -> bool:
    """Return whether the code of a class's methods has a name."""
    return any(name in names_in(base) for base in cls.__mro__)


@functools.cache
def names_in(cls: type) -> frozenset[str]:
    """Return the names that the code of a class's own methods mentions."""
    found: set[str] = set()
    codes = [code for value in vars(cls).values() if (code := _code_of(value)) is not None]
    while codes:
        code = codes.pop()
        found.update(code.co_names, code.co_varnames, code.co_cellvars)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                codes.append(constant)
            elif isinstance(constant, str):
                found.add(constant)
    return frozenset(found)


def _code_of(value: Any) -> types.CodeType | None:
    """Return the code of a method or property, without what decorates it; None for anything else."""
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return getattr(value, "__code__", None)


def parameters_of(function: object) -> tuple[str, ...]:
    """Return the names of a function's parameters, but for `*args` and `**kwargs`."""
    code = _code_of(function)
    return () if code is None else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _takes_others(function: object) -> bool:
    """Return whether a function has `*args` or `**kwargs`, or is no Python code."""
    code = _code_of(function)
    return code is None or bool(code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS))


def fits(wrapper: Wrapper, original: object) -> bool:
    """Return whether a wrapper's parameters are those of what it wraps, which begins with the object itself.

    It may have more that need not be given, such as those of earlier versions.
    """
    own, wrapped = parameters_of(wrapper)[2:], parameters_of(original)[1:]
    needed = own[: len(own) - len(getattr(wrapper, "__defaults__", None) or ())]
    known = {*needed} <= {*wrapped} or _takes_others(original)
    return original is not None and known and ({*wrapped} <= {*own} or _takes_others(wrapper))
