"""Lines of progress on the terminal, where the program has not said anything about logging."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

#: Seconds between two lines from one place in the code.
PAUSE = 10.0

_LOG = logging.getLogger("unisono")


class OccasionalLines(logging.StreamHandler):  # type: ignore[type-arg]
    """Prints messages to stderr, of those from one place in the code one in ten seconds; all warnings."""

    def __init__(self) -> None:
        super().__init__()
        self._printed: dict[tuple[str, int], float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message, unless there was one from there a moment ago."""
        place, now = (record.pathname, record.lineno), time.monotonic()
        last = self._printed.get(place)
        if record.levelno >= logging.WARNING or last is None or now - last >= PAUSE:
            self._printed[place] = now
            super().emit(record)


def _is_configured() -> bool:
    """Return whether the program has configured the logger."""
    levels = (_LOG.level, logging.root.level) != (logging.NOTSET, logging.WARNING)
    return levels or bool(_LOG.handlers) or not all(_is_of_import(h) for h in logging.root.handlers)


def _is_of_import(handler: logging.Handler) -> bool:
    """Return whether a handler of the root logger is none of the program's.

    Imports of absl, and of packages that log while they are imported, leave one with the common format.
    """
    if type(handler).__module__.startswith("absl."):
        return True
    known = getattr(handler.formatter, "_fmt", logging.BASIC_FORMAT)
    return type(handler) is logging.StreamHandler and known == logging.BASIC_FORMAT


@contextlib.contextmanager
def shown_progress() -> Iterator[None]:
    """Print what a training logs while the block runs, unless the program has a handler or a level."""
    if _is_configured():
        yield
        return
    handler = OccasionalLines()
    _LOG.addHandler(handler)
    _LOG.setLevel(logging.INFO)
    propagates, _LOG.propagate = _LOG.propagate, False
    try:
        yield
    finally:
        _LOG.removeHandler(handler)
        _LOG.setLevel(logging.NOTSET)
        _LOG.propagate = propagates
