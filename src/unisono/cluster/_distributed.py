"""Start and stop `jax.distributed`; nothing else imports it.

A failed `jax.distributed.initialize` ends the process in C++ without an exception, so all that can
be wrong is found before, in the pre-flight.

Tests: tests/cluster/test_rendezvous.py.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
from pathlib import Path
from typing import Any

import jax

from unisono._errors import BackendError, ClusterError
from unisono._lowering._xla_flags import limit_collectives
from unisono._mesh import jax_runs, make_cpu_devices
from unisono._system._environ import process_environ
from unisono._system._program_end import EXPLAINERS, expected_exit_code, program_has_failed, watch_program
from unisono.cluster._coordinator_gate import CoordinatorGate
from unisono.cluster._coordinator_proxy import CoordinatorProxy
from unisono.cluster._introduction import how_to_connect, introduce
from unisono.cluster._jax_internals import Board, let_gloo_listen_at, own_place, write_on_this_process
from unisono.cluster._jax_process_group import HostCollectives, JaxProcessGroup
from unisono.cluster._own_address import own_address
from unisono.cluster._program_digest import cluster_text, program_digest
from unisono.cluster.liveness._health import process_health, report_ready
from unisono.cluster.liveness._peer_monitor import PeerMonitor
from unisono.cluster.liveness._status import WorkerStatus
from unisono.cluster.liveness._status_server import Peers, StatusServer
from unisono.cluster.liveness._watchdog import PeerWatchdog, end_process
from unisono.cluster.rendezvous._client import RendezvousResult, rendezvous
from unisono.cluster_resolver._base import ClusterResolver, whole_of
from unisono.cluster_resolver._spec import Timeouts, split_address, with_port
from unisono.collectives._process_group import ProcessGroup, SingleProcessGroup, joined_group, note_joined
from unisono.rpc._transport._keys import WATCH_VARIABLES
from unisono.rpc._versions import installed

_LOG = logging.getLogger("unisono")

#: How many CPU devices each worker has, for clusters that are simulated on one machine.
_DEVICES = "UNISONO_DEVICES_PER_WORKER"
#: Which start of the cluster this is; a supervisor counts.
_GENERATION = "UNISONO_GENERATION"
#: Over which the processes of several hosts connect; a program's `CommunicationOptions` take precedence.
_INTERFACE = "UNISONO_INTERFACE"
#: Seconds between the time when a collective gives up and the time when JAX does.
_MARGIN = 60.0


def join(
    resolver: ClusterResolver,
    timeouts: Timeouts,
    collective: float | None = None,
    interface: str = "",
    with_spare: bool = False,
) -> ProcessGroup:
    """Wait for the other processes and start JAX with the devices of all.

    Args:
        collective: how long one collective may take, in seconds; that of `timeouts` if None.
        interface: over which the processes connect, see `CommunicationOptions`; empty to choose.
        with_spare: whether each process gets a CPU device for exchanges beside the steps.

    Raises:
        BackendError: JAX has started already.
        ClusterError: a process is missing, or differs; the message names it and the difference.
        InvalidArgumentError: the port for probes is not free.
    """
    # From now on it answers: others may start much later.
    process_health()
    process, count = resolver.process_id, resolver.num_processes
    environ = process_environ()
    generation = whole_of(_GENERATION, environ)
    group = joined_group()
    if isinstance(group, JaxProcessGroup):
        if (process, count) == (group.index, group.size):
            return group
        raise ClusterError(
            "A process can be in one cluster. Received: a second cluster, of "
            f"{count} processes. Start another process for it."
        )
    devices = whole_of(_DEVICES, environ)
    if count == 1:
        if devices and not jax_runs():
            make_cpu_devices(devices)
        report_ready()
        return SingleProcessGroup()
    if jax_runs():
        raise BackendError(
            "A multi-worker strategy must be created before JAX computes anything. Received: JAX has "
            "started. Create the strategy at the top of the program, before models and arrays."
        )
    if jax.distributed.is_initialized() and own_place() != (process, count):
        raise ClusterError(
            "A process that has called `jax.distributed.initialize` must have the same place in its cluster. "
            f"Received: process {process} of {count} there, and {'{} of {}'.format(*own_place())} in JAX. "
            "Leave out that call, or pass the resolver of the same cluster."
        )
    make_cpu_devices(max(1, devices), with_spare)
    limit = collective or timeouts.collective
    limit_collectives(limit)
    configuration = _configuration(resolver, devices, generation) | {"exchange device": with_spare}
    addresses = _addresses(resolver, count)
    # Before the others wait: a key that cannot be used is this process' own mistake.
    port = _watch_port(resolver, process)
    agreement = rendezvous(process, count, addresses, configuration, timeouts)
    interface = interface or environ.get(_INTERFACE, "")
    group = _meet(process, addresses, agreement, timeouts, limit, interface, port)
    note_joined(group)
    report_ready()
    return group


def _meet(
    process: int,
    addresses: list[str],
    agreement: RendezvousResult,
    timeouts: Timeouts,
    limit: float,
    interface: str,
    port: Any = None,
) -> JaxProcessGroup:
    """Start JAX, and connect this process to each other one; from its start, peers watch each other."""
    count = len(addresses)
    # Resolvers that know only process 0's address repeat it for all.
    is_known = len(set(addresses)) == count
    task = split_address(addresses[process])[0] if is_known else ""
    ip = own_address(interface, task, agreement.reached)
    status = WorkerStatus(sees_ends=False)
    server = StatusServer(ip, status, agreement.secret)
    uses_gloo = _choose_transport()
    if not jax.distributed.is_initialized():  # by Ray Train, or by the program
        _start_jax(agreement, count, process, timeouts, limit)
    if process:
        write_on_this_process()
    EXPLAINERS.insert(0, _explain_in_group)
    watch_program()
    # After JAX' own, so that it is called before; and before anything that may fail with JAX running.
    atexit.register(_leave, timeouts.shutdown, port)
    if port is not None:
        # The port of the address, which the rendezvous and JAX's start have used, is free from now on.
        port.listen(own_address("", task, agreement.reached))
    if uses_gloo:
        let_gloo_listen_at(ip)
    hosts = addresses if is_known else agreement.hosts
    names = tuple(f"worker {i} at {host}" for i, host in enumerate(hosts))
    listening = tuple(with_port(ip, server.port) if i == process else "" for i in range(count))
    peers = Peers(process, listening, names, agreement.secret, timeouts.heartbeat)
    monitor = PeerMonitor(status, introduce(Board(), peers, timeouts.start_up), limit)
    PeerWatchdog(monitor, status.in_flight, timeouts.heartbeat, end_process)
    return JaxProcessGroup(process, count, _connect(monitor, ip), monitor)


def _connect(monitor: PeerMonitor, ip: str) -> HostCollectives:
    """Run the first collective. Gloo connects at it, and gives up after 30 s: all processes wait for it now.

    Later one may be loading data.
    """
    # JAX's backend starts here: it asks process 0 for all devices, without a limit where that process ends.
    with monitor.status.in_flight.collective():
        collectives = HostCollectives()
        try:
            collectives.gather(b"")
        except (RuntimeError, ValueError) as error:
            reason = monitor.status.abort_reason or (
                "All workers must be able to connect to each other for collectives. Received: "
                f"{monitor.name}, which listens at {ip}: {str(error)[:300]}. {how_to_connect()}"
            )
            monitor.abort(reason)
            raise ClusterError(reason) from error
    monitor.status.sees_ends = collectives.platform == "cpu"
    return collectives


def _addresses(resolver: ClusterResolver, count: int) -> list[str]:
    """The address of each process, the coordinator's first."""
    every = list(_named_addresses(resolver).values())
    first = resolver.coordinator_address or ""
    return every if len(every) == count else [first] * count


def _named_addresses(resolver: ClusterResolver) -> dict[str, str]:
    """The known addresses of processes by the names of their tasks, the coordinator's first."""
    spec = resolver.cluster_spec()
    jobs = [job for job in ("chief", "worker") if job in spec.jobs]
    return {f"{job}:{i}": spec.task_address(job, i) for job in jobs for i in spec.task_indices(job)}


def _watch_port(resolver: ClusterResolver, process: int) -> Any:
    """Return the port at which watchers ask this process; None without a key for them."""
    environ = process_environ()
    if not any(environ.get(name) for name in WATCH_VARIABLES):
        return None
    tasks = _named_addresses(resolver)
    if len(tasks) != resolver.num_processes:
        _LOG.warning(
            "`unisono watch HOST:PORT` cannot reach this task: its address in the cluster is not known. "
            "Describe the cluster with the addresses of all tasks, as TF_CONFIG does."
        )
        return None
    # Few jobs have one.
    from unisono.cluster._watch_port import WatchPort

    return WatchPort(list(tasks)[process], tasks)


def _configuration(resolver: ClusterResolver, devices: int, generation: int) -> dict[str, Any]:
    """What must be equal on all processes."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    program = program_digest(Path(main)) if main else "interactive"
    spec = resolver.cluster_spec().as_dict()
    collective = {job: tasks for job, tasks in spec.items() if job in ("chief", "worker")}
    return {
        "generation": generation,
        "cluster": cluster_text(collective),
        "python": "{}.{}".format(*sys.version_info),
        **installed(),
        "devices": devices,
        "float64": bool(getattr(jax.config, "jax_enable_x64")),  # noqa: B009 (JAX's types lack it)
        "program": program,
    }


def _choose_transport() -> bool:
    """Return whether CPUs of several processes talk through Gloo: unless MPI is configured for JAX."""
    name = "jax_cpu_collectives_implementation"
    if getattr(jax.config, name) == "mpi":
        return False
    jax.config.update(name, "gloo")
    return True


def _start_jax(
    agreement: RendezvousResult, count: int, process: int, timeouts: Timeouts, limit: float
) -> None:
    # It swallows SIGTERM, which belongs to the library and its users.
    jax.config.update("jax_enable_preemption_service", False)
    _connect_directly()
    # JAX returns when all processes have connected: no further connection is needed.
    with contextlib.closing(
        CoordinatorProxy(agreement.coordinator, agreement.secret)
        if process
        else CoordinatorGate(agreement.bind, agreement.secret, count)
    ) as service:
        jax.distributed.initialize(
            service.address,
            num_processes=count,
            process_id=process,
            cluster_detection_method="deactivate",
            initialization_timeout=int(timeouts.start_up),
            # JAX ends processes in C++: only where nothing else has ended them. It looks at half the time.
            heartbeat_timeout_seconds=int(2 * (max(limit, timeouts.heartbeat) + _MARGIN)),
            shutdown_timeout_seconds=int(timeouts.shutdown),
            coordinator_bind_address=None if process else service.address,
        )


def _connect_directly() -> None:
    """Keep gRPC, which JAX speaks with its service, from a proxy: no proxy knows the way to this machine."""
    environ = process_environ()
    if any(name.lower() in ("http_proxy", "https_proxy", "grpc_proxy") for name in environ):
        known = environ.get("no_grpc_proxy") or environ.get("no_proxy") or environ.get("NO_PROXY") or ""
        environ["no_grpc_proxy"] = ",".join([*filter(None, [known]), "127.0.0.1", "localhost"])


def _explain_in_group(error: BaseException) -> BaseException | None:
    """Return what a failed collective means, as if raised where the program asked for an array."""
    explained = joined_group().explain(error)
    if explained is not None:
        explained.__cause__ = error
        explained.with_traceback(error.__traceback__)
    return explained


def _leave(seconds: float, port: Any = None) -> None:
    """Wait at a shutdown barrier with a timeout; then tell watchers how the program has ended.

    JAX's own barrier aborts the process in C++ when another process never arrives.
    """
    # A process that an error ends must not wait for the others.
    group = joined_group()
    if not program_has_failed() and isinstance(group, JaxProcessGroup):
        monitor = group.monitor
        missing = monitor.wait_for_shutdown(seconds)
        if monitor.is_aborted:
            if port is not None:
                port.end(1, monitor.status.abort_reason)
            end_process(monitor.status.abort_reason)
        elif missing is None:
            if port is not None:
                port.end(expected_exit_code())
            return
        else:
            sys.stderr.write(
                "All workers must reach the shutdown barrier. Received: this worker did; still missing: "
                f"{missing}. The log of the worker that ended or stopped first says why.\n"
            )
    if port is not None:
        port.end(1)
    # The kernel closes this process' connections: the others' collectives fail at once.
    end_process()
