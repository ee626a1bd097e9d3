"""`unisono.launch`: a function on several processes of this machine, from a notebook or a script."""

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
from unisono.cli._console import Screen
from unisono.cli._launch import cores, environ, visible_gpus
from unisono.cli._options import LaunchOptions
from unisono.cli._plan import LaunchPlan, RunPaths, base_environment
from unisono.cli._run_files import read_error
from unisono.cli._supervisor import Launch, Outcome, Supervisor
from unisono.cluster_resolver._spec import Task

#: Seconds that the others get to end after one failed.
_GRACE = 3.0


def launch(
    fn: Callable[..., Any],
    workers: int = 2,
    args: Sequence[Any] = (),
    devices_per_worker: int = 1,
    timeout: float | None = None,
) -> list[Any]:
    """Call a function in new processes that form a cluster, and return what each returned.

    Every process has its TF_CONFIG, so that `MultiWorkerMirroredStrategy()` in the function finds the others.
    They are new interpreters: JAX may run in this process already. What worker 0 prints appears here.

    Args:
        fn: the function; also one that is defined in a notebook, or inside another function.
        workers: how many processes.
        args: what the function is called with, the same in each.
        devices_per_worker: virtual CPU devices of each process.
        timeout: seconds after which all are ended; None for no limit.

    Returns:
        What the function returned, in the order of the workers.

    Raises:
        InvalidTypeError: when `fn` cannot be called.
        InvalidArgumentError: when a number cannot be used, or `fn` or `args` cannot be sent.
        ClusterError: when a worker died without an exception, or `timeout` is over.
        Exception: what the function raised in the worker that failed first.

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
    place = RunPaths(Path(tempfile.mkdtemp(prefix="unisono-")))
    try:
        (place.root / "call").write_bytes(_pickled(fn, tuple(args)))
        outcome = Supervisor(_description(options, place, timeout)).run()
        if outcome.failure is not None:
            _raise(outcome, place)
        return [_result(place, outcome.plan, task) for task in outcome.plan.tasks]
    finally:
        shutil.rmtree(place.root)


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps((fn, args)))
    except Exception as error:
        raise InvalidArgumentError(
            "`fn` and `args` must be such that they can be sent to another process. "
            f"Received: fn={fn!r}, of which {type(error).__name__}: {error}. "
            "Create locks, files, strategies and arrays on devices inside of the function."
        ) from error


def _description(options: LaunchOptions, place: RunPaths, timeout: float | None) -> Launch:
    # Unisono may have chosen the size of XLA's pool for this process: the others have their own.
    own = {name: value for name, value in environ().items() if name != "PJRT_NPROC"}
    deadline = None if timeout is None else time.monotonic() + timeout

    def asked() -> tuple[int, ...]:
        if deadline is not None and time.monotonic() > deadline:
            raise ClusterError(
                f"The function must end in time in every worker. Received: timeout={timeout}, which is over. "
                "Pass a longer `timeout`, or None."
            )
        return ()

    return Launch(
        options,
        place,
        base_environment(own, options, options.workers, cores(), place),
        _job,
        Screen(None, sys.stdout),
        asked,
        gpus=visible_gpus(own),
    )


def _job(plan: LaunchPlan, task: Task) -> dict[str, Any]:
    return {
        "environ": dict(plan.environment(task)),
        "kind": "call",
        "target": str(plan.place.root / "call"),
        "args": [],
        "sys_path": [path or os.getcwd() for path in sys.path],
        "log": str(plan.place.log(task)),
        "error": str(plan.place.error(task, plan.generation)),
        "result": str(_result_path(plan.place, task)),
    }


def _result_path(place: RunPaths, task: Task) -> Path:
    return place.root / f"result-{task.index}"


def _result(place: RunPaths, plan: LaunchPlan, task: Task) -> Any:
    import cloudpickle

    path = _result_path(place, task)
    if not path.is_file():
        raise ClusterError(
            f"The function must return in every worker. Received: {task} ended its process without an error. "
            "Return from the function instead of calling `sys.exit`."
        )
    return cloudpickle.loads(path.read_bytes())


class _WorkerTracebackError(Exception):
    """Holds the text of a traceback of another process, to be shown as the cause."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def _raise(outcome: Outcome, place: RunPaths) -> NoReturn:
    """Raise what failed first, as it was raised in its worker."""
    import cloudpickle

    failure = outcome.failure
    if failure is None:
        raise ClusterError(f"The workers must end with code 0. Received: {outcome.code}.")
    record = read_error(place.error(failure.task, outcome.plan.generation))
    if record is not None and record.get("pickle"):
        error = cloudpickle.loads(base64.b64decode(record["pickle"]))
        error.add_note(f"Raised in {failure.task} of unisono.launch.")
        raise error from _WorkerTracebackError(record["traceback"])
    raise ClusterError(
        f"The function must return in every worker. Received: {failure.task} {failure.detail}. "
        f"The last that it printed:\n{outcome.report}"
    )
