"""How all processes choose the same step to save after, without a message in every step."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable

from unisono._errors import ClusterError
from unisono.collectives._process_group import ProcessGroup

#: Seconds between two exchanges. An exchange costs about as much as a short step, and the platforms that send
#: SIGTERM leave tens of seconds until SIGKILL (Kubernetes and Slurm 30 by default).
PERIOD = 1.0


class SaveConsensus:
    """Chooses a step after which all processes save; this class for a single process."""

    @property
    def delay(self) -> float:
        """Seconds, besides the running step, until all processes know that one wants to save."""
        return 0.0

    def begin(self, step: int) -> None:
        """Compare how many steps were done before; called once by every process.

        Raises:
            ClusterError: the numbers differ between processes.
        """

    def agree(self, step: int, wanted: bool, *, is_last: bool = False) -> int | None:
        """Return the step after which all save; called by every process after every step.

        Returns:
            `step` or a later one, equal in all processes, until it is reached; None while none wants to save.
        """
        return step if wanted else None

    def finish(self) -> None:
        """Return when all processes have saved, so that none ends while another still writes."""


class PeriodicConsensus(SaveConsensus):
    """The processes exchange messages about once a second, at steps that all compute from the same answers.

    Each sends whether it wants to save and how long its steps take; from these, all compute the step of the
    next exchange.

    Args:
        gather: from this process' bytes to all processes'; called by all at the same step.
        period: seconds between two exchanges; with longer steps, there is one in each step.
    """

    def __init__(
        self,
        gather: Callable[[bytes], list[bytes]],
        period: float = PERIOD,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gather, self._period, self._clock = gather, period, clock
        self._asked: tuple[int, float] | None = None
        self._next: int | None = None
        self.questions = 0

    @property
    def delay(self) -> float:
        """Twice the period: steps may take longer than they did when the exchange was planned."""
        return 2 * self._period

    def begin(self, step: int) -> None:
        """Compare how many steps each worker has done."""
        every = [int(data) for data in self._gather(str(step).encode())]
        if len(set(every)) > 1:
            counts = ", ".join(f"{count} on worker {i}" for i, count in enumerate(every))
            raise ClusterError(
                "All workers must resume after the same step. Received: checkpoints after these numbers of "
                f"steps: {counts}. Pass a directory that all of them see."
            )

    def agree(self, step: int, wanted: bool, *, is_last: bool = False) -> int | None:
        """Return this step if one of the workers wants to save, at the steps where they exchange messages."""
        if self._next is not None and step < self._next and not is_last:
            return None
        # The pace is not known before the first exchange: infinity makes the second follow one step later.
        taken = self._clock() - self._asked[1] if self._asked is not None else math.inf
        steps = max(1, step - self._asked[0]) if self._asked is not None else 1
        answers = [json.loads(data) for data in self._gather(json.dumps([wanted, taken / steps]).encode())]
        self.questions += 1
        # The slowest worker's pace, so that all compute the same step.
        self._next = step + _steps_until(max(seconds for _, seconds in answers), self._period, steps)
        # After the exchange: the wait for slower workers is not part of a step.
        self._asked = step, self._clock()
        return step if any(wants for wants, _ in answers) else None

    def finish(self) -> None:
        """Wait for all in one more exchange: writing a large state may take the chief minutes."""
        self._gather(b"")


def _steps_until(seconds: float, period: float, before: int) -> int:
    """Return how many steps there are before the next exchange.

    Not more than twice as many as before the last one: the first steps compile, or return before the
    devices have done them.
    """
    return max(1, min(2 * before, int(period / max(seconds, 1e-9))))


def consensus_of(group: ProcessGroup) -> SaveConsensus:
    """Return how the processes of a group agree on a step."""
    return PeriodicConsensus(group.gather) if group.size > 1 else SaveConsensus()
