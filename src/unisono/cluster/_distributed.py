"""`jax.distributed` up and down, and what processes tell each other outside of steps. Its only importer.

A failed `jax.distributed.initialize` ends the process in C++ without an exception, so all that can
be wrong is found before, in the pre-flight.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from unisono._errors import BackendError, ClusterError
from unisono._mesh import jax_runs, limit_collectives, make_cpu_devices
from unisono.cluster._batch_fingerprint import are_near, fingerprint
from unisono.cluster._compilation_cache import write_on_this_process
from unisono.cluster._coordinator_proxy import CoordinatorProxy
from unisono.cluster._host_collectives import AT_ONCE, HostCollectives
from unisono.cluster.liveness._in_flight import IN_FLIGHT
from unisono.cluster.liveness._peer_monitor import PeerMonitor
from unisono.cluster.liveness._status import WorkerStatus
from unisono.cluster.liveness._status_server import Peers, StatusServer, own_ip
from unisono.cluster.liveness._watchdog import PeerWatchdog, end_process
from unisono.cluster.rendezvous._client import RendezvousResult, rendezvous
from unisono.cluster.rendezvous._mismatch import differences, named
from unisono.cluster_resolver._base import ClusterResolver, process_environ
from unisono.cluster_resolver._spec import Timeouts, with_port

_LOG = logging.getLogger("unisono")

#: How many CPU devices each worker has, for clusters that are simulated on one machine.
_DEVICES = "UNISONO_DEVICES_PER_WORKER"
#: Which start of the cluster this is; a supervisor counts.
_GENERATION = "UNISONO_GENERATION"
#: Seconds between the time when a collective gives up and the time when JAX does.
_MARGIN = 60.0
#: Bytes of a digest.
_DIGEST = 32
_PACKAGES = ("jax", "jaxlib", "keras", "numpy", "unisono")


@dataclasses.dataclass(frozen=True)
class Membership:
    """This process in its cluster.

    Args:
        process_id: its number among those that compute together.
        num_processes: how many there are.
        generation: which start of the cluster this is.
    """

    process_id: int
    num_processes: int
    generation: int = 0

    @property
    def is_chief(self) -> bool:
        """Whether this process writes and prints for all."""
        return self.process_id == 0


_joined: Membership | None = None
_attendance: PeerMonitor | None = None
_failed = False


def membership() -> Membership:
    """This process in its cluster; alone where it joined none."""
    return _joined or Membership(0, 1)


def join(resolver: ClusterResolver, timeouts: Timeouts, collective: float | None = None) -> Membership:
    """Meet the other processes and start JAX with the devices of all.

    Args:
        resolver: who they are.
        timeouts: how long to wait for them.
        collective: how long one collective may take, in seconds; that of `timeouts` if None.

    Returns:
        This process in the cluster.

    Raises:
        BackendError: JAX has started already.
        ClusterError: somebody is missing, or differs; it says who and what.
    """
    global _joined, _attendance
    process, count = resolver.process_id, resolver.num_processes
    environ = process_environ()
    generation = int(environ.get(_GENERATION, "0") or 0)
    if _joined is not None:
        if (process, count) == (_joined.process_id, _joined.num_processes):
            return _joined
        raise ClusterError(
            "A process can be in one cluster. Received: a second cluster, of "
            f"{count} processes. Start another process for it."
        )
    devices = int(environ.get(_DEVICES, "0") or 0)
    if count == 1:
        if devices and not jax_runs():
            make_cpu_devices(devices)
        return Membership(process, 1, generation)
    if jax_runs():
        raise BackendError(
            "A multi-worker strategy must be created before JAX computes anything. Received: JAX has "
            "started. Create the strategy at the top of the program, before models and arrays."
        )
    make_cpu_devices(max(1, devices))
    limit = collective or timeouts.collective
    limit_collectives(limit)
    facts = _facts(resolver, devices, generation)
    addresses = _addresses(resolver, count)
    agreement = rendezvous(process, count, addresses, facts, timeouts, host_service=True)
    _start_jax(agreement, count, process, timeouts, limit)
    _joined = Membership(process, count, generation)
    # After JAX' own, so that it is called before; and before anything that may fail with JAX running.
    atexit.register(_leave, timeouts.shutdown)
    _attendance = _introduce(agreement, addresses, timeouts, limit)
    PeerWatchdog(_attendance, IN_FLIGHT, timeouts.heartbeat, end_process)
    return _joined


def _introduce(
    agreement: RendezvousResult, addresses: list[str], timeouts: Timeouts, limit: float
) -> PeerMonitor:
    """Tell all processes where this one answers.

    These are the first collectives. Gloo connects at the first one, and gives up after 30 s: now all are
    here, later one may be loading data.
    """
    own = membership()
    record = WorkerStatus(pending=IN_FLIGHT)
    ip = agreement.bind.rpartition(":")[0].strip("[]") or own_ip(agreement.coordinator)
    presence = StatusServer(ip, record, agreement.secret)
    everywhere = ip in ("0.0.0.0", "::")
    host = agreement.coordinator.rpartition(":")[0].strip("[]") if everywhere else ip
    try:
        every = [data.decode() for data in gather_bytes(with_port(host, presence.port).encode())]
    except (RuntimeError, ValueError) as error:
        raise ClusterError(
            "All workers must stay while the cluster is started. Received: the first message of all failed: "
            f"{str(error)[:300]}. The log of the worker that ended first says why."
        ) from error
    hosts = addresses if len(set(addresses)) == len(addresses) else agreement.hosts
    names = tuple(f"worker {i} at {host}" for i, host in enumerate(hosts))
    peers = Peers(own.process_id, tuple(every), names, agreement.secret, timeouts.heartbeat)
    return PeerMonitor(record, peers, limit)


def attendance() -> PeerMonitor | None:
    """This process among the others; None where it is alone."""
    return _attendance


def _addresses(resolver: ClusterResolver, count: int) -> list[str]:
    """The address of each process, the coordinator's first."""
    spec = resolver.cluster_spec()
    every = [spec.task_address(job, i) for job in ("chief", "worker") for i in _indices(spec, job)]
    first = resolver.coordinator_address or ""
    return every if len(every) == count else [first] * count


def _indices(spec: Any, job: str) -> list[int]:
    return list(spec.task_indices(job)) if job in spec.jobs else []


def _facts(resolver: ClusterResolver, devices: int, generation: int) -> dict[str, Any]:
    """What must be equal on all processes."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    program = hashlib.sha256(Path(main).read_bytes()).hexdigest()[:16] if main else "interactive"
    spec = resolver.cluster_spec().as_dict()
    collective = {job: tasks for job, tasks in spec.items() if job in ("chief", "worker")}
    return {
        "generation": generation,
        "cluster": str(collective),
        "python": "{}.{}".format(*sys.version_info),
        **{name: metadata.version(name) for name in _PACKAGES},
        "devices": devices,
        "float64": bool(getattr(jax.config, "jax_enable_x64")),  # noqa: B009 (JAX's types lack it)
        "program": program,
    }


def _choose_transport() -> None:
    """CPUs of several processes talk through Gloo, unless MPI is configured for JAX."""
    name = "jax_cpu_collectives_implementation"
    if getattr(jax.config, name) != "mpi":
        jax.config.update(name, "gloo")


def _start_jax(
    agreement: RendezvousResult, count: int, process: int, timeouts: Timeouts, limit: float
) -> None:
    _choose_transport()
    # It swallows SIGTERM, which belongs to the library and its users.
    jax.config.update("jax_enable_preemption_service", False)
    _connect_directly()
    jax.distributed.initialize(
        CoordinatorProxy(agreement.coordinator).address if process else agreement.coordinator,
        num_processes=count,
        process_id=process,
        cluster_detection_method="deactivate",
        initialization_timeout=int(timeouts.start_up),
        # JAX ends processes in C++: only where nothing else has ended them. It looks at half the time.
        heartbeat_timeout_seconds=int(2 * (max(limit, timeouts.heartbeat) + _MARGIN)),
        shutdown_timeout_seconds=int(timeouts.shutdown),
        coordinator_bind_address=agreement.bind or None,
    )
    if process:
        write_on_this_process()
    _watch_for_failure()


def _connect_directly() -> None:
    """Keep gRPC, which JAX speaks with its service, from a proxy: no proxy knows the way to this machine."""
    environ = process_environ()
    if any(name.lower() in ("http_proxy", "https_proxy", "grpc_proxy") for name in environ):
        known = environ.get("no_grpc_proxy") or environ.get("no_proxy") or environ.get("NO_PROXY") or ""
        environ["no_grpc_proxy"] = ",".join([*filter(None, [known]), "127.0.0.1", "localhost"])


def _watch_for_failure() -> None:
    """Note an uncaught exception: its process must not wait for the others at a barrier."""
    before: Callable[..., Any] = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _failed
        _failed = not issubclass(kind, SystemExit)
        explained = explain(error)
        if explained is None:
            before(kind, error, trace)
            return
        # As if it had been raised where the program asked for an array.
        explained.__cause__ = error
        before(type(explained), explained.with_traceback(trace), trace)

    sys.excepthook = note


def explain(error: BaseException) -> ClusterError | None:
    """Return the error that tells of the process which caused one of JAX; None for other errors."""
    return None if _attendance is None else _attendance.explained(error)


def _leave(seconds: float) -> None:
    """Go when all go. JAX would wait at a barrier, and end the process in C++ when somebody does not come."""
    if not _failed and _attendance is not None:
        missing = _attendance.leave(seconds)
        if _attendance.is_broken:
            end_process(_attendance.record.word)
        elif missing is None:
            return
        else:
            sys.stderr.write(
                "All workers must come to the end of the program. Received: this one came, and not "
                f"{missing}. The log of the worker that ended or stopped first says why.\n"
            )
    # The others hear of it at once through their closed connections.
    end_process()


# --- words between processes, outside of steps ------------------------------------------------

_words: HostCollectives | None = None


def _spoken() -> HostCollectives:
    global _words
    if _words is None:
        _words = HostCollectives()
    return _words


def host_collectives() -> int:
    """Return how many collectives were made on behalf of the host; tests count them."""
    return 0 if _words is None else _words.collectives


def broadcast_bytes(data: bytes) -> bytes:
    """Return the first process' bytes on every process: one collective for a few, two for many."""
    with together():
        return _spoken().broadcast(data)


def gather_bytes(data: bytes) -> list[bytes]:
    """Return the bytes of every process, in the order of their numbers; collectives likewise."""
    with together():
        return _spoken().gather(data)


def broadcast_arrays(tree: Any) -> Any:
    """Return the first process' arrays on every process, as host arrays: one collective for all of them.

    Args:
        tree: pytree of arrays of the same shapes and dtypes on all processes.
    """
    leaves, structure = jax.tree.flatten(tree)
    arrays = [np.asarray(leaf) for leaf in leaves]
    if not arrays:
        return tree
    data = _bytes_of(arrays) if membership().is_chief else b""
    with together():
        data = _spoken().send(data, sum(a.nbytes for a in arrays))
    return jax.tree.unflatten(structure, _parted(data, arrays))


def equal_arrays(
    arrays: Sequence[Any], known: Sequence[bool], key: Any, what: str, batch: Sequence[Any] | None = None
) -> list[Any] | None:
    """Return the first process' arrays on every process, unless all have them already.

    Args:
        arrays: of the same shapes and dtypes on all processes.
        known: for each, whether it is what this process holds under `key` together with all others.
        key: under which; anything with a `repr`.
        what: what they are, for the message.
        batch: arrays of the first batch, which all processes must have alike; None not to compare it.

    Returns:
        The arrays, those that came from the first process as host arrays; None where all processes
        know all of them.

    Raises:
        ClusterError: when shapes or dtypes differ, and it names every difference; or when the batch does.
    """
    lines = "\n".join(f"{a.shape} {a.dtype}" for a in arrays)
    new = [i for i, is_known in enumerate(known) if not is_known]
    size = sum(arrays[i].nbytes for i in new)
    # A few bytes travel with the question.
    batch_print = b"" if batch is None else fingerprint(batch)
    head = _DIGEST + len(batch_print)
    at_once = size <= AT_ONCE - head
    own = [np.asarray(arrays[i]) for i in new] if at_once else []
    every = gather_bytes(_digest(f"{key} {new} {lines}".encode()) + batch_print + _bytes_of(own))
    if batch_print:
        _check_batches([e[_DIGEST:head] for e in every])
    if any(e[:_DIGEST] != every[0][:_DIGEST] for e in every):
        require_same({"variables": lines}, what)
        return list(broadcast_arrays(list(arrays)))
    if not new:
        return None
    data = every[0][head:]
    found = _parted(data, own) if at_once else broadcast_arrays([arrays[i] for i in new])
    result = list(arrays)
    for i, array in zip(new, found, strict=True):
        result[i] = array
    return result


def _check_batches(prints: Sequence[bytes]) -> None:
    """Raise on every process when the first batches differ, which each computes a part of."""
    others = [i for i, batch in enumerate(prints) if not are_near([prints[0], batch])]
    if others:
        raise ClusterError(
            "The first batch must be the same on all processes, for each computes its own rows of it. "
            f"Received: other values in the batch of {named(others)} than in that of process 0, of the same "
            "shapes. Seed what is drawn (`keras.utils.set_random_seed`); give data of each worker's own as a "
            "`unisono.data.Dataset` with AutoShardPolicy.FILE or OFF, or by "
            "`strategy.distribute_datasets_from_function`."
        )


def _bytes_of(arrays: Sequence[np.ndarray]) -> bytes:
    return b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)


def _parted(data: bytes, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The arrays of which `data` are the bytes; `_bytes_of`'s inverse."""
    found, at = [], 0
    for array in like:
        found.append(np.frombuffer(data, array.dtype, array.size, at).reshape(array.shape))
        at += array.nbytes
    return found


def are_alike(data: bytes) -> bool:
    """Return whether all processes hold the same bytes: one collective."""
    every = gather_bytes(_digest(data))
    return every.count(every[0]) == len(every)


def require_same(facts: Mapping[str, Any], what: str, besides: bytes = b"") -> list[bytes]:
    """Raise on every process when facts differ between them; one small collective where they agree.

    Args:
        facts: name to number or text.
        what: what they are about, for the message.
        besides: a few bytes that may differ.

    Returns:
        What every process said besides.

    Raises:
        ClusterError: it names every difference and who has which value.
    """
    text = json.dumps(dict(facts), sort_keys=True, default=str).encode()
    every = gather_bytes(_digest(text) + besides)
    if any(e[:_DIGEST] != every[0][:_DIGEST] for e in every):
        found = {i: json.loads(data) for i, data in enumerate(gather_bytes(text))}
        raise ClusterError(
            f"{what} must be the same on all processes. Received: " + " ".join(differences(found))
        )
    return [e[_DIGEST:] for e in every]


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Surround collectives: their errors tell who is missing.

    Raises:
        ClusterError: when one failed because of another process.
    """
    if _attendance is not None:
        _attendance.record.meetings += 1
    try:
        with IN_FLIGHT.together():
            yield
    except (RuntimeError, ValueError) as error:
        explained = explain(error)
        if explained is None:
            raise
        raise explained from error
