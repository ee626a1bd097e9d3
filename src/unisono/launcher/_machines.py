"""Where the processes of a launch run: on this machine, or on the servers of a standalone client.

Tests: tests/cluster/test_launch.py, tests/unit/launcher/test_supervisor.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from unisono.cluster_resolver._spec import Task, with_port
from unisono.launcher._generation import ProcessSource
from unisono.launcher._options import LaunchOptions
from unisono.launcher._orphan_reaper import sweep
from unisono.launcher._plan import HOST, MARK, LaunchPlan, RunPaths, make_plan, tasks_of
from unisono.launcher._processes import OrphanReaper, Process, SparePool, free_ports
from unisono.launcher._restart_policy import Failure
from unisono.launcher._run_files import BestEffort, read_capacity, write_secret
from unisono.rpc._transport._keys import new_secret
from unisono.rpc._transport._local import remove_sockets

#: Returns the job that is sent to a task's process.
JobOf = Callable[[LaunchPlan, Task], dict[str, Any]]


class Machines(Protocol):
    """The machines that run a supervisor's tasks."""

    def running(self, wake: Callable[[], None], files: BestEffort) -> AbstractContextManager[None]:
        """Return a context around all generations; `wake` is called when a process has ended."""

    def plan(self, generation: int, workers: int) -> LaunchPlan:
        """Return the plan of a generation, with new ports."""

    def source(self, plan: LaunchPlan) -> ProcessSource:
        """Return where the tasks of a generation get their processes from."""

    def shown(self, plan: LaunchPlan) -> tuple[Task, ...]:
        """Return the tasks whose output is shown."""

    def finish_evaluator(self, plan: LaunchPlan) -> None:
        """Let the evaluator know that training has succeeded, where it is elsewhere; called until it ends."""

    def sweep(self) -> set[int]:
        """Kill what the tasks have left behind, and return the processes' ids."""

    def fill_spares(self, now: float) -> int | None:
        """Start a spare process if one is missing, and return its id."""

    def capacity(self, paths: RunPaths) -> int | None:
        """Return how many workers there is room for, None for no limit."""

    def options_after(self, failure: Failure | None) -> LaunchOptions:
        """Return the options by which the end of a generation is judged."""

    def wait_until_ready(self, workers: int, stop_requests: Callable[[], tuple[int, ...]]) -> None:
        """Wait until a generation of `workers` workers can start, or the launch is asked to stop."""


class LocalMachine:
    """Runs the tasks on this machine.

    Args:
        gpus: the values for CUDA_VISIBLE_DEVICES, to be divided among the tasks.
    """

    def __init__(
        self,
        options: LaunchOptions,
        paths: RunPaths,
        environ: Mapping[str, str],
        job: JobOf,
        gpus: tuple[str, ...],
    ) -> None:
        self._options, self._paths, self._environ = options, paths, environ
        self._job, self._gpus = job, gpus
        self._ports: list[int] = []
        self._guard: OrphanReaper
        self._spares: SparePool
        self._wake: Callable[[], None]

    @contextmanager
    def running(self, wake: Callable[[], None], files: BestEffort) -> Iterator[None]:
        """Run helper processes, and give the tasks a key in common where there are parameter servers."""
        self._wake = wake
        with self._cluster_key(files):
            self._guard = OrphanReaper(self._environ[MARK])
            self._spares = SparePool(lambda: self._start("spares.log", warm=True), 0)
            try:
                yield
            finally:
                self._spares.close()
                self._guard.close()

    @contextmanager
    def _cluster_key(self, files: BestEffort) -> Iterator[None]:
        path: Path = self._paths.cluster_key
        if not self._options.ps:
            yield
            return
        with files.attempt():
            write_secret(path, new_secret())
        try:
            yield
        finally:
            with files.attempt():
                path.unlink(missing_ok=True)

    def _start(self, log: str, warm: bool = False) -> Process:
        return Process(self._environ, self._paths.root / log, self._guard, self._wake, warm)

    def plan(self, generation: int, workers: int) -> LaunchPlan:
        """Return the plan of a generation, with new ports."""
        count = len(tasks_of(self._options, workers))
        # New ports: a connection that is left from the old generation must not reach the new one.
        self._ports = free_ports(count, avoid=self._ports)
        self._spares.resize(self._options.spare_count(count))
        return make_plan(self._options, generation, workers, self._ports, self._paths, self._gpus)

    def source(self, plan: LaunchPlan) -> ProcessSource:
        """Return where the tasks of a generation get their processes from."""
        return ProcessSource(
            self._spares.claim, lambda task: self._start(plan.paths.log(task).name), self._job
        )

    def shown(self, plan: LaunchPlan) -> tuple[Task, ...]:
        """Return the chief, or worker 0."""
        return (plan.shown,)

    def finish_evaluator(self, plan: LaunchPlan) -> None:
        """Do nothing: the evaluator sees the launcher's file."""

    def sweep(self) -> set[int]:
        """Kill the processes that the tasks have left, and return their ids; remove the files of sockets."""
        killed = sweep(self._environ[MARK], self._spares.pids())
        if self._options.ps:
            # A signal ends servers, and the workers beside them, before they remove their own. No other task
            # has these ports until then.
            remove_sockets(with_port(HOST, port) for port in self._ports)
        return killed

    def fill_spares(self, now: float) -> int | None:
        """Start a spare process if one is missing, and return its id."""
        spare = self._spares.fill(now)
        return None if spare is None else spare.pid

    def capacity(self, paths: RunPaths) -> int | None:
        """Return the capacity file's number."""
        return read_capacity(paths.capacity)

    def options_after(self, failure: Failure | None) -> LaunchOptions:
        """Return the options of the launch."""
        return self._options

    def wait_until_ready(self, workers: int, stop_requests: Callable[[], tuple[int, ...]]) -> None:
        """Do nothing: this machine is there."""
