"""A function on an engine whose nodes share a folder: there are the function, its results and its errors.

Tests: tests/cluster/test_mpi_engine.py, tests/cluster/test_slurm_engine.py.
"""

from __future__ import annotations

import dataclasses
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unisono._errors import InvalidArgumentError
from unisono.cluster_resolver._spec import read_index
from unisono.launcher._call_folders import call_folder
from unisono.launcher._function_call import raise_failure, read_results, result_path, write_call
from unisono.launcher._launch import make_run_paths
from unisono.launcher._options import LaunchOptions
from unisono.launcher._plan import LaunchPlan, RunPaths, tasks_of
from unisono.launcher._restart_policy import Failure
from unisono.launcher._run_files import last_lines
from unisono.launcher._supervisor import Outcome
from unisono.launcher.engines._engine import FunctionCall, S, Submission
from unisono.launcher.engines._following import first_failure
from unisono.launcher.engines._settings import LOGS


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
        Exception: that of the function in the task that failed first.
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
