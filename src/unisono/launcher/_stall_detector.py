"""Detect the task that stalls a cluster: the rule, and the progress files that it reads."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

from unisono.cluster_resolver._spec import Task


@dataclasses.dataclass(frozen=True)
class TaskProgress:
    """The progress of a running task.

    Args:
        step: the last step that it wrote, -1 before the first.
        changed_at: when its progress file last changed, in seconds of a clock; None without a file.
        stopped_at: since when it has been stopped, as by SIGSTOP; None while it runs.
    """

    task: Task
    step: int = -1
    changed_at: float | None = None
    stopped_at: float | None = None


@dataclasses.dataclass(frozen=True)
class Stall:
    """The task that stalls the others.

    Args:
        stopped: whether it cannot handle signals, because it is stopped.
    """

    task: Task
    detail: str
    stopped: bool = False


def find_stall(progress: Iterable[TaskProgress], timeout: float, now: float) -> Stall | None:
    """Return the task that stalls the cluster, None while there is progress.

    Tasks that compute together wait for the slowest. Where none makes progress, the cause is a stopped task,
    else the one at the lowest step, else the one whose last progress is the oldest.
    """
    progress = tuple(progress)
    if not timeout or not any(_is_late(s, timeout, now) for s in progress):
        return None
    stopped = [s for s in progress if s.stopped_at is not None]
    if stopped:
        first = min(stopped, key=lambda s: (s.stopped_at or 0.0, s.task))
        return Stall(first.task, f"is stopped (state T) and made no progress for {timeout:g} s", stopped=True)
    late = [s for s in progress if _is_late(s, timeout, now)]
    behind = min(late, key=lambda s: (s.step, s.changed_at or 0.0, s.task))
    return Stall(behind.task, f"made no progress for {timeout:g} s after step {behind.step}")


def _is_late(each: TaskProgress, timeout: float, now: float) -> bool:
    marks = [mark for mark in (each.changed_at, each.stopped_at) if mark is not None]
    return any(now - mark > timeout for mark in marks)


class ProgressMonitor:
    """Reads the progress of the tasks of one generation."""

    def __init__(self, files: dict[Task, Path]) -> None:
        self._files = files
        self._marks: dict[Task, tuple[int, int]] = {}
        self._progress = {task: TaskProgress(task) for task in files}

    def begin_again(self, task: Task) -> None:
        """Forget the progress of a task whose process is replaced."""
        self._marks.pop(task, None)
        self._progress[task] = TaskProgress(task)

    def poll(self, pids: dict[Task, int], now: float) -> tuple[TaskProgress, ...]:
        """Return the progress of the running tasks, `pids`."""
        for task, pid in pids.items():
            seen = self._progress[task]
            mark = _mark(self._files[task])
            if mark is None and task in self._marks:
                # The file was removed. A task that trains writes it again as soon as it can.
                del self._marks[task]
                seen = dataclasses.replace(seen, changed_at=now)
            elif mark is not None and mark != self._marks.get(task):
                self._marks[task] = mark
                seen = dataclasses.replace(seen, step=read_step(self._files[task]), changed_at=now)
            since = seen.stopped_at if seen.stopped_at is not None else now
            stopped_at = since if is_stopped(pid) else None
            self._progress[task] = dataclasses.replace(seen, stopped_at=stopped_at)
        return tuple(self._progress[task] for task in pids)


def _mark(path: Path) -> tuple[int, int] | None:
    # Compared with the mark before instead of with the time: the file system's clock may be another
    # machine's.
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
    """Return whether a process is stopped by a signal; False where there is no `/proc`."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    # The state follows the program's name in parentheses, which may itself hold spaces and parentheses.
    return text.rpartition(")")[2].split()[:1] == ["T"]
