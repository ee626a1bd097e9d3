"""One generation of tasks: start, observe and end their processes."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from unisono._system._signals import RESTART_WANTED
from unisono.cluster.liveness._task_events import step_file
from unisono.cluster_resolver._spec import Task
from unisono.launcher import _restart_policy as decide
from unisono.launcher._plan import LaunchPlan
from unisono.launcher._processes import TaskProcess, kill_all
from unisono.launcher._run_files import (
    BestEffort,
    ErrorRecord,
    History,
    Tail,
    last_lines,
    names_in,
    read_error,
    size_of,
)
from unisono.launcher._stall_detector import ProgressMonitor, Stall, TaskProgress, find_stall, read_step
from unisono.launcher.terminal._live_console import Observation

#: A shell's exit code for a program that cannot be started.
_NOT_STARTED = 126
_KILLED = 128 + signal.SIGKILL
#: The most seconds for a task to write its stack traces into its log: on an idle machine it takes
#: milliseconds.
_STACK_WAIT = 5.0
#: faulthandler writes line by line, and gives no sign of its end: assume it once the log has not grown for so
#: long.
_STACK_PAUSE = 0.2
#: Seconds for a process that has raised an exception to end, before its task is started again without it.
_END_WITHIN = 3.0


@dataclasses.dataclass(frozen=True)
class ProcessSource:
    """Where tasks get their processes from."""

    claim: Callable[[], TaskProcess | None]
    start: Callable[[Task], TaskProcess]
    job: Callable[[LaunchPlan, Task], dict[str, Any]]


class TaskGroup:
    """The processes of one generation."""

    def __init__(self, plan: LaunchPlan, starter: ProcessSource, history: History, files: BestEffort) -> None:
        self.plan = plan
        self._history, self._files = history, files
        self._processes: dict[Task, TaskProcess] = {}
        self._failures: dict[Task, decide.Failure] = {}
        self._codes: dict[Task, int] = {}
        self._starts = {task: self._open_log(task) for task in plan.tasks}
        self._errors = {task: plan.paths.error(task, plan.generation) for task in plan.tasks}
        self._monitor = ProgressMonitor({t: plan.paths.progress(t, plan.generation) for t in plan.tasks})
        self._ending: decide.Ending | None = None
        self._raised: set[Task] = set()
        #: Of these, those whose program does not use the parameter servers.
        self._apart: set[Task] = set()
        #: The tasks that have said that their state is saved; their processes may still run.
        self._saved: set[Task] = set()
        #: A failure up to this time, in seconds since the epoch, is a possible root cause; a later one is the
        #: consequence of the SIGTERM that the launcher sent.
        self._until = math.inf
        self._killed = False
        #: The tasks that are asked to end when their chief has ended.
        self._served_later: list[Task] = []
        self._starter = starter
        #: The tasks that have failed and are started again, and when; in seconds of the monotonic clock.
        self._restarts: dict[Task, float] = {}
        #: The tasks that were started again.
        self._restarted: set[Task] = set()
        for task in plan.tasks:
            self._start(task, starter)

    def restart_later(self, task: Task, at: float) -> None:
        """Note that a task which has failed starts again; until then it does not count as failed.

        Args:
            at: when, in seconds of the monotonic clock; later where its process has not ended by then.
        """
        self._restarts[task] = at

    def restart_due(self, now: float) -> list[Task]:
        """Start the tasks again whose time has come, and return them."""
        due = []
        for task, at in list(self._restarts.items()):
            process = self._processes.get(task)
            if process is not None and task not in self._codes:
                # It has raised an exception, or is stopped: all it can still do is hang.
                if now >= at + _END_WITHIN:
                    process.kill()
                continue
            if now >= at:
                del self._restarts[task]
                self._restarted.add(task)
                self._failures.pop(task, None)
                self._codes.pop(task, None)
                self._raised.discard(task)
                self._saved.discard(task)
                self._starts[task] = self._open_log(task)
                self._monitor.begin_again(task)
                self._start(task, self._starter)
                due.append(task)
        return due

    def _start(self, task: Task, starter: ProcessSource) -> None:
        for path in (self.plan.paths.error, self.plan.paths.progress):
            with self._files.attempt():
                path(task, self.plan.generation).unlink(missing_ok=True)
        try:
            process = self._assign(task, starter)
        except OSError as error:
            detail = f"could not be started: {error}"
            self._failures[task] = decide.Failure(task, time.time(), _NOT_STARTED, detail)
            self._codes[task] = _NOT_STARTED
            self._history.write("failed", task, exit_code=_NOT_STARTED, detail=detail)
            return
        self._processes[task] = process
        self._history.write("started", task, process.pid, detail="warm" if process.warm else "cold")

    def _assign(self, task: Task, starter: ProcessSource) -> TaskProcess:
        job = starter.job(self.plan, task)
        # A spare may have died, or have been killed for memory, since the pool last looked: try the next.
        while (warm := starter.claim()) is not None:
            if warm.assign(job):
                return warm
            kill_all([warm])
        process = starter.start(task)
        if not process.assign(job):
            self._history.write("lost", task, process.pid, detail="ended before it took its task")
        return process

    def tail(self, task: Task) -> Tail:
        """Return a reader of a task's output."""
        return Tail(self.plan.paths.log(task), self._starts[task])

    def observe(self, signals: tuple[int, ...], resize: bool) -> decide.Generation:
        """Return the current state of the generation."""
        codes = {task: process.poll() for task, process in self._processes.items()}
        # After that, so that the file of a task that has ended is there; and not one look for each task.
        written = names_in(self.plan.paths.root / "errors")
        for task, process in self._processes.items():
            code = codes[task]
            has_ended = code is not None and task not in self._codes
            self._note_error(task, process, has_ended or self._errors[task].name in written)
            if code is not None and has_ended:
                self._note_end(task, process, code)
        if self._served_later and decide.chief_of(self.plan.tasks) in self._codes:
            self._ask_to_end(self._served_later)
            self._served_later = []
        states = tuple(
            self._state_of(t, waits=t in self._restarts and self._ending is None) for t in self.plan.tasks
        )
        return decide.Generation(states, self._ending, signals, resize)

    def _state_of(self, task: Task, *, waits: bool) -> decide.TaskState:
        restarted = task in self._restarted or waits
        if waits:
            return decide.TaskState(task, restarted=restarted)
        return decide.TaskState(
            task,
            self._codes.get(task),
            self._failures.get(task),
            task in self._raised,
            restarted,
            task in self._apart,
        )

    def _note_error(self, task: Task, process: TaskProcess, is_written: bool) -> None:
        """Count a task as failed from the time of its exception: it may take long to end after that."""
        if task in self._raised or task in self._saved:
            return
        record = self._error(task, process, is_written)
        if record is None:
            return
        if record["code"] == RESTART_WANTED:
            self._saved.add(task)
            return
        self._raised.add(task)
        if record.get("apart"):
            self._apart.add(task)
        if record["at"] <= self._until:
            failure = decide.Failure(task, record["at"], record["code"], record["summary"])
            self._fail(failure, process.pid)

    def _error(self, task: Task, process: TaskProcess | None, is_written: bool = True) -> ErrorRecord | None:
        """Return a task's record of its exception, from its file or else from memory."""
        record = read_error(self._errors[task]) if is_written else None
        kept = None if process is None else process.kept
        return kept.error if record is None and kept is not None else record

    def _note_end(self, task: Task, process: TaskProcess, code: int) -> None:
        has_saved = task in self._saved
        self._history.write("ended", task, process.pid, code, "its state was saved" if has_saved else "")
        # However its process has ended after that: killed while Python ends, or by a barrier of JAX.
        code = RESTART_WANTED if has_saved else code
        self._codes[task] = code
        at = process.ended_at or time.time()
        # Within a cluster only the launcher sends SIGKILL. If it did not, the kill came from outside (the
        # kernel's OOM killer, an operator): a root cause, even when it is noticed after the others were asked
        # to end.
        cause = at <= self._until or (code == _KILLED and not self._killed)
        if cause and code not in (0, RESTART_WANTED):
            detail = process.loss or decide.exit_text(code)
            self._fail(decide.Failure(task, at, code, detail), process.pid, bool(process.loss))

    def _fail(self, failure: decide.Failure, pid: int, is_loss: bool = False) -> None:
        known = self._failures.get(failure.task)
        # A machine may have been lost before its process failed for that very reason, and be missed later.
        if known is None or (is_loss and failure.at <= known.at):
            self._failures[failure.task] = failure
            # Of the file that outlives a SIGKILL: the next generation begins to write it anew.
            steps = {t: read_step(step_file(self.plan.paths.events(t))) for t in self.plan.tasks}
            step = steps[failure.task]
            # The others may have made a step more.
            facts = {} if step < 0 else {"step": step, "reached": max(steps.values())}
            self._history.write("failed", failure.task, pid, failure.code, failure.detail, **facts)

    @property
    def codes(self) -> tuple[int, ...]:
        """The exit codes of the tasks that have ended, without those that have no state of their own."""
        training = decide.saving_tasks(self.plan.tasks)
        return tuple(code for task, code in self._codes.items() if task in training)

    def pids(self) -> dict[Task, int]:
        """Return the ids of the running processes."""
        return {t: p.pid for t, p in self._processes.items() if t not in self._codes}

    def observation(self, progress: Sequence[TaskProgress]) -> Observation:
        """Return the tasks' state for a terminal."""
        stopped = {each.task for each in progress if each.stopped_at is not None}
        failed_at = min((failure.at for failure in self._failures.values()), default=None)
        states = {task: self._state_word(task, task in stopped) for task in self.plan.tasks}
        return Observation(self.plan.generation, states, failed_at)

    def _state_word(self, task: Task, is_stopped: bool) -> str:
        if task in self._restarts:
            return "restarts"
        if task in self._failures:
            return "failed"
        if task in self._codes:
            return f"ended ({self._codes[task]})"
        if is_stopped:
            return "stopped"
        return "serves" if task.type == "ps" else "runs"

    def progress(self, now: float) -> tuple[TaskProgress, ...]:
        """Return the progress of the running tasks, at a time of the supervisor's clock."""
        return self._monitor.poll(self.pids(), now)

    def check_progress(self, progress: tuple[TaskProgress, ...], timeout: float, now: float) -> Stall | None:
        """Count a task that stalls the others as failed, after it wrote its stack traces into its log."""
        if self._is_training_over():
            # The others may save or export for long, without a step; a stopped process does neither.
            progress = tuple(dataclasses.replace(each, changed_at=None) for each in progress)
        over = self._ending or self._failures
        stall = None if over else find_stall(progress, timeout, now)
        if stall is None or not (stall.stopped or self._can_report_progress(stall.task)):
            return None
        process = self._processes[stall.task]
        self._history.write("stalled", stall.task, process.pid, detail=stall.detail)
        if not stall.stopped:
            self._request_stack_trace(stall.task, process)
        failure = decide.Failure(stall.task, time.time(), decide.STALLED, stall.detail)
        self._fail(failure, process.pid)
        if stall.stopped:
            # A stopped process does not handle SIGTERM: waiting for its grace period would only delay the
            # restart.
            process.kill()
        return stall

    def _can_report_progress(self, task: Task) -> bool:
        """Return whether a task is able to write its progress: on a read-only file system it is not.

        Without this check, a full or remounted disk would look like a stall of every task.
        """
        try:
            # The directory, not the file: the file's time is the sign of progress.
            os.utime(self.plan.paths.progress(task, self.plan.generation).parent)
        except OSError as error:
            self._files.note(error.strerror or str(error))
            return False
        return True

    def _is_training_over(self) -> bool:
        """Return whether a worker has succeeded: those that compute together finish together."""
        jobs = {task.type for task in self.plan.tasks}
        ended = {task.type for task, code in self._codes.items() if code == 0}
        return "ps" not in jobs and bool(ended & {"chief", "worker"})

    def _request_stack_trace(self, task: Task, process: TaskProcess) -> None:
        log = self.plan.paths.log(task)
        size = size_of(log)
        process.send(signal.SIGUSR1)
        until = deadline = time.monotonic() + _STACK_WAIT
        while time.monotonic() < until:
            time.sleep(0.02)
            before, size = size, size_of(log)
            if size != before:
                until = min(deadline, time.monotonic() + _STACK_PAUSE)

    def terminate(self, ending: decide.Ending) -> None:
        """Send SIGTERM to every task; call this once.

        Where the tasks may save, those that serve a chief get it when the chief has ended.
        """
        for process in self._processes.values():
            # What has ended by now was not asked to, also where that was not seen yet.
            process.poll()
        self._ending, self._until = ending, time.time()
        self._history.write("ending", detail=ending.reason.value)
        may_save = ending.reason not in (decide.FailureReason.DONE, decide.FailureReason.FAILED)
        self._served_later = decide.serving_tasks(self.plan.tasks) if may_save else []
        self._ask_to_end([task for task in self.plan.tasks if task not in self._served_later])

    def _ask_to_end(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            process = self._processes.get(task)
            if process is not None and process.poll() is None:
                process.send(signal.SIGTERM)

    def kill(self) -> None:
        """Kill every task, also those that are stopped."""
        self._killed = True
        kill_all(list(self._processes.values()))

    def report(self, failure: decide.Failure) -> str:
        """Return the traceback of a failed task, or else the last lines of its log."""
        process = self._processes.get(failure.task)
        record = self._error(failure.task, process)
        if record is not None and record["traceback"] and failure.code == record["code"]:
            return record["traceback"].rstrip()
        kept = None if process is None else process.kept
        # What the log did not take is later than what is in it.
        unwritten = "" if kept is None else kept.last_lines()
        log = self.plan.paths.log(failure.task)
        return unwritten or last_lines(log, self._starts[failure.task])

    def _open_log(self, task: Task) -> int:
        """Return the byte of a task's log where this generation begins; a line divides generations."""
        log = self.plan.paths.log(task)
        with self._files.attempt(), log.open("ab+") as file:
            if size := file.tell():
                file.seek(size - 1)
                # A killed process may have written half a line.
                line_end = b"" if file.read(1) == b"\n" else b"\n"
                file.write(line_end + f"--- {task}, generation {self.plan.generation} ---\n".encode())
        return size_of(log)
