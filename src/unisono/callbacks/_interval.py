"""How often to back up: the shortest interval whose backups cost no more than a share of training.

Young (1974, https://doi.org/10.1145/361147.361115) and Daly (2006,
https://doi.org/10.1016/j.future.2004.11.016) lose the least time with an interval of
`sqrt(2 * cost * MTBF)`. The mean time between failures of a run is not known beforehand; what a backup
costs can be measured. So the share of training that backups may take decides: `cost / share` seconds.
That is Young's interval for a failure every `cost / (2 * share ** 2)` seconds. Where failures are rarer,
fewer backups would cost less, but at most the share can be gained.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator

#: Executions that are not measured: the first ones compile.
_COMPILING = 2
#: Executions without a backup beside them before the first backup, and between the next ones.
_QUIET_FIRST, _QUIET = 2, 8
#: Of how many backups the median counts, and how many must have been measured for a choice.
_RECENT, _ENOUGH = 5, 3
#: Executions that tell how long a step takes; of these, one in `_STRANGE` may have compiled.
_STEPS, _STRANGE = 256, 64


@dataclasses.dataclass(frozen=True)
class Costs:
    """The costs of a step and a backup, in seconds.

    Args:
        step: a step while nothing is written.
        blocked: the training thread copies the state and hands it over.
        slowed: the steps beside the writing take longer than others, all together.
        written: from the hand-over until the backup is on the disk.
    """

    step: float
    blocked: float
    slowed: float
    written: float

    def share(self, steps: int) -> float:
        """The share of training that backups take, with one every `steps` steps."""
        return (self.blocked + self.slowed) / (steps * self.step)


@dataclasses.dataclass(frozen=True)
class WriteRecord:
    """A backup that was written.

    Args:
        seconds: how long that took.
        size: its arrays, in bytes.
    """

    seconds: float
    size: int


def interval_of(costs: Costs, together: int, max_overhead: float, max_seconds: float) -> int:
    """Return after how many steps to back up.

    Args:
        together: steps that run at once; the result is a multiple of them.
        max_overhead: the share of training that backups may take.
        max_seconds: what a failure may cost at most, the time of writing included; it wins over the
            share, but no backup begins before the one before it is written.

    >>> interval_of(Costs(step=0.01, blocked=0.001, slowed=0.019, written=0.1), 1, 0.01, 60.0)
    200
    >>> interval_of(Costs(step=0.01, blocked=0.001, slowed=0.019, written=0.1), 1, 0.01, 0.5)
    40
    """
    execution = costs.step * together
    # Rounded, so that what comes out even is not one more for the last bit.
    wanted, most, least = (
        round(seconds / execution, 6)
        for seconds in (
            (costs.blocked + costs.slowed) / max_overhead,
            max_seconds - costs.written,
            costs.written,
        )
    )
    count = math.ceil(wanted) if math.ceil(wanted) <= most else math.floor(most)
    return together * max(1, count, math.ceil(least))


def sentence(steps: int, costs: Costs, size: int) -> str:
    """Return the choice and its reasons, for people.

    >>> sentence(200, Costs(step=0.01, blocked=0.001, slowed=0.019, written=0.1), 2_800_000)
    'a backup every 200 steps: state 2.8 MB, step 10 ms; a backup blocks 1 ms, slows the steps beside it
    by 19 ms and is written in 100 ms (1 % of training)'
    """
    return (
        f"a backup every {steps} step{'s' * (steps != 1)}: state {_size(size)}, step {_time(costs.step)}; a "
        f"backup blocks {_time(costs.blocked)}, slows the steps beside it by {_time(costs.slowed)} and is "
        f"written in {_time(costs.written)} ({round(100 * costs.share(steps), 1):g} % of training)"
    )


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{round(1000 * seconds, 2):.3g} ms"


def _size(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


@dataclasses.dataclass
class _BackupRun:
    """A backup that is being written, and the steps beside it."""

    blocked: float
    seconds: float = 0.0
    steps: int = 0


class BackupInterval:
    """Measures steps and the first backups, then says when a backup is due; continues to measure.

    Args:
        say: called with what was chosen, and again when that has changed by more than a factor of 2.
    """

    def __init__(
        self,
        max_overhead: float,
        max_seconds: float,
        together: int,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._max_overhead, self._max_seconds = max_overhead, max_seconds
        self._together, self._say, self._clock = together, say, clock
        #: The interval, None as long as too little is known.
        self.steps: int | None = None
        self._said: int | None = None
        self._mark: tuple[float, int] | None = None
        self._began: float | None = None
        self._compiling = _COMPILING
        self._quiet: collections.deque[float] = collections.deque(maxlen=_STEPS)
        self._quiet_now = 0
        self._running: _BackupRun | None = None
        self._finished = 0
        self._costs: collections.deque[Costs] = collections.deque(maxlen=_RECENT)

    def begin_batch(self, batches: int, is_busy: bool, written: WriteRecord | None) -> None:
        """Note that an execution begins."""
        now = self._clock()
        self._began = now if self._began is None else self._began
        self._end_execution(now, batches)
        self._mark = now, batches
        if self._running is not None and not is_busy and written is not None:
            self._end_backup(self._running, written)

    def pause(self, batches: int) -> None:
        """Pause step timing: what happens until the next batch is not a step."""
        self._end_execution(self._clock(), batches)
        self._mark = None

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Around the part of a backup for which training waits."""
        began = self._clock()
        yield
        now = self._began = self._clock()
        self._running = _BackupRun(now - began)
        self._mark = None if self._mark is None else (now, self._mark[1])

    def is_due(self, batches: int) -> bool:
        """Return whether to back up now; never while a backup is being written."""
        if self._began is None or not batches:
            return False
        # Early enough for this backup to be written when the time is over.
        written = self._costs[-1].written if self._costs else 0.0
        if self._clock() - self._began >= self._max_seconds - written:
            return True
        if self.steps is None:
            return self._quiet_now >= (_QUIET if self._finished else _QUIET_FIRST)
        return batches >= self.steps

    def _end_execution(self, now: float, batches: int) -> None:
        # Batches that are passed over after a restart are not counted, and no steps.
        if self._mark is None or batches <= self._mark[1]:
            return
        seconds, steps = now - self._mark[0], batches - self._mark[1]
        if self._compiling:
            self._compiling -= 1
        elif self._running is not None:
            self._running.seconds += seconds
            self._running.steps += steps
        else:
            self._quiet.append(seconds / steps)
            self._quiet_now += 1

    def _end_backup(self, backup: _BackupRun, written: WriteRecord) -> None:
        self._running, self._quiet_now = None, 0
        self._finished += 1
        if self._finished == 1 or not (self._quiet or backup.steps):
            # The first compiles its copies, and says nothing of the others.
            return
        step = self._step() if self._quiet else backup.seconds / backup.steps
        slowed = max(0.0, backup.seconds - backup.steps * step)
        self._costs.append(Costs(step, backup.blocked, slowed, written.seconds))
        if len(self._costs) >= _ENOUGH:
            self._choose(step, written.size)

    def _step(self) -> float:
        """The mean, because the host runs ahead of the devices in bursts; a few executions compile."""
        usual = sorted(self._quiet)[: len(self._quiet) - len(self._quiet) // _STRANGE]
        # A clock that stands still must not end training.
        return max(statistics.fmean(usual), 1e-9)

    def _choose(self, step: float, size: int) -> None:
        blocked, slowed, written = (
            statistics.median(getattr(c, name) for c in self._costs)
            for name in ("blocked", "slowed", "written")
        )
        costs = Costs(step, blocked, slowed, written)
        self.steps = interval_of(costs, self._together, self._max_overhead, self._max_seconds)
        if self._said is None or not self._said / 2 <= self.steps <= self._said * 2:
            self._said = self.steps
            self._say(sentence(self.steps, costs, size))
