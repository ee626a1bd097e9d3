"""Checks of arguments that many functions make."""

from __future__ import annotations

import inspect
import numbers
import operator
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import SupportsIndex, TypeGuard

from unisono._errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from unisono._features import load

_DIGITS = re.compile(r"[0-9]{1,18}")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
#: A drive of Windows, or a server's folder.
_WINDOWS = re.compile(r"[A-Za-z]:[\\/]|\\\\")


def whole_number(value: object, least: int) -> int | None:
    """Return an argument as a Python int, if it is a whole number of at least a given size.

    Returns:
        The number; None for a smaller one and for everything else, also for True and False.

    >>> whole_number(3, 1), whole_number(0, 1), whole_number(3.0, 1), whole_number(True, 1)
    (3, None, None, None)
    """
    number = _index_of(value)
    return number if number is not None and number >= least else None


def _index_of(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        # NumPy's integers have an index, and floats, which `int` would truncate without an error, have none.
        return operator.index(value)
    except TypeError:
        return None


def digits(text: str) -> int | None:
    """Return the number that a text of at most 18 digits is; None for every other text.

    >>> digits("12"), digits("-1"), digits("\u00b2"), digits("9" * 5000)
    (12, None, None, None)
    """
    # Not `str.isdigit`, which is true for digits that `int` does not read; nor so many that it refuses them.
    return int(text) if _DIGITS.fullmatch(text) else None


def checked_whole(value: object, name: str, least: int, hint: str) -> int:
    """Return an argument as a Python int.

    Args:
        least: the smallest allowed number.
        hint: what to write instead.

    Raises:
        InvalidTypeError: The value is not a whole number.
        InvalidArgumentError: The value is too small.

    >>> checked_whole(3, "count", 0, "")
    3
    """
    number = _index_of(value)
    if number is None:
        raise InvalidTypeError(f"{name} must be a whole number. Received: {name}={value!r}. {hint}")
    if number < least:
        raise InvalidArgumentError(f"{name} must be at least {least}. Received: {name}={number}. {hint}")
    return number


def check_instance(value: object, name: str, kind: type, hint: str) -> None:
    """Raise for an argument of another type; None stands for one that was left out.

    Args:
        hint: what to write instead.

    Raises:
        InvalidTypeError: The value is not of the type.

    >>> check_instance(None, "count", int, "Leave it out.")
    """
    if value is not None and not isinstance(value, kind):
        raise InvalidTypeError(f"`{name}` must be a `{kind.__name__}`. Received: {name}={value!r}. {hint}")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether an argument is a whole or floating-point number, also NumPy's.

    >>> is_number(3), is_number(0.5), is_number(True), is_number("3")
    (True, True, False, False)
    """
    # NumPy registers its numbers there, which are not all Python's.
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def whole_numbers(values: Iterable[object], least: int) -> list[int] | None:
    """Return arguments as Python ints; None if one of them is no whole number of at least a given size.

    >>> whole_numbers((3, 4), 1), whole_numbers((3, 4.0), 1)
    ([3, 4], None)
    """
    given = [whole_number(value, least) for value in values]
    found = [number for number in given if number is not None]
    return found if len(found) == len(given) else None


def takes_arguments(fn: object, count: int, *names: str) -> bool:
    """Return whether a function can be called with a number of positional arguments, as far as is known.

    >>> takes_arguments(lambda x, y: x, 2), takes_arguments(lambda x: x, 2)
    (True, False)
    """
    if not callable(fn):
        return False
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        # A function in C may have no signature.
        return True
    try:
        signature.bind(*[None] * count, **dict.fromkeys(names))
    except TypeError:
        return False
    return True


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file or directory.

    Raises:
        UnsupportedError: it is an address, such as `gs://bucket/run`, which would be a folder `gs:` here.
        InvalidArgumentError: it is a path of Windows, on another system, or (InvalidTypeError) no path.

    >>> local_path("run").name
    'run'
    """
    if not isinstance(path, (str, bytes, os.PathLike)) or (os.name == "posix" and _WINDOWS.match(str(path))):
        raise load("mistake")("path", path)
    text = os.fspath(path)
    if isinstance(text, str) and _SCHEME.match(text):
        raise UnsupportedError(
            "Files are written and read on file systems of this machine; checkpoints, backups, logs, models "
            "and saved data also in object stores such as `s3://` and `gs://`. "
            f"Received: {text!r}. Write a directory, as where `gcsfuse` or `mount-s3` has mounted the "
            "bucket; in a cluster, one that all tasks see."
        )
    return Path(path)
