"""The fields of a message from outside, checked one by one: an error names the field that is wrong.

Tests: tests/unit/parameter_server/test_server.py, tests/unit/standalone/test_hostile_requests.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from unisono._checks import is_number, whole_number
from unisono._errors import InvalidArgumentError
from unisono._types import Json


def text(meta: Mapping[str, Json], name: str, longest: int = 1 << 20) -> str:
    """Return a field that must be a text.

    >>> text({"job": "a"}, "job")
    'a'
    """
    value = meta.get(name)
    if not isinstance(value, str) or not value or len(value) > longest:
        raise _wrong(name, f"a text of at most {longest} characters", value)
    return value


def number(meta: Mapping[str, Json], name: str, least: float, most: float) -> float:
    """Return a field that must be a number.

    >>> number({"lease": 3}, "lease", 1, 10)
    3
    """
    value = meta.get(name)
    if not is_number(value) or not least <= value <= most:
        raise _wrong(name, f"a number from {least:g} to {most:g}", value)
    return value


def whole(
    meta: Mapping[str, Json], name: str, default: int | None = None, least: int = 0, most: float = math.inf
) -> int:
    """Return a field that must be a whole number.

    >>> whole({"closure": 3}, "closure")
    3
    """
    value = meta.get(name, default)
    number = whole_number(value, least)
    if number is None or number > most:
        limit = "" if most == math.inf else f" and at most {most:g}"
        raise _wrong(name, f"a whole number of at least {least}{limit}", value)
    return number


def mapping(meta: Mapping[str, Json], name: str) -> dict[str, Any]:
    """Return a field that must be an object."""
    value = meta.get(name)
    if not isinstance(value, dict):
        raise _wrong(name, "an object", value)
    return value


def listed(meta: Mapping[str, Json], name: str) -> Sequence[Json]:
    """Return a field that must be a list; an empty one where it is absent."""
    value = meta.get(name, ())
    if not isinstance(value, (list, tuple)):
        raise _wrong(name, "a list", value)
    return value


def ints(meta: Mapping[str, Json], name: str) -> tuple[int, ...]:
    """Return a field that must be a list of whole numbers, which may be negative."""
    values = tuple(listed(meta, name))
    # Types, because `isinstance` takes a truth value for a number.
    if not {*map(type, values)} <= {int}:
        raise _wrong(name, "a list of whole numbers", values)
    return values


def _wrong(name: str, what: str, value: object) -> InvalidArgumentError:
    # What is hostile may be long.
    return InvalidArgumentError(f"A request's `{name}` must be {what}. Received: {repr(value)[:200]}.")
