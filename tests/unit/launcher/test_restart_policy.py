"""Tables of what is decided, with a clock that is an argument."""

import dataclasses
import signal

import pytest

from unisono._system._signals import RESTART_WANTED
from unisono.cluster_resolver._spec import Task
from unisono.launcher._options import LaunchOptions
from unisono.launcher._restart_policy import (
    Completion,
    Ending,
    Failure,
    FailureReason,
    Generation,
    GenerationRecord,
    Kill,
    NoAction,
    Quit,
    Restart,
    TaskRestart,
    TaskState,
    Terminate,
    exit_text,
    next_action,
    next_generation,
    root_cause,
    task_restart,
    to_restart,
    waits_for_evaluator,
    wants_resize,
    with_failure,
    worker_target,
)

OPTIONS = LaunchOptions(workers=2, grace=10.0)
NOW = 100.0


def state(*codes, jobs=None, failures=(), raised=(), restarted=(), **more):
    tasks = jobs or [Task("worker", i) for i in range(len(codes))]
    failed = {f.task: f for f in failures}
    return Generation(
        tuple(
            TaskState(t, c, failed.get(t), t.index in raised, t in restarted)
            for t, c in zip(tasks, codes, strict=True)
        ),
        **more,
    )


def failure(index, at, code=1, detail="failed"):
    return Failure(Task("worker", index), at, code, detail)


PS = [Task("chief", 0), Task("worker", 0), Task("ps", 0)]
NO_CHIEF = [Task("worker", 0), Task("worker", 1), Task("ps", 0)]
ENDING = Ending(FailureReason.FAILED, since=100.0, kill_at=103.0)


@pytest.mark.parametrize(
    ("seen", "reason", "kill_at"),
    [
        (state(1, None, failures=[failure(0, 5.0)]), FailureReason.FAILED, 103.0),
        (state(None, None, signals=(15,)), FailureReason.STOPPED, 110.0),
        # The group of processes was stopped as a whole: no task failed.
        (state(143, None, failures=[failure(0, 5.0, 143)], signals=(15,)), FailureReason.STOPPED, 110.0),
        (state(RESTART_WANTED, None), FailureReason.WANTED, 110.0),
        (state(None, None, resize=True), FailureReason.RESIZE, 110.0),
        (state(0, None, None, jobs=PS), FailureReason.DONE, 110.0),
        # A worker that was started again may come after the end of worker 0, the chief here.
        (state(0, None, None, jobs=NO_CHIEF, restarted=[Task("worker", 1)]), FailureReason.DONE, 110.0),
    ],
)
def test_why_a_generation_is_ended(seen, reason, kill_at):
    action = next_action(seen, OPTIONS, NOW)
    assert isinstance(action, Terminate)
    assert (action.ending.reason, action.ending.kill_at) == (reason, kill_at)


@pytest.mark.parametrize(
    "seen",
    [
        state(None, None),
        state(0, None),
        state(None, 0, None, jobs=PS),
        # Without a chief the workers are waited for, and the servers are not.
        state(0, None, None, jobs=NO_CHIEF),
        state(None, 0, None, jobs=NO_CHIEF, restarted=[Task("worker", 0)]),
        state(None, 137, ending=ENDING),
    ],
)
def test_a_generation_goes_on(seen):
    assert isinstance(next_action(seen, OPTIONS, NOW), NoAction)


def test_the_first_failure_is_the_cause():
    seen = state(1, 137, None, failures=[failure(0, 7.0), failure(1, 6.0, 137)])
    assert next_action(seen, OPTIONS, NOW).ending.first == failure(1, 6.0, 137)


LOST = "failed: jax.errors.JaxRuntimeError: UNKNOWN: Gloo all-reduce failed: Connection closed by peer"


@pytest.mark.parametrize(
    "failures",
    [
        [failure(0, 6.0), failure(1, 7.0)],
        # A killed process is seen to be dead after its peers have noticed.
        [failure(0, 7.0, 137), failure(1, 6.0, detail=LOST)],
        [failure(0, 7.0, 139), failure(1, 6.0, 134)],
        [failure(0, 7.0, 134), failure(1, 6.0, detail=LOST)],
        [failure(0, 6.0, detail=LOST), failure(1, 7.0, detail=LOST)],
        [failure(0, 7.0), failure(1, 6.0, detail="ClusterError: worker 1 of 2 lost worker 0 at a:1")],
    ],
)
def test_the_cause_of_the_others(failures):
    assert root_cause(failures) == root_cause(failures[::-1]) == failures[0]


def test_the_cause_is_looked_for_again_at_the_end():
    first = failure(0, 6.0, detail=LOST)
    ending = Ending(FailureReason.FAILED, 100.0, 103.0, first)
    seen = state(1, 137, failures=[first, failure(1, 7.0, 137)], ending=ending)
    assert next_action(seen, OPTIONS, NOW).ending.first == failure(1, 7.0, 137)


@pytest.mark.parametrize(
    ("reason", "raised", "now", "action"),
    [
        (FailureReason.FAILED, (1,), 100.4, NoAction),
        (FailureReason.FAILED, (1,), 100.5, Kill),
        (FailureReason.FAILED, (), 100.5, NoAction),
        (FailureReason.STOPPED, (1,), 100.5, NoAction),
    ],
)
def test_tasks_that_raised_have_nothing_left_to_do(reason, raised, now, action):
    ending = Ending(reason, since=100.0, kill_at=103.0)
    assert isinstance(next_action(state(137, None, raised=raised, ending=ending), OPTIONS, now), action)


def test_an_exception_counts_before_its_task_has_ended():
    assert isinstance(next_action(state(None, None, failures=[failure(1, 6.0)]), OPTIONS, NOW), Terminate)


def test_all_done_is_over_at_once():
    action = next_action(state(0, 0), OPTIONS, NOW)
    assert isinstance(action, Completion)
    assert action.ending.reason is FailureReason.DONE


def test_workers_done_ends_servers():
    tasks = [Task("worker", 0), Task("worker", 1), Task("ps", 0)]
    assert next_action(state(0, 0, None, jobs=tasks), OPTIONS, NOW).ending.reason is FailureReason.DONE


EVALUATED = [Task("worker", 0), Task("worker", 1), Task("evaluator", 0)]


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        (state(0, 0, None, jobs=EVALUATED), True),
        (state(0, None, None, jobs=EVALUATED), False),
        (state(0, RESTART_WANTED, None, jobs=EVALUATED), False),
        (state(0, 0, 0, jobs=EVALUATED), False),
        (state(0, 0), False),
        (state(0, None, None, None, jobs=[*PS, Task("evaluator", 0)]), True),
        (state(0, 0, None, jobs=EVALUATED, ending=ENDING), False),
    ],
)
def test_when_the_evaluator_hears_that_training_has_ended(seen, told):
    assert waits_for_evaluator(seen) is told


def test_the_evaluator_is_waited_for():
    assert isinstance(next_action(state(0, 0, None, jobs=EVALUATED, resize=True), OPTIONS, NOW), NoAction)
    assert next_action(state(0, 0, 0, jobs=EVALUATED), OPTIONS, NOW).ending.reason is FailureReason.DONE


def test_training_that_has_ended_well_is_not_started_again():
    failed = Failure(EVALUATED[2], 5.0, 3, "failed")
    ending = next_action(state(0, 0, 3, jobs=EVALUATED, failures=[failed]), OPTIONS, NOW).ending
    assert ending.trained
    action = next_generation(GenerationRecord(failures=((NOW, EVALUATED[2]),)), ending, (0, 0, 3), TWO, NOW)
    assert (action.code, action.detail) == (3, "training had succeeded and is not started again")
    ending = next_action(state(0, None, 3, jobs=EVALUATED, failures=[failed]), OPTIONS, NOW).ending
    assert isinstance(next_generation(GenerationRecord(), ending, (0, 143, 3), TWO, NOW), Restart)


@pytest.mark.parametrize(
    ("now", "signals", "action"),
    [(102.9, (), NoAction), (103.0, (), Kill), (102.0, (2,), NoAction), (102.0, (2, 2), Kill)],
)
def test_killed_after_the_grace_or_the_second_signal(now, signals, action):
    assert isinstance(next_action(state(None, 0, ending=ENDING, signals=signals), OPTIONS, now), action)


def test_an_ended_generation_is_over():
    assert next_action(state(143, 1, ending=ENDING), OPTIONS, NOW) == Completion(ENDING)


def ended(reason, **more):
    return Ending(reason, since=0.0, kill_at=0.0, **more)


FAILED = ended(FailureReason.FAILED, first=failure(1, 5.0, 3))
TWO = LaunchOptions(workers=2, max_restarts=2)


@pytest.mark.parametrize(
    ("options", "failures", "ending", "codes", "action"),
    [
        (OPTIONS, [], ended(FailureReason.DONE), (0, 0), Quit(0)),
        (OPTIONS, [], ended(FailureReason.STOPPED, signal=2), (143, 143), Quit(130)),
        (OPTIONS, [], ended(FailureReason.STOPPED, signal=15), (143, 0), Quit(143)),
        (OPTIONS, [], ended(FailureReason.STOPPED, signal=15), (42, 42), Quit(42)),
        (OPTIONS, [], ended(FailureReason.STOPPED, signal=15), (42, 137), Quit(143)),
        (OPTIONS, [], ended(FailureReason.STOPPED, signal=2), (42, 42), Quit(130)),
        (TWO, [], ended(FailureReason.WANTED), (42, 42), Restart(0.0, 2)),
        (TWO, [NOW], FAILED, (143, 3), Restart(0.0, 2)),
        (TWO, [NOW, NOW], FAILED, (143, 3), Restart(0.0, 2)),
        # Older than the window: forgiven.
        (TWO, [NOW - 601, NOW - 10, NOW], FAILED, (143, 3), Restart(0.0, 2)),
    ],
)
def test_what_follows(options, failures, ending, codes, action):
    record = GenerationRecord(failures=tuple((at, Task("worker", 1)) for at in failures))
    assert next_generation(record, ending, codes, options, NOW) == action


@pytest.mark.parametrize(
    ("options", "ending", "code"),
    [
        (OPTIONS, FAILED, 3),
        (LaunchOptions(workers=2, max_restarts=0), ended(FailureReason.WANTED), 42),
    ],
)
def test_without_restarts_the_code_is_that_of_the_first_failure(options, ending, code):
    record = GenerationRecord(failures=((NOW, Task("worker", 1)),))
    assert next_generation(record, ending, (143, code), options, NOW).code == code


def test_used_up_restarts_end_the_launch():
    record = GenerationRecord(failures=tuple((NOW - i, Task("worker", i)) for i in range(3)))
    action = next_generation(record, FAILED, (1, 1), TWO, NOW)
    assert (action.code, action.detail) == (3, "2 restarts in 10 minutes are used up")


@pytest.mark.parametrize(
    ("restarts", "delay"), [(0, 0.0), (1, 0.5), (2, 1.0), (3, 2.0), (7, 30.0), (99, 30.0)]
)
def test_restarts_come_later_each_time(restarts, delay):
    record = GenerationRecord(restarts=(NOW - 10,) * restarts)
    options = LaunchOptions(workers=2, max_restarts=100)
    assert next_generation(record, FAILED, (1, 1), options, NOW) == Restart(delay, 2)
    assert next_generation(record, ended(FailureReason.RESIZE), (42, 42), options, NOW) == Restart(0.0, 2)


ELASTIC = LaunchOptions(workers=4, elastic=(2, 4), cool_down=60.0)


def blamed(*indices, at=NOW):
    return tuple((at, Task("worker", index)) for index in indices)


@pytest.mark.parametrize(
    ("failures", "capacity", "workers"),
    [
        ((), None, 4),
        (blamed(1), None, 4),
        (blamed(1, 2), None, 4),
        (blamed(1, 1), None, 3),
        (blamed(1, 1, 1), None, 3),
        (blamed(1, 1, 2, 2), None, 2),
        (blamed(1, 1, at=NOW - 601), None, 4),
        (((NOW, Task("ps", 0)),) * 2, None, 4),
        ((), 3, 3),
        ((), 9, 4),
        (blamed(1, 1), 2, 2),
        ((), 1, 1),
    ],
)
def test_how_many_workers(failures, capacity, workers):
    assert worker_target(GenerationRecord(failures=failures, capacity=capacity), ELASTIC, NOW) == workers


def test_a_launch_of_one_size_keeps_it():
    record = GenerationRecord(failures=blamed(1, 1, 1, 1), capacity=1)
    assert worker_target(record, LaunchOptions(workers=4, max_restarts=9), NOW) == 4


def test_too_few_workers_end_the_launch():
    action = next_generation(GenerationRecord(failures=blamed(0), capacity=1), FAILED, (1,), ELASTIC, NOW)
    assert (action.code, action.detail) == (3, "there is room for 1 workers, but at least 2 are needed")


@pytest.mark.parametrize(
    ("failures", "capacity", "workers", "started", "wanted"),
    [
        ((), None, 4, 0.0, False),
        ((), 3, 4, 0.0, True),
        ((), 3, 4, NOW - 59, False),
        ((), 1, 4, 0.0, False),
        (blamed(1, 1), None, 3, 0.0, False),
        (blamed(1, 1, at=NOW - 601), None, 3, 0.0, True),
    ],
)
def test_when_another_size_is_asked_for(failures, capacity, workers, started, wanted):
    record = GenerationRecord(failures=failures, capacity=capacity)
    assert wants_resize(record, ELASTIC, workers, started, NOW) is wanted


def test_how_an_end_is_told():
    assert exit_text(128 + signal.SIGSEGV) == "was killed by SIGSEGV (exit code 139)"
    assert exit_text(255) == "failed with exit code 255"


WITH_SERVERS = LaunchOptions(workers=1, ps=1, chief=True)


def killed(task, code=137, detail="was killed", raised=False):
    return TaskState(task, code, Failure(task, 5.0, code, detail), raised)


@pytest.mark.parametrize(
    ("options", "more", "codes", "alone"),
    [
        (WITH_SERVERS, {}, (None, 137, None), True),
        (WITH_SERVERS, {}, (137, None, None), True),
        # Without a limit, with --elastic, and after the end of training a failure ends all tasks.
        (LaunchOptions(workers=1, ps=1, chief=True, max_restarts=0), {}, (None, 137, None), False),
        (LaunchOptions(workers=1, ps=1, chief=True, elastic=(1, 1)), {}, (None, 137, None), False),
        (LaunchOptions(workers=1, chief=True, max_restarts=5), {}, (None, 137, None), False),
        (WITH_SERVERS, {}, (0, 137, None), False),
        (WITH_SERVERS, {"signals": (15,)}, (None, 137, None), False),
        (WITH_SERVERS, {"ending": ENDING}, (None, 137, None), False),
    ],
)
def test_with_servers_one_task_starts_again(options, more, codes, alone):
    failures = [Failure(t, 5.0, c, "was killed") for t, c in zip(PS, codes, strict=True) if c]
    seen = state(*codes, jobs=PS, failures=failures, **more)
    assert bool(to_restart(seen, options)) is alone


def test_single_restarts_wait_longer_each_time_and_are_limited():
    options = LaunchOptions(workers=1, ps=1, chief=True, max_restarts=3)
    record, delays = GenerationRecord(), []
    for at in (10.0, 11.0, 12.0):
        action = task_restart(record, killed(PS[2]), options, at)
        delays.append((action.delay, action.count))
        record = with_failure(record, killed(PS[2]), at)
    assert delays == [(0.0, 1), (0.5, 2), (1.0, 3)]
    assert task_restart(record, killed(PS[1]), options, 13.0) == Quit(
        137, "3 restarts in 10 minutes are used up"
    )
    # Old failures do not count.
    assert task_restart(record, killed(PS[1]), options, 700.0) == TaskRestart(0.0, 1)


def test_a_task_that_uses_the_library_wrongly_is_not_started_again():
    failed = killed(PS[1], 1, "failed: unisono.InvalidArgumentError: no 'ps' tasks", raised=True)
    action = task_restart(GenerationRecord(), failed, WITH_SERVERS, 10.0)
    assert action == Quit(1, "worker:0 would fail again in the same way and is not started again")


def test_a_program_that_does_not_use_the_servers_is_not_started_again():
    failed = killed(PS[1], 1, "failed: KeyError: 'x'", raised=True)
    assert isinstance(task_restart(GenerationRecord(), failed, WITH_SERVERS, 10.0), TaskRestart)
    action = task_restart(GenerationRecord(), dataclasses.replace(failed, apart=True), WITH_SERVERS, 10.0)
    assert action == Quit(
        1,
        "worker:0 failed, and its program has no ParameterServerStrategy: no task is started again",
    )


def test_a_task_that_raises_the_same_error_again_is_not_started_a_third_time():
    failed = killed(PS[1], 1, "failed: ImportError: no x", raised=True)
    assert isinstance(task_restart(GenerationRecord(), failed, WITH_SERVERS, 10.0), TaskRestart)
    record = with_failure(GenerationRecord(), failed, 10.0)
    action = task_restart(record, failed, WITH_SERVERS, 20.0)
    assert action == Quit(1, "worker:0 failed twice with the same error and is not started again")
    for other in (
        killed(PS[1]),
        killed(PS[1], 1, "failed: OSError", raised=True),
        killed(PS[2], 1, raised=True),
    ):
        assert isinstance(task_restart(record, other, WITH_SERVERS, 20.0), TaskRestart)
    assert isinstance(task_restart(record, failed, WITH_SERVERS, 700.0), TaskRestart)


@pytest.mark.parametrize("error", ["unisono.MissingPackageError: zmq", "ModuleNotFoundError: No module 'x'"])
def test_a_missing_package_is_no_reason_to_start_again(error):
    failed = killed(PS[1], 1, f"failed: {error}", raised=True)
    assert isinstance(task_restart(GenerationRecord(), failed, WITH_SERVERS, 10.0), Quit)
    ending = Ending(FailureReason.FAILED, 0.0, 0.0, failed.failure)
    quit_ = next_generation(GenerationRecord(), ending, (1,), LaunchOptions(2, max_restarts=3), 10.0)
    assert quit_ == Quit(1, f"{PS[1]} lacks a package, and no task is started again")
