"""The rendezvous of a cluster's processes, before JAX starts.

A failed start of JAX ends the program without an exception, so misconfigurations are found here.

Process 0 listens at its address. The others connect to it and send a hello: who they are, and what must be
equal everywhere. When all are connected, each gets the same answer. The network is trusted, as it is by Gloo:
a message can end the rendezvous, but nothing in it is executed.

Tests: tests/cluster/test_rendezvous.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from unisono._errors import ClusterError, InvalidArgumentError
from unisono.cluster.rendezvous import _addresses, _protocol
from unisono.cluster.rendezvous._addresses import UnknownNames
from unisono.cluster.rendezvous._protocol import (
    Member,
    Message,
    OtherVersionError,
    RendezvousState,
    UnknownPeerError,
)
from unisono.cluster.rendezvous._server import RendezvousServer, describe, enable_keepalive
from unisono.cluster_resolver._spec import Timeouts, address_problem, as_ip, split_address, with_port

_LOG = logging.getLogger("unisono")

#: Seconds for one attempt to connect, and for process 0's first answer, at most.
_HELLO_SECONDS = 5.0
#: Seconds that every attempt has, also the last one: without them its error would be its own short timeout.
_LEAST_SECONDS = 0.5
#: Seconds of one wait for a message, after which other things may be due.
_TICK = 0.25
#: Seconds in which a port may become free: a supervisor restarts all while an earlier run is still ending.
_BIND_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class RendezvousResult:
    """What all processes agreed on.

    Args:
        coordinator: the `"host:port"` of JAX's coordination service, which runs in process 0.
        bind: the `"ip:port"` at which process 0 lets it listen; empty in the other processes.
        hosts: the names of the machines, by process; empty where the addresses of all are known.
        secret: random, made by process 0: authenticates the processes to each other later.
        reached: the IP address at which process 0 is reached.
    """

    coordinator: str
    bind: str
    hosts: tuple[str, ...]
    secret: str = dataclasses.field(default="", repr=False)
    reached: str = ""


def rendezvous(
    process_id: int,
    num_processes: int,
    address_of: Sequence[str],
    config: Mapping[str, Any],
    timeouts: Timeouts,
) -> RendezvousResult:
    """Wait until all processes of a cluster are connected and agree.

    Args:
        process_id: this process' number, from 0.
        address_of: `"host:port"` of the processes; of process 0 at least.
        config: what must be equal everywhere: names -> strings and numbers. With a `"generation"`, processes
            of older ones are rejected, and the others keep waiting.
        timeouts: `start_up` is for all to connect, in seconds.

    Raises:
        InvalidArgumentError: when an argument cannot be used.
        ClusterError: in every process, when configurations differ or a process is missing; in one, when
            it is rejected, cannot listen, or process 0 does not answer.

    >>> rendezvous(0, 1, ["localhost:4711"], {"jax": "0.10.2"}, Timeouts()).coordinator
    'localhost:4711'
    """
    _check(process_id, num_processes, address_of)
    compared = {**config, "num_processes": num_processes}
    own = Member(process_id, _host_name(), os.getpid(), secrets.token_hex(8), compared)
    # Before anything is opened: a configuration that is too long is this process' own mistake.
    hello = _protocol.frame(_protocol.hello(own))
    began_at = time.monotonic()
    if process_id:
        return RendezvousClient(process_id, address_of[0], hello, began_at, timeouts.start_up).run()
    # Resolvers that know only process 0's address repeat it for all.
    known = address_of[:1] if len(set(address_of)) == 1 else address_of
    return _serve(_protocol.open_rendezvous(own, num_processes, known, timeouts.start_up, began_at))


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


# --- process 0 ---------------------------------------------------------------------------------


def _serve(state: RendezvousState) -> RendezvousResult:
    with contextlib.ExitStack() as stack:
        host, port = split_address(state.address_of[0])
        # A lone process waits for no other, and needs no port to be free.
        listener = _listen(host, port if state.num_processes > 1 else 0, state)
        names = UnknownNames(split_address(address)[0] for address in state.address_of[1:])
        server = stack.enter_context(RendezvousServer(listener, state, names))
        # JAX takes the port over: the others have reached it, through firewalls and behind a service's name.
        coordinator = with_port(host, port)
        secret = secrets.token_hex(16)
        server.run({"coordinator": coordinator, "secret": secret})
        hosts, reached = server.hosts(), server.reached
    # JAX' service has no authentication: it listens where the others have arrived, never on all interfaces.
    return RendezvousResult(coordinator, with_port(reached, port), hosts, secret, reached)


def _listen(host: str, port: int, state: RendezvousState) -> socket.socket:
    hosts = [split_address(address)[0] for address in state.address_of]
    unknown = [""] * (state.num_processes - len(hosts))
    try:
        resolved, reason = _addresses.resolve(host), "does not name one interface of this machine"
    except OSError as error:
        resolved, reason = [], f"cannot be resolved ({describe(error)})"
    deadline = state.began_at + min(_BIND_SECONDS, state.start_up)
    for ip in _addresses.interfaces(host, resolved, [*hosts, *unknown]):
        listener = _bind(ip, port, deadline)
        if listener is not None:
            return listener
    if as_ip(host):
        raise ClusterError(
            "Process 0 must run on the machine of its address. Received: "
            f"{state.address_of[0]}, but this machine ({_host_name()}) has no interface {host}. Start "
            "process 0 there; where an address is forwarded to this machine, write its name instead."
        )
    _LOG.info(
        "Process 0 accepts connections on port %d of all interfaces until all have connected: %r %s.",
        port, host, reason,
    )  # fmt: skip
    v6 = socket.has_dualstack_ipv6() and (not resolved or any(":" in ip for ip in resolved))
    listener = _bind("::" if v6 else "0.0.0.0", port, deadline)
    if listener is None:
        raise ClusterError(
            f"Process 0 must be able to listen on port {port}. Received: this machine ({_host_name()}) has "
            "no network interface. Check `ip address`, also inside the container."
        )
    return listener


def _bind(ip: str, port: int, deadline: float) -> socket.socket | None:
    """Return a listening socket, or None when this machine does not have the IP address."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    while True:
        try:
            return socket.create_server((ip, port), family=family, backlog=1024, dualstack_ipv6=ip == "::")
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                return None
            # An earlier run may be about to end.
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                raise ClusterError(
                    f"Process 0 must be able to listen on port {port} of its address. Received: "
                    f"{with_port(ip, port)}: {describe(error)}. End the program that holds the port "
                    f"(`ss -ltnp 'sport = :{port}'` shows it), or write another free port for the "
                    "first task, in the TF_CONFIG of every process."
                ) from None
        time.sleep(0.1)


# --- the other processes -----------------------------------------------------------------------


class _RetryError(ClusterError):
    """Process 0 did not answer this attempt."""


class RendezvousClient:
    """The end of every other process: it connects to process 0, and retries until it is answered.

    Args:
        hello: this process' first message, as a frame.
        began_at: when the rendezvous began, in seconds of a monotonic clock.
    """

    def __init__(self, process_id: int, address: str, hello: bytes, began_at: float, start_up: float) -> None:
        self._address = address
        self._hello = hello
        self._began_at = began_at
        self._start_up = start_up
        self._roster: list[str] | None = None
        self._process_id = process_id
        #: True if a line has said what this process waits for.
        self._reminded = False

    def run(self) -> RendezvousResult:
        """Return what was agreed on.

        Raises:
            ClusterError: when the cluster cannot start, or process 0 does not answer in time.
        """
        attempts = 0
        while True:
            try:
                return self._attempt()
            except _RetryError as problem:
                trouble = str(problem)
                is_unknown = isinstance(problem.__cause__, socket.gaierror)
            attempts += 1
            remaining = self._remaining()
            if is_unknown or self._until_reminder() <= 0:
                self._remind(_protocol.waiting_text(self._address, trouble, max(0.0, remaining)))
            if remaining <= 0:
                text = _protocol.unreachable_text(self._address, trouble, attempts, self._start_up)
                raise ClusterError(text)
            time.sleep(min(remaining, _protocol.retry_delay(attempts - 1)))

    def _until_reminder(self) -> float:
        """Return the seconds until a line says what this process waits for."""
        return math.inf if self._reminded else self._began_at + _protocol.REMIND_SECONDS - time.monotonic()

    def _remind(self, text: str) -> None:
        if not self._reminded:
            self._reminded = True
            _LOG.warning(text)

    def _remaining(self) -> float:
        grace = 0.0 if self._roster is None else _protocol.GRACE_SECONDS
        return self._began_at + self._start_up + grace - time.monotonic()

    def _attempt(self) -> RendezvousResult:
        self._roster = None
        with self._connect() as sock:
            # Process 0 answers a hello at once with a roster; another program does not.
            deadline = time.monotonic() + min(_HELLO_SECONDS, max(_LEAST_SECONDS, self._remaining()))
            inbox = bytearray()
            while True:
                known = self._roster is not None
                message = self._receive(
                    sock, inbox, self._remaining() if known else deadline - time.monotonic()
                )
                if message["kind"] == "abort":
                    raise ClusterError(str(message.get("reason")))
                try:
                    if message["kind"] == "start":
                        return _read_result(message, str(sock.getpeername()[0]))
                    self._roster = _protocol.read_lines(message, "roster")
                except UnknownPeerError as problem:
                    raise _RetryError(f"another program answers there: {problem}") from problem

    def _connect(self) -> socket.socket:
        host, port = split_address(self._address)
        sock = None
        try:
            # Not beyond the moment of the reminder, which names what the attempt has met.
            left = min(self._remaining(), self._until_reminder())
            sock = socket.create_connection((host, port), min(_HELLO_SECONDS, max(_LEAST_SECONDS, left)))
            # TCP's simultaneous open: a connection to a free port of the own machine may get that very port
            # as its source, and then it is connected to itself.
            if sock.getsockname() == sock.getpeername():
                raise ConnectionRefusedError(errno.ECONNREFUSED, "connected to itself")
            enable_keepalive(sock)
            sock.sendall(self._hello)
        except OSError as error:
            if sock is not None:
                sock.close()
            raise _RetryError(describe(error)) from error
        return sock

    def _receive(self, sock: socket.socket, inbox: bytearray, timeout: float) -> dict[str, Any]:
        """The next message of process 0."""
        deadline = time.monotonic() + timeout
        try:
            while (message := _protocol.take_frame(inbox)) is None:
                # In short waits, so that the reminder is in time.
                sock.settimeout(max(0.01, min(_TICK, deadline - time.monotonic())))
                try:
                    data = sock.recv(1 << 16)
                except TimeoutError:
                    if time.monotonic() >= deadline:
                        raise
                    if self._roster is not None and self._until_reminder() <= 0:
                        self._remind(_protocol.absent_text(self._process_id, self._roster))
                    continue
                if not data:
                    raise _RetryError("the connection was closed before all processes had connected")
                inbox += data
                if time.monotonic() >= deadline:
                    raise TimeoutError
            return message
        except OtherVersionError as problem:
            text = _protocol.other_version_text(self._address, str(problem))
            raise ClusterError(text) from problem
        except UnknownPeerError as problem:
            raise _RetryError(f"another program answers there: {problem}") from problem
        except TimeoutError as error:
            if self._roster is None:
                raise _RetryError("it accepts connections but does not answer as process 0") from error
            raise ClusterError(_protocol.overdue_text(self._roster, self._start_up)) from error
        except OSError as error:
            raise _RetryError(describe(error)) from error


def _read_result(message: Message, peer: str) -> RendezvousResult:
    hosts = _protocol.read_lines(message, "hosts")
    coordinator, secret, reached = (message.get(key) for key in ("coordinator", "secret", "reached"))
    if not isinstance(coordinator, str) or not isinstance(secret, str):
        raise UnknownPeerError("its message has no coordinator or no secret")
    if address_problem(coordinator):
        raise UnknownPeerError("its message has a coordinator without an address")
    if not isinstance(reached, str) or not as_ip(reached.partition("%")[0]):
        raise UnknownPeerError("its message does not say at which address it is reached")
    # On its own machine its name may be a loopback address, where JAX's service does not listen.
    if _addresses.is_loopback(peer) and not _addresses.is_loopback(reached):
        coordinator = with_port(reached, split_address(coordinator)[1])
    return RendezvousResult(coordinator, "", tuple(hosts), secret, reached)
