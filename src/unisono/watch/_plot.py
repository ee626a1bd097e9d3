"""Small curves in characters: Braille patterns, two columns and four rows of dots in each.

Tests: tests/unit/watch/test_screen.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from unisono.watch._job import Point

#: The dots of a pattern: by their row, the left and the right one.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_EMPTY = 0x2800


def braille(points: Sequence[Point], columns: int, rows: int) -> list[str]:
    r"""Return a curve as rows of characters, the first row at the top.

    Args:
        points: in the order of their steps; a point that is not finite is left out.

    >>> braille([(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)], 2, 1)
    ['⡠⠊']
    """
    known = [(step, value) for step, value in points if math.isfinite(value)]
    cells = [[_EMPTY] * columns for _ in range(rows)]
    if not known or columns < 1 or rows < 1:
        return [" " * columns for _ in range(rows)]
    wide, high = 2 * columns, 4 * rows
    first, last = known[0][0], known[-1][0]
    low, top = min(v for _, v in known), max(v for _, v in known)
    before: tuple[int, int] | None = None
    for step, value in known:
        x = 0 if last == first else round((step - first) / (last - first) * (wide - 1))
        y = high // 2 if top == low else round((top - value) / (top - low) * (high - 1))
        for at_x, at_y in _line(before or (x, y), (x, y)):
            cells[at_y // 4][at_x // 2] |= _DOTS[at_y % 4][at_x % 2]
        before = x, y
    return ["".join(map(chr, row)) for row in cells]


def _line(begin: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the dots of a line between two."""
    (x0, y0), (x1, y1) = begin, end
    steps = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [(x0 + round((x1 - x0) * i / steps), y0 + round((y1 - y0) * i / steps)) for i in range(steps + 1)]
