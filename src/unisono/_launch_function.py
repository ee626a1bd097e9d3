"""`unisono.launch`: call a function in several processes of this machine, from a notebook or a script.

Tests: tests/cluster/test_launch_function.py.
"""

from __future__ import annotations

import base64
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from unisono._errors import ClusterError, InvalidArgumentError, InvalidTypeError
from unisono.cluster_resolver._spec import Task
from unisono.launcher._console import Console
from unisono.launcher._launch import cores, environ, visible_gpus
from unisono.launcher._options import LaunchOptions
from unisono.launcher._plan import LaunchPlan, RunPaths, base_environment
from unisono.launcher._run_files import read_error
from unisono.launcher._supervisor import Launch, Outcome, Supervisor

#: Seconds between SIGTERM and SIGKILL: a notebook waits for them after an interrupt.
_GRACE = 3.0


def launch(
    fn: Callable[..., Any],
    workers: int = 2,
    args: Sequence[Any] = (),
    devices_per_worker: int = 1,
    timeout: float | None = None,
) -> list[Any]:
    """Call a function in new processes that form a cluster, and return its results.

    Every process has its TF_CONFIG, so that `MultiWorkerMirroredStrategy()` in the function finds its peers.
    The processes are new interpreters, so JAX may run in this process already. Worker 0's output is shown
    here.

    Args:
        fn: the function; also one that is defined in a notebook or inside another function.
        workers: the number of processes.
        args: the arguments of the function, the same in each process.
        devices_per_worker: the number of virtual CPU devices of each process.
        timeout: seconds after which all processes are killed; None for no limit.

    Returns:
        The results of the function, in the order of the workers.

    Raises:
        InvalidTypeError: when `fn` is not callable.
        InvalidArgumentError: when a number is out of range, or `fn` or `args` cannot be pickled.
        ClusterError: when a worker died without an exception, or did not return within `timeout`.
        Exception: the exception of the function in the worker that failed first.

    >>> import os
    >>> launch(lambda x: x + 1, workers=1, args=(41,))
    [42]
    """
    if not callable(fn):
        raise InvalidTypeError(
            f"`fn` must be a function. Received: fn={fn!r}. Write `unisono.launch(train, workers=2)`."
        )
    options = LaunchOptions(
        workers=workers, devices_per_worker=devices_per_worker, grace=_GRACE, stall_timeout=0.0
    )
    paths = RunPaths(Path(tempfile.mkdtemp(prefix="unisono-")))
    try:
        (paths.root / "call").write_bytes(_pickle(fn, tuple(args)))
        outcome = Supervisor(_description(options, paths, timeout)).run()
        if outcome.failure is not None:
            _raise(outcome, paths)
        return [_result(paths, outcome.plan, task) for task in outcome.plan.tasks]
    finally:
        shutil.rmtree(paths.root)


def _pickle(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps((fn, args)))
    except Exception as error:
        raise InvalidArgumentError(
            "`fn` and `args` must be picklable, so that they can be sent to another process. "
            f"Received: fn={fn!r}, which raised {type(error).__name__}: {error}. "
            "Create locks, files, strategies and arrays on devices inside the function."
        ) from error


def _description(options: LaunchOptions, paths: RunPaths, timeout: float | None) -> Launch:
    # Unisono may have set the size of XLA's thread pool for this process; the workers compute their own.
    own = {name: value for name, value in environ().items() if name != "PJRT_NPROC"}
    deadline = None if timeout is None else time.monotonic() + timeout

    def stop_requests() -> tuple[int, ...]:
        if deadline is not None and time.monotonic() > deadline:
            raise ClusterError(
                f"The function must return in every worker within `timeout`. Received: timeout={timeout}, "
                "which has passed. Pass a longer `timeout`, or None."
            )
        return ()

    return Launch(
        options,
        paths,
        base_environment(own, options, options.workers, cores(), paths),
        _job,
        Console(None, sys.stdout),
        stop_requests,
        gpus=visible_gpus(own),
    )


def _job(plan: LaunchPlan, task: Task) -> dict[str, Any]:
    return {
        "environ": dict(plan.environment(task)),
        "kind": "call",
        "target": str(plan.paths.root / "call"),
        "args": [],
        "sys_path": [path or os.getcwd() for path in sys.path],
        "log": str(plan.paths.log(task)),
        "error": str(plan.paths.error(task, plan.generation)),
        "result": str(_result_path(plan.paths, task)),
    }


def _result_path(paths: RunPaths, task: Task) -> Path:
    return paths.root / f"result-{task.index}"


def _result(paths: RunPaths, plan: LaunchPlan, task: Task) -> Any:
    import cloudpickle

    path = _result_path(paths, task)
    if not path.is_file():
        raise ClusterError(
            f"The function must return in every worker. Received: {task}, whose process exited with code 0. "
            "Return from the function instead of calling `sys.exit`."
        )
    return cloudpickle.loads(path.read_bytes())


class _WorkerTracebackError(Exception):
    """The text of a traceback from another process, shown as the cause of its exception."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def _raise(outcome: Outcome, paths: RunPaths) -> NoReturn:
    """Raise the exception of the worker that failed first."""
    import cloudpickle

    failure = outcome.failure
    if failure is None:
        raise ClusterError(f"The workers must exit with code 0. Received: {outcome.code}.")
    record = read_error(paths.error(failure.task, outcome.plan.generation))
    if record is not None and record.get("pickle"):
        error = cloudpickle.loads(base64.b64decode(record["pickle"]))
        error.add_note(f"Raised in {failure.task} of unisono.launch.")
        raise error from _WorkerTracebackError(record["traceback"])
    raise ClusterError(
        f"The function must return in every worker. Received: {failure.task} {failure.detail}. "
        f"The end of its output:\n{outcome.report}"
    )
