"""The supervisor's own order of looking and deciding; what it decides is tested with the restart policy."""

import errno
import os
import signal
import stat

import pytest

from unisono.cluster_resolver._spec import Task
from unisono.launcher._options import LaunchOptions
from unisono.launcher._plan import RunPaths, make_plan
from unisono.launcher._restart_policy import Ending, Failure, FailureReason, Generation, TaskState
from unisono.launcher._supervisor import Launch, Supervisor

OPTIONS = LaunchOptions(workers=1, ps=1, chief=True)
CHIEF, WORKER, SERVER = Task("chief", 0), Task("worker", 0), Task("ps", 0)


class Screen:
    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)

    def flush(self):
        pass


class Tasks:
    """Tasks of which another one has failed each time that they are looked at."""

    def __init__(self, root, failing):
        self.plan = make_plan(OPTIONS, 0, 1, [1, 2, 3], RunPaths(root))
        self.failing, self.restarted, self.looks = list(failing), [], 0

    def observe(self, signals, resize):
        self.looks += 1
        if not self.failing:
            ending = Ending(FailureReason.DONE, 0.0, 0.0)
            return Generation(tuple(TaskState(t, 0) for t in self.plan.tasks), ending)
        now = self.failing.pop(0)
        states = (
            TaskState(t, 137, Failure(t, 0.0, 137, "was killed")) if t in now else TaskState(t)
            for t in self.plan.tasks
        )
        return Generation(tuple(states))

    def restart_later(self, task, at):
        self.restarted.append(task)

    def restart_due(self, now):
        return []

    def terminate(self, ending):
        raise AssertionError(f"the launch must go on: {ending}")


def test_a_task_that_fails_while_another_is_started_again_starts_again_too(tmp_path):
    """The second look found a new failure, and ended the launch because of it."""
    tasks, screen = Tasks(tmp_path, [{CHIEF}, {SERVER}, {WORKER}, set(), {CHIEF}]), Screen()
    launch = Launch(OPTIONS, RunPaths(tmp_path), {}, lambda plan, task: {}, screen)
    ending = Supervisor(launch)._watch(tasks)
    assert ending.reason is FailureReason.DONE
    assert tasks.restarted == [CHIEF, SERVER, WORKER, CHIEF]
    assert sum("it starts again" in line for line in screen.lines) == 4


def test_a_signal_ends_the_looking(tmp_path):
    tasks = Tasks(tmp_path, [])
    launch = Launch(
        OPTIONS, RunPaths(tmp_path), {}, lambda plan, task: {}, Screen(), lambda: (signal.SIGTERM,)
    )
    assert Supervisor(launch)._watch(tasks).reason is FailureReason.DONE
    assert tasks.looks == 1


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_folder_that_cannot_be_flushed_keeps_its_fence(tmp_path, monkeypatch, number):
    """The launch took it for an earlier launch's and removed it."""
    real = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    launch = Launch(OPTIONS, RunPaths(tmp_path), {}, lambda plan, task: {}, Screen())
    plan = make_plan(OPTIONS, 3, 1, [1, 2, 3], launch.paths)
    Supervisor(launch)._raise_fence(plan)
    assert plan.paths.fence.read_text() == "3\n"


def test_a_fence_of_an_earlier_launch_is_removed_where_none_can_be_written(tmp_path, monkeypatch):
    launch = Launch(OPTIONS, RunPaths(tmp_path), {}, lambda plan, task: {}, Screen())
    launch.paths.fence.write_text("7\n")

    def fsync(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    Supervisor(launch)._raise_fence(make_plan(OPTIONS, 3, 1, [1, 2, 3], launch.paths))
    assert not launch.paths.fence.exists()


@pytest.mark.parametrize("is_seen_while_others_run", [True, False])
def test_why_a_generation_ends_is_shown_before_the_next_one(tmp_path, is_seen_while_others_run):
    """Tasks that all end at once are not stopped, which shows the reason otherwise."""
    options, screen = LaunchOptions(workers=2, max_restarts=1), Screen()
    supervisor = Supervisor(Launch(options, RunPaths(tmp_path), {}, lambda plan, task: {}, screen))
    supervisor._is_explained = is_seen_while_others_run
    tasks = Tasks(tmp_path, [])
    tasks.codes = {WORKER: 137}
    ending = Ending(FailureReason.FAILED, 0.0, 0.0, Failure(WORKER, 0.0, 137, "was killed by SIGKILL"))
    assert supervisor._decide_next(tasks, ending).workers == 2
    shown = [f"unisono: worker:0 was killed by SIGKILL (log: {tasks.plan.paths.log(WORKER)})"]
    assert screen.lines == ([] if is_seen_while_others_run else shown)


@pytest.mark.parametrize(("codes", "expected"), [((42, 42), 42), ((42, 137), 143)])
def test_a_signal_while_tasks_save_for_another_size_ends_the_launch_as_saved(tmp_path, codes, expected):
    """It ended with 143, after which no scheduler starts it again."""
    options = LaunchOptions(workers=2, elastic=(1, 2))
    launch = Launch(
        options, RunPaths(tmp_path), {}, lambda plan, task: {}, Screen(), lambda: (signal.SIGTERM,)
    )
    tasks = Tasks(tmp_path, [])
    tasks.codes = codes
    outcome = Supervisor(launch)._decide_next(tasks, Ending(FailureReason.RESIZE, 0.0, 0.0))
    assert outcome.code == expected
