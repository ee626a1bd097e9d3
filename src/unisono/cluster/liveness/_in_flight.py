"""What this process waits for together with the others: the last program that it started, or a message."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

_NUMBERS = itertools.count()


class InFlight:
    """Told by the threads that compute; asked by one that looks out for the others.

    >>> pending = InFlight()
    >>> pending.waits_for is None
    True
    >>> with pending.together():
    ...     pending.waits_for is None
    False
    """

    def __init__(self) -> None:
        self._program: tuple[int, Any] | None = None
        self._beside: tuple[tuple[int, Any], ...] = ()
        self._meetings: dict[int, None] = {}

    def started(self, token: Any) -> None:
        """Note a program.

        Args:
            token: an output that nothing donates.
        """
        self._program = next(_NUMBERS), token

    def started_beside(self, token: Any) -> None:
        """Note a program that runs beside the steps, which end before it or after it.

        Args:
            token: an output that nothing donates.

        >>> import jax
        >>> pending = InFlight()
        >>> pending.started_beside(jax.numpy.zeros(()).block_until_ready())
        >>> pending.waits_for is None
        True
        """
        running = (entry for entry in self._beside if not _is_done(entry[1]))
        self._beside = (*running, (next(_NUMBERS), token))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around something that ends only when all processes have come to it."""
        number = next(_NUMBERS)
        self._meetings[number] = None
        try:
            yield
        finally:
            del self._meetings[number]

    @property
    def waits_for(self) -> int | None:
        """A number of what is not done; the same as long as it is waited for. None for nothing."""
        program = self._program
        if program is not None and not _is_done(program[1]):
            return program[0]
        for number, token in self._beside:
            if not _is_done(token):
                return number
        return next(iter(self._meetings.copy()), None)


def _is_done(token: Any) -> bool:
    try:
        return bool(token.is_ready())
    except RuntimeError:  # deleted by whoever took it over
        return True


#: Of this process.
IN_FLIGHT = InFlight()
