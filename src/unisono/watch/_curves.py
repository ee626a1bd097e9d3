"""Curves of bounded length: of many points the smallest and the largest of each part of the steps stay."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from unisono.watch._job import Point

#: Points of a curve that is shown, at most.
SHOWN = 1000
#: Points that are kept, at most.
_KEPT = 4 * SHOWN


def thinned(points: Sequence[Point], most: int = SHOWN) -> list[Point]:
    """Return at most so many points, with the first, the last, and the extremes of each part.

    Args:
        points: in the order of their steps.
        most: at least 4.

    >>> thinned([(0, 1.0), (1, 9.0), (2, 1.0), (3, 2.0), (4, 0.0), (5, 3.0), (6, 1.0)], 4)
    [(0, 1.0), (1, 9.0), (4, 0.0), (6, 1.0)]
    """
    if len(points) <= most:
        return list(points)
    inner = points[1:-1]
    parts = max(1, (most - 2) // 2)
    kept = [points[0]]
    for i in range(parts):
        part = inner[i * len(inner) // parts : (i + 1) * len(inner) // parts]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(ends)
    return [*kept, points[-1]]


@dataclasses.dataclass
class GrowingCurve:
    """A curve that grows while the job runs, in bounded memory."""

    points: list[Point] = dataclasses.field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        """Add a point, behind the others or, where logs were read late, between them."""
        points = self.points
        i = len(points)
        while i and points[i - 1][0] > step:
            i -= 1
        if i and points[i - 1][0] == step:
            points[i - 1] = step, value
        else:
            points.insert(i, (step, value))
        if len(points) > _KEPT:
            self.points = thinned(points, _KEPT // 2)

    def rewind(self, step: int) -> None:
        """Remove the points behind a step, which a restart has lost."""
        while self.points and self.points[-1][0] > step:
            self.points.pop()
