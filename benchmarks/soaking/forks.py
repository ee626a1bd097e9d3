"""Launchers and tasks that are forked from this process, which has imported all and has not started JAX.

It saves seconds for each start. What a task does from then on is `launcher/_task.py`'s, as always.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import types

#: Seconds within which the launcher counts failures: with its own ten minutes, tasks that fail often would
#: start again after half a minute each.
WINDOW = 6.0

#: What is added to the clock of each host, in memory that all forked processes share.
CLOCKS = mmap.mmap(-1, mmap.PAGESIZE)
_real_time = time.time


def set_clock(host, seconds):
    """Let the clock of a host jump to so many seconds before or after the true time."""
    struct.pack_into("d", CLOCKS, 8 * host, seconds)


def clock_of(host):
    """By how many seconds the clock of a host is wrong."""
    return struct.unpack_from("d", CLOCKS, 8 * host)[0]


def follow_clock(host):
    """Let `time.time` of this process be the clock of a host."""
    time.time = lambda: _real_time() + clock_of(host)


def import_all():
    """Import what tasks need."""
    import jax  # noqa: F401
    import keras  # noqa: F401
    import numpy  # noqa: F401
    from orbax.checkpoint import v1  # noqa: F401

    import unisono
    import unisono.cli._app
    import unisono.data

    for name in unisono.__all__:
        if name != "summary":
            getattr(unisono, name)


def enter_host(holder):
    """Move this process to the network, the name and the mounts of another one."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Without root, hosts belong to a namespace of users: that one first.
    names = ("net", "uts", "mnt") if os.geteuid() == 0 else ("user", "net", "uts", "mnt")
    files = [os.open(f"/proc/{holder}/ns/{name}", os.O_RDONLY) for name in names]
    for file in files:
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), f"setns to process {holder} failed")
        os.close(file)


def fork(body, output, environ=None, holder=None):
    """Run a function in a new process that ends as a Python program does.

    Args:
        body: the function.
        output: the file to which its output is appended.
        environ: variables to set.
        holder: the process whose host it runs on; None for this one's.

    Returns:
        The id of the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.update(environ or {})
        if holder is not None:
            enter_host(holder)
        code = body() or 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        leave(code)
    return 0


def leave(code):
    """End this process as the interpreter does."""
    with contextlib.suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def command(arguments, host=None):
    """Be the command `unisono` with these arguments; the tasks that it starts are forked, too.

    Args:
        arguments: of the command.
        host: whose clock it follows, with a short window for failures; None for the usual ones.
    """
    from unisono.cli import _app
    from unisono.launcher import _processes
    from unisono.standalone import _client

    signal.signal(signal.SIGINT, signal.default_int_handler)
    names = {name: getattr(subprocess, name) for name in ("PIPE", "STDOUT", "DEVNULL")}
    _processes.subprocess = types.SimpleNamespace(**names, Popen=_start)
    if host is not None:
        follow_clock(host)
        for module in (_app, _client):
            module.LaunchOptions = functools.partial(module.LaunchOptions, window=WINDOW)
    sys.argv = ["unisono", *arguments]
    _app.main()


def _start(command, **options):
    if command[1].endswith("_task.py"):
        return Forked(command, **options)
    return subprocess.Popen(command, **options)


class Forked:
    """A task's process, as `subprocess.Popen` shows it; it has all files of the launcher.

    Args:
        command: of `_task.py`.
        stdout: the file of its output.
        env: its variables.
        others: what a fork does anyway.
    """

    def __init__(self, command, stdout, env, **others):
        given, pipe = os.pipe()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                os.setsid()
                os.close(pipe)
                for source, target in ((given, 0), (stdout.fileno(), 1), (stdout.fileno(), 2)):
                    os.dup2(source, target)
                code = _be_task(parent, env)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                leave(code)
        os.close(given)
        self.stdin = os.fdopen(pipe, "wb")

    def wait(self):
        """The exit code, as `Popen` gives it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _be_task(parent, environ):
    from unisono.launcher import _task

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _task.exit_with_launcher(parent)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    sys.stdin = os.fdopen(os.dup(0))
    line = sys.stdin.readline()
    if not line:
        return 0
    if "jax" in sys.modules:
        _task.follow_late_variables()
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    os.environ.update(environ)
    try:
        job = json.loads(line)
        _task.take_over(job, warm=False)
        _task.run(job)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 0
