"""Runs one task: `python _task.py <pid of the launcher> [warm]`, with the task on standard input.

A warm one imports the slow libraries first, at low priority, and then waits; only afterwards is it told
which task it is. The file runs by itself: it imports nothing of Unisono before it knows.
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import ctypes
import errno
import faulthandler
import importlib.machinery
import importlib.util
import io
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import zipfile
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

_PR_SET_PDEATHSIG = 1
#: What takes seconds to import. None of these starts JAX, or reads who this task is.
_WARM_MODULES = ("unisono", "numpy", "jax", "jax.numpy", "keras", "unisono.data", "unisono.cluster_resolver")
_JAX_VARIABLE = b"JAX_"
#: What a write raises where the log's file system has no room, or has gone.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)
#: As in `_decide`: no failure.
_RESTART_WANTED = 42


def die_with(parent: int) -> None:
    """End this process when the launcher ends, however that comes about."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        # It ended before the line above.
        os._exit(1)


def warm_up() -> threading.Thread:
    """Import the slow libraries, in a thread: Linux' priorities are per thread, and mostly never rise."""
    _set_group_priority(19)
    thread = threading.Thread(target=_import_all)
    thread.start()
    return thread


def hurry(importing: threading.Thread) -> None:
    """Finish the imports as fast as any task: who has a task is no spare any more.

    Args:
        importing: from `warm_up`; on a busy machine it may have hardly begun.
    """
    _set_group_priority(0)
    # The thread's own priority counts within its group alone; only some may raise it.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, importing.native_id or 0, os.getpriority(os.PRIO_PROCESS, 0))
    importing.join()


def _import_all() -> None:
    os.nice(19)
    for name in _WARM_MODULES:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    unisono = sys.modules["unisono"]
    for name in unisono.__all__:
        if name.endswith("Strategy"):
            getattr(unisono, name)


def _set_group_priority(nice: int) -> None:
    """A session is a scheduling group of its own on many machines: priorities hold within it only."""
    for _ in range(30):
        try:
            Path("/proc/self/autogroup").write_text(f"{nice}\n")
        except BlockingIOError:  # Linux changes one group in a tenth of a second; root's at any time
            time.sleep(0.1)
        except OSError:  # the kernel has no such groups, or says no: then the task is as good as another
            return
        else:
            return


def follow_late_variables() -> None:
    """Tell JAX of variables that the program sets: JAX read them when it was imported, before that."""

    def follow(event: str, args: tuple[Any, ...]) -> None:
        if event == "os.putenv" and args[0].startswith(_JAX_VARIABLE):
            _update_jax(args[0].decode(), os.fsdecode(args[1]))

    sys.addaudithook(follow)


def _update_jax(name: str, text: str) -> None:
    jax = sys.modules["jax"]
    option = name.lower()
    if not hasattr(jax.config, option):
        return
    kind = type(getattr(jax.config, option))
    value: Any = text
    if kind is bool:
        value = text.lower() in ("1", "t", "true", "y", "yes", "on")
    elif kind in (int, float):
        value = kind(text)
    jax.config.update(option, value)


def become(job: dict[str, Any], warm: bool) -> None:
    """Take over the environment, the arguments and the log of a task."""
    log = _open_log(job["log"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    sys.stdout.flush()
    sys.stderr.flush()
    for source, target in ((log, 1), (log, 2), (nothing, 0)):
        os.dup2(source, target)
    os.close(log)
    os.close(nothing)
    for name in ("stdout", "stderr"):
        stream = _forgiving(getattr(sys, name))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.update(job["environ"])
    sys.argv = [job["target"], *job["args"]]
    sys.path[:] = job["sys_path"] or [_first_path(job), *sys.path[1:]]
    if warm:
        follow_late_variables()


def _open_log(path: str) -> int:
    """Open the log; what a task prints is dropped where there is no room for the file."""
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


class _Log(io.FileIO):
    """A log whose full disk is not the program's failure: `print` must not end a training."""

    def write(self, data: Any) -> int:
        """Write bytes, or drop them."""
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise
            return memoryview(data).nbytes


def _forgiving(stream: Any) -> io.TextIOWrapper:
    raw: Any = _Log(stream.fileno(), "w", closefd=False)
    raw.name = stream.name
    # Python itself has no buffer between them with PYTHONUNBUFFERED.
    buffer = raw if stream.write_through else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffer,
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _first_path(job: dict[str, Any]) -> str:
    """As `python script.py` and `python -m module` have it."""
    if job["kind"] == "script":
        return str(Path(os.path.realpath(job["target"])).parent)
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed; this is Python's name for it
        return ""


def run(job: dict[str, Any]) -> None:
    """Run the task's program; its exception goes to the log as usual, and then to the launcher.

    In this order: the launcher then ends all tasks, this one among them. An exception in a process that the
    program has forked is that process' own.
    """
    own = os.getpid()
    try:
        if job["kind"] == "call":
            _call(Path(job["target"]), Path(job["result"]))
        elif job["kind"] == "module":
            _run_module(job["target"])
        else:
            _run_script(job["target"])
        _warn_alone()
    except SystemExit as error:
        at, code = time.time(), exit_code(error)
        if error.code is not None and not isinstance(error.code, int):
            # As Python does at its end.
            print(error.code, file=sys.stderr, flush=True)
        if code == 0:
            _warn_alone()
        if code not in (0, _RESTART_WANTED) and os.getpid() == own:
            summary = f"failed with exit code {code}"
            _write(Path(job["error"]), at, {"code": code, "summary": summary, "traceback": ""})
        sys.exit(code)
    except Exception as error:
        at = time.time()
        error = error.with_traceback(without_own_frames(error.__traceback__))
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            if os.getpid() == own:
                _report(error, Path(job["error"]), at, pickled=job["kind"] == "call")
        sys.exit(1)


def _run_script(path: str) -> None:
    """Run a script, or a directory or an archive with a `__main__`, as `python path` does."""
    if os.path.isdir(path) or path.endswith(".pyc") or zipfile.is_zipfile(path):
        runpy.run_path(path, run_name="__main__")
        return
    with io.open_code(os.path.abspath(path)) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    _execute(code, {"__file__": path, "__loader__": importlib.machinery.SourceFileLoader("__main__", path)})


def _run_module(name: str) -> None:
    """Run a module as `python -m name` does."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    loader: Any = None if spec is None else spec.loader
    code = loader.get_code(spec.name) if spec is not None and hasattr(loader, "get_code") else None
    if spec is None or code is None:
        raise ImportError(
            f"No module named {name}, or it cannot be run: a package needs a __main__.", name=name
        )
    sys.argv[0] = spec.origin or name
    names = {"__file__": spec.origin, "__cached__": spec.cached, "__package__": spec.parent}
    _execute(code, {**names, "__loader__": loader, "__spec__": spec})


def _execute(code: CodeType, names: dict[str, Any]) -> None:
    """Run the program's code as `__main__`; with `runpy`, its threads and exit handlers lose that module."""
    main = ModuleType("__main__")
    main.__dict__.update({"__builtins__": builtins, **names})
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _warn_alone() -> None:
    """Say where the program has trained without the tasks that were started with it."""
    if "jax" not in sys.modules:
        return
    try:
        from unisono.training._scope_warnings import warn_alone
    except ImportError:  # the program has another `sys.path`
        return
    warn_alone()


def exit_code(error: SystemExit) -> int:
    """Return the code with which Python ends.

    >>> exit_code(SystemExit()), exit_code(SystemExit(3)), exit_code(SystemExit("no data"))
    (0, 3, 1)
    """
    if error.code is None:
        return 0
    # As the system keeps it: -1 becomes 255.
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _call(target: Path, result: Path) -> None:
    import cloudpickle

    function, args = cloudpickle.loads(target.read_bytes())
    aside = result.with_suffix(".part")
    aside.write_bytes(cloudpickle.dumps(function(*args)))
    aside.replace(result)


def without_own_frames(seen: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the program's first frame on."""
    while seen is not None and seen.tb_frame.f_code.co_filename in (
        __file__,
        runpy.__file__,
        "<frozen runpy>",
    ):
        seen = seen.tb_next
    return seen


def _report(error: Exception, path: Path, at: float, pickled: bool) -> None:
    record: dict[str, Any] = {
        "code": 1,
        "summary": "failed: " + _first_line(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    if pickled:
        record["pickle"] = _pickled(error)
    _write(path, at, record)


def _first_line(error: Exception) -> str:
    r"""Return an exception's type and the first line of what it says, without the notes that were added.

    >>> error = ValueError("a\nb")
    >>> error.add_note("See the documentation.")
    >>> _first_line(error), _first_line(ValueError())
    ('ValueError: a', 'ValueError')
    """
    texts = traceback.format_exception_only(error)
    name = type(error).__name__
    # A syntax error shows its line first; notes follow.
    text = next((text for text in texts if name in text.partition(":")[0]), texts[-1])
    return (text.strip().splitlines() or [name])[0].rstrip(" :")


def _write(path: Path, at: float, record: dict[str, Any]) -> None:
    """The time tells the launcher who failed first."""
    aside = path.with_suffix(".part")
    try:
        aside.write_text(json.dumps({"at": at, **record}))
        aside.replace(path)
    except OSError:  # the launcher has the exit code, and the log
        return


def _pickled(error: Exception) -> str | None:
    import cloudpickle

    try:
        return base64.b64encode(cloudpickle.dumps(error)).decode()
    except Exception:  # whatever a user's exception holds: its text is there
        return None


def main() -> None:
    """Wait for the task, then run it."""
    die_with(int(sys.argv[1]))
    faulthandler.enable()
    # The launcher asks with it where a task that makes no progress is.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    importing = warm_up() if "warm" in sys.argv else None
    line = sys.stdin.readline()
    if not line:
        return
    job = json.loads(line)
    if importing is not None:
        hurry(importing)
    become(job, warm=importing is not None)
    run(job)


if __name__ == "__main__":
    # Its own directory: the program's imports must not find these files.
    del sys.path[0]
    sys.path.insert(0, "")
    main()
