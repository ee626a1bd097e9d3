"""Processes of a launch: free ports, start, signals, and that none of them is left behind."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from unisono._errors import ClusterError
from unisono.cli._plan import HOST
from unisono.cli._restart_policy import shell_code

_HERE = Path(__file__).parent
#: Below the range from which systems take the ports of outgoing connections.
_FIRST_PORT, _LAST_PORT = 10_000, 32_000


def free_ports(count: int, avoid: Collection[int] = ()) -> list[int]:
    """Return ports of the loopback interface on which nobody listens, each once.

    Args:
        count: how many.
        avoid: ports not to take, such as those of a generation before.

    Raises:
        ClusterError: when the machine has none left.
    """
    held: list[socket.socket] = []
    try:
        # Not from the user's generator: equal seeds would make two launches choose the same ports.
        for port in random.SystemRandom().sample(range(_FIRST_PORT, _LAST_PORT), _LAST_PORT - _FIRST_PORT):
            if len(held) == count:
                break
            if port not in avoid:
                _hold(port, held)
        if len(held) < count:
            raise ClusterError(
                f"{count} ports between {_FIRST_PORT} and {_LAST_PORT} must be free. Received: {len(held)}. "
                "End programs that listen on this machine, or launch fewer tasks."
            )
        return [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()


def _hold(port: int, held: list[socket.socket]) -> None:
    candidate = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        candidate.bind((HOST, port))
    except OSError:  # taken
        candidate.close()
    else:
        held.append(candidate)


class Guard:
    """A process that kills what is left when the launcher dies.

    The tasks themselves ask the kernel for that; this is for their children, such as data loaders.

    Args:
        mark: of the launch, in the environment of all its processes.
    """

    def __init__(self, mark: str) -> None:
        # Without site packages, by itself: it starts in hundredths of a second.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_HERE / "_orphan_reaper.py"), mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """Watch over a process group."""
        self._write(f"+{group}\n")

    def remove(self, group: int) -> None:
        """The group has ended."""
        self._write(f"-{group}\n")

    def _write(self, line: str) -> None:
        pipe = self._process.stdin
        if pipe is None or self._process.poll() is not None:
            return
        try:
            os.write(pipe.fileno(), line.encode())
        except BrokenPipeError:  # somebody killed it: the tasks still die with the launcher
            return

    def close(self) -> None:
        """End it; groups that were not removed are killed."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


class Process:
    """A task's process, leader of its own session.

    Args:
        environ: its environment.
        output: the log of what it prints before it has a task.
        guard: told of it.
        wake: called, in a thread, when the process has ended.
        warm: whether it imports the slow libraries before it takes a task.

    Raises:
        OSError: when the system cannot start it.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        output: Path,
        guard: Guard,
        wake: Callable[[], None],
        warm: bool = False,
    ) -> None:
        command = [sys.executable, str(_HERE / "_task.py"), str(os.getpid())]
        with _opened(output) as log:
            self._popen = subprocess.Popen(
                [*command, "warm"] if warm else command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                start_new_session=True,
            )
        self.pid = self._popen.pid
        self.warm = warm
        self._guard, self._wake = guard, wake
        self._code: int | None = None
        #: When it ended, in seconds since the epoch.
        self.ended_at: float | None = None
        guard.add(self.pid)
        threading.Thread(target=self._wait, name=f"wait for {self.pid}", daemon=True).start()

    def _wait(self) -> None:
        if hasattr(os, "waitid"):
            # It stays a zombie: until `poll` its number cannot become another process'.
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:  # macOS, before Python 3.13
            self._popen.wait()
        self.ended_at = time.time()
        self._wake()

    def assign(self, job: Mapping[str, Any]) -> bool:
        """Give it its task; return False where it has died before."""
        if self._popen.stdin is None:
            return False
        try:
            with self._popen.stdin as pipe:
                pipe.write(json.dumps(job).encode() + b"\n")
        except BrokenPipeError:
            return False
        return True

    def poll(self) -> int | None:
        """Return the exit code as a shell sees it, None while it runs; its children end with it."""
        if self._code is None and self.ended_at is not None:
            self._signal_group(signal.SIGKILL)
            self._code = shell_code(self._popen.wait())
            if self._popen.stdin is not None and not self._popen.stdin.closed:
                self._popen.stdin.close()
            self._guard.remove(self.pid)
        return self._code

    def send(self, number: int) -> None:
        """Send a signal to the process, not to its children."""
        if self._code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it and its children at once, also where it is stopped."""
        if self._code is None:
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # nobody is left in it
            return


def _opened(log: Path) -> BinaryIO:
    """Return a log to append to; nothing is kept where the disk has no room for it."""
    try:
        return log.open("ab")
    except OSError:
        return Path(os.devnull).open("ab")


def end_all(processes: Collection[Process], seconds: float = 10.0) -> None:
    """Kill processes and wait for their end, at most so long."""
    for process in processes:
        process.kill()
    deadline = time.monotonic() + seconds
    while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
        time.sleep(0.01)


class Spares:
    """Processes that have imported what takes long, and wait for a task.

    Args:
        start: makes one.
        count: how many should wait.
    """

    def __init__(self, start: Callable[[], Process], count: int) -> None:
        self._start, self._count = start, count
        self._waiting: list[Process] = []
        self._next = 0.0

    def fill(self, now: float, gap: float = 0.5) -> Process | None:
        """Start one if one is missing, and return it; no two within `gap` seconds of `now`'s clock."""
        self._waiting = [p for p in self._waiting if p.poll() is None]
        if len(self._waiting) >= self._count or now < self._next:
            return None
        self._next = now + gap
        self._waiting.append(self._start())
        return self._waiting[-1]

    def take(self) -> Process | None:
        """Return the one that waits longest, None where none does."""
        while self._waiting:
            process = self._waiting.pop(0)
            if process.poll() is None:
                return process
        return None

    def pids(self) -> set[int]:
        """The numbers of those that wait."""
        return {process.pid for process in self._waiting}

    def resize(self, count: int) -> None:
        """From now on so many should wait."""
        self._count = count

    def dismiss(self) -> None:
        """End all."""
        end_all(self._waiting)
        self._waiting = []
