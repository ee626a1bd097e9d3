"""What programs of TensorFlow 1 begin with: `tf.app`, `tf.logging`, `tf.compat.as_str`.

Tests: tests/unit/tf/test_tf_programs.py.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import app

_log = logging.getLogger("unisono")

debug, info, warning, warn, error, fatal = (
    _log.debug, _log.info, _log.warning, _log.warning, _log.error, _log.critical,
)  # fmt: skip


def set_verbosity(v: int | str) -> None:
    """Show the library's messages of a level and above it."""
    # Does nothing where the program has handlers.
    logging.basicConfig()
    _log.setLevel(v)


def run(main: Callable[[Any], Any] | None = None, argv: Sequence[str] | None = None) -> None:
    """Parse the flags of a program, call its `main`, and end with what it returns.

    Args:
        main: the function, called with the arguments that are no flags; None for the program's own.
        argv: the program's arguments; None for those of the process.
    """
    app.run(sys.modules["__main__"].main if main is None else main, None if argv is None else list(argv))


def as_bytes(bytes_or_text: str | bytes, encoding: str = "utf-8") -> bytes:
    """Return a string as bytes."""
    return bytes_or_text.encode(encoding) if isinstance(bytes_or_text, str) else bytes(bytes_or_text)


def as_text(bytes_or_text: str | bytes, encoding: str = "utf-8") -> str:
    """Return a string as text."""
    return bytes_or_text if isinstance(bytes_or_text, str) else bytes(bytes_or_text).decode(encoding)


as_str = as_text


def as_str_any(value: Any) -> str:
    """Return any value as text."""
    return as_text(value) if isinstance(value, bytes) else str(value)
