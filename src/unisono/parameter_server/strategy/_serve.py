"""What workers and parameter servers do until the chief ends the job.

Tests: tests/cluster/test_parameter_server.py.
"""

from __future__ import annotations

import abc
import atexit
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from unisono._errors import ClusterError
from unisono._lowering._xla_flags import fuse_results, stay_on_cpus
from unisono._system._environ import process_environ
from unisono._system._interrupts import in_main_thread
from unisono._system._lease import Lease
from unisono._system._process import allow_open_files, started_at
from unisono._system._signals import SignalWatch
from unisono._system._task_reports import process_events
from unisono.cluster._lone_task import servers_joined
from unisono.cluster.liveness._health import report_ready
from unisono.cluster.rendezvous._addresses import UnknownNames
from unisono.cluster.rendezvous._protocol import unknown_name_text
from unisono.cluster_resolver._base import seconds_of
from unisono.cluster_resolver._spec import split_address
from unisono.parameter_server.server._chief_presence import HEARTBEAT_SECONDS, end_marker_of
from unisono.parameter_server.server._client import WARN_AFTER, ServerClient
from unisono.parameter_server.server._durable import DurableStore
from unisono.parameter_server.server._programs import ExportedProgram, own_platform
from unisono.parameter_server.server._server import VariableServer
from unisono.parameter_server.server._store import VariableStore
from unisono.parameter_server.state._journal import LOG_BYTES
from unisono.parameter_server.strategy._roles import Roles
from unisono.parameter_server.worker._step_worker import StepWorker
from unisono.rpc._calls import ClientId, Handler, RequestClient, RequestServer
from unisono.rpc._frames import Frame
from unisono.rpc._transport._client import RpcClient
from unisono.rpc._transport._keys import ClusterKeys, read_keys
from unisono.rpc._transport._server import RpcServer, require_key_or_refuse

#: The variable with the directory in which parameter servers keep their state; without it, in memory alone.
DIRECTORY_VARIABLE = "UNISONO_PS_DIRECTORY"

#: The variable that turns the log off: `0`. What is not in a snapshot is then lost with the process.
LOG_VARIABLE = "UNISONO_PS_LOG"
#: The variable with the seconds between two snapshots of a server.
SNAPSHOT_VARIABLE = "UNISONO_PS_SNAPSHOT_SECONDS"
SNAPSHOT_SECONDS = 60.0

#: The variable with the seconds for which a task waits without a sign of its chief; 0 for no limit.
CHIEF_VARIABLE = "UNISONO_CHIEF_TIMEOUT"
#: The default: a chief that is started again by hand finds its cluster, and a forgotten one ends by itself.
CHIEF_SECONDS = 600.0
#: The variable with the seconds between SIGTERM and SIGKILL: so long a task serves a chief that saves.
GRACE_VARIABLE = "UNISONO_GRACE"
GRACE_SECONDS = 30.0
#: Seconds without a sign of the chief after which a task that got SIGTERM does not wait for it.
_VANISHED = 2.5 * HEARTBEAT_SECONDS
#: Seconds in which a program that runs, or is compiled, may end when the job has ended.
_PROGRAM_SECONDS = 60.0
#: The most seconds between two looks at the time of the last sign.
_LOOK_EVERY = 2.0

_LOG = logging.getLogger("unisono")


def load_program(digest: str, data: bytes) -> ExportedProgram:
    """Return a compiled program of a worker."""
    program = ExportedProgram(data)
    if program.device is not None:
        _LOG.warning(
            "A step is computed on this worker's CPU: the chief traced it before it knew of a worker with "
            "other devices. Start such workers before the chief's first step."
        )
    return program


def is_supervised() -> bool:
    """Return whether `unisono launch` has started this process: it ends the tasks after their chief."""
    return "UNISONO_LAUNCH" in process_environ()


def durable_store(index: int) -> DurableStore | None:
    """Return the store of a parameter server that outlives its process, None without a directory for it."""
    directory = process_environ().get(DIRECTORY_VARIABLE)
    if not directory:
        return None
    interval = seconds_of(SNAPSHOT_VARIABLE, SNAPSHOT_SECONDS)
    own = Path(directory) / f"ps-{index}"
    if process_environ().get(LOG_VARIABLE) == "0":
        return DurableStore(own, 0, interval or None)
    # An older state than the log's is of no use.
    return DurableStore(own, LOG_BYTES, None)


def warn_of_unknown_names(roles: Roles) -> None:
    """Say, from a thread, which hosts of other tasks have names that this machine does not know."""
    others = (address for task, address in roles.addresses.items() if task != roles.task)
    UnknownNames((split_address(a)[0] for a in others), lambda name: _LOG.warning(unknown_name_text(name)))


def service_of(roles: Roles) -> Service:
    """Begin to serve the chief of a cluster, in threads.

    Raises:
        ClusterError: when the task cannot listen at its address.
    """
    _LOG.info("%s serves at %s", roles.task, roles.addresses[roles.task])
    warn_of_unknown_names(roles)
    allow_open_files()
    address, keys = roles.addresses[roles.task], read_keys(process_environ(), roles.task, roles.spec)
    # Else the chief would wait for a task that has ended.
    require_key_or_refuse(address, keys)
    service: Service
    if roles.task in roles.workers:
        servers = [RpcClient(task, roles.addresses[task], keys) for task in roles.servers]
        service = WorkerService(roles, servers, lambda handler: RpcServer(address, handler, keys))
    else:
        service = _VariableService(roles, keys)
    # A program that never joins: Python must not end while one of the service's threads is in JAX.
    atexit.register(service.close)
    report_ready()
    return service


def serve_and_exit(roles: Roles) -> NoReturn:
    """Serve the chief of a cluster, then end this process with the exit code of the chief's program.

    The constructor of a `ParameterServerStrategy` calls it in workers and servers: the program that follows
    is the chief's, and must not run here.

    Raises:
        SystemExit: the job has ended.
        ClusterError: the task cannot listen at its address, or the chief has vanished.
    """
    sys.exit(service_of(roles).join())


class Service(abc.ABC):
    """What a task serves in threads, until the chief ends the job."""

    #: Set when the chief has ended the job.
    ended: threading.Event
    _served: VariableServer | StepWorker
    _rpc_server: RequestServer

    def __init__(self, roles: Roles) -> None:
        servers_joined()
        self._roles = roles
        self._chief_seconds = seconds_of(CHIEF_VARIABLE, CHIEF_SECONDS)
        self._grace = seconds_of(GRACE_VARIABLE, GRACE_SECONDS)
        #: When the task got SIGTERM, in seconds of the monotonic clock; and whether it obeys now.
        self._asked_at: float | None = None
        self._obeys = False

    def join(self) -> int:
        """Wait for the end of the job; return the exit code.

        Where all tasks get SIGTERM at once, as under Kubernetes and Slurm, the chief saves first, and needs
        this one for it.

        Raises:
            ClusterError: the chief has vanished.
        """
        # Under a launcher SIGTERM arrives when the chief has ended.
        is_watching = in_main_thread() and not is_supervised()
        watch = SignalWatch(self._note_signal, signal.SIGTERM) if is_watching else None
        try:
            code = self._wait()
        finally:
            atexit.unregister(self.close)
            self.close()
            if watch is not None:
                watch.restore()
        if self._obeys:
            # As if it arrived now: to the handler that the program had before.
            signal.raise_signal(signal.SIGTERM)
        return self.exit_code if code is None else code

    def _note_signal(self) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()

    def _waits_no_longer(self, silence: float) -> bool:
        """Return whether a task that got SIGTERM obeys, without a decision of its chief."""
        if self._asked_at is None:
            return False
        self._obeys = silence >= _VANISHED or time.monotonic() - self._asked_at >= self._grace
        return self._obeys

    def _wait(self) -> int | None:
        """Wait for the end of the job; return the exit code that a chief has left which has ended before."""
        asked_at, has_said = None, False
        address, began = self._roles.addresses[self._roles.task], started_at()
        while True:
            self._note_memory()
            if (code := end_marker_of(address, began)) is not None:
                return code
            if self.ended.wait(min(_LOOK_EVERY, max(0.05, self._chief_seconds / 10))):
                return None
            silence = self.chief_lease.silence
            if not has_said and silence >= WARN_AFTER:
                has_said = True
                self._say_waiting()
            if self._waits_no_longer(silence):
                return 128 + signal.SIGTERM
            if asked_at != self._asked_at:
                asked_at = self._asked_at
                _LOG.warning(
                    "%s got SIGTERM, and serves until %s ends the job, for %g s at most (%s).",
                    self._roles.task, self._roles.chief, self._grace, GRACE_VARIABLE,
                )  # fmt: skip
            if self._chief_seconds and silence >= self._chief_seconds:
                raise self._alone()

    def _note_memory(self) -> None:
        """Tell a launcher how much memory a parameter server has, which makes no steps that would say it."""
        if self._roles.task in self._roles.servers and (events := process_events()).is_read:
            from unisono.cluster.liveness._task_events import host_bytes

            events.note("serves", memory=host_bytes())

    def _say_waiting(self) -> None:
        """Say that the chief has not been there yet; a chief that is lost is reported later."""
        chief = self._roles.chief
        if self.chief_lease.was_renewed:
            return
        _LOG.warning(
            "%s waits for %s%s, which has sent nothing for %.0f s. See whether it has started and reaches "
            "%s: the hosts in TF_CONFIG, and the firewall.",
            self._roles.task, chief, f" at {self._roles.addresses[chief]}" if chief in self._roles.addresses
            else "", self.chief_lease.silence, self._roles.addresses[self._roles.task],
        )  # fmt: skip

    def _alone(self) -> ClusterError:
        chief = self._roles.chief
        where = f" at {self._roles.addresses[chief]}" if chief in self._roles.addresses else ""
        return ClusterError(
            f"A task serves a chief that is there. Received: no sign of {chief}{where} for "
            f"{self._chief_seconds:g} s; {self._roles.task} ends. Start all tasks again. {CHIEF_VARIABLE} "
            "sets another limit in seconds, 0 none."
        )

    @property
    def chief_lease(self) -> Lease:
        """Of the chief on this task: renewed by what the chief sends."""
        return self._served.chief_lease

    @property
    def exit_code(self) -> int:
        """For the process, once the job has ended: what the chief has said."""
        return self._served.exit_code

    def _accepts(self, client: ClientId) -> bool:
        return any(map(client.acts_for, self._roles.accepted))

    def _reply(self, client: ClientId, answer: Frame) -> None:
        self._rpc_server.reply(client, answer)

    @abc.abstractmethod
    def close(self) -> None:
        """End all connections."""


class _VariableService(Service):
    """A parameter server and its `RpcServer`."""

    _rpc_server: RpcServer

    def __init__(self, roles: Roles, keys: ClusterKeys | None) -> None:
        super().__init__(roles)
        fuse_results()
        stay_on_cpus()
        self._durable = durable_store(roles.task.index)
        self._served = server = VariableServer(
            VariableStore() if self._durable is None else self._durable.store,
            self._durable,
            self._accepts,
        )
        self.ended = server.ended
        self._rpc_server = RpcServer(roles.addresses[roles.task], server.handle, keys)
        self._rpc_server.start()

    def close(self) -> None:
        """End all connections; what was kept on the disk is removed where the job has ended well."""
        self._rpc_server.close(_PROGRAM_SECONDS)
        if self._durable is not None:
            self._durable.close(remove=self.ended.is_set() and not self.exit_code)


class WorkerService(Service):
    """A worker and its `RpcServer`."""

    def __init__(
        self,
        roles: Roles,
        servers: Sequence[RequestClient],
        make_rpc_server: Callable[[Handler], RequestServer],
    ) -> None:
        super().__init__(roles)
        self._client = ServerClient(servers)
        self._served = self._worker = StepWorker(
            roles.workers.index(roles.task),
            len(roles.workers),
            self._client,
            load_program,
            self._reply,
            self._accepts,
            own_platform(),
        )
        self.ended = self._worker.ended
        self._rpc_server = make_rpc_server(self._worker.handle)
        self._worker.start()
        self._rpc_server.start()

    def close(self) -> None:
        """End all connections."""
        self._worker.close()
        self._rpc_server.close()
        # What the thread waits for fails.
        self._client.close()
        self._worker.join(_PROGRAM_SECONDS)
