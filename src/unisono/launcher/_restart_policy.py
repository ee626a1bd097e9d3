"""The restart policy: pure decisions about a generation of tasks, which the supervisor executes.

`next_action` decides about a generation that runs or is being ended, `next_generation` about what follows it.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import signal
from collections.abc import Iterable

from unisono._system._signals import RESTART_WANTED
from unisono.cluster_resolver._spec import Task
from unisono.launcher._options import LaunchOptions

#: The exit code where a task made no progress, as of the command `timeout`.
STALLED = 124

#: Seconds between SIGTERM and SIGKILL after a failure. The peers cannot save, because their collectives are
#: broken; this is time for their exceptions and logs only.
_FAILURE_GRACE = 3.0
#: The same where all remaining tasks have raised exceptions already: all they can still do is hang at a
#: shutdown barrier.
_RAISED_GRACE = 0.5
#: The delay before the second restart, doubled for each one after it, and its limit. In seconds.
_FIRST_DELAY, _LONGEST_DELAY = 0.5, 30.0

#: Errors of the library about the program itself, which another start does not change.
_MISUSE = re.compile(r"failed: unisono\.(InvalidArgument|InvalidType|Unsupported|MissingPackage)Error\b")
#: A package or a module of the program that is not there, which another start does not change either.
_MISSING = re.compile(r"failed: (unisono\.MissingPackageError|ModuleNotFoundError)\b")

#: JAX aborts a process, in C++, when its coordination service loses a peer.
_ABORTED = 128 + signal.SIGABRT
#: Found in the error of a task whose peer was lost: messages of the system, JAX, Gloo, gRPC and NCCL.
_LOST_PEER = re.compile(
    "closed by peer|reset by peer|broken pipe|connection refused|gloo|nccl|coordination service|heartbeat"
    "|lost (worker|chief)",
    re.I,
)


class FailureReason(enum.Enum):
    """Why a generation ends."""

    DONE = "done"
    FAILED = "failed"
    WANTED = "restart wanted"
    RESIZE = "resize"
    STOPPED = "stopped"


@dataclasses.dataclass(frozen=True)
class Failure:
    """How a task failed.

    Args:
        at: when, in seconds since the epoch.
        code: the code that a shell would show: the exit code, or 128 + the signal's number.
    """

    task: Task
    at: float
    code: int
    detail: str


@dataclasses.dataclass(frozen=True)
class TaskState:
    """The state of a task.

    Args:
        code: its exit code as a shell sees it, None while it runs.
        failure: how it failed; None for failures after the launcher had asked it to end.
        raised: whether its program has raised an exception; the process may still run.
        restarted: whether it was started again alone, while the others went on.
        apart: whether its program has failed and does not use the parameter servers.
    """

    task: Task
    code: int | None = None
    failure: Failure | None = None
    raised: bool = False
    restarted: bool = False
    apart: bool = False


@dataclasses.dataclass(frozen=True)
class Ending:
    """Why and how a generation is being ended.

    Args:
        since: when that was decided, in seconds of the monotonic clock.
        kill_at: when the remaining tasks get SIGKILL, on the same clock.
        first: the root cause, where the reason is a failure.
        signal: the signal that the launcher received, where that is the reason.
    """

    reason: FailureReason
    since: float
    kill_at: float
    first: Failure | None = None
    signal: int = 0
    trained: bool = False


@dataclasses.dataclass(frozen=True)
class Generation:
    """The state of a generation.

    Args:
        ending: set once its end was decided.
        signals: the signals that asked the launcher to stop, in the order of their arrival.
        resize: whether another number of workers is wanted now.
    """

    tasks: tuple[TaskState, ...]
    ending: Ending | None = None
    signals: tuple[int, ...] = ()
    resize: bool = False


class NoAction:
    """Do nothing."""


class Kill:
    """Send SIGKILL to the remaining tasks."""


@dataclasses.dataclass(frozen=True)
class Terminate:
    """Send SIGTERM to the tasks."""

    ending: Ending


@dataclasses.dataclass(frozen=True)
class Completion:
    """All tasks have ended."""

    ending: Ending


def next_action(
    state: Generation, options: LaunchOptions, now: float
) -> NoAction | Terminate | Kill | Completion:
    """Decide what to do with a generation."""
    if state.ending is None:
        ending = _ending_now(state, options, now)
        if ending is None:
            return NoAction()
        return Completion(ending) if _all_ended(state) else Terminate(ending)
    if _all_ended(state):
        return Completion(_with_root_cause(state, state.ending))
    return Kill() if len(state.signals) > 1 or now >= _kill_time(state, state.ending) else NoAction()


def _kill_time(state: Generation, ending: Ending) -> float:
    raised = all(t.raised for t in state.tasks if t.code is None)
    quick = raised and ending.reason is FailureReason.FAILED
    return min(ending.kill_at, ending.since + _RAISED_GRACE) if quick else ending.kill_at


def _with_root_cause(state: Generation, ending: Ending) -> Ending:
    """Determine the root cause again at the end: a killed process may be noticed after its peers' errors."""
    failures = [t.failure for t in state.tasks if t.failure is not None]
    if ending.reason is not FailureReason.FAILED or not failures:
        return ending
    return dataclasses.replace(ending, first=root_cause(failures))


def root_cause(failures: Iterable[Failure]) -> Failure:
    """Return the failure that caused the others.

    That is the first one. But the error of a task that lost a peer is a consequence, and so is an abort, most
    of the time: JAX aborts its process when a peer is lost.
    """
    return min(failures, key=lambda f: (_rank(f), f.at))


def _rank(failure: Failure) -> int:
    if failure.code == _ABORTED:
        return 1
    return 2 if _LOST_PEER.search(failure.detail) else 0


def _ending_now(state: Generation, options: LaunchOptions, now: float) -> Ending | None:
    patient = now + options.grace
    if state.signals:
        # The same signal may have reached the tasks, as Ctrl-C does: then they did not fail.
        return Ending(FailureReason.STOPPED, now, patient, signal=state.signals[0])
    failures = [t.failure for t in state.tasks if t.failure is not None]
    if failures:
        kill_at = now + min(options.grace, _FAILURE_GRACE)
        return Ending(FailureReason.FAILED, now, kill_at, root_cause(failures), trained=_trained(state.tasks))
    if any(t.code == RESTART_WANTED for t in state.tasks):
        return Ending(FailureReason.WANTED, now, patient)
    if _is_done(state.tasks):
        return Ending(FailureReason.DONE, now, patient)
    return Ending(FailureReason.RESIZE, now, patient) if state.resize and not _trained(state.tasks) else None


def _is_done(tasks: tuple[TaskState, ...]) -> bool:
    evaluators = [t for t in tasks if t.task.type == "evaluator"]
    return all(t.code is not None for t in (*_training_tasks(tasks), *evaluators))


def _training_tasks(tasks: tuple[TaskState, ...]) -> list[TaskState]:
    """Return the tasks whose end is the end of training.

    With parameter servers and a chief that is the chief: servers, and the workers that it sends functions
    to, run until they are stopped. Otherwise it is the chief and all workers, but for a worker that was
    started again beside worker 0, the chief of such a cluster: where it starts after the end, it would wait
    for a chief.
    """
    chiefs = [t for t in tasks if t.task.type == "chief"]
    if chiefs and any(t.task.type == "ps" for t in tasks):
        return chiefs
    workers = [t for t in tasks if t.task.type == "worker" and (t.task.index == 0 or not t.restarted)]
    return [*chiefs, *workers]


def chief_of(tasks: Iterable[Task]) -> Task | None:
    """Return the task that parameter servers and workers serve; None without parameter servers.

    >>> chief_of([Task("worker", 0), Task("worker", 1), Task("ps", 0)])
    Task(type='worker', index=0)
    """
    known = list(tasks)
    if not any(task.type == "ps" for task in known):
        return None
    leads = [task for task in known if task.type == "chief"] or [t for t in known if t.type == "worker"]
    return min(leads, key=lambda task: task.index)


def serving_tasks(tasks: Iterable[Task]) -> list[Task]:
    """Return the tasks that serve a chief: it cannot save without them."""
    known = list(tasks)
    chief = chief_of(known)
    return [t for t in known if chief is not None and t != chief and t.type in ("worker", "ps")]


def saving_tasks(tasks: Iterable[Task]) -> list[Task]:
    """Return the tasks that save the state of the training: an evaluator has none of its own.

    >>> [str(task) for task in saving_tasks([Task("worker", 0), Task("worker", 1), Task("evaluator", 0)])]
    ['worker:0', 'worker:1']
    """
    known = list(tasks)
    serving = serving_tasks(known)
    return [task for task in known if task.type != "evaluator" and task not in serving]


def waits_for_evaluator(state: Generation) -> bool:
    """Return whether all training tasks have succeeded and an evaluator still runs.

    The supervisor then creates the file `finished`: the evaluator ends after the last checkpoint.
    """
    at_work = any(t.code is None for t in state.tasks if t.task.type == "evaluator")
    return state.ending is None and at_work and _trained(state.tasks)


def _trained(tasks: tuple[TaskState, ...]) -> bool:
    return all(t.code == 0 and t.failure is None for t in _training_tasks(tasks))


def _all_ended(state: Generation) -> bool:
    return all(t.code is not None for t in state.tasks)


@dataclasses.dataclass(frozen=True)
class GenerationRecord:
    """The history of a launch.

    Args:
        failures: for each generation that failed, when (in seconds of the monotonic clock) and the task at
            fault.
        capacity: the number of workers that there is room for, None where it is not limited.
        errors: the exceptions of tasks that were started again alone: when, the task and the first line.
    """

    failures: tuple[tuple[float, Task], ...] = ()
    restarts: tuple[float, ...] = ()
    capacity: int | None = None
    errors: tuple[tuple[float, Task, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Restart:
    """Start the next generation, with `workers` workers, after `delay` seconds."""

    delay: float
    workers: int


@dataclasses.dataclass(frozen=True)
class Quit:
    """End the launch with an exit code."""

    code: int
    detail: str = ""


def next_generation(
    record: GenerationRecord, ending: Ending, codes: tuple[int, ...], options: LaunchOptions, now: float
) -> Restart | Quit:
    """Decide what follows a generation that has ended.

    Args:
        record: the history of the launch, this generation's failure included.
        now: the time on the monotonic clock, in seconds.
    """
    if ending.reason is FailureReason.DONE:
        return Quit(0)
    if ending.reason is FailureReason.STOPPED:
        return Quit(stopped_code(ending.signal, codes))
    if ending.first is None and not options.restarts:
        return Quit(RESTART_WANTED, "the tasks requested a restart (--max-restarts allows it)")
    code = RESTART_WANTED if ending.first is None else ending.first.code
    if ending.trained:
        # The failure is the evaluator's or a server's: training again would not repair it.
        return Quit(code, "training had succeeded and is not started again")
    if options.restarts and ending.first is not None and _MISSING.match(ending.first.detail):
        return Quit(code, f"{ending.first.task} lacks a package, and no task is started again")
    recent = _recent(record, options, now)
    if len(recent) > options.restarts:
        return Quit(code, _exhausted(options))
    workers = worker_target(record, options, now)
    least = options.worker_range[0]
    if workers < least:
        return Quit(code, f"there is room for {workers} workers, but at least {least} are needed")
    resizes = ending.reason is FailureReason.RESIZE
    return Restart(0.0 if resizes else _delay(record, options, now), workers)


@dataclasses.dataclass(frozen=True)
class TaskRestart:
    """Start one task again after `delay` seconds, the `count`th restart within the window."""

    delay: float
    count: int


def to_restart(state: Generation, options: LaunchOptions) -> list[TaskState]:
    """Return the failed tasks about which `task_restart` decides; none where a failure ends all tasks."""
    over = state.ending is not None or state.signals or _trained(state.tasks)
    if over or not options.restarts_tasks:
        return []
    return [t for t in state.tasks if t.failure is not None]


def task_restart(
    record: GenerationRecord, failed: TaskState, options: LaunchOptions, now: float
) -> TaskRestart | Quit:
    """Decide whether a task is started again alone.

    A program that uses the library wrongly, raises the same exception twice, or does not use the servers
    for which it was started, would do so at each start: then the launch ends.
    """
    failure = failed.failure
    code, detail = (1, "") if failure is None else (failure.code, failure.detail)
    known = [(task, text) for at, task, text in record.errors if now - at <= options.window]
    if failed.raised and (_MISUSE.match(detail) or _MISSING.match(detail)):
        return Quit(code, f"{failed.task} would fail again in the same way and is not started again")
    if failed.apart:
        return Quit(
            code,
            f"{failed.task} failed, and its program has no ParameterServerStrategy: no task is started again",
        )
    if failed.raised and (failed.task, detail) in known:
        return Quit(code, f"{failed.task} failed twice with the same error and is not started again")
    count = len(_recent(record, options, now)) + 1
    if count > options.restarts:
        return Quit(code, _exhausted(options))
    return TaskRestart(_delay(record, options, now), count)


def with_failure(record: GenerationRecord, failed: TaskState, now: float) -> GenerationRecord:
    """Return the history after a task was started again alone."""
    errors = record.errors
    if failed.raised and failed.failure is not None:
        errors = (*errors, (now, failed.task, failed.failure.detail))
    return dataclasses.replace(
        record,
        failures=(*record.failures, (now, failed.task)),
        restarts=(*record.restarts, now),
        errors=errors,
    )


def stopped_code(number: int, codes: tuple[int, ...]) -> int:
    """Return the code of a launch that a signal has ended, from the codes of its tasks."""
    # The tasks have saved their state: 42 asks the scheduler that preempted the launcher to start it again.
    # Ctrl-C comes from a user, and shells expect 130.
    saved = RESTART_WANTED in codes and set(codes) <= {0, RESTART_WANTED}
    return RESTART_WANTED if saved and number != signal.SIGINT else 128 + number


def _exhausted(options: LaunchOptions) -> str:
    if not options.restarts:
        return ""
    minutes = f"in {options.window / 60:g} minutes"
    if options.restarts == 1:
        return f"1 restart {minutes} is used up"
    return f"{options.restarts} restarts {minutes} are used up"


def _recent(record: GenerationRecord, options: LaunchOptions, now: float) -> list[Task]:
    return [task for at, task in record.failures if now - at <= options.window]


def _delay(record: GenerationRecord, options: LaunchOptions, now: float) -> float:
    """Return the seconds to wait before a restart: none at first, then doubled each time.

    A machine that was lost is replaced at once; a program that fails at each start does not use up a core.
    """
    count = sum(now - at <= options.window for at in record.restarts)
    return 0.0 if count == 0 else min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** min(count - 1, 16))


def worker_target(record: GenerationRecord, options: LaunchOptions, now: float) -> int:
    """Return the number of workers for the next generation; it may be below the allowed minimum.

    Each worker index that failed twice within the window reduces the number by one, until its failures are
    older than the window. Twice, because a single failure may be a chance one.
    """
    least, most = options.worker_range
    if least == most:
        return most
    failed = [task for task in _recent(record, options, now) if task.type == "worker"]
    dropped = sum(failed.count(task) // 2 for task in set(failed))
    room = most if record.capacity is None else min(most, record.capacity)
    return min(most - dropped, room)


def wants_resize(
    record: GenerationRecord, options: LaunchOptions, workers: int, started: float, now: float
) -> bool:
    """Return whether a running generation should be replaced by one of another size."""
    least, most = options.worker_range
    target = worker_target(record, options, now)
    return least < most and target >= least and target != workers and now - started >= options.cool_down


def shell_code(code: int) -> int:
    """Return a process' exit code as a shell sees it.

    >>> shell_code(3), shell_code(-9)
    (3, 137)
    """
    return 128 - code if code < 0 else code


def exit_text(code: int) -> str:
    """Return how a process ended, from its exit code as a shell sees it.

    >>> exit_text(1), exit_text(137)
    ('failed with exit code 1', 'was killed by SIGKILL (exit code 137)')
    """
    number = code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"failed with exit code {code}"
    return f"was killed by {name} (exit code {code})"
