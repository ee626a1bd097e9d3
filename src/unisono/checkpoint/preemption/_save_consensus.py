"""How processes come to save after the same step, without a message in every step."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Protocol

from unisono._errors import ClusterError

#: Seconds between two questions whether a process is to end, where the steps are short. A question
#: costs about as much as a short step; whoever ends processes gives them tens of seconds.
PERIOD = 1.0


class SaveConsensus(Protocol):
    """How all processes come to save after the same step."""

    @property
    def delay(self) -> float:
        """How many seconds it takes until the wish of one is heard by all, besides the running step."""

    def begin(self, step: int) -> None:
        """Hear which steps were done before; called once by every process.

        Raises:
            ClusterError: not the same in all processes.
        """

    def agree(self, step: int, wanted: bool, *, is_last: bool = False) -> int | None:
        """Return the step after which all save; called by every process after every step.

        Args:
            step: how many steps are done; the same in all processes.
            wanted: whether this process wants to save.
            is_last: whether no step follows.

        Returns:
            `step` or a later one, the same in all processes, until it has come; None while none wants.
        """

    def finish(self) -> None:
        """Return when all processes have saved, so that none ends while another still writes."""


class LocalConsensus:
    """The agreement of one process with itself."""

    delay = 0.0

    def begin(self, step: int) -> None:
        """Nobody can differ."""

    def agree(self, step: int, wanted: bool, *, is_last: bool = False) -> int | None:
        """At once."""
        return step if wanted else None

    def finish(self) -> None:
        """There is nobody to wait for."""


class PeriodicConsensus:
    """All processes ask each other about once a second, at steps that follow from their answers.

    An answer is whether its process wants to save, and how long its steps take: all compute the step
    of the next question from the same answers.

    Args:
        gather: from this process' bytes to those of all; called by all at the same step.
        period: seconds between two questions; a step that takes longer has a question of its own.
        clock: seconds.
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
        """The steps may take longer than they did when the question was planned."""
        return 2 * self._period

    def begin(self, step: int) -> None:
        """Ask once who has done how many steps."""
        every = [int(data) for data in self._gather(str(step).encode())]
        if len(set(every)) > 1:
            found = ", ".join(f"{count} on worker {i}" for i, count in enumerate(every))
            raise ClusterError(
                "All workers must go on after the same step. Received: checkpoints after so many steps: "
                f"{found}. Pass a directory that all of them see."
            )

    def agree(self, step: int, wanted: bool, *, is_last: bool = False) -> int | None:
        """The step at which somebody's wish was heard by all."""
        if self._next is not None and step < self._next and not is_last:
            return None
        taken = self._clock() - self._asked[1] if self._asked is not None else math.inf
        steps = max(1, step - self._asked[0]) if self._asked is not None else 1
        answers = [json.loads(data) for data in self._gather(json.dumps([wanted, taken / steps]).encode())]
        self.questions += 1
        self._next = step + _steps_until(max(seconds for _, seconds in answers), self._period, steps)
        self._asked = step, self._clock()
        return step if any(wish for wish, _ in answers) else None

    def finish(self) -> None:
        """One more question; a large state may take the one who writes it minutes."""
        self._gather(b"")


def _steps_until(seconds: float, period: float, before: int) -> int:
    """How many steps of so many seconds come before the next question.

    Not more than twice as many as before the last one: the first steps compile, or return before the
    devices have done them.
    """
    return max(1, min(2 * before, int(period / max(seconds, 1e-9))))
