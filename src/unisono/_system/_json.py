"""JSON from files, variables and other processes: whatever is wrong with it is a `ValueError`.

Python's reader raises a `RecursionError` for a text of a thousand brackets, and so does all that later goes
through the value of one of nearly as many.

Tests: tests/unit/system/test_json.py.
"""

from __future__ import annotations

import json
import struct

from unisono._types import Json

#: Exceptions where something of another form is read than was written: another type, a field that is
#: missing, sizes that no memory holds.
MALFORMED: tuple[type[Exception], ...] = (
    ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError, SyntaxError,
    TypeError, ValueError, struct.error,
)  # fmt: skip
#: The same, of a file.
UNREADABLE: tuple[type[Exception], ...] = (OSError, *MALFORMED)
#: How deep lists and objects may lie in each other: a fifth of what Python's stack holds.
_DEEPEST = 200


def parse_json(text: str | bytes | bytearray) -> Json:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is none, its lists and objects lie too deep in each other, or it is not Unicode.

    >>> parse_json('{"a": [1]}')
    {'a': [1]}
    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
        ...
    ValueError: lists and objects lie more than 200 deep in each other
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"lists and objects lie more than {_DEEPEST} deep in each other") from None
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            item
            for each in level
            if isinstance(each, (list, dict))
            for item in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return value
    raise ValueError(f"lists and objects lie more than {_DEEPEST} deep in each other")
