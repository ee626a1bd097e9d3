"""How many steps run together in one program, and how many programs are in flight.

Tests: tests/unit/training/test_multi_step.py, tests/virtual/training/test_lookahead.py.
"""

from __future__ import annotations

import collections
from time import perf_counter
from typing import NamedTuple

import jax

from unisono._types import PyTree
from unisono.training.groups._multi_step import MOST_STEPS

#: Steps of the first program: its time says how many the next ones should have.
_FIRST = 1

#: Seconds that one program's steps should take: short for a person who watches the progress bar or presses
#: Ctrl-C, else long. On CPUs a program takes its working memory from the system anew, and each page of it
#: costs a fault: a transformer's step on two replicas took 532 ms (934 ms of CPU time) alone and 439 ms
#: (762) in groups of four (2 cores, jaxlib 0.10.2, 2026-11-22). Processes that must agree follow each
#: other's changes of pace later, and notice a lost peer at the end of a program only. On other devices
#: memory costs nothing: a program need only be longer than what starts the next one.
_SECONDS = (1.0, 2.5)
_SECONDS_SHORT = (0.04, 0.1)

#: Programs that may be in flight; the host meanwhile fills the buffers of the next one.
IN_FLIGHT = 2


class _StartedProgram(NamedTuple):
    """A program that was started; see `AdaptiveGroupSize.wait_for_capacity`."""

    token: PyTree
    steps: int
    collecting: float
    began: float
    agreed: jax.Array | None


class AdaptiveGroupSize:
    """How many steps to run together: as many as take some tenths of a second.

    Several processes must all run the same number. Each program takes the minimum (`pmin`) of the sizes
    that the processes propose. All apply it after waiting for that program, hence at the same point.

    Args:
        num_processes: how many take the steps; several must agree on the size.

    >>> pace = AdaptiveGroupSize()
    >>> for _ in range(4):  # nothing takes any time here
    ...     pace.wait_for_capacity(jax.numpy.zeros(()), pace.size)
    >>> pace.size  # the third and the fourth waited for the first and the second
    2
    """

    def __init__(self, num_processes: int = 1, platform: str = "cpu") -> None:
        self.is_agreed = num_processes > 1
        is_long = platform == "cpu" and not self.is_agreed
        self._shortest, self._longest = _SECONDS if is_long else _SECONDS_SHORT
        self.size = _FIRST
        #: What this process proposes.
        self.wish = _FIRST
        self._flying: collections.deque[_StartedProgram] = collections.deque()
        #: Between which times the last program ended that was waited for.
        self._ended_after = self._ended_before = 0.0

    def wait_for_capacity(
        self, token: object, count: int, collecting: float = 0.0, agreed: jax.Array | None = None
    ) -> None:
        """Note a program that was started; wait until few enough are in flight.

        Args:
            token: some of its outputs, which nothing donates.
            collecting: seconds that it took to get their batches.
            agreed: array of the smallest wish of all processes; None where there is one process.
        """
        self._flying.append(_StartedProgram(token, count, collecting, perf_counter(), agreed))
        while len(self._flying) > IN_FLIGHT:
            oldest = self._flying.popleft()
            was_done = all(x.is_ready() for x in jax.tree.leaves(oldest.token))
            jax.block_until_ready(oldest.token)
            now = perf_counter()
            # The devices began when the program before had ended; slow data count as slow steps. When a
            # program ended that was done before this wait is not known: perhaps long ago, in another epoch.
            most = now - max(oldest.began, self._ended_after)
            least = 0.0 if was_done else now - max(oldest.began, self._ended_before)
            self._adjust(oldest.steps, max(oldest.collecting, most), max(oldest.collecting, least))
            self._ended_before = now
            if not was_done:
                self._ended_after = now
            self.size = self.wish if oldest.agreed is None else int(oldest.agreed)

    def _adjust(self, steps: int, most: float, least: float) -> None:
        """Propose another size, by the time that a program took.

        Args:
            most: seconds that it took at most.
            least: seconds that it took at least.
        """
        if least > self._longest:
            self.wish = max(1, min(self.wish, steps // 2))
        elif most < self._shortest and steps >= self.wish:
            self.wish = min(2 * self.wish, MOST_STEPS)
