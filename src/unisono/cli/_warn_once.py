"""Warnings of a command that makes the same model several times."""

from __future__ import annotations

import logging
from collections.abc import Callable


def warn_once() -> None:
    """Let each text of the library's logger pass once, in the rest of this process."""
    logging.getLogger("unisono").addFilter(once())


def once() -> Callable[[logging.LogRecord], bool]:
    """Return a filter of a logger that lets each text pass once.

    >>> records = [logging.makeLogRecord({"msg": text}) for text in ("a", "b", "a")]
    >>> list(map(once(), records))
    [True, True, False]
    """
    texts: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        count = len(texts)
        texts.add(record.getMessage())
        return len(texts) > count

    return is_new
