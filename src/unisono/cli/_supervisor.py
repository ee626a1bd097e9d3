"""Runs generations of tasks until one is done: obeys what `_decide` says."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from unisono._errors import ClusterError, InvalidArgumentError
from unisono.cli import _restart_policy as decide
from unisono.cli._console import Shows
from unisono.cli._generation import Starter, Tasks
from unisono.cli._options import LaunchOptions
from unisono.cli._orphan_reaper import sweep
from unisono.cli._plan import MARK, LaunchPlan, RunPaths, make_plan, tasks_of
from unisono.cli._processes import Guard, Process, Spares, free_ports
from unisono.cli._run_files import BestEffort, History, has_room, read_capacity, write_aside
from unisono.cli._stall_detector import ActiveClock, Sight
from unisono.cluster_resolver._spec import Task

#: How long the supervisor sleeps when no process ends, in seconds.
_PAUSE = 0.05
#: Seconds between two looks at progress, capacity and spares.
_LOOK = 0.5
#: Spares are made when training runs: when every task wrote its progress, or after so many seconds.
_SPARES_AFTER = 20.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: A task that is stopped for so long is named on the terminal.
_STOPPED_AFTER = 2.0


@dataclasses.dataclass(frozen=True)
class Launch:
    """What a supervisor is given.

    Args:
        options: how many tasks, and what happens when one fails.
        place: where the files go; the directory exists.
        environ: what every process starts with.
        job: what a task is told, from the plan of its generation.
        screen: where the chief's output goes.
        asked: returns the signals by which the launcher was asked to stop, so far.
        describe: returns the start-up block of the first generation.
        gpus: what CUDA_VISIBLE_DEVICES may name, to be divided among the tasks.
    """

    options: LaunchOptions
    place: RunPaths
    environ: Mapping[str, str]
    job: Callable[[LaunchPlan, Task], dict[str, Any]]
    screen: Shows
    asked: Callable[[], tuple[int, ...]] = tuple
    describe: Callable[[LaunchPlan], str] = dataclasses.field(default=lambda plan: "")
    gpus: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a launch ended.

    Args:
        code: the launcher's exit code.
        plan: the last generation.
        failure: its first failure, where one was the reason.
        detail: why there was no restart; may be empty.
        report: the traceback or the last lines of the task that failed first.
    """

    code: int
    plan: LaunchPlan
    failure: decide.Failure | None = None
    detail: str = ""
    report: str = ""


class Supervisor:
    """Runs a launch in the thread that calls `run`.

    Args:
        launch: what to run.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._options = launch.options
        self._files = BestEffort(launch.screen.say, launch.place.root)
        self._history = History(launch.place.history, self._files)
        self._wake = threading.Event()
        self._record = decide.GenerationRecord()
        self._clock = ActiveClock()
        self._guard: Guard
        self._spares: Spares
        self._ports: list[int] = []
        self._named: set[int] = set()

    def run(self) -> Outcome:
        """Run generations until one is done or none may follow; no process is left.

        Raises:
            ClusterError: when another launcher uses the directory, or no ports are free.
            InvalidArgumentError: when files cannot be made in the directory.
        """
        with _locked(self._launch.place, self._files), self._helpers():
            self._history.write("launched", pid=os.getpid())
            outcome = self._generations()
            self._history.write("quit", exit_code=outcome.code, detail=outcome.detail)
            return outcome

    def _make_folders(self) -> None:
        for folder in ("errors", "progress"):
            with self._files.attempt():
                (self._launch.place.root / folder).mkdir(parents=True, exist_ok=True)

    @contextmanager
    def _helpers(self) -> Iterator[None]:
        self._guard = Guard(self._launch.environ[MARK])
        self._spares = Spares(lambda: self._start("spares.log", warm=True), 0)
        try:
            yield
        finally:
            self._spares.dismiss()
            self._guard.close()

    def _start(self, log: str, warm: bool = False) -> Process:
        launch = self._launch
        return Process(launch.environ, launch.place.root / log, self._guard, self._wake.set, warm)

    def _generations(self) -> Outcome:
        generation, workers = 0, self._options.worker_range[1]
        while True:
            outcome = self._generation(self._plan(generation, workers))
            if isinstance(outcome, Outcome):
                return outcome
            generation, workers = generation + 1, outcome.workers

    def _plan(self, generation: int, workers: int) -> LaunchPlan:
        count = len(tasks_of(self._options, workers))
        # New ports: what is left of the old generation must not be taken for the new one.
        self._ports = free_ports(count, avoid=self._ports)
        self._spares.resize(self._options.spare_count(count))
        launch = self._launch
        plan = make_plan(self._options, generation, workers, self._ports, launch.place, launch.gpus)
        self._history.generation = generation
        self._make_folders()
        self._raise_fence(plan)
        return plan

    def _raise_fence(self, plan: LaunchPlan) -> None:
        try:
            write_aside(plan.place.fence, f"{plan.generation}\n")
        except OSError as error:
            self._files.note(error.strerror or str(error))
            with self._files.attempt():
                # It may be of a launch before, at a later generation.
                plan.place.fence.unlink(missing_ok=True)
        with self._files.attempt():
            plan.place.finished.unlink(missing_ok=True)

    def _generation(self, plan: LaunchPlan) -> Outcome | decide.Restart:
        screen = self._launch.screen
        screen.say(self._launch.describe(plan) if plan.generation == 0 else _again(plan))
        starter = Starter(
            self._spares.take, lambda task: self._start(plan.place.log(task).name), self._launch.job
        )
        tasks = Tasks(plan, starter, self._history, self._files)
        try:
            screen.follow(plan.shown, tasks.tail())
            ending = self._watch(tasks)
        finally:
            tasks.kill()
            left = sweep(self._launch.environ[MARK], self._spares.pids())
            screen.finish()
        if left:
            numbers = " ".join(map(str, sorted(left)))
            self._history.write("swept", detail=numbers)
            if ending.reason is decide.FailureReason.DONE:
                screen.say(f"unisono: ended what tasks had left behind: processes {numbers}")
        return self._next(tasks, ending)

    def _watch(self, tasks: Tasks) -> decide.Ending:
        started = looked = time.monotonic()
        resize = False
        while True:
            now = time.monotonic()
            if now - looked >= _LOOK:
                looked = now
                resize = self._look(tasks, started, now)
            state = tasks.look(self._launch.asked(), resize)
            action = decide.watch(state, self._options, now)
            if isinstance(action, decide.Over):
                return action.ending
            if isinstance(action, decide.End):
                tasks.end(action.ending)
                self._launch.screen.say(_ending_text(action.ending, tasks.plan))
            elif isinstance(action, decide.Kill):
                tasks.kill()
            elif decide.waits_for_evaluator(state):
                self._tell_evaluator(tasks.plan)
            self._wake.wait(_PAUSE)
            self._wake.clear()
            self._launch.screen.flush()

    def _tell_evaluator(self, plan: LaunchPlan) -> None:
        finished = plan.place.finished
        if finished.exists():
            return
        with self._files.attempt():
            write_aside(finished, f"{plan.generation}\n")
            self._history.write("finished", detail="the evaluator is waited for")
            self._launch.screen.say("unisono: training has ended; the evaluator finishes")

    def _check_directory(self) -> None:
        """Make the directory again where it was removed, and report that it is full."""
        place = self._launch.place
        if not (place.root / "progress").is_dir():
            self._files.note("it was removed")
            self._make_folders()
        elif not has_room(place.root):
            self._files.note(os.strerror(errno.ENOSPC))

    def _look(self, tasks: Tasks, started: float, now: float) -> bool:
        """Look at what changes slowly; return whether another number of workers is wanted."""
        self._check_directory()
        active = self._clock.read(now)
        sights = tasks.sights(active)
        self._name_stopped(tasks, sights, active)
        tasks.check_progress(sights, self._options.stall_timeout, active)
        if now - started > _SPARES_AFTER or _all_progress(sights):
            self._fill_spares(now)
        capacity = read_capacity(tasks.plan.place.capacity)
        self._record = dataclasses.replace(self._record, capacity=capacity)
        workers = sum(task.type == "worker" for task in tasks.plan.tasks)
        return decide.wants_resize(self._record, self._options, workers, started, now)

    def _fill_spares(self, now: float) -> None:
        try:
            spare = self._spares.fill(now)
        except OSError as error:  # no memory, or no room for a process: the tasks matter more
            self._history.write("no spare", detail=str(error))
            return
        if spare is not None:
            self._history.write("spare", pid=spare.pid)

    def _name_stopped(self, tasks: Tasks, sights: tuple[Sight, ...], now: float) -> None:
        pids = tasks.pids()
        for sight in sights:
            pid = pids[sight.task]
            if sight.stopped_at is None:
                self._named.discard(pid)
            elif now - sight.stopped_at > _STOPPED_AFTER and pid not in self._named:
                self._named.add(pid)
                self._history.write("stopped", sight.task, pid)
                self._launch.screen.say(f"unisono: {sight.task} is stopped; `kill -CONT {pid}` lets it go on")

    def _next(self, tasks: Tasks, ending: decide.Ending) -> Outcome | decide.Restart:
        now = time.monotonic()
        first = ending.first
        # Who takes a machine away says so before the task fails, perhaps just before.
        capacity = read_capacity(self._launch.place.capacity)
        self._record = dataclasses.replace(self._record, capacity=capacity)
        if first is not None:
            failures = (*self._record.failures, (now, first.task))
            self._record = dataclasses.replace(self._record, failures=failures)
        action = decide.after(self._record, ending, tasks.codes, self._options, now)
        if isinstance(action, decide.Quit):
            report = "" if first is None else tasks.report(first)
            return Outcome(action.code, tasks.plan, first, action.detail, report)
        self._record = dataclasses.replace(self._record, restarts=(*self._record.restarts, now))
        self._history.write("restart", detail=f"{action.workers} workers in {action.delay:g} s")
        number = self._sleep(action.delay)
        return action if number is None else Outcome(128 + number, tasks.plan)

    def _sleep(self, seconds: float) -> int | None:
        """Wait before a restart; return the signal by which the launcher was asked to stop."""
        until = time.monotonic() + seconds
        while not self._launch.asked():
            left = until - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(left, _PAUSE))
        return self._launch.asked()[0]


@contextmanager
def _locked(place: RunPaths, files: BestEffort) -> Iterator[None]:
    """One launcher per directory: two would write each other's fence.

    Raises:
        ClusterError: when another one uses it.
        InvalidArgumentError: when nothing can be written there; a full disk is gone on with.
    """
    try:
        file = (place.root / "lock").open("w")
    except OSError as error:
        if error.errno in _NO_ROOM:
            files.note(os.strerror(error.errno))
            yield
            return
        raise InvalidArgumentError(
            f"The log directory must be one that can be written. Received: {str(place.root)!r} "
            f"({error.strerror}). Write `--log-dir` with another directory."
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ClusterError(
                "A log directory serves one launcher at a time. "
                f"Received: {place.root}, which another one uses. Write `--log-dir` with another directory."
            ) from None
        yield


def _all_progress(sights: tuple[Sight, ...]) -> bool:
    computing = [s for s in sights if s.task.type in ("chief", "worker")]
    return bool(computing) and all(s.changed_at is not None for s in computing)


def _again(plan: LaunchPlan) -> str:
    return f"unisono: generation {plan.generation} starts with {len(plan.tasks)} tasks"


def _ending_text(ending: decide.Ending, plan: LaunchPlan) -> str:
    if ending.first is not None:
        task = ending.first.task
        return f"unisono: {task} {ending.first.detail} (log: {plan.place.log(task)}); the others are ended"
    texts = {
        decide.FailureReason.DONE: "unisono: done; servers are ended",
        decide.FailureReason.STOPPED: f"unisono: stopping; tasks have {plan.options.grace:g} s to save",
        decide.FailureReason.WANTED: "unisono: a task asks for a restart; the others are asked to save",
        decide.FailureReason.RESIZE: "unisono: another number of workers is wanted; tasks are asked to save",
    }
    return texts[ending.reason]
