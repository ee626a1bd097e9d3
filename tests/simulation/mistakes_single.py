"""Mistakes in how a single task is started again, while the others of a launch go on."""

from tests.simulation._planted import Mistake

_POLICY = "unisono.launcher._restart_policy"
_SUPERVISOR = "unisono.launcher._supervisor"
_GENERATION = "unisono.launcher._generation"


def _mistake(name, place, old, new):
    return Mistake(name, place, old, new, "single_restarts")


MISTAKES = (
    _mistake(
        "one failure ends the others",
        f"{_POLICY}:to_restart",
        "if over or not options.restarts_tasks:",
        "if True:",
    ),
    _mistake(
        "a task starts again without a delay",
        f"{_POLICY}:task_restart",
        "return TaskRestart(_delay(record, options, now), count)",
        "return TaskRestart(0.0, count)",
    ),
    _mistake(
        "single restarts are not counted",
        f"{_SUPERVISOR}:Supervisor._restart_failed",
        "self._record = decide.with_failure(self._record, failed, now)",
        "pass",
    ),
    _mistake(
        "the same error is tried again and again",
        f"{_POLICY}:task_restart",
        "if failed.raised and (failed.task, detail) in known:",
        "if False:",
    ),
    _mistake(
        "a program that uses the library wrongly starts again",
        f"{_POLICY}:task_restart",
        "if failed.raised and (_MISUSE.match(detail) or _MISSING.match(detail)):",
        "if False:",
    ),
    _mistake(
        "a program without servers starts again", f"{_POLICY}:task_restart", "if failed.apart:", "if False:"
    ),
    _mistake(
        "a task starts beside its hanging process",
        f"{_GENERATION}:TaskGroup.restart_due",
        "if process is not None and task not in self._codes:",
        "if False:",
    ),
    _mistake(
        "a process that hangs at its end is waited for",
        f"{_GENERATION}:TaskGroup.restart_due",
        "process.kill()",
        "pass",
    ),
    _mistake(
        "a failure counts again after the restart",
        f"{_GENERATION}:TaskGroup.restart_due",
        "self._failures.pop(task, None)",
        "pass",
    ),
    _mistake(
        "servers are asked to end with their chief",
        f"{_GENERATION}:TaskGroup.terminate",
        "decide.serving_tasks(self.plan.tasks) if may_save else []",
        "[]",
    ),
    _mistake(
        "a worker that was started again is waited for",
        f"{_POLICY}:_training_tasks",
        "(t.task.index == 0 or not t.restarted)",
        "True",
    ),
    _mistake(
        "the evaluator is not told the end",
        f"{_SUPERVISOR}:Supervisor._watch",
        "elif decide.waits_for_evaluator(state):",
        "elif False:",
    ),
    _mistake(
        "the key of a cluster stays",
        "unisono.launcher._machines:LocalMachine._cluster_key",
        "path.unlink(missing_ok=True)",
        "pass",
    ),
)
