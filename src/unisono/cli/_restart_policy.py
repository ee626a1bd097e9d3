"""What happens to a generation of tasks, and after it: pure decisions that the supervisor obeys.

`watch` looks at a generation that runs or is being ended, `after` at one that is over.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import signal
from collections.abc import Iterable

from unisono.cli._options import LaunchOptions
from unisono.cluster_resolver._spec import Task

#: A task that ends with this code has saved its state and asks to be started again, as in TensorFlow.
RESTART_WANTED = 42

#: The exit code where a task made no progress, as of `timeout`.
STALLED = 124

#: After a failure the others' collectives are broken: there is less to wait for than on request.
_FAILURE_GRACE = 3.0
#: And nothing where they have all raised errors, and hang at most in saying good-bye to each other.
_RAISED_GRACE = 0.5
_FIRST_DELAY, _LONGEST_DELAY = 0.5, 30.0

_ABORTED = 128 + signal.SIGABRT
#: What a task says whose peer has gone: its words, and JAX's, Gloo's, gRPC's and NCCL's.
_LOST_PEER = re.compile(
    "closed by peer|reset by peer|broken pipe|connection refused|gloo|nccl|coordination service|heartbeat",
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
        task: the task.
        at: when, in seconds since the epoch.
        code: what a shell would see: the exit code, or 128 + the signal's number.
        detail: one line for people.
    """

    task: Task
    at: float
    code: int
    detail: str


@dataclasses.dataclass(frozen=True)
class TaskState:
    """What is known about a task.

    Args:
        task: the task.
        code: its exit code as a shell sees it, None while it runs.
        failure: how it failed, where that was before or at the end of the generation.
        raised: whether its program has raised an exception; it may still run.
    """

    task: Task
    code: int | None = None
    failure: Failure | None = None
    raised: bool = False


@dataclasses.dataclass(frozen=True)
class Ending:
    """A generation that is being ended.

    Args:
        reason: why.
        since: when that was decided, in seconds of the monotonic clock.
        kill_at: when what is left gets SIGKILL, of the same clock.
        first: the failure that is the reason.
        signal: what the launcher was sent, where that is the reason.
        trained: whether all that train had ended well by then.
    """

    reason: FailureReason
    since: float
    kill_at: float
    first: Failure | None = None
    signal: int = 0
    trained: bool = False


@dataclasses.dataclass(frozen=True)
class Generation:
    """A generation as the supervisor sees it.

    Args:
        tasks: the state of each.
        ending: set once its end was decided.
        signals: how often the launcher was asked to stop, and by which signal.
        resize: whether another number of workers is wanted now.
    """

    tasks: tuple[TaskState, ...]
    ending: Ending | None = None
    signals: tuple[int, ...] = ()
    resize: bool = False


class Go:
    """Nothing is to be done."""


class Kill:
    """Everything that is left gets SIGKILL."""


@dataclasses.dataclass(frozen=True)
class End:
    """The tasks get SIGTERM."""

    ending: Ending


@dataclasses.dataclass(frozen=True)
class Over:
    """No task is left."""

    ending: Ending


def watch(state: Generation, options: LaunchOptions, now: float) -> Go | End | Kill | Over:
    """Decide what to do with a generation.

    Args:
        state: what is seen.
        options: what was asked for.
        now: seconds of the monotonic clock.
    """
    if state.ending is None:
        ending = _why_end(state, options, now)
        if ending is None:
            return Go()
        return Over(ending) if _all_ended(state) else End(ending)
    if _all_ended(state):
        return Over(_explained(state, state.ending))
    return Kill() if len(state.signals) > 1 or now >= _kill_time(state, state.ending) else Go()


def _kill_time(state: Generation, ending: Ending) -> float:
    raised = all(t.raised for t in state.tasks if t.code is None)
    quick = raised and ending.reason is FailureReason.FAILED
    return min(ending.kill_at, ending.since + _RAISED_GRACE) if quick else ending.kill_at


def _explained(state: Generation, ending: Ending) -> Ending:
    """A killed process is seen to be dead only after its peers have noticed: look again at the end."""
    failures = [t.failure for t in state.tasks if t.failure is not None]
    if ending.reason is not FailureReason.FAILED or not failures:
        return ending
    return dataclasses.replace(ending, first=root_cause(failures))


def root_cause(failures: Iterable[Failure]) -> Failure:
    """Return the failure that caused the others.

    It is the first; but a task that lost a peer is a consequence, and an abort mostly is: JAX ends its
    process so when others have gone.

    Args:
        failures: at least one.
    """
    return min(failures, key=lambda f: (_rank(f), f.at))


def _rank(failure: Failure) -> int:
    if failure.code == _ABORTED:
        return 1
    return 2 if _LOST_PEER.search(failure.detail) else 0


def _why_end(state: Generation, options: LaunchOptions, now: float) -> Ending | None:
    patient = now + options.grace
    if state.signals:
        # Whoever stops us may have stopped the tasks, too: those did not fail.
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
    waited = {*_training_jobs(tasks), "evaluator"}
    return all(t.code is not None for t in tasks if t.task.type in waited)


def _training_jobs(tasks: tuple[TaskState, ...]) -> set[str]:
    """Servers wait for ever: with parameter servers the chief's end is the end, without, everyone's."""
    jobs = {t.task.type for t in tasks}
    return {"chief"} if {"ps", "chief"} <= jobs else {"chief", "worker"}


def waits_for_evaluator(state: Generation) -> bool:
    """Return whether all that train have ended well, and an evaluator is still at work.

    It is told so: what it has not evaluated yet is the last checkpoint.
    """
    at_work = any(t.code is None for t in state.tasks if t.task.type == "evaluator")
    return state.ending is None and at_work and _trained(state.tasks)


def _trained(tasks: tuple[TaskState, ...]) -> bool:
    jobs = _training_jobs(tasks)
    return all(t.code == 0 and t.failure is None for t in tasks if t.task.type in jobs)


def _all_ended(state: Generation) -> bool:
    return all(t.code is not None for t in state.tasks)


@dataclasses.dataclass(frozen=True)
class GenerationRecord:
    """What happened in the launch so far.

    Args:
        failures: when (seconds of the monotonic clock) a generation failed, and which task was first.
        restarts: when generations were started again.
        capacity: how many workers there is room for, None where nobody says.
    """

    failures: tuple[tuple[float, Task], ...] = ()
    restarts: tuple[float, ...] = ()
    capacity: int | None = None


@dataclasses.dataclass(frozen=True)
class Restart:
    """The next generation is started."""

    delay: float
    workers: int


@dataclasses.dataclass(frozen=True)
class Quit:
    """The launch is over."""

    code: int
    detail: str = ""


def after(
    record: GenerationRecord, ending: Ending, codes: tuple[int, ...], options: LaunchOptions, now: float
) -> Restart | Quit:
    """Decide what follows a generation that is over.

    Args:
        record: what happened in the launch, this generation's failure included.
        ending: why the generation ended.
        codes: its tasks' exit codes.
        options: what was asked for.
        now: seconds of the monotonic clock.
    """
    if ending.reason is FailureReason.DONE:
        return Quit(0)
    if ending.reason is FailureReason.STOPPED:
        return Quit(_stopped_code(ending.signal, codes))
    if ending.first is None and not options.restarts:
        return Quit(RESTART_WANTED, "the tasks want to be started again (--max-restarts allows it)")
    code = RESTART_WANTED if ending.first is None else ending.first.code
    if ending.trained:
        # Of the evaluator, or of a server: to train again would help neither.
        return Quit(code, "training had ended well and is not started again")
    recent = _recent(record, options, now)
    if len(recent) > options.restarts:
        return Quit(code, _exhausted(options))
    workers = worker_target(record, options, now)
    least = options.worker_range[0]
    if workers < least:
        return Quit(code, f"there is room for {workers} workers, and at least {least} are needed")
    return Restart(_delay(record, ending, options, now), workers)


def _stopped_code(number: int, codes: tuple[int, ...]) -> int:
    # The tasks saved their state and want to be started again: whoever stopped us should know.
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


def _delay(record: GenerationRecord, ending: Ending, options: LaunchOptions, now: float) -> float:
    """The first restart comes at once, those after it twice as late each time."""
    if ending.reason is FailureReason.RESIZE:
        return 0.0
    count = sum(now - at <= options.window for at in record.restarts)
    return 0.0 if count == 0 else min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** min(count - 1, 16))


def worker_target(record: GenerationRecord, options: LaunchOptions, now: float) -> int:
    """Return how many workers the next generation should have; it may be fewer than are allowed.

    A worker index that failed twice within the window is one worker fewer, until its failures are
    older than the window.
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
    """Return whether a running generation should make room for one of another size."""
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
