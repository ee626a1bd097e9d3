"""A function that is called in the processes of a launch: its folder, arguments, results and exceptions.

Tests: tests/unit/launcher/test_function_call.py, tests/cluster/test_launch_function.py.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import logging
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from unisono._errors import ClusterError, InvalidArgumentError
from unisono._system._pickling import pickle_by_value
from unisono.cluster_resolver._spec import Task
from unisono.launcher._options import UserProgram
from unisono.launcher._plan import LaunchPlan, RunPaths
from unisono.launcher._run_files import read_error
from unisono.launcher._supervisor import Outcome
from unisono.launcher.terminal._printable import as_message

_LOG = logging.getLogger("unisono")
#: How the name of a call's folder begins.
CALL_PREFIX = "unisono-call-"
_OWNER = "owner"


@contextmanager
def call_folder(parent: Path | None = None) -> Iterator[Path]:
    """Make a folder for the files of a call, and remove it; remove the folders of killed processes.

    A killed process removes nothing: the next call does. Each folder has a file that its process keeps
    locked; the kernel drops the lock with the process, so that an id which another process has by then means
    nothing.

    Args:
        parent: where it is made; None for the system's temporary directory.
    """
    place = Path(tempfile.gettempdir()) if parent is None else parent
    _remove_abandoned(place)
    root = Path(tempfile.mkdtemp(prefix=CALL_PREFIX, dir=place))
    # Not a lock of `lockf`, which belongs to the process: a second call in another thread would get it.
    with (root / _OWNER).open("w") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        # What has no content yet was not locked yet.
        file.write(f"{os.getpid()}\n")
        file.flush()
        try:
            yield root
        finally:
            shutil.rmtree(root)


def _remove_abandoned(place: Path) -> None:
    for root in place.glob(f"{CALL_PREFIX}*"):
        # Of other users, of another file system, or removed meanwhile.
        with contextlib.suppress(OSError):
            if root.lstat().st_uid == os.geteuid() and _is_abandoned(root / _OWNER):
                shutil.rmtree(root)


def _is_abandoned(owner: Path) -> bool:
    with owner.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return bool(file.read())


def pickle_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return a function, its arguments and the level of this process' messages as bytes."""
    try:
        return pickle_by_value((fn, args, _LOG.getEffectiveLevel()))
    except Exception as error:
        raise InvalidArgumentError(
            "`fn` and `args` must be picklable, so that they can be sent to another process. "
            f"Received: fn={fn!r}, which raised {type(error).__name__}: {error}. "
            "Create locks, files, strategies and arrays on devices inside the function."
        ) from error


def write_call(root: Path, fn: Callable[..., Any], args: tuple[Any, ...]) -> UserProgram:
    """Write a call, and where its modules are, to a folder that the tasks see; return their program."""
    name = re.sub(r"\W+", "", getattr(fn, "__name__", type(fn).__name__)) or "function"
    target = root / f"{name}.call"
    target.write_bytes(pickle_call(fn, args))
    target.with_suffix(".path").write_text(json.dumps([path or os.getcwd() for path in sys.path]))
    return UserProgram(str(target), is_call=True)


def path_of_call(target: Path) -> list[str]:
    """Return where Python finds the modules of a call that `write_call` has written."""
    folders: list[str] = json.loads(target.with_suffix(".path").read_text())
    return folders


def result_path(paths: RunPaths, task: Task) -> Path:
    """Return the file for what the function has returned in a task."""
    return paths.root / f"result-{task.type}-{task.index}"


def read_results(paths: RunPaths, plan: LaunchPlan) -> list[Any]:
    """Return the function's results in the chief and the workers.

    With parameter servers a worker may return nothing: it has served their chief.
    """
    import cloudpickle

    values = []
    for task in (task for task in plan.tasks if task.type in ("chief", "worker")):
        path = result_path(paths, task)
        if path.is_file():
            values.append(cloudpickle.loads(path.read_bytes()))
        elif plan.has_servers and task != plan.shown:
            values.append(None)
        else:
            raise ClusterError(
                f"The function must return in every worker. Received: {task}, whose process exited with code "
                "0. Return from the function instead of calling `sys.exit`."
            )
    return values


def time_limit(timeout: float | None) -> Callable[[], tuple[int, ...]]:
    """Return a launch's source of requests to stop, which raises an error after some seconds."""
    deadline = math.inf if timeout is None else time.monotonic() + timeout

    def stop_requests() -> tuple[int, ...]:
        if time.monotonic() > deadline:
            raise ClusterError(
                f"The function must return in every worker within `timeout`. Received: timeout={timeout}, "
                "which has passed. Pass a longer `timeout`, or None."
            )
        return ()

    return stop_requests


class _WorkerTracebackError(Exception):
    """The text of a traceback from another process, shown as the cause of its exception."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def raise_failure(outcome: Outcome, paths: RunPaths) -> NoReturn:
    """Raise the exception of the task that failed first.

    Raises:
        ClusterError: when the task has raised none, or an exception that cannot be pickled.
        Exception: from the task.
    """
    failure = outcome.failure
    if failure is None:
        raise ClusterError(f"The workers must exit with code 0. Received: {outcome.code}.")
    record = read_error(paths.error(failure.task, outcome.plan.generation))
    text = None if record is None else record.get("pickle")
    error = _unpickled(text) if text else None
    if record is not None and error is not None:
        error.add_note(f"Raised in {failure.task} of unisono.launch.")
        raise error from _WorkerTracebackError(as_message(record["traceback"]))
    detail = f" ({outcome.detail})" if outcome.detail else ""
    raise ClusterError(
        f"The function must return in every worker. Received: {failure.task} {failure.detail}{detail}. "
        f"The end of its output:\n{as_message(outcome.report)}"
    )


def _unpickled(text: str) -> BaseException | None:
    import cloudpickle

    try:
        error = cloudpickle.loads(base64.b64decode(text))
    except Exception:  # a class that this process lacks, or cannot make again: the traceback's text is left
        return None
    return error if isinstance(error, BaseException) else None
