"""The processes of a launch: free ports, starting, signals, and leaving no process behind.

Tests: tests/unit/launcher/test_processes.py, tests/unit/launcher/test_kept_output.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from unisono._errors import ClusterError
from unisono.launcher._plan import HOST
from unisono.launcher._restart_policy import shell_code
from unisono.launcher._run_files import ErrorRecord, error_record
from unisono.rpc._ports import VARIABLE, in_random_order, ports_to_choose_from

_HERE = Path(__file__).parent
#: Below the ephemeral ports (from 32,768 on Linux, 49,152 on macOS), which the system may hand to any
#: outgoing connection between this check and the task's start; above the ports of well-known services.
_PORTS = range(10_000, 32_000)
#: The most bytes that are kept of a task: its last ones.
_KEPT = 64 << 10
#: As in `_task`, which is a program of its own: what stands around the record of an exception, and how that
#: begins. A program may print zeros, too.
_RECORD, _BEGINS = b"\0", b'{"at": '


def free_ports(count: int, avoid: Collection[int] = ()) -> list[int]:
    """Return different free ports of the loopback interface."""
    held: list[socket.socket] = []
    try:
        ports = ports_to_choose_from(_PORTS)
        for port in in_random_order(ports):
            if len(held) == count:
                break
            if port not in avoid:
                _try_bind(port, held)
        if len(held) < count:
            raise ClusterError(
                f"{count} ports from {ports[0]} to {ports[-1]} must be free. Received: {len(held)}. End "
                "programs that listen on this machine, launch fewer tasks, or write another range into "
                f"{VARIABLE}."
            )
        return [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()


def _try_bind(port: int, held: list[socket.socket]) -> None:
    candidate = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        candidate.bind((HOST, port))
    except OSError:  # the port is in use
        candidate.close()
    else:
        held.append(candidate)


class OrphanReaper:
    """A process that kills the tasks' children when the launcher dies.

    The kernel kills the tasks themselves (`_task.exit_with_launcher`), but not their children, such as data
    loaders.
    """

    def __init__(self, mark: str) -> None:
        # Isolated (-I) and without site packages (-S), it starts in hundredths of a second. In a session of
        # its own, it survives a kill of the launcher's process group.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_HERE / "_orphan_reaper.py"), mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """Watch a process group."""
        self._write(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Stop watching a process group, which has ended: its id may be reused."""
        self._write(f"-{group}\n")

    def _write(self, line: str) -> None:
        pipe = self._process.stdin
        if pipe is None or self._process.poll() is not None:
            return
        try:
            os.write(pipe.fileno(), line.encode())
        except BrokenPipeError:  # the reaper was killed: the tasks themselves still die with the launcher
            return

    def close(self) -> None:
        """Close its input, on which it kills the remaining groups and exits, and wait for it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


class KeptOutput:
    """A pipe from a task, and the last of what came through it, in memory.

    A task writes into it what its log does not take, as where the disk is full, and the record of its
    exception.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        # Neither end may hold up the other one.
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        self._bytes = b""
        self._is_open = True

    @property
    def descriptor(self) -> int:
        """The end for the task, until `given`."""
        return self._write

    def given(self) -> None:
        """Close the task's end in this process: the task has inherited it, or was not started."""
        os.close(self._write)

    def read(self) -> None:
        """Take what has come, without waiting."""
        while self._is_open:
            try:
                part = os.read(self._read, _KEPT)
            except BlockingIOError:
                return
            if not part:
                self.close()
            self._bytes = (self._bytes + part)[-_KEPT:]

    def close(self) -> None:
        """End the pipe; what has come stays."""
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(OSError):
                os.close(self._read)

    @property
    def error(self) -> ErrorRecord | None:
        """The task's record of its exception, where it could not write it; None without one."""
        records = (part for part in self._bytes.split(_RECORD)[1:] if part.startswith(_BEGINS))
        return next(filter(None, map(error_record, records)), None)

    def last_lines(self, count: int = 25) -> str:
        """Return the last lines that the log did not take."""
        parts = self._bytes.split(_RECORD)
        text = b"".join(p for p in parts if not p.startswith(_BEGINS)).decode(errors="replace")
        return "\n".join(text.splitlines()[-count:])


class Process:
    """A task's process, leader of its own session.

    Args:
        output: the log for its output before it has a task.
        wake: called in a thread when the process has ended.
        warm: whether it imports the slow libraries before it takes a task.

    Raises:
        OSError: when the system cannot start the process.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        output: Path,
        guard: OrphanReaper,
        wake: Callable[[], None],
        warm: bool = False,
    ) -> None:
        command = [sys.executable, str(_HERE / "_task.py"), str(os.getpid())]
        #: Output that its log does not take.
        self.kept = KeptOutput()
        self._kept_descriptor = self.kept.descriptor
        try:
            with _open_log(output) as log:
                self._popen = subprocess.Popen(
                    [*command, "warm"] if warm else command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=dict(environ),
                    start_new_session=True,
                    pass_fds=(self._kept_descriptor,),
                )
        except OSError:
            self.kept.close()
            raise
        finally:
            self.kept.given()
        self.pid = self._popen.pid
        self.warm = warm
        self._guard, self._wake = guard, wake
        self._code: int | None = None
        #: The time of its end, in seconds since the epoch.
        self.ended_at: float | None = None
        self.loss = ""
        guard.add(self.pid)
        threading.Thread(target=self._wait, name=f"wait for {self.pid}", daemon=True).start()

    def _wait(self) -> None:
        if hasattr(os, "waitid"):
            # WNOWAIT leaves a zombie, so that until `poll` its id cannot be reused: `send` and `kill` stay
            # safe.
            with contextlib.suppress(ChildProcessError):  # `poll` was faster
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:  # macOS, before Python 3.13
            self._popen.wait()
        self._note_end()
        self._wake()

    def _note_end(self) -> None:
        if self.ended_at is None:
            self.ended_at = time.time()

    def _has_ended(self) -> bool:
        """Return whether the process has ended: the thread that waits for it may be late to say so."""
        may_ask = self.ended_at is None and hasattr(os, "waitid")
        if may_ask and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
            self._note_end()
        return self.ended_at is not None

    def assign(self, job: Mapping[str, Any]) -> bool:
        """Send the process its job; return False where it is dead."""
        if self._popen.stdin is None:
            return False
        try:
            with self._popen.stdin as pipe:
                pipe.write(json.dumps({**job, "kept": self._kept_descriptor}).encode() + b"\n")
        except BrokenPipeError:
            return False
        return True

    def poll(self) -> int | None:
        """Return the exit code as a shell sees it, None while the process runs; then kill its children."""
        self.kept.read()
        if self._code is None and self._has_ended():
            # Before `wait` reaps it: afterwards the group's id could belong to another process.
            self._signal_group(signal.SIGKILL)
            self._code = shell_code(self._popen.wait())
            if self._popen.stdin is not None and not self._popen.stdin.closed:
                self._popen.stdin.close()
            self._guard.remove(self.pid)
            # All that it wrote is there; a process that it has left behind may hold the other end.
            self.kept.read()
            self.kept.close()
        return self._code

    def send(self, number: int) -> None:
        """Send a signal to the process, not to its children."""
        if self._code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process and its children, also where it is stopped."""
        if self._code is None:
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # the group is empty
            return


class UnwrittenOutput(Protocol):
    """The output of a task that its files did not take, as where the disk is full."""

    @property
    def error(self) -> ErrorRecord | None:
        """The record of its exception, None where it is written, or there is none."""

    def last_lines(self, count: int = 25) -> str:
        """Return the last lines that the log did not take."""


class TaskProcess(Protocol):
    """The process of a task, on this machine or on another one."""

    #: Its id; 0 on another machine.
    pid: int
    #: True if it had imported the slow libraries before it got its task.
    warm: bool
    #: The time of its end, in seconds since the epoch.
    ended_at: float | None
    #: The loss of its machine, where that has ended it; otherwise empty.
    loss: str

    @property
    def kept(self) -> UnwrittenOutput | None:
        """The output that its files did not take; None where they take all."""

    def assign(self, job: Mapping[str, Any]) -> bool:
        """Send the process its job; return False where it is dead."""

    def poll(self) -> int | None:
        """Return the exit code as a shell sees it, None while the process runs."""

    def send(self, number: int) -> None:
        """Send a signal to the process, not to its children."""

    def kill(self) -> None:
        """Kill the process and its children."""


def _open_log(log: Path) -> BinaryIO:
    """Open a log to append to, or the null device where the log cannot be created."""
    try:
        return log.open("ab")
    except OSError:
        return Path(os.devnull).open("ab")


def kill_all(processes: Collection[TaskProcess], seconds: float = 10.0) -> None:
    """Kill processes and wait at most `seconds` for their end."""
    for process in processes:
        process.kill()
    deadline = time.monotonic() + seconds
    while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
        time.sleep(0.01)


class SparePool:
    """Warm processes: they have imported the slow libraries, and wait for a job."""

    def __init__(self, start: Callable[[], Process], count: int) -> None:
        self._start, self._count = start, count
        self._waiting: list[Process] = []
        self._next = 0.0

    def fill(self, now: float, gap: float = 0.5) -> Process | None:
        """Start a process if one is missing, and return it.

        Args:
            now: the time on a monotonic clock, in seconds.
            gap: the least seconds between two starts: the imports of many at once would slow training.
        """
        self._waiting = [p for p in self._waiting if p.poll() is None]
        if len(self._waiting) >= self._count or now < self._next:
            return None
        self._next = now + gap
        self._waiting.append(self._start())
        return self._waiting[-1]

    def claim(self) -> Process | None:
        """Remove and return the process that has waited longest, None where there is none."""
        while self._waiting:
            process = self._waiting.pop(0)
            if process.poll() is None:
                return process
        return None

    def pids(self) -> set[int]:
        """Return the ids of the waiting processes."""
        return {process.pid for process in self._waiting}

    def resize(self, count: int) -> None:
        """Change the number of processes to keep."""
        self._count = count

    def close(self) -> None:
        """Kill all waiting processes."""
        kill_all(self._waiting)
        self._waiting = []
