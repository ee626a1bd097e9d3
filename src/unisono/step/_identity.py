"""When two functions are the same step: a function that is defined again for each step is compiled once.

Tests: tests/virtual/step/test_compiler.py.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Hashable

#: Types whose values are compared; other objects are the same only if they are one object.
VALUES = (bool, int, float, complex, str, bytes, type(None), enum.Enum)


class IdentityKey:
    """A key that is equal for one object alone, and keeps it, so that its id is not given to another."""

    __slots__ = ("target",)

    def __init__(self, target: object) -> None:
        self.target = target

    def __hash__(self) -> int:
        return id(self.target)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and other.target is self.target


def identity_of(fn: object) -> Hashable:
    """Return a key that is equal for functions which do the same: one code on equal closed-over values.

    Returns:
        A key for a dict. Objects that are not numbers, strings or functions count as equal
        only where they are one object, which the key keeps alive.

    >>> def make(power):
    ...     return lambda x: x**power
    >>> identity_of(make(2)) == identity_of(make(2)), identity_of(make(2)) == identity_of(make(3))
    (True, False)
    """
    return _identity(fn, ())


def _identity(value: object, outer: tuple[object, ...]) -> Hashable:
    if isinstance(value, types.FunctionType):
        if value in outer:
            # A function that closes over itself.
            return ("outer function", outer.index(value))
        return _of_function(value, (*outer, value))
    if isinstance(value, types.MethodType):
        return ("method", IdentityKey(value.__self__), _identity(value.__func__, outer))
    if isinstance(value, functools.partial):
        keywords = tuple((name, _identity(arg, outer)) for name, arg in sorted(value.keywords.items()))
        args = tuple(_identity(arg, outer) for arg in value.args)
        return ("partial", _identity(value.func, outer), args, keywords)
    if isinstance(value, VALUES):
        # By their text: 0.0 equals -0.0, and NaN not itself.
        return (type(value), repr(value) if isinstance(value, (float, complex)) else value)
    if type(value) is tuple:
        return tuple(_identity(item, outer) for item in value)
    return IdentityKey(value)


def _of_function(fn: types.FunctionType, outer: tuple[object, ...]) -> Hashable:
    if fn.__closure__ is None and fn.__defaults__ is None and fn.__kwdefaults__ is None:
        return (fn.__code__, IdentityKey(fn.__globals__))
    cells = tuple(_of_cell(cell, outer) for cell in fn.__closure__ or ())
    defaults = tuple(_identity(value, outer) for value in fn.__defaults__ or ())
    keywords = tuple((k, _identity(v, outer)) for k, v in sorted((fn.__kwdefaults__ or {}).items()))
    return (fn.__code__, IdentityKey(fn.__globals__), cells, defaults, keywords)


def _of_cell(cell: types.CellType, outer: tuple[object, ...]) -> Hashable:
    try:
        return _identity(cell.cell_contents, outer)
    except ValueError:
        return "empty"
