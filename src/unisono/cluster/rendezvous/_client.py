"""The rendezvous of a cluster's processes, before JAX starts.

A failed start of JAX ends the program without an exception, so what can be wrong is found here.

Process 0 listens at its address, the others connect to it and tell who they are and what must be
equal everywhere; when all are here each gets the same answer. The network is trusted, as JAX's
own service on it must be: a message can end the meeting, but nothing that it says is executed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import secrets
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from unisono._errors import ClusterError, InvalidArgumentError
from unisono.cluster.rendezvous import _protocol
from unisono.cluster.rendezvous._protocol import Member, OtherVersionError, RendezvousState, UnknownPeerError
from unisono.cluster.rendezvous._server import RendezvousServer, described, keep_alive
from unisono.cluster_resolver._spec import Timeouts, address_problem, with_port

_LOG = logging.getLogger("unisono")

#: Seconds for one attempt to connect, and for process 0's first answer, at most.
_HELLO_SECONDS = 5.0
#: Seconds that an attempt has also when the time is over, so that its own haste is not the trouble.
_LEAST_SECONDS = 0.5
#: Seconds in which a port that an earlier run holds may become free.
_BIND_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class RendezvousResult:
    """What all processes agreed on.

    Args:
        coordinator: the `"host:port"` where JAX' coordination service shall be; empty when the
            service is somebody else's.
        bind: the `"ip:port"` at which process 0 lets it listen; empty in the other processes.
        hosts: the names of the machines, by process.
        secret: random, made by process 0: with it the processes know each other later.
        warnings: differences that may be, as sentences.
    """

    coordinator: str
    bind: str
    hosts: tuple[str, ...]
    secret: str = dataclasses.field(default="", repr=False)
    warnings: tuple[str, ...] = ()


def rendezvous(
    process_id: int,
    num_processes: int,
    address_of: Sequence[str],
    facts: Mapping[str, Any],
    timeouts: Timeouts,
    *,
    host_service: bool = True,
    may_differ: Collection[str] = (),
) -> RendezvousResult:
    """Wait until all processes of a cluster are here and agree.

    Args:
        process_id: this process' number, from 0.
        num_processes: how many there are.
        address_of: `"host:port"` of the processes; of process 0 at least.
        facts: what must be equal everywhere: names -> strings and numbers. With a `"generation"`
            processes of older ones are told to end, and the others go on waiting.
        timeouts: `start_up` is for all to come, in seconds.
        host_service: whether JAX' coordination service will run in process 0, which then finds a
            free port for it.
        may_differ: the facts whose difference is a warning. Process 0's list counts.

    Returns:
        What was agreed on, with one coordinator in all processes.

    Raises:
        InvalidArgumentError: when an argument cannot be used.
        InvalidTypeError: when `facts` is no flat dict.
        ClusterError: in every process, when a fact differs or a process is missing; in one, when it
            is not wanted, cannot listen, or process 0 does not answer.

    >>> facts = {"jax": "0.10.2"}
    >>> rendezvous(0, 1, ["localhost:4711"], facts, Timeouts(), host_service=False).coordinator
    ''
    """
    _check(process_id, num_processes, address_of)
    _protocol.check_facts(facts)
    told = {**facts, "num_processes": num_processes}
    me = Member(process_id, _host_name(), os.getpid(), secrets.token_hex(8), told)
    # Before anything is opened: facts that are too long are this process' own mistake.
    greeting = _protocol.frame(_protocol.hello(me))
    begun = time.monotonic()
    if process_id:
        return _RendezvousClient(address_of[0], greeting, num_processes, begun, timeouts.start_up).attend()
    # Where only process 0's address is known, some write it for all.
    known = address_of[:1] if len(set(address_of)) == 1 else address_of
    meeting = _protocol.open_meeting(me, num_processes, known, timeouts.start_up, begun)
    return _receive(dataclasses.replace(meeting, may_differ=frozenset(may_differ)), host_service)


def _check(process_id: int, num_processes: int, address_of: Sequence[str]) -> None:
    problem = None
    if num_processes < 1:
        problem = f"num_processes={num_processes}"
    elif not 0 <= process_id < num_processes:
        problem = f"process_id={process_id} of {num_processes}"
    elif isinstance(address_of, str) or not 1 <= len(address_of) <= num_processes:
        problem = f"address_of={address_of!r} for {num_processes} processes"
    for address in address_of if problem is None else ():
        wrong = address_problem(address)
        problem = problem or (wrong and f"{address!r}: {wrong}")
    if problem:
        raise InvalidArgumentError(
            "A process must have a number below the number of processes, and process 0 an address. "
            f"Received: {problem}. Write `rendezvous(0, 2, ['10.0.0.1:2222', '10.0.0.2:2222'], ...)`."
        )


def _host_name() -> str:
    name = socket.gethostname()[:255]
    return name if name and name.isprintable() else "unknown"


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _resolve(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


# --- process 0 ---------------------------------------------------------------------------------


def _receive(meeting: RendezvousState, host_service: bool) -> RendezvousResult:
    with contextlib.ExitStack() as stack:
        host, port = _split(meeting.address_of[0])
        # One alone meets nobody, and needs no port to be free.
        listener, everywhere = _listen(host, port if meeting.num_processes > 1 else 0, meeting)
        server = stack.enter_context(RendezvousServer(listener, meeting))
        coordinator = bind = ""
        if host_service:
            ip = str(listener.getsockname()[0])
            # Behind a service's name only the port that was written is forwarded: JAX takes it over.
            chosen = port if everywhere else stack.enter_context(_reserved(ip, listener.family))
            coordinator, bind = with_port(host, chosen), with_port(ip, chosen)
        secret = secrets.token_hex(16)
        go = server.run({"coordinator": coordinator, "secret": secret})
        hosts = server.hosts()
    for warning in go.warnings:
        _LOG.warning("Processes differ: %s", warning)
    return RendezvousResult(coordinator, bind, hosts, secret, go.warnings)


@contextlib.contextmanager
def _reserved(ip: str, family: int) -> Iterator[int]:
    """A free port of an interface, held until the end of the block so that nobody else gets it."""
    with socket.socket(family, socket.SOCK_STREAM) as held:
        held.bind((ip, 0))
        yield int(held.getsockname()[1])


def _listen(host: str, port: int, meeting: RendezvousState) -> tuple[socket.socket, bool]:
    """Return the socket at which process 0 listens, and whether it is at all interfaces."""
    hosts = [_split(address)[0] for address in meeting.address_of]
    unknown = [""] * (meeting.num_processes - len(hosts))
    try:
        resolved, reason = _resolve(host, port), "does not name one interface of this machine"
    except OSError as error:
        resolved, reason = [], f"cannot be resolved ({described(error)})"
    until = meeting.begun + min(_BIND_SECONDS, meeting.start_up)
    for ip in _protocol.interfaces(host, resolved, [*hosts, *unknown]):
        listener = _listener(ip, port, until)
        if listener is not None:
            return listener, False
    if _protocol.is_ip(host):
        raise ClusterError(
            "Process 0 must run on the machine of its address. Received: "
            f"{meeting.address_of[0]}, and this machine ({_host_name()}) has no interface {host}. Start "
            "process 0 there; where an address is forwarded to this machine, write its name."
        )
    _LOG.warning("Process 0 listens at port %d of all interfaces: %r %s.", port, host, reason)
    v6 = socket.has_dualstack_ipv6() and (not resolved or any(":" in ip for ip in resolved))
    listener = _listener("::" if v6 else "0.0.0.0", port, until)
    if listener is None:
        raise ClusterError(f"Process 0 must be able to listen. Received: no interface for port {port}.")
    return listener, True


def _listener(ip: str, port: int, until: float) -> socket.socket | None:
    """A socket that listens, or None when this machine does not have the IP address."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    while True:
        try:
            return socket.create_server((ip, port), family=family, backlog=1024, dualstack_ipv6=ip == "::")
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                return None
            # An earlier run may be just about to end.
            if error.errno != errno.EADDRINUSE or time.monotonic() >= until:
                raise ClusterError(
                    f"Process 0 must be able to listen at port {port} of its address. Received: "
                    f"{with_port(ip, port)}: {described(error)}. End the program that has the port "
                    f"(`ss -ltnp 'sport = :{port}'` shows it), or write another free port for the "
                    "first task, in the TF_CONFIG of every process."
                ) from error
        time.sleep(0.1)


# --- the other processes -----------------------------------------------------------------------


class _NotYetError(ClusterError):
    """Process 0 did not answer this time."""


class _RendezvousClient:
    """A process that comes to process 0, and comes again until it is answered."""

    def __init__(
        self, address: str, greeting: bytes, num_processes: int, begun: float, start_up: float
    ) -> None:
        self._address = address
        self._greeting = greeting
        self._num_processes = num_processes
        self._begun = begun
        self._start_up = start_up
        self._roster: list[str] | None = None

    def attend(self) -> RendezvousResult:
        """Return what was agreed on."""
        attempt = 0
        while True:
            try:
                return self._sit()
            except _NotYetError as problem:
                trouble = str(problem)
            attempt += 1
            left = self._left()
            if left <= 0:
                text = _protocol.unreachable_text(self._address, trouble, attempt, self._start_up)
                raise ClusterError(text)
            time.sleep(min(left, _protocol.pause(attempt - 1)))

    def _left(self) -> float:
        grace = 0.0 if self._roster is None else _protocol.GRACE_SECONDS
        return self._begun + self._start_up + grace - time.monotonic()

    def _sit(self) -> RendezvousResult:
        self._roster = None
        with self._connected() as sock:
            answered_until = time.monotonic() + min(_HELLO_SECONDS, max(_LEAST_SECONDS, self._left()))
            inbox = bytearray()
            while True:
                patience = self._left()
                if self._roster is None:
                    patience = answered_until - time.monotonic()
                message = self._next(sock, inbox, patience)
                if message["kind"] == "stop":
                    raise ClusterError(str(message.get("text")))
                try:
                    if message["kind"] == "go":
                        return _read_agreement(message)
                    self._roster = _protocol.lines_of(message, "roster")
                except UnknownPeerError as problem:
                    raise _NotYetError(f"something else answers there: {problem}") from problem

    def _connected(self) -> socket.socket:
        host, port = _split(self._address)
        sock = None
        try:
            sock = socket.create_connection(
                (host, port), min(_HELLO_SECONDS, max(_LEAST_SECONDS, self._left()))
            )
            # On one machine a connection to a free port may be given that very port, and connect to itself.
            if sock.getsockname() == sock.getpeername():
                raise ConnectionRefusedError(errno.ECONNREFUSED, "connected to itself")
            keep_alive(sock)
            sock.sendall(self._greeting)
        except OSError as error:
            if sock is not None:
                sock.close()
            raise _NotYetError(described(error)) from error
        return sock

    def _next(self, sock: socket.socket, inbox: bytearray, patience: float) -> dict[str, Any]:
        """The next message of process 0."""
        until = time.monotonic() + patience
        try:
            while (message := _protocol.take_frame(inbox)) is None:
                sock.settimeout(max(0.01, until - time.monotonic()))
                data = sock.recv(1 << 16)
                if not data:
                    raise _NotYetError("the connection was closed before all were here")
                inbox += data
                if time.monotonic() >= until:
                    raise TimeoutError
            return message
        except OtherVersionError as problem:
            text = _protocol.other_version_text(self._address, str(problem))
            raise ClusterError(text) from problem
        except UnknownPeerError as problem:
            raise _NotYetError(f"something else answers there: {problem}") from problem
        except TimeoutError as error:
            if self._roster is None:
                raise _NotYetError("it accepts connections, and does not answer as process 0") from error
            raise ClusterError(_protocol.missing_text(self._roster, self._start_up)) from error
        except OSError as error:
            raise _NotYetError(described(error)) from error


def _read_agreement(message: Mapping[str, Any]) -> RendezvousResult:
    hosts, warnings = (_protocol.lines_of(message, key) for key in ("hosts", "warnings"))
    coordinator, secret = message.get("coordinator"), message.get("secret")
    if not isinstance(coordinator, str) or not isinstance(secret, str):
        raise UnknownPeerError("its message has no coordinator or no secret")
    # Empty where the service is somebody else's.
    if coordinator and address_problem(coordinator):
        raise UnknownPeerError("its message has a coordinator without an address")
    return RendezvousResult(coordinator, "", tuple(hosts), secret, tuple(warnings))
