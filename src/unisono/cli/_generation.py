"""One generation of tasks: their processes, what is seen of them, and how they are ended."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from unisono.cli import _restart_policy as decide
from unisono.cli._plan import LaunchPlan
from unisono.cli._processes import Process, end_all
from unisono.cli._run_files import BestEffort, History, Tail, last_lines, read_error, size_of
from unisono.cli._stall_detector import Sight, Stall, Watcher, find_stall
from unisono.cluster_resolver._spec import Task

#: The code of a shell where a program cannot be started.
_NOT_STARTED = 126
_KILLED = 128 + signal.SIGKILL
#: How long a task may take to write its stack into its log, in seconds: the machine may be busy.
_STACK_WAIT = 5.0
#: It writes line by line, and is done when its log has not grown for so long.
_STACK_PAUSE = 0.2


@dataclasses.dataclass(frozen=True)
class Starter:
    """How tasks get a process.

    Args:
        take: returns a warm process, or None.
        start: makes a cold one for a task, or raises OSError.
        job: what a task is told.
    """

    take: Callable[[], Process | None]
    start: Callable[[Task], Process]
    job: Callable[[LaunchPlan, Task], dict[str, Any]]


class Tasks:
    """The processes of one generation.

    Args:
        plan: what they are.
        starter: how each gets its process.
        history: where events are written.
        files: reports what cannot be written.
    """

    def __init__(self, plan: LaunchPlan, starter: Starter, history: History, files: BestEffort) -> None:
        self.plan = plan
        self._history, self._files = history, files
        self._processes: dict[Task, Process] = {}
        self._failures: dict[Task, decide.Failure] = {}
        self._codes: dict[Task, int] = {}
        self._starts = {task: self._open_log(task) for task in plan.tasks}
        self._watcher = Watcher({t: plan.place.progress(t, plan.generation) for t in plan.tasks})
        self._ending: decide.Ending | None = None
        self._raised: set[Task] = set()
        #: Until when what fails is a cause, in seconds since the epoch; later, it is what we did.
        self._until = math.inf
        self._killed = False
        for task in plan.tasks:
            self._start(task, starter)

    def _start(self, task: Task, starter: Starter) -> None:
        for path in (self.plan.place.error, self.plan.place.progress):
            with self._files.attempt():
                path(task, self.plan.generation).unlink(missing_ok=True)
        try:
            process = self._assigned(task, starter)
        except OSError as error:
            detail = f"could not be started: {error}"
            self._failures[task] = decide.Failure(task, time.time(), _NOT_STARTED, detail)
            self._codes[task] = _NOT_STARTED
            self._history.write("failed", task, exit_code=_NOT_STARTED, detail=detail)
            return
        self._processes[task] = process
        self._history.write("started", task, process.pid, detail="warm" if process.warm else "cold")

    def _assigned(self, task: Task, starter: Starter) -> Process:
        job = starter.job(self.plan, task)
        warm = starter.take()
        while warm is not None:
            if warm.assign(job):
                return warm
            end_all([warm])
            warm = starter.take()
        process = starter.start(task)
        if not process.assign(job):
            self._history.write("lost", task, process.pid, detail="ended before it took its task")
        return process

    def tail(self) -> Tail:
        """What the shown task prints."""
        shown = self.plan.shown
        return Tail(self.plan.place.log(shown), self._starts[shown])

    def look(self, signals: tuple[int, ...], resize: bool) -> decide.Generation:
        """Return the generation as it is now."""
        for task, process in self._processes.items():
            code = process.poll()
            self._note_error(task, process)
            if code is not None and task not in self._codes:
                self._note_end(task, process, code)
        states = tuple(
            decide.TaskState(t, self._codes.get(t), self._failures.get(t), t in self._raised)
            for t in self.plan.tasks
        )
        return decide.Generation(states, self._ending, signals, resize)

    def _note_error(self, task: Task, process: Process) -> None:
        """An exception counts from when it was raised: the task may take long to end."""
        if task in self._raised:
            return
        record = read_error(self.plan.place.error(task, self.plan.generation))
        if record is None:
            return
        self._raised.add(task)
        if record["at"] <= self._until:
            failure = decide.Failure(task, record["at"], record["code"], record["summary"])
            self._fail(failure, process.pid)

    def _note_end(self, task: Task, process: Process, code: int) -> None:
        self._codes[task] = code
        self._history.write("ended", task, process.pid, code)
        at = process.ended_at or time.time()
        # Nobody else in a cluster kills a process: it is a cause also when it is seen late.
        cause = at <= self._until or (code == _KILLED and not self._killed)
        if cause and code not in (0, decide.RESTART_WANTED):
            self._fail(decide.Failure(task, at, code, decide.exit_text(code)), process.pid)

    def _fail(self, failure: decide.Failure, pid: int) -> None:
        if failure.task not in self._failures:
            self._failures[failure.task] = failure
            self._history.write("failed", failure.task, pid, failure.code, failure.detail)

    @property
    def codes(self) -> tuple[int, ...]:
        """The exit codes of all that ended."""
        return tuple(self._codes.values())

    def pids(self) -> dict[Task, int]:
        """The processes that run."""
        return {t: p.pid for t, p in self._processes.items() if t not in self._codes}

    def sights(self, now: float) -> tuple[Sight, ...]:
        """What is seen of the tasks that run, at a time of the supervisor's clock."""
        return self._watcher.look(self.pids(), now)

    def check_progress(self, sights: tuple[Sight, ...], timeout: float, now: float) -> Stall | None:
        """Count a task that holds the others up as failed, after it wrote its stack into its log."""
        over = self._ending or self._failures or self._is_training_over()
        stall = None if over else find_stall(sights, timeout, now)
        if stall is None or not (stall.stopped or self._signs_arrive(stall.task)):
            return None
        process = self._processes[stall.task]
        self._history.write("stalled", stall.task, process.pid, detail=stall.detail)
        if not stall.stopped:
            self._ask_for_stack(stall.task, process)
        failure = decide.Failure(stall.task, time.time(), decide.STALLED, stall.detail)
        self._fail(failure, process.pid)
        if stall.stopped:
            # It hears no request to end, and the next generation need not wait for an answer.
            process.kill()
        return stall

    def _signs_arrive(self, task: Task) -> bool:
        """Whether a task could show progress: a file system that became read-only is not its silence."""
        try:
            # Not the file itself, whose time is what tasks show.
            os.utime(self.plan.place.progress(task, self.plan.generation).parent)
        except OSError as error:
            self._files.note(error.strerror or str(error))
            return False
        return True

    def _is_training_over(self) -> bool:
        """Workers that compute together end together: who is left saves, exports, or says good-bye."""
        jobs = {task.type for task in self.plan.tasks}
        ended = {task.type for task, code in self._codes.items() if code == 0}
        return "ps" not in jobs and bool(ended & {"chief", "worker"})

    def _ask_for_stack(self, task: Task, process: Process) -> None:
        log = self.plan.place.log(task)
        size = size_of(log)
        process.send(signal.SIGUSR1)
        until = deadline = time.monotonic() + _STACK_WAIT
        while time.monotonic() < until:
            time.sleep(0.02)
            before, size = size, size_of(log)
            if size != before:
                until = min(deadline, time.monotonic() + _STACK_PAUSE)

    def end(self, ending: decide.Ending) -> None:
        """Ask every task to end; this is decided once."""
        self._ending, self._until = ending, time.time()
        self._history.write("ending", detail=ending.reason.value)
        for process in self._processes.values():
            if process.poll() is None:
                process.send(signal.SIGTERM)

    def kill(self) -> None:
        """End every task at once, by its number, also those that are stopped."""
        self._killed = True
        end_all(list(self._processes.values()))

    def report(self, failure: decide.Failure) -> str:
        """Return what a task that failed left behind: its traceback, or its last lines."""
        record = read_error(self.plan.place.error(failure.task, self.plan.generation))
        if record is not None and record["traceback"] and failure.code == record["code"]:
            return str(record["traceback"]).rstrip()
        log = self.plan.place.log(failure.task)
        return last_lines(log, self._starts[failure.task])

    def _open_log(self, task: Task) -> int:
        """Return where a task's part of its log begins; a line divides generations."""
        log = self.plan.place.log(task)
        with self._files.attempt(), log.open("a") as file:
            if file.tell():
                file.write(f"--- {task}, generation {self.plan.generation} ---\n")
        return size_of(log)
