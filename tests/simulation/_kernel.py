"""Processes, signals, pipes and locks of a simulated machine: what the launcher's own code gets of `os`.

A process has a number, a group, a parent, an environment and open ends of pipes. It is a zombie from its end
until its parent has waited for it, and its number goes to another process from five seconds after that on.
SIGKILL and what ends by default end a process a moment later, also a stopped one. Who loses its parent can
have asked for a signal then; init waits for the others. Programs are started by the names of their files.

Tests: tests/unit/test_simulated_launches.py.
"""

import contextlib
import errno
import os
import signal
import subprocess
import types
from pathlib import PurePath

import greenlet
import pytest

from tests.simulation._world import DELAY, Violation

#: Numbers of the ends of pipes: those of files are lower.
_FIRST_PIPE = 1 << 26
#: Bytes that a pipe holds, and those that are written at once or not at all.
_PIPE, _PIPE_BUF = 64 << 10, 4096
_FIRST_PID = 2000
#: Seconds after which the number of a process that has ended may be another one's. Between a look and a
#: signal a moment passes, which nobody can avoid.
_REUSED_AFTER = 5.0
#: Seconds until a signal that ends a process has done so, at most.
_DEATH = 0.05
LOCK_EX, LOCK_NB = 2, 4
_IGNORED = (signal.SIGCHLD, signal.SIGCONT, signal.SIGWINCH, signal.SIGURG)


class Entry:
    """A process of the table."""

    def __init__(self, kernel, pid, name, environ, parent, group):
        self.kernel, self.pid, self.name, self.environ = kernel, pid, name, dict(environ)
        self.parent, self.group = parent, group or pid
        self.children = []
        #: As `Popen.returncode`: None while it runs.
        self.code = None
        self.is_reaped = False
        self.death_signal = 0
        #: What signals do; None for one that is ignored.
        self.handlers = {}
        self.waiters = []
        self.argv, self.job, self.kept = (), None, []
        self.process = None
        #: True of a process that no launcher has started.
        self.is_foreign = False

    @property
    def is_alive(self):
        return self.code is None

    def __repr__(self):
        return f"{self.name} ({self.pid})"


class _Pipe:
    """What is written at one end and read at the other."""

    def __init__(self):
        self.data = bytearray()
        self.ends = {"r": set(), "w": set()}
        self.waiters = []


class Kernel:
    """The process table of a machine.

    Args:
        machine: on which processes are started.
        programs: by the name of a file: what a process does that runs it; it gets the process' arguments.
    """

    def __init__(self, world, machine, programs):
        self.world, self.machine, self.programs = world, machine, programs
        self.table, self.free, self._next = {}, [], _FIRST_PID
        self._pipes, self._numbers = {}, iter(range(_FIRST_PIPE, 1 << 30))
        self._blocking, self._locks = {}, {}
        self.ports = {}
        #: Called with the sender, the process and the number of each signal.
        self.on_signal = lambda sender, target, number: None
        #: Called with a process before something is written to its standard input.
        self.on_input = lambda target: None

    # --- processes -------------------------------------------------------------------------------------

    @property
    def current(self):
        """The process that runs now; None for the checker."""
        fiber = self.world.current
        return None if fiber is None else fiber.process.own.get("entry")

    def start(self, name, body, environ=(), parent=None, group=0, argv=()):
        """Start a process; `body()` returns its exit code."""
        entry = Entry(self, self._number(), name, environ, parent, group)
        entry.argv = argv
        self.table[entry.pid] = entry
        if parent is not None:
            parent.children.append(entry)
        process = entry.process = self.machine.process(name, lambda: self._main(entry, body))
        process.pid = entry.pid
        process.own["entry"] = entry
        process.at_end(lambda: self._end(entry))
        return entry

    def _number(self):
        groups = {each.group for each in self.table.values()}
        late = [pid for at, pid in self.free if at <= self.world.now - _REUSED_AFTER and pid not in groups]
        if late and self.world.choose(2, "fault number again"):
            pid = late[0]
            self.free = [(at, each) for at, each in self.free if each != pid]
            return pid
        self._next += 1
        return self._next

    def _main(self, entry, body):
        try:
            code = body()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except (Violation, greenlet.GreenletExit):
            raise
        except Exception as error:
            # A program's own error is caught where a program is run.
            self.world.fail(error, entry.name)
            raise
        entry.process.own["code"] = 0 if code is None else code
        return code

    def exit_at_once(self, code):
        """Be `os._exit`."""
        process = self.world.current.process
        process.own["code"] = code
        process.kill()

    def _end(self, entry):
        entry.code = entry.process.own.get("code", -signal.SIGKILL)
        for number in [n for n, (pipe, end) in self._pipes.items() if entry in pipe.ends[end]]:
            self._drop(number, entry)
        self.ports = {port: owner for port, owner in self.ports.items() if owner is not entry}
        for child in entry.children:
            child.parent = None
            if not child.is_alive:
                self._reap(child)
            elif child.death_signal:
                self._deliver(child, child.death_signal)
        if entry.parent is None:
            self._reap(entry)
        while self.world.wake(entry.waiters):
            pass

    def _reap(self, entry):
        if not entry.is_reaped:
            entry.is_reaped = True
            del self.table[entry.pid]
            self.free.append((self.world.now, entry.pid))
            if entry.parent is not None:
                entry.parent.children.remove(entry)

    def wait(self, entry, reap=True):
        """Wait for the end of a child."""
        while entry.is_alive:
            self.world.block(entry.waiters, None, f"the end of {entry}")
        if reap:
            self._reap(entry)
        return entry.code

    def living(self, mark=None):
        """Return the processes that run, with a mark in their environment."""
        every = [each for each in self.table.values() if each.is_alive and not each.is_foreign]
        return every if mark is None else [each for each in every if mark in str(each.environ)]

    # --- signals ---------------------------------------------------------------------------------------

    def kill(self, pid, number):
        """Be `os.kill`."""
        entry = self.table.get(pid)
        if entry is None:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        if number:
            self._send(entry, number)

    def killpg(self, group, number):
        """Be `os.killpg`."""
        found = [each for each in self.table.values() if each.group == group]
        if not found:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        for entry in found:
            self._send(entry, number)

    def _send(self, entry, number):
        if entry.is_foreign:
            sender = self.current
            self.world.fail(
                Violation(f"{sender} sends the signal {number} to {entry}, which is none of its.")
            )
        if entry.is_alive:
            self.on_signal(self.current, entry, number)
            self._deliver(entry, number)

    def _deliver(self, entry, number):
        if number in entry.handlers and number != signal.SIGKILL:
            handler = entry.handlers[number]
            if handler is not None:
                # Called where Python looks for signals.
                self.world.call_later(self.world.uniform(0.0, 0.3), lambda: self._handle(entry, handler))
        elif number not in _IGNORED:
            self.world.call_later(self.world.uniform(0.0, _DEATH, DELAY), lambda: self._die(entry, number))

    def _handle(self, entry, handler):
        if entry.is_alive:
            self.world.spawn(handler, "signal", entry.process)

    @staticmethod
    def _die(entry, number):
        if entry.is_alive:
            entry.process.own["code"] = -number
            entry.process.kill()

    # --- pipes -----------------------------------------------------------------------------------------

    def pipe(self):
        """Be `os.pipe`."""
        pipe, owner = _Pipe(), self.current
        numbers = next(self._numbers), next(self._numbers)
        for number, end in zip(numbers, "rw", strict=True):
            self._pipes[number] = pipe, end
            pipe.ends[end].add(owner)
        return numbers

    def give(self, number, entry):
        """Let a process have an end of a pipe, too."""
        pipe, end = self._pipes[number]
        pipe.ends[end].add(entry)

    def held(self, entry):
        """Return the ends of pipes that a process has open."""
        return [n for n, (pipe, end) in self._pipes.items() if entry in pipe.ends[end]]

    def _drop(self, number, entry):
        pipe, end = self._pipes[number]
        pipe.ends[end].discard(entry)
        while self.world.wake(pipe.waiters):
            pass

    def _pipe(self, number):
        pipe, end = self._pipes.get(number, (None, ""))
        if pipe is None or self.current not in pipe.ends[end]:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return pipe

    def read(self, number, most):
        """Be `os.read`."""
        pipe = self._pipe(number)
        self._await_data(pipe, number)
        data = bytes(pipe.data[:most])
        del pipe.data[:most]
        return data

    def _await_data(self, pipe, number):
        while not pipe.data and pipe.ends["w"]:
            if not self._blocking.get(number, True):
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            self.world.block(pipe.waiters, None, "a pipe")

    def write(self, number, data):
        """Be `os.write`."""
        pipe = self._pipe(number)
        self.world.give_way()
        if not pipe.ends["r"]:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        room = _PIPE - len(pipe.data)
        if room < (len(data) if len(data) <= _PIPE_BUF else 1):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        pipe.data += bytes(data[:room])
        while self.world.wake(pipe.waiters):
            pass
        return min(room, len(data))

    def close(self, number):
        """Close an end of a pipe in the present process."""
        self._pipe(number)
        self._drop(number, self.current)

    def read_line(self, number):
        """Return the bytes up to the end of a line, or of all."""
        line, pipe = b"", self._pipe(number)
        while not line.endswith(b"\n"):
            self._await_data(pipe, number)
            part = pipe.data[: pipe.data.find(b"\n") + 1 or None]
            if not part:
                break
            del pipe.data[: len(part)]
            line += part
        return bytes(line)

    # --- what is patched -------------------------------------------------------------------------------

    def popen(self, command, env=None, start_new_session=False, pass_fds=(), **streams):
        """Be `subprocess.Popen`.

        Raises:
            OSError: there are too many processes.
        """
        program = next(PurePath(each).name for each in command[1:] if each.endswith(".py"))
        argv = command[[PurePath(each).name for each in command].index(program) :]
        parent = self.current
        if program == "_task.py" and self.world.fault(0.03, "fork"):
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        environ = parent.environ if env is None else env
        read, write = self.pipe()
        name = f"{program.strip('_').removesuffix('.py')}.{next(self.world.numbers)}"
        group = 0 if start_new_session else parent.group
        body = self.programs[program]
        entry = self.start(name, lambda: body(argv), environ, parent, group, argv)
        entry.stdin = read
        for number in (read, *pass_fds):
            self.give(number, entry)
        self.close(read)
        return _Child(self, entry, write)

    def flock(self, file, operation):
        """Be `fcntl.flock` for an exclusive lock."""
        while self._is_locked(file):
            if operation & LOCK_NB:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            self.world.sleep(0.01)
        self._locks[file.name] = self.current, file

    def _is_locked(self, file):
        holder, held = self._locks.get(file.name, (None, None))
        return holder is not None and holder.is_alive and not held.closed and held is not file

    def statvfs(self, path):
        """Be `os.statvfs`."""
        room = int(min(self.machine.disks["disk"].room, 1 << 40))
        return types.SimpleNamespace(f_bavail=room, f_bfree=room, f_blocks=1 << 40)

    def marked(self):
        """Return what stands for `/proc`."""
        return _Proc(self)

    @contextlib.contextmanager
    def doors(self):
        """Replace the calls of `os` while a block runs."""
        with pytest.MonkeyPatch.context() as patches:
            for name, own in (("read", self.read), ("write", self.write), ("close", self.close)):
                patches.setattr(os, name, _for_pipes(getattr(os, name), own))
            real = os.set_blocking
            patches.setattr(
                os,
                "set_blocking",
                lambda n, on: self._blocking.__setitem__(n, on) if n >= _FIRST_PIPE else real(n, on),
            )
            for name in ("pipe", "kill", "killpg", "statvfs"):
                patches.setattr(os, name, getattr(self, name))
            patches.setattr(os, "waitid", self._waitid)
            patches.setattr(os, "getppid", lambda: self.current.parent.pid if self.current.parent else 1)
            patches.setattr(os, "_exit", self.exit_at_once)
            yield

    def _waitid(self, kind, pid, options):
        entry = self.table.get(pid)
        if entry is None or entry.parent is not self.current:
            raise ChildProcessError(errno.ECHILD, os.strerror(errno.ECHILD))
        if options & os.WNOHANG and entry.is_alive:
            return None
        self.wait(entry, reap=not options & os.WNOWAIT)
        return entry


def _for_pipes(real, own):
    return lambda number, *rest: (own if number >= _FIRST_PIPE else real)(number, *rest)


class _Child:
    """What `subprocess.Popen` returns."""

    def __init__(self, kernel, entry, write):
        self._kernel, self._entry = kernel, entry
        self.pid, self.returncode = entry.pid, None
        self.stdin = _Input(kernel, write, entry)

    def poll(self):
        if self.returncode is None and not self._entry.is_alive:
            self.wait()
        return self.returncode

    def wait(self, timeout=None):
        self.returncode = self._kernel.wait(self._entry)
        return self.returncode


class _Input:
    """The launcher's end of a process' standard input, with a buffer."""

    def __init__(self, kernel, number, entry):
        self._kernel, self._number, self._entry = kernel, number, entry
        self._data, self.closed = b"", False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def fileno(self):
        return self._number

    def write(self, data):
        self._data += data

    def close(self):
        if self.closed:
            return
        self.closed = True
        try:
            if self._data:
                self._kernel.on_input(self._entry)
                self._kernel.write(self._number, self._data)
        finally:
            self._kernel.close(self._number)


class _Proc:
    """`/proc`, as far as it is read: who has which environment."""

    def __init__(self, kernel):
        self._kernel = kernel

    def glob(self, pattern):
        # The processes of the moment at which the folder is listed.
        return [_ProcFolder(self._kernel, entry) for entry in list(self._kernel.table.values())]


class _ProcFolder:
    def __init__(self, kernel, entry):
        self._kernel, self._entry, self.name = kernel, entry, str(entry.pid)

    def __truediv__(self, name):
        return self

    def read_bytes(self):
        self._kernel.world.give_way()
        # A zombie has no environment.
        if not self._entry.is_alive:
            return b""
        return "\0".join(f"{name}={value}" for name, value in self._entry.environ.items()).encode()


def subprocess_of(kernel):
    """Return what stands for the module `subprocess`."""
    return types.SimpleNamespace(
        Popen=kernel.popen, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT
    )


class PortSocket:
    """A socket that is bound to a port of the loopback interface, and no more."""

    def __init__(self, kernel):
        self._kernel, self._port = kernel, None

    def bind(self, address):
        if address[1] in self._kernel.ports:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        self._port = address[1]
        self._kernel.ports[self._port] = self._kernel.current

    def getsockname(self):
        return "127.0.0.1", self._port

    def close(self):
        if self._port is not None:
            del self._kernel.ports[self._port]
            self._port = None


def locks_of(kernel):
    """Return what stands for the module `fcntl`."""
    return types.SimpleNamespace(LOCK_EX=LOCK_EX, LOCK_NB=LOCK_NB, flock=kernel.flock)


def sockets_of(kernel):
    """Return what stands for the module `socket`, for those that look for free ports."""
    return types.SimpleNamespace(AF_INET=2, SOCK_STREAM=1, socket=lambda *kind: PortSocket(kernel))
