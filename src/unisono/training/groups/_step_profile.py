"""Where the host's time goes in `fit`.

The timer never waits for the devices, which compute meanwhile, and so cannot hold them up.

Tests: tests/virtual/callbacks/test_timer.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import jax

from unisono._features import load
from unisono._system._task_reports import TaskEvents
from unisono._types import PyTree

if TYPE_CHECKING:
    from unisono._mesh import ReplicaMesh
    from unisono.training.groups._batch_placement import BatchGroup
    from unisono.training.groups._step_sample import StepSampler
    from unisono.training.groups._step_work import StepWork


class HostTimes(NamedTuple):
    """What a `HostTimer` shows, or the difference of two of them.

    Args:
        data: seconds in which the host waited for the next batch.
        placing: seconds in which it put batches onto the devices.
        starting: seconds in which it started steps, and waited because it was too many steps ahead.
    """

    data: float = 0.0
    placing: float = 0.0
    starting: float = 0.0
    batches: int = 0
    rows: int = 0

    def since(self, earlier: HostTimes) -> HostTimes:
        """Return what happened after another reading of the same clock.

        >>> HostTimes(data=3.0, batches=12).since(HostTimes(data=1.0, batches=2))
        HostTimes(data=2.0, placing=0.0, starting=0.0, batches=10, rows=0)
        """
        return HostTimes(*map(operator.sub, self, earlier))


class HostTimer:
    """Adds up the host's time over all steps of one train function; costs about a microsecond a step.

    >>> import numpy as np
    >>> timer = HostTimer()
    >>> timer.add((np.zeros((4, 2)), None), seconds=0.5)
    >>> timer.calls += 2.0
    >>> timer.read()
    HostTimes(data=0.5, placing=0.0, starting=1.5, batches=1, rows=4)
    """

    def __init__(
        self, events: TaskEvents | None = None, mesh: ReplicaMesh | None = None, dtype: str = "float32"
    ) -> None:
        #: Count its steps, which `start_steps` does.
        self.events = events
        self._computes = mesh, dtype
        #: Seconds in which batches were placed, and of all calls of the function.
        self.placing = self.calls = 0.0
        #: Looks into single programs; None where that is not asked for.
        self.sampler: StepSampler | None = None
        #: Counts what steps compute; None where that is not asked for.
        self.work: StepWork | None = None
        #: Seconds of waiting for data, and how many of them the events have.
        self.data = self.noted = 0.0
        self._batches = self._rows = 0

    def add(self, batch: PyTree, seconds: float) -> None:
        """Note that a batch has arrived."""
        leaves = jax.tree.leaves(batch)
        # What is not a batch is rejected by the step itself, whose error names it.
        shape = getattr(leaves[0], "shape", ()) if leaves else ()
        self.add_rows(shape[0] if shape else 0, seconds)

    def add_rows(self, rows: int, seconds: float) -> None:
        """Note that a batch of some rows has arrived."""
        self.data += seconds
        self._batches += 1
        self._rows += rows

    def count_work(self) -> StepWork:
        """Count what steps compute from now on."""
        if self.work is None:
            self.work = load("work of steps")(*self._computes)
        work: StepWork = self.work
        return work

    def read(self) -> HostTimes:
        """Return the sums so far."""
        starting = self.calls - self.data - self.placing
        return HostTimes(self.data, self.placing, starting, self._batches, self._rows)


Result = TypeVar("Result")


def start_steps(timer: HostTimer, group: BatchGroup, start: Callable[[], Result]) -> Result:
    """Start a group's program, sampled where that is asked for, and count its steps."""
    sampler, events, work, steps = timer.sampler, timer.events, timer.work, group.count
    result = start() if sampler is None else sampler.run(group.form, steps, start)
    if work is not None:
        work.count(group)
        if events is not None:
            events.worked(work, result, steps)
    if events is not None:
        if sampler is not None and sampler.parts is not None:
            events.exchange, events.compute = sampler.parts.exchange_share, sampler.parts.compute_share
        waited, timer.noted = timer.data - timer.noted, timer.data
        events.stepped(steps, waited)
    return result
