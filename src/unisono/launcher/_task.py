"""Run one task: `python _task.py <pid of the launcher> [warm]`, with its job as JSON on standard input.

A warm process imports the slow libraries first, at low priority, and then waits for its job. This file runs
as a program of its own: it imports nothing of Unisono before it has its job.
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
import logging
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

#: From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
#: Modules that take seconds to import. None of them starts JAX's backend or reads the variables of a cluster.
_WARM_MODULES = ("unisono", "numpy", "jax", "jax.numpy", "keras", "unisono.data", "unisono.cluster_resolver")
_JAX_VARIABLE = b"JAX_"
#: The errors of a write where the log's file system is full, over quota, read-only or gone.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)
#: The launcher's pipe for what the log does not take.
_KEPT: list[int] = []
#: The log that could not be created: what Python prints goes to the launcher alone.
_MISSING_LOG: list[str] = []
#: The most bytes of one message to it, which holds 64 KiB.
_MOST_KEPT = 16 << 10
#: As in `_system/_signals`, which this file must not import.
_RESTART_WANTED = 42


def exit_with_launcher(parent: int) -> None:
    """Make the kernel kill this process when the launcher ends, also by SIGKILL."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        # The launcher ended before the line above took effect.
        os._exit(1)


def warm_up() -> threading.Thread:
    """Import the slow libraries at low priority.

    In a thread: Linux has priorities per thread, and without privileges a thread cannot raise its own again.
    """
    _set_group_priority(19)
    thread = threading.Thread(target=_import_all)
    thread.start()
    return thread


def finish_warm_up(importing: threading.Thread) -> None:
    """Wait for the imports to finish, at normal priority: a process with a job is not a spare any more."""
    _set_group_priority(0)
    # Of minor effect, as the thread's priority counts within its group only; needs CAP_SYS_NICE.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, importing.native_id or 0, os.getpriority(os.PRIO_PROCESS, 0))
    importing.join()


def _import_all() -> None:
    os.nice(19)
    for name in _WARM_MODULES:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    # Unisono's public names are imported on first use: a program's first strategy would take seconds
    # otherwise.
    unisono = sys.modules["unisono"]
    for name in unisono.__all__:
        if name.endswith("Strategy"):
            getattr(unisono, name)


def _set_group_priority(nice: int) -> None:
    """Set the priority of this session, on kernels where a session is a scheduling group of its own.

    There a thread's nice value counts only within its session (autogroup, see man 7 sched).
    """
    for _ in range(30):
        try:
            Path("/proc/self/autogroup").write_text(f"{nice}\n")
        except BlockingIOError:
            # Without CAP_SYS_ADMIN, the kernel accepts one change per 0.1 s from all processes together;
            # tasks start at the same time.
            time.sleep(0.1)
        except OSError:  # no autogroups, or no permission: the process runs at the priority it has
            return
        else:
            return


def follow_late_variables() -> None:
    """Forward the JAX variables that the program sets to `jax.config`.

    JAX reads them when it is imported. In a warm process that has happened before the program starts.
    """

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
    value: str | float | bool = text
    # As JAX itself parses these variables.
    if kind is bool:
        value = text.lower() in ("1", "t", "true", "y", "yes", "on")
    elif kind in (int, float):
        value = kind(text)
    jax.config.update(option, value)


def take_over(job: dict[str, Any], warm: bool) -> None:
    """Take over the environment, the arguments and the log of a task."""
    if "kept" in job:
        # Of this process alone: a child would hold the pipe open.
        os.set_inheritable(job["kept"], False)
        _KEPT.append(job["kept"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if job["log"] is not None:
        _write_to_log(job["log"])
    if "sigterm" in job:
        # The signal that stands for SIGTERM where the engine does not pass on SIGTERM itself.
        signal.signal(job["sigterm"], lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    if "title" in job:
        set_title(job["title"])
    if warm:
        follow_late_variables()
    os.environ.update(job["environ"])
    sys.argv = [job["target"], *job["args"]]
    sys.path[:] = job["sys_path"] or [_first_path(job), *sys.path[1:]]
    if job.get("program"):
        # What a standalone client has brought comes before the modules of this machine.
        sys.path.insert(0, job["program"])


def set_title(title: str) -> None:
    """Name this process in `ps`, and by the title's second word in `top`, where the package is there."""
    # A title may overwrite the environment, by which the launcher finds what tasks leave behind.
    os.environ["SPT_NOENV"] = "1"
    try:
        import setproctitle

        setproctitle.setproctitle(title)
        # The short name, without a blank: who splits /proc/<pid>/stat at blanks (Slurm's proctrack/linuxproc
        # does) otherwise takes another column for the parent, and can no longer end the process.
        setproctitle.setthreadtitle(title.split()[1])
    except ImportError:
        return
    finally:
        del os.environ["SPT_NOENV"]


def _write_to_log(path: str) -> None:
    # File descriptors instead of `sys.stdout` alone: C++ libraries and child processes write to the log, too.
    log = _open_log(path)
    sys.stdout.flush()
    sys.stderr.flush()
    for target in (1, 2):
        os.dup2(log, target)
    os.close(log)
    for name in ("stdout", "stderr"):
        stream = _tolerant_stream(getattr(sys, name))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _open_log(path: str) -> int:
    """Open the log; where the file cannot be created, what Python prints goes to the launcher alone."""
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError:
        _MISSING_LOG.append(path)
        return os.open(os.devnull, os.O_WRONLY)


def _keep(data: ReadableBuffer) -> int:
    """Send the launcher what the log does not take, as far as it can take it; return its size."""
    view = memoryview(data).cast("B")
    if _KEPT:
        with contextlib.suppress(OSError):  # the launcher reads now and then: what does not fit is dropped
            os.write(_KEPT[-1], view[-_MOST_KEPT:])
    return view.nbytes


class _Log(io.FileIO):
    """A log that does without the disk when it is full: `print` must not end a training."""

    def write(self, data: ReadableBuffer) -> int:
        """Write bytes, or send them to the launcher where there is no room."""
        if _MISSING_LOG:
            return _keep(data)
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise
            return _keep(data)


def _tolerant_stream(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    raw: Any = _Log(stream.fileno(), "w", closefd=False)
    raw.name = stream.name
    # As Python does: with PYTHONUNBUFFERED there is no buffer between the text and the file.
    buffer = raw if stream.write_through else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffer,
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _first_path(job: dict[str, Any]) -> str:
    """Return the first entry of `sys.path`, as `python script.py` and `python -m module` set it."""
    if job["kind"] == "script":
        return str(Path(os.path.realpath(job["target"])).parent)
    try:
        return os.getcwd()
    except FileNotFoundError:  # the directory was removed; Python then uses the empty string
        return ""


def run(job: dict[str, Any]) -> None:
    """Run the task's program; write its exception to the log as usual, and then report it to the launcher.

    The report comes last, because the launcher then ends all tasks, this one included. A process that the
    program has forked reports nothing: its parent decides what its exception means.
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
            # As Python does for `sys.exit("message")`.
            print(error.code, file=sys.stderr, flush=True)
        if code == 0:
            _warn_alone()
        if code != 0 and os.getpid() == own:
            # Now, where the state is saved: what follows, such as a barrier of JAX, may outlast the grace.
            summary = "has saved" if code == _RESTART_WANTED else f"failed with exit code {code}"
            _write(job["error"], at, {"code": code, "summary": summary, "traceback": ""})
        sys.exit(code)
    except Exception as error:
        at = time.time()
        error = error.with_traceback(without_own_frames(error.__traceback__))
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            if os.getpid() == own:
                _report(error, job["error"], at, pickled=job["kind"] == "call", apart=_computes_apart())
        sys.exit(1)


def _run_script(path: str) -> None:
    """Run a script, or a directory or an archive with a `__main__`, as `python path` does."""
    # Not `runpy` for a script, see `_execute`; it is needed for what is not one source file.
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
    # `get_code` is optional in the protocol of loaders: namespace packages lack it.
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
    """Run the program's code as `__main__`.

    `runpy` restores `sys.modules["__main__"]` and clears the module's globals when the code returns: threads
    and exit handlers of the program would then fail.
    """
    main = ModuleType("__main__")
    main.__dict__.update({"__builtins__": builtins, **names})
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _warn_alone() -> None:
    """Warn where the program has trained apart from the tasks that were started with it."""
    if "jax" not in sys.modules:
        return
    try:
        from unisono.training._scope_warnings import warn_alone
    except ImportError:  # the program has changed `sys.path`
        return
    warn_alone()


def _computes_apart() -> bool:
    """Return whether the program does not use the parameter servers that were started for it."""
    if "unisono.training._scope_warnings" not in sys.modules:
        return False
    from unisono.cluster._lone_task import computes_apart_from_servers

    return computes_apart_from_servers()


def exit_code(error: SystemExit) -> int:
    """Return the code with which Python ends.

    >>> exit_code(SystemExit()), exit_code(SystemExit(3)), exit_code(SystemExit("no data"))
    (0, 3, 1)
    """
    if error.code is None:
        return 0
    # The system keeps the lowest eight bits: -1 becomes 255.
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _call(target: Path, result: Path) -> None:
    import cloudpickle

    function, args, level = cloudpickle.loads(target.read_bytes())
    if level != logging.WARNING:
        # What its caller wants to see of the library, such as an Estimator's losses.
        logging.basicConfig()
        logging.getLogger("unisono").setLevel(level)
    own = os.getpid()
    data = _pickled_value(function(*args))
    # A process that the function has forked returns from it, too.
    if os.getpid() == own:
        aside = result.with_suffix(".part")
        aside.write_bytes(data)
        aside.replace(result)


def _pickled_value(value: Any) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise TypeError(
            "The function must return a value that can be pickled, so that it can be sent to its caller. "
            f"Received: {type(value).__name__}, which raised {type(error).__name__}: {error}. "
            "Return numbers, arrays and texts, such as `history.history` or `model.get_weights()`."
        ) from error


def without_own_frames(seen: TracebackType | None) -> TracebackType | None:
    """Return a traceback without this file's and runpy's frames at its beginning."""
    while seen is not None and seen.tb_frame.f_code.co_filename in (
        __file__,
        runpy.__file__,
        "<frozen runpy>",
    ):
        seen = seen.tb_next
    return seen


def _report(error: Exception, path: str | None, at: float, pickled: bool, apart: bool) -> None:
    record: dict[str, Any] = {
        "code": 1,
        "summary": "failed: " + _first_line(error),
        "traceback": "".join(traceback.format_exception(error)),
        "apart": apart,
    }
    if pickled:
        record["pickle"] = _pickle(error)
    _write(path, at, record)


def _first_line(error: Exception) -> str:
    r"""Return an exception's type and the first line of its message, without its notes.

    >>> error = ValueError("a\nb")
    >>> error.add_note("See the documentation.")
    >>> _first_line(error), _first_line(ValueError())
    ('ValueError: a', 'ValueError')
    """
    texts = traceback.format_exception_only(error)
    name = type(error).__name__
    # The texts of a syntax error begin with its source line; notes follow the message.
    text = next((text for text in texts if name in text.partition(":")[0]), texts[-1])
    return (text.strip().splitlines() or [name])[0].rstrip(" :")


def _write(path: str | None, at: float, record: dict[str, Any]) -> None:
    """Write how the program has ended at the time `at`, by which the launcher finds the first failure."""
    if path is None:
        return
    aside = Path(path).with_suffix(".part")
    try:
        aside.write_text(json.dumps({"at": at, **record}))
        aside.replace(path)
    except OSError:
        short = {"at": at, "code": record["code"], "summary": record["summary"][:1000]}
        # Less than a message, also as JSON. The marks are as in `_processes`.
        short["traceback"] = record["traceback"][-_MOST_KEPT // 4 :]
        _keep(b"\0" + json.dumps(short).encode() + b"\0")


def _pickle(error: Exception) -> str | None:
    import cloudpickle

    try:
        return base64.b64encode(cloudpickle.dumps(error)).decode()
    except Exception:  # a user's exception may hold anything; the launcher then has its text
        return None


def main() -> None:
    """Wait for the job, then run it."""
    exit_with_launcher(int(sys.argv[1]))
    faulthandler.enable()
    # The launcher sends SIGUSR1 to a task that makes no progress, for its stack traces in the log.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    importing = warm_up() if "warm" in sys.argv else None
    line = sys.stdin.readline()
    if not line:
        return
    job = json.loads(line)
    if importing is not None:
        finish_warm_up(importing)
    take_over(job, warm=importing is not None)
    run(job)


if __name__ == "__main__":
    # The directory of this file: the program's imports must not find these modules.
    del sys.path[0]
    sys.path.insert(0, "")
    main()
