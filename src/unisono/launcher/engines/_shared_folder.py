"""Files of tasks in a folder that an engine's nodes share: exceptions, and results of a function.

Tests: tests/unit/launcher/engines/test_slurm_job.py, tests/cluster/test_mpi_engine.py,
tests/cluster/test_slurm_engine.py.
"""

from __future__ import annotations

import dataclasses
import math
import re
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unisono._errors import InvalidArgumentError
from unisono._system._signals import RESTART_WANTED
from unisono.cluster_resolver._spec import Task, read_index
from unisono.launcher._function_call import (
    call_folder,
    raise_failure,
    read_results,
    result_path,
    write_call,
)
from unisono.launcher._launch import make_run_paths
from unisono.launcher._options import LaunchOptions
from unisono.launcher._plan import LaunchPlan, RunPaths, tasks_of
from unisono.launcher._restart_policy import Failure, root_cause, saving_tasks
from unisono.launcher._run_files import last_lines, read_error
from unisono.launcher._supervisor import Outcome
from unisono.launcher.engines._engine import FunctionCall, S, Submission
from unisono.launcher.engines._settings import LOGS
from unisono.launcher.terminal._printable import prefixed

_RECORD = re.compile(r"g(\d+)-(\w+)-(\d+)\.json")


def recorded_failures(paths: RunPaths, generation: int) -> list[Failure]:
    """Return the failures that the tasks of a generation have recorded."""
    failures = []
    for path in sorted((paths.root / "errors").glob(f"g{generation}-*.json")):
        match, record = _RECORD.fullmatch(path.name), read_error(path)
        if match is not None and record is not None and record["code"] != RESTART_WANTED:
            task = Task(match[2], int(match[3]))
            failures.append(Failure(task, record["at"], record["code"], record["summary"]))
    return failures


def has_saved(paths: RunPaths, options: LaunchOptions, generation: int) -> bool:
    """Return whether all tasks that save have said that the state is saved, however they have ended then."""
    # Of workers whose number may change, the fewest must have said it: how many there were is not known here.
    fewest, most = (saving_tasks(tasks_of(options, workers)) for workers in options.worker_range)
    records = [read_error(paths.error(task, generation)) for task in fewest]
    said = all(record is not None and record["code"] == RESTART_WANTED for record in records)
    return said and not any(failure.task in most for failure in recorded_failures(paths, generation))


def first_failure(paths: RunPaths, generation: int, engine: Iterable[Failure]) -> Failure | None:
    """Return the failure that caused the others, None where there is none."""
    said = [Failure(f.task, math.inf, f.code, f.detail) for f in engine][:1]
    failures = [*recorded_failures(paths, generation), *said]
    return root_cause(failures) if failures else None


def failure_report(paths: RunPaths, generation: int, engine: Iterable[Failure]) -> str:
    """Return why a job failed, with the traceback of the first failure at the end."""
    first = first_failure(paths, generation, engine)
    if first is None:
        return ""
    log = paths.log(first.task)
    record = read_error(paths.error(first.task, generation)) if first.at < math.inf else None
    detail = record["traceback"] if record is not None and record["traceback"] else last_lines(log, 0)
    head = f"unisono: {first.task} {first.detail}, in generation {generation}; its log is {log}"
    return "\n".join(filter(None, [head, prefixed(first.task, detail.rstrip())]))


def call_in_folder(
    run: Callable[[Submission[S]], int],
    ended: Callable[[RunPaths, LaunchOptions], list[Failure]],
    submission: Submission[S],
    function: FunctionCall,
    limit: str,
) -> list[Any]:
    """Call a function in tasks that see the folder; return the values of the chief and the workers.

    Args:
        ended: returns which task ended first, as the engine says it.
        limit: what to write in place of a `timeout`.

    Raises:
        InvalidArgumentError: with a `timeout`, or a function that cannot be pickled.
        ClusterError: when a task has ended without an exception, or without returning.
        KeyboardInterrupt: after Ctrl-C.
        Exception: from the function in the task that failed first.
    """
    if function.timeout is not None:
        raise InvalidArgumentError(
            "`timeout` is for this machine, servers and Ray: here the engine ends what takes too long. "
            f"Received: timeout={function.timeout}. Write `{limit}`."
        )
    with _folder(submission.log_dir) as root:
        paths = RunPaths(root)
        program = write_call(root, function.fn, tuple(function.args))
        code = run(dataclasses.replace(submission, program=program, log_dir=root))
        if code == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        outcome = _outcome(paths, submission.options, code, ended)
        if code:
            raise_failure(outcome, paths)
        return read_results(paths, outcome.plan)


@contextmanager
def _folder(log_dir: Path | None) -> Iterator[Path]:
    """Return a new folder for a call; one below the user's stays, another one is removed with the call."""
    if log_dir is not None:
        yield Path(tempfile.mkdtemp(prefix="call-", dir=make_run_paths(log_dir).root))
        return
    with call_folder(make_run_paths(Path(LOGS)).root) as root:
        yield root


def _outcome(
    paths: RunPaths,
    options: LaunchOptions,
    code: int,
    ended: Callable[[RunPaths, LaunchOptions], list[Failure]],
) -> Outcome:
    """Return how the tasks have ended, by the files that they have left."""
    tasks = tasks_of(options, options.worker_range[1])
    if options.elastic is not None:
        tasks = tuple(t for t in tasks if t.type != "worker" or result_path(paths, t).exists())
    generation = (read_index(paths.fence.read_text().strip()) or 0) if paths.fence.exists() else 0
    failure = first_failure(paths, generation, ended(paths, options)) if code else None
    report = "" if failure is None else last_lines(paths.log(failure.task), 0)
    plan = LaunchPlan(generation, dict.fromkeys(tasks, ""), paths, options)
    return Outcome(code, plan, failure, report=report)
