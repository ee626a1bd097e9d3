"""What counts as the failure of a task, whoever is seen first: with processes that do as they are told."""

import json
import os
import signal
import time

import pytest

from unisono.cluster_resolver._spec import Task
from unisono.launcher import _generation
from unisono.launcher import _restart_policy as decide
from unisono.launcher._generation import ProcessSource, TaskGroup
from unisono.launcher._options import LaunchOptions
from unisono.launcher._plan import RunPaths, make_plan, tasks_of
from unisono.launcher._processes import KeptOutput
from unisono.launcher._run_files import BestEffort, History
from unisono.launcher._stall_detector import TaskProgress

W0, W1 = Task("worker", 0), Task("worker", 1)


class Process:
    """A process that ends when a test says so."""

    warm, loss, kept = False, "", None

    def __init__(self, pid):
        self.pid, self.code, self.ended_at, self.signals = pid, None, None, []

    def assign(self, job):
        return True

    def poll(self):
        return self.code

    def send(self, number):
        self.signals.append(number)

    def kill(self):
        if self.code is None:
            self.end(137)

    def end(self, code):
        self.code, self.ended_at = code, time.time()


class Launch:
    """The tasks of a generation, by default of two workers, and their processes."""

    def __init__(self, root, options=None):
        options = options or LaunchOptions(workers=2)
        for folder in ("errors", "progress"):
            (root / folder).mkdir()
        self.paths = RunPaths(root)
        plan = make_plan(options, 0, 2, [*range(1, 1 + len(tasks_of(options, 2)))], self.paths)
        self.processes = {task: Process(100 + i) for i, task in enumerate(plan.tasks)}
        starter = ProcessSource(lambda: None, self.processes.get, lambda plan, task: {})
        files = BestEffort(pytest.fail, root)
        self.tasks = TaskGroup(plan, starter, History(self.paths.history, files), files)

    def raises(self, task, summary, code=1):
        record = {"at": time.time(), "code": code, "summary": summary, "traceback": "Traceback"}
        self.paths.error(task, 0).write_text(json.dumps(record))

    def failures(self):
        return {
            t.task: t.failure.detail for t in self.tasks.observe((), False).tasks if t.failure is not None
        }

    def end(self):
        """The launcher asks all to end, because of the failures so far."""
        failures = [t.failure for t in self.tasks.observe((), False).tasks if t.failure is not None]
        self.tasks.terminate(
            decide.Ending(decide.FailureReason.FAILED, 0.0, 3.0, decide.root_cause(failures))
        )


@pytest.fixture
def launch(tmp_path):
    return Launch(tmp_path)


def test_a_death_that_is_seen_after_the_others_were_asked_to_end_is_a_cause(launch):
    launch.raises(W0, "failed: OSError: Connection closed by peer")
    launch.end()
    launch.processes[W1].end(137)
    launch.processes[W0].end(1)
    state = launch.tasks.observe((), False)
    assert launch.failures()[W1].startswith("was killed by SIGKILL")
    over = decide.next_action(state, LaunchOptions(workers=2), 1.0)
    assert over.ending.first.task == W1


def test_a_machine_that_was_lost_before_its_process_failed_for_that_reason(launch):
    """Its process may run on, and say what the others say: the loss is older, and is seen later."""
    lost_at = time.time()
    launch.raises(W0, "failed: Gloo: Connection closed by peer")
    launch.raises(W1, "failed: Gloo: Connection closed by peer")
    launch.failures()
    launch.processes[W1].loss = "its machine was lost"
    launch.processes[W1].code, launch.processes[W1].ended_at = 137, lost_at
    failures = [t.failure for t in launch.tasks.observe((), False).tasks if t.failure is not None]
    assert decide.root_cause(failures).detail == "its machine was lost"


def test_who_has_ended_before_the_others_are_asked_to_has_failed(launch, monkeypatch):
    """Its end is seen only then: the error of its peer was there first."""
    launch.raises(W1, "failed: RuntimeError: Gloo: Connection closed by peer")
    failures = [t.failure for t in launch.tasks.observe((), False).tasks if t.failure is not None]
    first, polled = launch.processes[W0], []

    def poll():
        polled.append(time.time())
        first.code, first.ended_at = 139, polled[0]
        return first.code

    monkeypatch.setattr(first, "poll", poll)
    launch.tasks.terminate(decide.Ending(decide.FailureReason.FAILED, 0.0, 3.0, failures[0]))
    assert launch.failures()[W0] == "was killed by SIGSEGV (exit code 139)"


def test_what_we_killed_did_not_fail(launch):
    launch.raises(W0, "failed: ValueError")
    launch.end()
    assert [p.signals for p in launch.processes.values()] == [[signal.SIGTERM]] * 2
    launch.tasks.kill()
    assert launch.failures() == {W0: "failed: ValueError"}
    assert launch.tasks.codes == (137, 137)


def test_who_has_said_that_it_has_saved_ends_with_42_however_it_ends(launch):
    launch.tasks.terminate(decide.Ending(decide.FailureReason.STOPPED, 0.0, 30.0, signal=15))
    for task in (W0, W1):
        launch.raises(task, "has saved", 42)
    assert launch.failures() == {}
    # One is aborted at a barrier of JAX, the other one is still at it when the grace period is over.
    launch.processes[W0].end(134)
    launch.tasks.observe((), False)
    launch.tasks.kill()
    assert launch.failures() == {}
    assert launch.tasks.codes == (42, 42)
    assert decide.stopped_code(signal.SIGTERM, launch.tasks.codes) == 42
    ends = [
        e for e in map(json.loads, launch.paths.history.read_text().splitlines()) if e["event"] == "ended"
    ]
    assert [(e["exit_code"], e["detail"]) for e in ends] == [
        (134, "its state was saved"),
        (137, "its state was saved"),
    ]


def test_an_evaluator_says_nothing_about_whether_all_is_saved(tmp_path):
    launch = Launch(tmp_path, LaunchOptions(workers=2, evaluator=True))
    launch.tasks.terminate(decide.Ending(decide.FailureReason.STOPPED, 0.0, 3.0))
    for task, process in launch.processes.items():
        process.end(137 if task.type == "evaluator" else 42)
    launch.tasks.observe((), False)
    assert launch.tasks.codes == (42, 42)


def test_what_ends_because_it_was_asked_to_did_not_fail(launch):
    launch.processes[W0].end(5)
    launch.end()
    launch.processes[W1].end(143)
    assert launch.failures() == {W0: "failed with exit code 5"}


def test_a_stack_that_comes_late_and_in_parts_is_waited_for(launch, monkeypatch):
    clock = [0.0]
    log = launch.paths.log(W1)

    def sleep(seconds):
        clock[0] += seconds
        # Two lines, the first after a second, the other when the first was seen.
        lines = sum(clock[0] > at for at in (1.0, 1.1))
        log.write_text("line\n" * lines)

    monkeypatch.setattr(_generation.time, "sleep", sleep)
    monkeypatch.setattr(_generation.time, "monotonic", lambda: clock[0])
    progress = (TaskProgress(W0, 5, 2.0), TaskProgress(W1, 4, 1.0))
    stall = launch.tasks.check_progress(progress, 10.0, 20.0)
    assert stall.task == W1
    assert launch.processes[W1].signals == [signal.SIGUSR1]
    assert log.read_text() == "line\n" * 2
    assert 1.2 < clock[0] < 2.0
    assert launch.failures() == {W1: stall.detail}


def test_a_stopped_task_that_holds_the_others_up_is_killed_at_once(launch):
    """It cannot hear SIGTERM, for whose answer the others are given seconds."""
    stall = launch.tasks.check_progress(
        (TaskProgress(W0, 5, 2.0), TaskProgress(W1, 4, 1.0, stopped_at=1.5)), 10.0, 20.0
    )
    assert (stall.task, stall.stopped) == (W1, True)
    assert launch.processes[W1].code == 137
    assert launch.processes[W1].signals == []
    assert launch.failures() == {W1: stall.detail}
    (failure,) = [t.failure for t in launch.tasks.observe((), False).tasks if t.failure is not None]
    assert failure.code == decide.STALLED


def test_who_makes_no_steps_after_another_has_ended_well_is_at_its_end_too(launch):
    """It may save or export for long: that is no stall."""
    launch.processes[W0].end(0)
    launch.tasks.observe((), False)
    assert launch.tasks.check_progress((TaskProgress(W1, 5, 1.0),), 10.0, 20.0) is None
    assert launch.failures() == {}
    # Who is stopped does neither, and would be waited for without an end.
    assert launch.tasks.check_progress((TaskProgress(W1, 5, 1.0, stopped_at=11.0),), 10.0, 20.0) is None
    stall = launch.tasks.check_progress((TaskProgress(W1, 5, 1.0, stopped_at=11.0),), 10.0, 22.0)
    assert (stall.task, launch.processes[W1].code) == (W1, 137)
    assert launch.failures() == {W1: stall.detail}


def test_a_task_starts_again_alone_when_its_process_has_ended(launch):
    launch.raises(W1, "failed: ValueError")
    assert set(launch.failures()) == {W1}
    first = launch.processes[W1]
    launch.tasks.restart_later(W1, 10.0)
    # Meanwhile it counts as running, also when its process ends.
    assert launch.failures() == {}
    assert launch.tasks.restart_due(12.9) == []
    assert first.code is None
    # It has raised an exception and does not end.
    assert launch.tasks.restart_due(13.0) == []
    assert first.code == 137
    assert [t.code for t in launch.tasks.observe((), False).tasks] == [None, None]
    launch.processes[W1] = Process(102)
    assert launch.tasks.restart_due(13.1) == [W1]
    assert launch.tasks.pids() == {W0: 100, W1: 102}
    assert launch.failures() == {}
    launch.processes[W1].end(3)
    assert launch.failures() == {W1: "failed with exit code 3"}


def test_a_task_that_waits_for_its_restart_has_ended_when_all_are_ended(launch):
    launch.processes[W1].end(137)
    assert set(launch.failures()) == {W1}
    launch.tasks.restart_later(W1, 10.0)
    launch.tasks.terminate(decide.Ending(decide.FailureReason.STOPPED, 0.0, 3.0))
    assert [t.code for t in launch.tasks.observe((), False).tasks] == [None, 137]


@pytest.mark.parametrize("has_chief", [True, False])
@pytest.mark.parametrize("reason", ["STOPPED", "WANTED"])
def test_tasks_that_serve_a_chief_are_asked_to_end_after_it(tmp_path, has_chief, reason):
    launch = Launch(tmp_path, LaunchOptions(workers=2, ps=1, chief=has_chief))
    chief = Task("chief", 0) if has_chief else W0
    others = [process for task, process in launch.processes.items() if task != chief]
    launch.tasks.terminate(decide.Ending(decide.FailureReason[reason], 0.0, 3.0))
    launch.tasks.observe((), False)
    assert launch.processes[chief].signals == [signal.SIGTERM]
    assert [p.signals for p in others] == [[]] * len(others)
    launch.processes[chief].end(42)
    for _ in range(2):
        launch.tasks.observe((), False)
    assert [p.signals for p in others] == [[signal.SIGTERM]] * len(others)
    for process in others:
        process.end(143)
    # What has no state of its own says nothing about whether all is saved.
    launch.tasks.observe((), False)
    assert launch.tasks.codes == (42,)


def test_tasks_that_serve_end_at_once_where_the_chief_has_ended_well(tmp_path):
    launch = Launch(tmp_path, LaunchOptions(workers=2, ps=1, chief=True))
    launch.processes[Task("chief", 0)].end(0)
    launch.tasks.terminate(decide.Ending(decide.FailureReason.DONE, 0.0, 3.0))
    assert [p.signals for p in launch.processes.values()] == [[], *[[signal.SIGTERM]] * 3]


def test_an_exception_that_could_not_be_written_counts_and_is_shown(launch):
    kept = KeptOutput()
    launch.processes[W1].kept = kept
    record = {
        "at": time.time(),
        "code": 1,
        "summary": "failed: OSError: full",
        "traceback": "Traceback\nOSError",
    }
    os.write(kept.descriptor, b"a last line\n\0" + json.dumps(record).encode())
    kept.given()
    kept.read()
    assert launch.failures() == {W1: "failed: OSError: full"}
    state = next(t for t in launch.tasks.observe((), False).tasks if t.task == W1)
    assert state.raised
    assert launch.tasks.report(state.failure) == "Traceback\nOSError"
    # A process that ended otherwise, as by its own C++ code: the last lines.
    other = decide.Failure(W1, time.time(), 134, "was killed by SIGABRT")
    assert launch.tasks.report(other) == "a last line"
    kept.close()


def test_the_line_between_generations_is_a_line_of_its_own(tmp_path):
    log = RunPaths(tmp_path).log(W0)
    log.write_text("half a li")
    Launch(tmp_path)
    assert log.read_text() == f"half a li\n--- {W0}, generation 0 ---\n"
