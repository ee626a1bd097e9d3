"""Run generations of tasks until one succeeds: execute the decisions of `_restart_policy`.

Tests: tests/unit/launcher/test_supervisor.py, tests/cluster/test_launch.py,
tests/cluster/test_launch_restarts.py.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from unisono._system._files import replace_file
from unisono._system._lease import ActiveClock
from unisono.cluster_resolver._spec import Task
from unisono.launcher import _restart_policy as decide
from unisono.launcher._generation import TaskGroup
from unisono.launcher._launch_file import write_launch_file
from unisono.launcher._machines import LocalMachine, Machines
from unisono.launcher._options import LaunchOptions
from unisono.launcher._plan import LaunchPlan, RunPaths
from unisono.launcher._run_files import BestEffort, History, has_room, locked
from unisono.launcher._stall_detector import TaskProgress
from unisono.launcher.terminal._console import BackgroundConsole, Console
from unisono.launcher.terminal._live_console import Observation

#: Seconds between two checks for errors and signals. The end of a process wakes the supervisor at once.
_POLL = 0.05
#: Seconds, for each task, from the end of a process to the check that follows: twice what that takes.
_GATHER = 2e-5
#: Seconds between two checks of progress, capacity and spares, which read a file per task.
_SLOW_POLL = 0.5
#: Spares start once training runs, because their imports would slow the tasks' own: when every task has
#: written its progress, or after so many seconds, for programs that write none.
_SPARES_AFTER = 20.0
#: Seconds after which a stopped task is reported on the terminal; debuggers stop a process for an instant.
_STOPPED_AFTER = 2.0


@dataclasses.dataclass(frozen=True)
class Launch:
    """The input of a supervisor.

    Args:
        paths: the files; their directory exists.
        stop_requests: returns the signals that asked the launcher to stop, so far.
        describe: returns the start-up block of the first generation.
        gpus: the values for CUDA_VISIBLE_DEVICES, to be divided among the tasks.
        machines: run the tasks; None for this machine.
        show: is given what a terminal shows of the tasks, twice a second and at the end of a generation.
        title: the program in short, for those who look at the launch.
        servers: where the tasks write their events, if not in the log folder.
    """

    options: LaunchOptions
    paths: RunPaths
    environ: Mapping[str, str]
    job: Callable[[LaunchPlan, Task], dict[str, Any]]
    screen: Console | BackgroundConsole
    stop_requests: Callable[[], tuple[int, ...]] = tuple
    describe: Callable[[LaunchPlan], str] = dataclasses.field(default=lambda plan: "")
    gpus: tuple[str, ...] = ()
    machines: Machines | None = None
    show: Callable[[Observation], None] = dataclasses.field(default=lambda seen: None)
    title: str = ""
    servers: Mapping[str, str] | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a launch ended.

    Args:
        detail: why there was no restart; may be empty.
        report: the traceback, or the last lines of the log, of the task that failed first.
    """

    code: int
    plan: LaunchPlan
    failure: decide.Failure | None = None
    detail: str = ""
    report: str = ""


class Supervisor:
    """Runs a launch in the thread that calls `run`."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._options = launch.options
        self._files = BestEffort(launch.screen.say, launch.paths.root)
        self._history = History(launch.paths.history, self._files)
        self._wake = threading.Event()
        self._record = decide.GenerationRecord()
        self._clock = ActiveClock()
        self._machines: Machines = launch.machines or LocalMachine(
            launch.options, launch.paths, launch.environ, launch.job, launch.gpus
        )
        self._reported_stopped: set[int] = set()
        #: Why no task starts again, once that is decided.
        self._quit: decide.Quit | None = None
        #: True if the screen has shown why the generation ends. All tasks may end before that is seen.
        self._is_explained = False

    def run(self) -> Outcome:
        """Run generations until one succeeds or none may follow; leave no process behind.

        Raises:
            ClusterError: when another launcher uses the directory, or no ports are free.
            InvalidArgumentError: when files cannot be created in the directory.
        """
        running = self._machines.running(self._wake.set, self._files)
        with locked(self._launch.paths.root, self._files), running:
            with self._files.attempt():
                launch = self._launch
                write_launch_file(launch.paths, self._options, launch.title, launch.servers)
            self._history.write("launched", pid=os.getpid())
            outcome = self._generations()
            self._history.write("quit", exit_code=outcome.code, detail=outcome.detail)
            return outcome

    def _make_folders(self) -> None:
        for folder in ("errors", "events", "progress"):
            with self._files.attempt():
                (self._launch.paths.root / folder).mkdir(parents=True, exist_ok=True)

    def _generations(self) -> Outcome:
        generation, workers = 0, self._options.worker_range[1]
        while True:
            outcome = self._generation(self._plan(generation, workers))
            if isinstance(outcome, Outcome):
                return outcome
            generation, workers = generation + 1, outcome.workers

    def _plan(self, generation: int, workers: int) -> LaunchPlan:
        plan = self._machines.plan(generation, workers)
        self._history.generation = generation
        self._make_folders()
        self._raise_fence(plan)
        return plan

    def _raise_fence(self, plan: LaunchPlan) -> None:
        text = f"{plan.generation}\n"
        try:
            replace_file(plan.paths.fence, text, durable=True)
        except OSError as error:
            self._files.note(error.strerror or str(error))
            with self._files.attempt():
                # A fence of an earlier launch may name a later generation, and would stop this one from
                # writing. This launch's own is there if the disk failed after it was renamed.
                if plan.paths.fence.exists() and plan.paths.fence.read_text() != text:
                    plan.paths.fence.unlink()
        with self._files.attempt():
            plan.paths.finished.unlink(missing_ok=True)

    def _generation(self, plan: LaunchPlan) -> Outcome | decide.Restart:
        screen = self._launch.screen
        screen.say(self._launch.describe(plan) if plan.generation == 0 else _restart_text(plan))
        tasks = TaskGroup(plan, self._machines.source(plan), self._history, self._files)
        try:
            for task in self._machines.shown(plan):
                screen.follow(task, tasks.tail(task))
            ending = self._watch(tasks)
        finally:
            tasks.kill()
            left = self._machines.sweep()
            self._launch.show(tasks.observation(()))
            screen.finish()
        if left:
            numbers = " ".join(map(str, sorted(left)))
            self._history.write("swept", detail=numbers)
            if ending.reason is decide.FailureReason.DONE:
                screen.say(f"unisono: killed processes that tasks had left behind: {numbers}")
        return self._decide_next(tasks, ending)

    def _watch(self, tasks: TaskGroup) -> decide.Ending:
        started = looked = time.monotonic()
        resize, self._is_explained = False, False
        while True:
            now = time.monotonic()
            if now - looked >= _SLOW_POLL:
                looked = now
                resize = self._poll_slowly(tasks, started, now)
            state = tasks.observe(self._launch.stop_requests(), resize)
            # Again, until nothing new is found: a task may fail while another one is started.
            while self._quit is None and self._restart_failed(tasks, state, now):
                state = tasks.observe(self._launch.stop_requests(), resize)
            action = decide.next_action(state, self._options, now)
            if isinstance(action, decide.Completion):
                return action.ending
            if isinstance(action, decide.Terminate):
                tasks.terminate(action.ending)
                self._launch.screen.say(_ending_text(action.ending, tasks.plan))
                self._is_explained = True
            elif isinstance(action, decide.Kill):
                tasks.kill()
            elif decide.waits_for_evaluator(state):
                self._notify_evaluator(tasks.plan)
            if self._wake.wait(_POLL):
                # Where many tasks end, one look finds several of them.
                time.sleep(_GATHER * len(tasks.plan.tasks))
            self._wake.clear()
            self._launch.screen.flush()

    def _restart_failed(self, tasks: TaskGroup, state: decide.Generation, now: float) -> bool:
        """Start single tasks again where the others go on; return whether a failure was dealt with."""
        screen, plan = self._launch.screen, tasks.plan
        for failed in (restarted := decide.to_restart(state, self._options)):
            action = decide.task_restart(self._record, failed, self._options, now)
            if isinstance(action, decide.Quit):
                self._quit = action
                return False
            self._record = decide.with_failure(self._record, failed, now)
            tasks.restart_later(failed.task, now + action.delay)
            detail = "" if failed.failure is None else failed.failure.detail
            self._history.write("restart task", failed.task, detail=f"in {action.delay:g} s")
            screen.say(
                f"unisono: {failed.task} {detail} (log: {plan.paths.log(failed.task)}); it starts again in "
                f"{action.delay:g} s, the others go on (restart {action.count} of {self._options.restarts})"
            )
        if state.ending is None and not state.signals:
            for task in tasks.restart_due(now):
                screen.say(f"unisono: {task} was started again")
        return bool(restarted)

    def _notify_evaluator(self, plan: LaunchPlan) -> None:
        # Each time: a server elsewhere may not answer at once.
        self._machines.finish_evaluator(plan)
        finished = plan.paths.finished
        if finished.exists():
            return
        with self._files.attempt():
            replace_file(finished, f"{plan.generation}\n", durable=True)
            self._history.write("finished", detail="the evaluator is waited for")
            self._launch.screen.say("unisono: training has ended; waiting for the evaluator")

    def _check_directory(self) -> None:
        """Create the directory again where it was removed; report where it is full."""
        paths = self._launch.paths
        if not (paths.root / "progress").is_dir():
            self._files.note("it was removed")
            self._make_folders()
        elif not has_room(paths.root):
            self._files.note(os.strerror(errno.ENOSPC))

    def _poll_slowly(self, tasks: TaskGroup, started: float, now: float) -> bool:
        """Check what changes slowly; return whether another number of workers is wanted."""
        self._check_directory()
        active = self._clock.now()
        progress = tasks.progress(active)
        self._launch.show(tasks.observation(progress))
        self._report_stopped(tasks, progress, active)
        tasks.check_progress(progress, self._options.stall_timeout, active)
        if now - started > _SPARES_AFTER or _all_progress(progress):
            self._fill_spares(now)
        capacity = self._machines.capacity(tasks.plan.paths)
        self._record = dataclasses.replace(self._record, capacity=capacity)
        workers = sum(task.type == "worker" for task in tasks.plan.tasks)
        return decide.wants_resize(self._record, self._options, workers, started, now)

    def _fill_spares(self, now: float) -> None:
        try:
            spare = self._machines.fill_spares(now)
        except OSError as error:  # no memory, or too many processes: training continues without a spare
            self._history.write("no spare", detail=str(error))
            return
        if spare is not None:
            self._history.write("spare", pid=spare)

    def _report_stopped(self, tasks: TaskGroup, progress: tuple[TaskProgress, ...], now: float) -> None:
        pids = tasks.pids()
        for each in progress:
            pid = pids[each.task]
            if each.stopped_at is None:
                self._reported_stopped.discard(pid)
            elif now - each.stopped_at > _STOPPED_AFTER and pid not in self._reported_stopped:
                self._reported_stopped.add(pid)
                self._history.write("stopped", each.task, pid)
                self._launch.screen.say(f"unisono: {each.task} is stopped; `kill -CONT {pid}` resumes it")

    def _decide_next(self, tasks: TaskGroup, ending: decide.Ending) -> Outcome | decide.Restart:
        now = time.monotonic()
        first = ending.first
        # Read again: a machine's owner writes the lower capacity before its task fails, perhaps just before.
        capacity = self._machines.capacity(self._launch.paths)
        self._record = dataclasses.replace(self._record, capacity=capacity)
        if first is not None:
            failures = (*self._record.failures, (now, first.task))
            self._record = dataclasses.replace(self._record, failures=failures)
        action = self._quit or decide.next_generation(
            self._record, ending, tasks.codes, self._machines.options_after(first), now
        )
        if isinstance(action, decide.Quit):
            report = "" if first is None else tasks.report(first)
            return Outcome(action.code, tasks.plan, first, action.detail, report)
        if first is not None and not self._is_explained:
            self._launch.screen.say(_failure_text(first, tasks.plan))
        self._record = dataclasses.replace(self._record, restarts=(*self._record.restarts, now))
        self._history.write("restart", detail=f"{action.workers} workers in {action.delay:g} s")
        self._machines.wait_until_ready(action.workers, self._launch.stop_requests)
        number = self._sleep(action.delay)
        if number is None:
            return action
        # The tasks may all have saved, for another number of workers.
        return Outcome(decide.stopped_code(number, tasks.codes), tasks.plan)

    def _sleep(self, seconds: float) -> int | None:
        """Wait before a restart; return the signal that asked the launcher to stop meanwhile."""
        until = time.monotonic() + seconds
        while not self._launch.stop_requests():
            left = until - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(left, _POLL))
        return self._launch.stop_requests()[0]


def _all_progress(progress: tuple[TaskProgress, ...]) -> bool:
    computing = [s for s in progress if s.task.type in ("chief", "worker")]
    return bool(computing) and all(s.changed_at is not None for s in computing)


def _restart_text(plan: LaunchPlan) -> str:
    return f"unisono: generation {plan.generation} starts with {len(plan.tasks)} tasks"


def _failure_text(failure: decide.Failure, plan: LaunchPlan) -> str:
    return f"unisono: {failure.task} {failure.detail} (log: {plan.paths.log(failure.task)})"


def _ending_text(ending: decide.Ending, plan: LaunchPlan) -> str:
    if ending.first is not None:
        return f"{_failure_text(ending.first, plan)}; stopping the others"
    texts = {
        decide.FailureReason.DONE: "unisono: done; stopping the servers",
        decide.FailureReason.STOPPED: f"unisono: stopping; tasks have {plan.options.grace:g} s to save",
        decide.FailureReason.WANTED: "unisono: a task requested a restart; asking the others to save",
        decide.FailureReason.RESIZE: "unisono: resizing to another number of workers; asking tasks to save",
    }
    return texts[ending.reason]
