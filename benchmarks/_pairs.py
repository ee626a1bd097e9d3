"""Statistics of two sides measured in turns: ratios of neighbouring values, and what they tell."""

import dataclasses
import math
import statistics

#: How sure an interval is at least.
CONFIDENCE = 0.95
#: The loss that `against.py` does not accept.
ACCEPTED = 0.03
SLOWER, FASTER, NOT_TOLD = "slower", "faster", "not told apart"


@dataclasses.dataclass(frozen=True)
class Ratios:
    """Ratios of two sides, one for each round.

    Args:
        middle: the median.
        low: the lower end of the interval that holds the true median; 0 where the rounds are too few.
        high: the upper end; infinity where the rounds are too few.
    """

    middle: float
    low: float
    high: float

    @property
    def verdict(self):
        """One of `SLOWER`, `FASTER` and `NOT_TOLD`: a ratio is above 1 where the new side is faster."""
        if self.high < 1:
            return SLOWER
        return FASTER if self.low > 1 else NOT_TOLD

    @property
    def is_loss(self):
        """True if the new side is slower by more than is accepted, for sure."""
        return self.high < 1 - ACCEPTED

    def __str__(self):
        if math.isinf(self.high):
            return f"{self.middle:.3f} (too few rounds)"
        return f"{self.middle:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratios(new, old):
    """Compare values that were measured in turns; more is better.

    The interval follows from the sign test: it assumes nothing of the noise but that rounds are independent.
    A busy moment, which meets both sides of a round, changes a ratio little.
    """
    each = sorted(a / b for a, b in zip(new, old, strict=True))
    left_out = _left_out(len(each))
    low, high = (0.0, math.inf) if left_out is None else (each[left_out], each[-1 - left_out])
    return Ratios(statistics.median(each), low, high)


def _left_out(count):
    """How many of the sorted ratios lie outside of the interval at each end; None where they are too few."""
    outside, found = 0.0, None
    for number in range(count // 2):
        outside += 2 * math.comb(count, number) / 2**count
        if outside > 1 - CONFIDENCE:
            break
        found = number
    return found
