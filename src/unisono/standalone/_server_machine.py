"""The parts of a standalone server: processes, spare ones, ports and a directory.

Tests: tests/cluster/test_standalone.py, tests/unit/standalone/test_standard_server.py.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from unisono._errors import InvalidArgumentError
from unisono._system._files import own_folder_problem
from unisono.launcher._launch import cores, visible_gpus
from unisono.launcher._options import LaunchOptions
from unisono.launcher._orphan_reaper import sweep
from unisono.launcher._plan import MARK, RunPaths, base_environment
from unisono.launcher._processes import OrphanReaper, Process, SparePool, free_ports
from unisono.standalone._protocol import ProcessShape

_JOB_PREFIX = "job-"


def server_directory(address: str, given: Path | None) -> Path:
    """Make the directory of a server where it is missing, and return it.

    It has a fixed name, so that a server that is started again finds the state of its job.

    Args:
        given: the user's choice; None for one below the system's temporary directory.
    """
    name = address.replace(":", "-").replace("[", "").replace("]", "").replace("*", "any")
    path = given or Path(tempfile.gettempdir()) / f"unisono-serve-{os.geteuid()}-{name}"
    if problem := own_folder_problem(path, denied=0o022):
        raise InvalidArgumentError(
            "The directory of a server must belong to this user, and no other may write there. "
            f"Received: {str(path)!r}: {problem}. Write `unisono serve --dir` with another directory."
        )
    return path.resolve()


class ServerMachine:
    """Starts processes, warm ones where they fit."""

    def __init__(self, root: Path, environ: Mapping[str, str], spares: int) -> None:
        self.root, self._environ = root, environ
        self.cores, self.gpus = cores(), visible_gpus(environ)
        self._mark = secrets.token_hex(16)
        self._guard = OrphanReaper(self._mark)
        self._spares = SparePool(self._start_spare, spares)
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = lambda: None

    def job_directory(self, job: str) -> Path:
        """Return the directory of a job, made where it is missing; other jobs' are removed."""
        path = self.root / f"{_JOB_PREFIX}{job}"
        if not path.is_dir():
            for other in self.root.glob(f"{_JOB_PREFIX}*"):
                shutil.rmtree(other, ignore_errors=True)
            path.mkdir(mode=0o700)
        return path

    def ports(self, count: int, avoid: Collection[int]) -> list[int]:
        """Return free ports."""
        return free_ports(count, avoid)

    def claim_spare(self, shape: ProcessShape) -> Process | None:
        """Return a fitting spare process, or None."""
        with self._lock:
            return self._spares.claim() if shape.is_usual else None

    def start(self, shape: ProcessShape, log: Path) -> Process:
        """Start a process."""
        return Process(self._environment(shape), log, self._guard, self._wake)

    def _start_spare(self) -> Process:
        log = self.root / "spares.log"
        return Process(self._environment(ProcessShape()), log, self._guard, self._wake, warm=True)

    def _environment(self, shape: ProcessShape) -> dict[str, str]:
        # A restart is always possible here: the programs that XLA compiles are kept for the next job.
        options = LaunchOptions(ps=int(shape.ps), devices_per_worker=shape.devices, max_restarts=1)
        paths = RunPaths(self.root)
        base = base_environment(self._environ, options, shape.tasks, self.cores, paths, len(self.gpus))
        # All processes of this server have one mark, besides an outer launcher's.
        return {**base, MARK: "/".join(filter(None, [self._environ.get(MARK), self._mark]))}

    def fill_spares(self) -> None:
        """Start a spare process if one is missing."""
        with self._lock:
            self._spares.fill(time.monotonic())

    def sweep(self) -> set[int]:
        """Kill all processes of jobs, also what they have left behind; return their ids."""
        return sweep(self._mark, self._spares.pids())

    def close(self) -> None:
        """Kill all processes."""
        self._spares.close()
        sweep(self._mark)
        self._guard.close()
