"""The start and the end of a task on a simulated kernel: the project's `_task`, without a program.

Real: how a process waits for its job, is bound to its launcher's life, ends, and reports its end. A stub: how
it takes variables and descriptors over, and what its program computes.

Tests: tests/unit/test_simulated_launches.py.
"""

import contextlib
import errno
import io
import json
import signal
import sys
import types

import pytest

from tests.simulation._file_doors import FileDoors, Machine
from tests.simulation._kernel import locks_of, sockets_of, subprocess_of
from tests.simulation._world import SETTING, Violation
from unisono.cluster_resolver._spec import Task
from unisono.launcher import _orphan_reaper, _processes, _run_files, _stall_detector, _task


class Pieces:
    """What a task prints, in pieces that may end within a line or a character."""

    def __init__(self, kind):
        self.kind = kind

    def of(self, text):
        if self.kind == "binary":
            return [b"\xff\xfe\x00" + text.encode()[:2], bytes(range(200, 256)) + b"\n"]
        if self.kind == "partial":
            data = f"ä{text} ö".encode()
            return [data[:1], data[1:-1], data[-1:]]
        if self.kind == "long":
            return [text.encode() * 400, b"\r\n"]
        return [f"{text}\n".encode()]


class _SystemOf:
    """`sys` for the programs of processes: each has its own arguments and input."""

    def __init__(self, kernel):
        self._kernel = kernel
        self.modules, self.platform, self.exit = {}, "linux", sys.exit

    @property
    def argv(self):
        return self._kernel.current.argv

    @property
    def stdin(self):
        entry = self._kernel.current
        return _Lines(lambda: self._kernel.read_line(entry.stdin).decode())

    @property
    def stderr(self):
        return types.SimpleNamespace(write=self._write, flush=lambda: None)

    def excepthook(self, kind, error, trace):
        self._write(f"Traceback: {kind.__name__}: {error}\n")

    def _write(self, text):
        self._kernel.current.log(text.encode())


class _Lines:
    def __init__(self, readline):
        self.readline = readline

    def __iter__(self):
        return iter(self.readline, "")


class _OfProcess:
    """A list that each process has of its own."""

    def __init__(self, kernel):
        self._kernel = kernel

    def __bool__(self):
        return bool(self._kernel.current.kept)

    def __getitem__(self, place):
        return self._kernel.current.kept[place]


class TaskPrograms:
    """The programs of tasks, and what they have printed."""

    def __init__(self, world, kernel):
        self.world, self.kernel = world, kernel
        self.pieces = Pieces(world.pick(("lines", "partial", "long", "binary"), SETTING))
        #: What each process of a task has printed, in the order of their starts.
        self.printed = {}

    def fail_unless(self, is_right, text):
        """Let the world fail: in a task, an error would be the program's."""
        if not is_right:
            self.world.fail(Violation(text))

    def taken(self, entry):
        """Note that a process has a task now."""

    def run_script(self, path):
        """Be the program of a task."""

    def call(self, target, result):
        """Be a function that is called in a task."""

    def take_over(self, job, warm):
        """Take over the job of a task, as `_task.take_over` does of the environment and the log."""
        entry = self.kernel.current
        self.fail_unless(entry.job is None, f"{entry} gets a second job.")
        entry.job, entry.task = job, Task(**json.loads(job["environ"]["TF_CONFIG"])["task"])
        entry.name = f"{entry.task.type}{entry.task.index}"
        entry.kept.append(job["kept"])
        entry.printed = bytearray()
        self.printed.setdefault(entry.task, []).append(entry)
        try:
            file = open(job["log"], "ab", buffering=0)  # noqa: SIM115
        except OSError:
            file = None

        def log(data):
            try:
                if file is None:
                    raise OSError(errno.ENOENT, "no log")
                file.seek(0, io.SEEK_END)
                file.write(data)
                entry.printed.extend(data)
            except OSError:
                _task._keep(data)

        entry.log, entry.wants_end = log, False
        self.taken(entry)

    def print(self, entry, text):
        """Print a text in pieces."""
        for piece in self.pieces.of(text):
            entry.log(piece)

    def start_others(self, entry):
        """Start a loader of data in the group, one with an environment of its own, and a daemon."""
        others = (("loader", entry.environ, entry, entry.group), ("bare", {}, entry, entry.group))
        for name, environ, parent, group in (*others, ("daemon", entry.environ, None, 0)):
            other = self.kernel.start(
                f"{name}.{entry.pid}", lambda: self.world.sleep(1e4), environ, parent, group
            )
            # A fork has all that is open.
            self.kernel.give(entry.kept[-1], other)


@contextlib.contextmanager
def doors(world, machine, kernel, programs):
    """Put what launchers and their tasks touch into the world."""
    system = _SystemOf(kernel)
    of_signals = types.SimpleNamespace(**{n: getattr(signal, n) for n in dir(signal) if n.isupper()})
    of_signals.signal = lambda number, handler: kernel.current.handlers.__setitem__(number, None)
    faults = types.SimpleNamespace(enable=lambda: None, register=lambda n, **_: _writes_stacks(kernel, n))
    kernel.programs.update(
        {"_task.py": lambda argv: _task.main(), "_orphan_reaper.py": lambda argv: _orphan_reaper.main()}
    )
    with (
        FileDoors(world, Machine(world, "checker", machine.disks)),
        kernel.doors(),
        pytest.MonkeyPatch.context() as patches,
    ):
        patches.setattr(_processes, "subprocess", subprocess_of(kernel))
        patches.setattr(_processes, "socket", sockets_of(kernel))
        patches.setattr(_processes, "_PORTS", range(10_000, 10_016))
        patches.setattr(_run_files, "fcntl", locks_of(kernel))
        patches.setattr(_orphan_reaper.find_marked, "__defaults__", (kernel.marked(),))
        patches.setattr(_orphan_reaper, "sys", system)
        patches.setattr(_orphan_reaper, "signal", of_signals)
        patches.setattr(_stall_detector, "is_stopped", lambda pid: _is_stopped(kernel, pid))
        patches.setattr(_task, "sys", system)
        patches.setattr(_task, "_KEPT", _OfProcess(kernel))
        patches.setattr(_task, "faulthandler", faults)
        patches.setattr(_task, "ctypes", types.SimpleNamespace(CDLL=lambda *_, **__: _LibC(kernel)))
        patches.setattr(_task, "warm_up", lambda: world.sleep(world.uniform(0.5, 2.0)) or True)
        patches.setattr(_task, "finish_warm_up", lambda importing: None)
        patches.setattr(_task, "take_over", programs.take_over)
        patches.setattr(_task, "_run_script", programs.run_script)
        patches.setattr(_task, "_call", programs.call)
        yield


class _LibC:
    def __init__(self, kernel):
        self._kernel = kernel

    def prctl(self, option, number, *rest):
        entry = self._kernel.current
        self._kernel.world.give_way()
        entry.death_signal = number
        return 0


def _writes_stacks(kernel, number):
    entry = kernel.current
    entry.handlers[number] = lambda: entry.log(b"\nThread 0x1 (most recent call first):\n")


def _is_stopped(kernel, pid):
    entry = kernel.table.get(pid)
    return entry is not None and entry.process.is_paused
