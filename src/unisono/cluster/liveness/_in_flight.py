"""Work that this process waits for together with the others: the last programs, and open collectives.

Tests: tests/unit/cluster/test_watchdog.py.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from unisono.collectives._process_group import ProgramToken

_NUMBERS = itertools.count()


class InFlight:
    """What is in flight. Written by the threads that compute, read by the watchdog's.

    >>> in_flight = InFlight()
    >>> in_flight.oldest is None
    True
    >>> with in_flight.collective():
    ...     in_flight.oldest is None
    False
    """

    def __init__(self) -> None:
        self._program: tuple[int, ProgramToken] | None = None
        self._concurrent: tuple[tuple[int, ProgramToken], ...] = ()
        self._collectives: dict[int, None] = {}

    def note_program(self, token: ProgramToken) -> None:
        """Note that a step was dispatched. Devices run steps in order: the last one is enough."""
        self._program = next(_NUMBERS), token

    def note_concurrent_program(self, token: ProgramToken) -> None:
        """Note a program beside the steps, which may finish before them or after them.

        >>> import jax
        >>> in_flight = InFlight()
        >>> in_flight.note_concurrent_program(jax.numpy.zeros(()).block_until_ready())
        >>> in_flight.oldest is None
        True
        """
        running = (entry for entry in self._concurrent if not _is_ready(entry[1]))
        self._concurrent = (*running, (next(_NUMBERS), token))

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Surround a blocking call that returns only when all processes have made it."""
        number = next(_NUMBERS)
        self._collectives[number] = None
        try:
            yield
        finally:
            del self._collectives[number]

    @property
    def oldest(self) -> int | None:
        """The number of a program or collective that has not finished; None where nothing is in flight.

        While this process makes no progress the number stays the same.
        """
        program = self._program
        if program is not None and not _is_ready(program[1]):
            return program[0]
        for number, token in self._concurrent:
            if not _is_ready(token):
                return number
        # A copy: another thread may enter or leave a collective meanwhile.
        return next(iter(self._collectives.copy()), None)


def _is_ready(token: ProgramToken) -> bool:
    try:
        return bool(token.is_ready())
    except RuntimeError:
        # JAX's answer for a deleted array: a later step took the buffer over, so its program is done.
        return True
