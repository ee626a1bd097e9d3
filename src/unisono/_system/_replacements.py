"""What the library replaces in classes and modules of others: the only place that assigns to them.

Each subject has a table: an owner, the name of its attribute, and what makes the new attribute of the present
one. `put` puts a table in place, and `undo` takes all of them away again.

Tests: tests/unit/system/test_replacements.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

#: A class or module, the name of an attribute, and what makes the new one of the present: None for none.
Replacement: TypeAlias = tuple[Any, str, Callable[[Any], object]]

_undoing = contextlib.ExitStack()
_subjects: set[str] = set()
_replaced: list[tuple[Any, str]] = []


def put(subject: str, table: Iterable[Replacement]) -> None:
    """Replace attributes, once for each subject.

    Args:
        subject: the name of the module with the table.
        table: is not read the second time.

    >>> class Own:
    ...     size = 1
    >>> put("doctest", [(Own, "size", lambda size: size + 1), (Own, "width", given(3))])
    >>> Own.size, Own.width
    (2, 3)
    """
    if subject in _subjects:
        return
    # Reading it may raise an error, as the check of Keras does.
    found = list(table)
    _subjects.add(subject)
    for owner, name, make in found:
        _replaced.append((owner, name))
        if name in vars(owner):
            when_undone(setattr, owner, name, vars(owner)[name])
        else:
            when_undone(delattr, owner, name)
        setattr(owner, name, make(getattr(owner, name, None)))


def when_undone(call: Callable[..., object], *args: object) -> None:
    """Call a function when all replacements are undone, which is in the reversed order."""
    _undoing.callback(call, *args)


def undo() -> None:
    """Put all attributes back; methods that a program has bound already stay as they are."""
    _undoing.close()
    _subjects.clear()
    _replaced.clear()


def replaced() -> list[tuple[Any, str]]:
    """Return the owners and names of all attributes that are replaced now."""
    return [*_replaced]


def given(value: object) -> Callable[[Any], object]:
    """Return what replaces an attribute by a value."""
    return lambda _: value


def missing(value: object) -> Callable[[Any], object]:
    """Return what gives an attribute to those that have none of the name."""
    return lambda present: value if present is None else present


def where_defined(owner: Any, name: str, make: Callable[[Any], object]) -> Replacement:
    """Return a replacement in the class that defines an attribute: others may have their own.

    >>> class Base:
    ...     size = 1
    >>> where_defined(type("Derived", (Base,), {}), "size", given(2))[0] is Base
    True
    """
    return next(c for c in getattr(owner, "__mro__", [owner]) if name in vars(c)), name, make
