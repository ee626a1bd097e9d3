"""Where the host's time goes in `fit`: waiting for data, placing batches, starting steps.

Only the host's time is measured: the timer never waits for the devices, which compute meanwhile, and so
cannot hold them up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, ParamSpec, TypeVar

import jax

P = ParamSpec("P")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class HostTimes:
    """What a `HostTimer` shows, or the difference of two of them.

    Args:
        data: seconds in which the host waited for the next batch.
        placing: seconds in which it put batches onto the devices.
        starting: seconds in which it started steps, and waited because it was too many steps ahead.
        batches: how many batches.
        rows: how many rows these had.
    """

    data: float = 0.0
    placing: float = 0.0
    starting: float = 0.0
    batches: int = 0
    rows: int = 0

    def since(self, earlier: HostTimes) -> HostTimes:
        """Return what happened after another reading of the same clock.

        Args:
            earlier: that reading.

        >>> HostTimes(data=3.0, batches=12).since(HostTimes(data=1.0, batches=2))
        HostTimes(data=2.0, placing=0.0, starting=0.0, batches=10, rows=0)
        """
        return HostTimes(
            self.data - earlier.data,
            self.placing - earlier.placing,
            self.starting - earlier.starting,
            self.batches - earlier.batches,
            self.rows - earlier.rows,
        )


class HostTimer:
    """Adds up the host's time over all steps of one train function; costs about a microsecond a step.

    >>> import numpy as np
    >>> clock = HostTimer()
    >>> clock.begin()
    >>> clock.add([(np.zeros((4, 2)), None)])
    >>> clock.end()
    >>> clock.read().batches, clock.read().rows
    (1, 4)
    """

    def __init__(self) -> None:
        self._mark = 0.0
        self._data = self._placing = self._after = 0.0
        self._batches = self._rows = 0

    def begin(self) -> None:
        """Note that the host begins to wait for data."""
        self._mark = perf_counter()

    def wait(self) -> None:
        """Note that the host waits for data once more in the same call."""
        now = perf_counter()
        self._after += now - self._mark
        self._mark = now

    def add(self, batches: Sequence[Any]) -> None:
        """Note that the data have arrived.

        Args:
            batches: those of one call of the train function.
        """
        now = perf_counter()
        self._data += now - self._mark
        self._mark = now
        self._batches += len(batches)
        for batch in batches:
            leaves = jax.tree.leaves(batch)
            # What is not a batch is rejected by the step itself, whose error names it.
            shape = getattr(leaves[0], "shape", ()) if leaves else ()
            self._rows += shape[0] if shape else 0

    def end(self) -> None:
        """Note that the step was started, or failed."""
        self._after += perf_counter() - self._mark

    def time(self, place: Callable[P, T]) -> Callable[P, T]:
        """Return a function that does as `place`, and whose time counts as placing.

        Args:
            place: from a batch to a batch on the devices.
        """

        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            began = perf_counter()
            placed = place(*args, **kwargs)
            self._placing += perf_counter() - began
            return placed

        return timed

    def read(self) -> HostTimes:
        """Return the sums so far."""
        starting = self._after - self._placing
        return HostTimes(self._data, self._placing, starting, self._batches, self._rows)
