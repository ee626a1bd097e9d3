"""The supervisor's own order of looking and deciding; what it decides is tested with the restart policy."""

import signal

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
