"""The servers of a cluster as the machines of a launch: the supervisor of `unisono launch` decides.

Tests: tests/unit/standalone/test_remote_machines.py, tests/cluster/test_standalone.py.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unisono._errors import ClusterError, ContextError
from unisono.cluster_resolver._spec import Task
from unisono.launcher._function_call import result_path
from unisono.launcher._generation import ProcessSource
from unisono.launcher._options import LaunchOptions
from unisono.launcher._plan import LaunchPlan, RunPaths, gpus_of, tasks_of
from unisono.launcher._restart_policy import Failure
from unisono.launcher._run_files import BestEffort
from unisono.rpc._calls import PeerLostError, RequestClient
from unisono.standalone._lease_book import ServerBusyError
from unisono.standalone._link import RequestRefusedError, ServerLink
from unisono.standalone._remote_process import LocalCopies, RemoteProcess
from unisono.standalone._slots import Slots, task_address

#: Restarts after the loss of servers where the user names no number, as for parameter servers.
_RESTARTS = 10
_POLL = 0.05
#: Seconds between two attempts to take a server that trains for another client.
_BUSY_RETRY = 0.5


@dataclasses.dataclass(frozen=True)
class RemoteProgram:
    """The program of the tasks.

    Args:
        files: what is brought to each server, by name below the job's directory.
        describe: returns what is particular to the program in the job of a process, from the job's directory
            on the server and the task.
    """

    files: Mapping[str, bytes]
    describe: Callable[[RunPaths, Task], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class ServerTimeouts:
    """How long a client waits for servers.

    Args:
        answer: seconds until a server must answer at first.
        busy: seconds for servers that train for another client.
        lost: seconds for servers that were lost, before the training ends.
    """

    answer: float = 10.0
    busy: float = 0.0
    lost: float = 300.0


@dataclasses.dataclass(frozen=True)
class ServerAccess:
    """How a client reaches servers, and what its user can do where it does not.

    Args:
        connect: returns the connection with a server, from its address or name.
        if_absent: what to do where nothing listens at first.
        if_lost: what to do where a server has not been found again.
        until: until when the client waits for a lost server.
        places: how `unisono watch` finds the servers, as `launch.json` says it; empty where it asks its user.
    """

    connect: Callable[[str], RequestClient]
    if_absent: str = "Run `unisono serve --address {address}` on that machine, with the same key as here"
    if_lost: str = "Run `unisono serve` there again"
    until: str = "`unisono serve` runs there again"
    places: Mapping[str, str] = dataclasses.field(default_factory=dict)


class RemoteMachines:
    """Runs tasks on servers.

    Args:
        paths: the client's own files, to which the tasks' are copied.
    """

    def __init__(
        self,
        slots: Slots,
        links: Mapping[str, ServerLink],
        options: LaunchOptions,
        paths: RunPaths,
        program: RemoteProgram,
        say: Callable[[str], None],
        timeouts: ServerTimeouts,
        access: ServerAccess,
    ) -> None:
        self._slots, self._links, self._options, self._paths = slots, links, options, paths
        self._program, self._say, self._timeouts, self._access = program, say, timeouts, access
        self._wake: Callable[[], None] = lambda: None
        self._ports: dict[str, list[int]] = {}
        self._placed: dict[Task, str] = {}
        self._starts = 0
        self._reported: set[str] = set()
        #: The generation whose evaluator was told the end of training.
        self._finished = -1

    def claim_all(self, stop_requests: Callable[[], tuple[int, ...]]) -> None:
        """Take all servers for the job.

        Raises:
            ServerBusyError: when one trains for another client for longer than the client waits.
            ClusterError: when one does not answer, or refuses.
        """
        deadline = time.monotonic() + self._timeouts.busy
        is_reported = False
        # In the order of their addresses: two clients cannot wait for each other.
        for address in self._slots.addresses:
            while True:
                problem = self._taken(address)
                if problem is None:
                    break
                if time.monotonic() >= deadline or stop_requests():
                    raise problem
                if not is_reported:
                    is_reported = True
                    self._say(f"unisono: waiting at most {self._timeouts.busy:g} s: {problem}")
                time.sleep(_BUSY_RETRY)

    def _taken(self, address: str) -> ServerBusyError | None:
        link = self._links[address]
        try:
            self._claim(link)
        except PeerLostError as error:
            what = (
                f"nothing listens there. {self._access.if_absent.format(address=address)}"
                if link.is_refused()
                else "a process listens there, or the machine is away. See that it is `unisono serve`, that "
                "it is not stopped, and that both have a key or neither"
            )
            raise ClusterError(
                f"Each server of the cluster must run. Received: no answer from {address} within "
                f"{self._timeouts.answer:g} s: {what}. ({error})"
            ) from None
        except RequestRefusedError as error:
            if error.kind == ServerBusyError.__name__:
                return ServerBusyError(str(error))
            raise ClusterError(f"The server {address} has refused the job: {error}") from None
        return None

    def _claim(self, link: ServerLink) -> None:
        seconds = self._timeouts.answer
        deadline = time.monotonic() + seconds
        while True:
            try:
                # Twice at least: a process that was stopped meanwhile finds the first one late.
                link.claim(min(seconds / 2, max(0.0, deadline - time.monotonic())))
            except PeerLostError:
                # Perhaps a connection alone was lost.
                if time.monotonic() + _POLL >= deadline:
                    raise
                time.sleep(_POLL)
            else:
                return

    def wake(self) -> None:
        """Let the supervisor look at its processes."""
        self._wake()

    @contextmanager
    def running(self, wake: Callable[[], None], files: BestEffort) -> Iterator[None]:
        """Note whom to wake."""
        self._wake = wake
        yield

    @property
    def _live(self) -> list[str]:
        return [address for address, link in self._links.items() if link.is_live]

    def plan(self, generation: int, workers: int) -> LaunchPlan:
        """Return the plan of a generation, with new ports of the servers' machines.

        Raises:
            ClusterError: when a server has no free ports.
        """
        while True:
            self.wait_until_ready(workers, tuple)
            placed = self._slots.placed(tasks_of(self._options, workers), self._live)
            try:
                return LaunchPlan(generation, self._addresses(placed), self._paths, self._options)
            except PeerLostError:
                pass
            except RequestRefusedError as error:
                if error.kind != ContextError.__name__:
                    raise ClusterError(f"A server of the cluster cannot start tasks. {error}") from None
            # Lost a moment ago, or started again: its connection notices, too.
            time.sleep(_POLL)

    def _addresses(self, placed: Mapping[Task, str]) -> dict[Task, str]:
        self._placed = dict(placed)
        processes = {}
        for server in set(placed.values()):
            tasks = [task for task, each in placed.items() if each == server]
            ports = self._links[server].ports(len(tasks), self._ports.get(server, []))
            self._ports[server] = ports
            processes.update(
                {
                    t: task_address(self._links[server].reached_at, p)
                    for t, p in zip(tasks, ports, strict=True)
                }
            )
        return {task: processes[task] for task in placed}

    def source(self, plan: LaunchPlan) -> ProcessSource:
        """Return where the tasks get their processes from: their servers have spare ones."""
        return ProcessSource(lambda: None, lambda task: self._process(plan, task), self._job)

    def _process(self, plan: LaunchPlan, task: Task) -> RemoteProcess:
        self._starts += 1
        key = f"g{plan.generation}-{task.type}-{task.index}-{self._starts}"
        copies = LocalCopies(
            plan.paths.log(task),
            plan.paths.error(task, plan.generation),
            plan.paths.progress(task, plan.generation),
            result_path(plan.paths, task),
        )
        return RemoteProcess(key, task, self._links[self._placed[task]], copies, self._wake)

    def _job(self, plan: LaunchPlan, task: Task) -> dict[str, Any]:
        server = self._placed[task]
        beside = [each for each, other in self._placed.items() if other == server]
        options = self._options
        shape = {"tasks": len(beside), "devices": options.devices_per_worker, "ps": options.ps > 0}
        fields = {"generation": plan.generation, "shape": shape, "description": {}}
        info = self._links[server].live_info
        if info is None:
            return fields
        there = dataclasses.replace(plan, paths=RunPaths(Path(info.root)))
        environ = there.environment(task)
        if info.gpus:
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus_of(task, info.gpus, beside))
        description: dict[str, Any] = {"environ": environ, "sys_path": None, "args": []}
        return {**fields, "description": description | self._program.describe(there.paths, task)}

    def shown(self, plan: LaunchPlan) -> tuple[Task, ...]:
        """Return all tasks, the chief or worker 0 first."""
        return (plan.shown, *(task for task in plan.tasks if task != plan.shown))

    def finish_evaluator(self, plan: LaunchPlan) -> None:
        """Let the evaluator's server know that training has succeeded; called until it knows."""
        for task, server in self._placed.items():
            link = self._links[server]
            if task.type != "evaluator" or self._finished == plan.generation or not link.is_live:
                continue
            try:
                link.put(plan.paths.finished.name, f"{plan.generation}\n".encode())
            except (PeerLostError, RequestRefusedError):
                # Its connection is lost for a moment, or its disk is full.
                continue
            self._finished = plan.generation

    def sweep(self) -> set[int]:
        """Kill what the tasks have left behind; ids of other machines are not returned."""
        for link in self._links.values():
            link.sweep()
        return set()

    def fill_spares(self, now: float) -> int | None:
        """Do nothing: each server has its own."""
        return None

    def capacity(self, paths: RunPaths) -> int | None:
        """Return how many workers the servers have room for that are there."""
        self._report_losses()
        return self._slots.room(self._live)

    def _report_losses(self) -> None:
        """Name the servers that were lost since the last call; in the supervisor's thread."""
        for address, link in self._links.items():
            for text in sorted(link.losses - self._reported):
                self._reported.add(text)
                tasks = ", ".join(str(task) for task, each in self._placed.items() if each == address)
                self._say(f"unisono: {tasks} {text}")

    def options_after(self, failure: Failure | None) -> LaunchOptions:
        """Return the options: the loss of a server allows restarts, also where a failure does not."""
        losses = {text for link in self._links.values() for text in link.losses}
        is_loss = failure is not None and failure.detail in losses
        if is_loss and self._options.max_restarts is None:
            return dataclasses.replace(self._options, max_restarts=_RESTARTS)
        return self._options

    def wait_until_ready(self, workers: int, stop_requests: Callable[[], tuple[int, ...]]) -> None:
        """Wait until the servers are back that so many workers and the other tasks need.

        Raises:
            ClusterError: when they are not back in time; it names them.
        """
        self._report_losses()
        deadline = time.monotonic() + self._timeouts.lost
        is_reported = False
        while missing := self._slots.missing(workers, self._live):
            names = ", ".join(missing)
            if stop_requests():
                return
            if time.monotonic() > deadline:
                raise ClusterError(self._missing_text(missing))
            if not is_reported:
                is_reported = True
                self._say(
                    f"unisono: waiting at most {self._timeouts.lost:g} s for the server {names}; the "
                    f"training continues when {self._access.until}"
                )
            time.sleep(_POLL)

    def _missing_text(self, missing: Sequence[str]) -> str:
        seconds = f"within {self._timeouts.lost:g} s after they were lost"
        refusals = [f"{each} says: {text}" for each in missing if (text := self._links[each].refusal)]
        if refusals:
            return (
                "The servers of a cluster must take the job again. Received: errors from some of "
                f"{', '.join(missing)} {seconds}. {' '.join(refusals)}"
            )
        return (
            f"The servers of a cluster must run. Received: no answer from {', '.join(missing)} {seconds}. "
            f"{self._access.if_lost}, or let the training continue with fewer workers (`elastic`)."
        )

    def close(self) -> None:
        """End the job on all servers."""
        for link in self._links.values():
            link.close()
