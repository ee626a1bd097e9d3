"""Which requests a server has carried out: one that arrives again, late or repeated, changes nothing.

Pushes have closures for that. This is about requests of the chief that write, of which there are few.

Tests: tests/unit/parameter_server/test_server.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from unisono._errors import InvalidArgumentError
from unisono._types import Json

#: How many numbers are kept: the chief waits for answers, and has far fewer requests under way.
_KEPT = 1024


class RequestDedup:
    """The numbers of the last requests that were carried out.

    Args:
        numbers: of requests, oldest first.
        floors: for each client, a number up to which all others count as carried out.

    >>> answered = RequestDedup()
    >>> answered.note(7)
    >>> 7 in answered, 8 in answered
    (True, False)
    """

    def __init__(self, numbers: Iterable[int] = (), floors: Iterable[tuple[int, int]] = ()) -> None:
        self._numbers = dict.fromkeys(numbers)
        self._floors = dict(floors)

    def __contains__(self, request: int) -> bool:
        """Return whether a request was carried out.

        Raises:
            InvalidArgumentError: it is so old that this is not known.
        """
        if request in self._numbers:
            return True
        if request and request <= self._floors.get(request >> 32, -1):
            raise InvalidArgumentError(
                f"A request must be sent soon after it was made. Received: number {request:#x}, and {_KEPT} "
                "later ones were carried out. It is a repetition."
            )
        return False

    def note(self, request: int) -> None:
        """Keep a number."""
        if not request:
            return
        self._numbers[request] = None
        if len(self._numbers) > _KEPT:
            oldest = next(iter(self._numbers))
            del self._numbers[oldest]
            # The upper half of a number is its client.
            self._floors[oldest >> 32] = max(oldest, self._floors.get(oldest >> 32, 0))

    def encode(self) -> Json:
        """Return the arguments of an equal object, as JSON holds them."""
        return [list(self._numbers), list(self._floors.items())]
