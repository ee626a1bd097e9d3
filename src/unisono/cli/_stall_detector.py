"""Which task holds the others up: the rule, and the files it looks at."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

from unisono.cluster_resolver._spec import Task


@dataclasses.dataclass(frozen=True)
class Sight:
    """What is seen of a task that runs.

    Args:
        task: the task.
        step: the last step it wrote, -1 before the first.
        changed_at: when its progress file last changed, in seconds of a clock; None without a file.
        stopped_at: since when it is stopped, as by SIGSTOP; None when it is not.
    """

    task: Task
    step: int = -1
    changed_at: float | None = None
    stopped_at: float | None = None


@dataclasses.dataclass(frozen=True)
class Stall:
    """The task that holds the others up.

    Args:
        task: the task.
        detail: one line for people.
        stopped: whether it cannot answer, because it is stopped.
    """

    task: Task
    detail: str
    stopped: bool = False


def find_stall(sights: Iterable[Sight], timeout: float, now: float) -> Stall | None:
    """Return the task to end, None while all is well.

    Tasks that compute together wait for the slowest: where none goes on, a stopped one is to blame,
    else the one that is behind, else the one that was the first to be silent.

    Args:
        sights: what is seen of the tasks that run.
        timeout: seconds without a change; 0 for no limit.
        now: the clock of `changed_at` and `stopped_at`.
    """
    sights = tuple(sights)
    if not timeout or not any(_is_late(s, timeout, now) for s in sights):
        return None
    stopped = [s for s in sights if s.stopped_at is not None]
    if stopped:
        first = min(stopped, key=lambda s: (s.stopped_at or 0.0, s.task))
        return Stall(first.task, f"is stopped (state T) and made no progress for {timeout:g} s", stopped=True)
    late = [s for s in sights if _is_late(s, timeout, now)]
    behind = min(late, key=lambda s: (s.step, s.changed_at or 0.0, s.task))
    return Stall(behind.task, f"made no progress for {timeout:g} s after step {behind.step}")


def _is_late(sight: Sight, timeout: float, now: float) -> bool:
    marks = [mark for mark in (sight.changed_at, sight.stopped_at) if mark is not None]
    return any(now - mark > timeout for mark in marks)


class ActiveClock:
    """A clock that stands still while this process does.

    A launcher that was stopped, or a machine that slept, has not seen the tasks for a while, and
    must not take that for their silence.

    Args:
        gap: a pause between two readings that is longer counts as so long, in seconds.
    """

    def __init__(self, gap: float = 2.0) -> None:
        self._gap = gap
        self._active = 0.0
        self._last: float | None = None

    def read(self, now: float) -> float:
        """Return the seconds of activity at the monotonic time `now`."""
        if self._last is not None:
            self._active += min(now - self._last, self._gap)
        self._last = now
        return self._active


class Watcher:
    """Looks at the tasks of one generation.

    Args:
        files: where each task writes its progress.
    """

    def __init__(self, files: dict[Task, Path]) -> None:
        self._files = files
        self._marks: dict[Task, tuple[int, int]] = {}
        self._sights = {task: Sight(task) for task in files}

    def look(self, pids: dict[Task, int], now: float) -> tuple[Sight, ...]:
        """Return what is seen of the tasks that run, `pids`."""
        for task, pid in pids.items():
            seen = self._sights[task]
            mark = _mark(self._files[task])
            if mark is None and task in self._marks:
                # The file was removed: until there is another one, the task's silence means nothing.
                del self._marks[task]
                seen = dataclasses.replace(seen, changed_at=None)
            elif mark is not None and mark != self._marks.get(task):
                self._marks[task] = mark
                seen = dataclasses.replace(seen, step=read_step(self._files[task]), changed_at=now)
            since = seen.stopped_at if seen.stopped_at is not None else now
            stopped_at = since if is_stopped(pid) else None
            self._sights[task] = dataclasses.replace(seen, stopped_at=stopped_at)
        return tuple(self._sights[task] for task in pids)


def _mark(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


def read_step(path: Path) -> int:
    """Return the step of the last line, `step wallclock`; -1 where it cannot be read."""
    try:
        lines = path.read_text(errors="replace").split("\n")
    except OSError:
        return -1
    words = next((line.split() for line in reversed(lines) if line.strip()), ["-1"])
    return int(words[0]) if re.fullmatch("[0-9]{1,18}", words[0]) else -1


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal; False where `/proc` does not say."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    # The name, in parentheses, may hold anything.
    return text.rpartition(")")[2].split()[:1] == ["T"]
