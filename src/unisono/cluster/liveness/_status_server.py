"""A port at which a thread of each process answers its peers: is the process running, and how far is it?

A main thread that is blocked in a collective answers nothing itself, and the error of a collective does not
say which process it waited for. Questions carry the secret that the processes agreed on at the rendezvous:
other programs that connect get no answer, and nothing that they send can end the thread.

Tests: tests/unit/cluster/test_peer_monitor.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hmac
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from unisono._errors import ClusterError
from unisono.cluster.liveness._status import WorkerStatus, answer_problem
from unisono.cluster.rendezvous._protocol import Message, UnknownPeerError, frame, take_frame
from unisono.cluster_resolver._spec import split_address

_LOG = logging.getLogger("unisono")

#: Seconds for a question to arrive, and for an answer by default. Both take 0.1 ms, but the processors may be
#: busy with the compilers of several processes.
_SECONDS = 10.0
#: Seconds between two looks for connections whose time is over.
_TICK = 1.0
#: Seconds before a question is sent again whose connection was closed without an answer.
_RETRY_SECONDS = 0.05
#: Connections that are open at once; beyond them the oldest is closed, and a peer retries.
_CONNECTIONS = 256
#: Bytes of a question at most: what an unknown peer can make this process keep, per connection.
_QUESTION_BYTES = 1 << 16
#: Bytes of an answer at most.
_ANSWER_BYTES = 1 << 20
#: For questions. Unlike `epoll`, `poll` needs no descriptor: where none is left, an error would end the
#: watchdog's thread.
_Selector: type[selectors.BaseSelector] = getattr(selectors, "PollSelector", selectors.SelectSelector)


class AbsentError(ClusterError):
    """A process does not answer; the text says what is known of it."""


class UnreachableError(AbsentError):
    """A process cannot be connected to: its machine or the network is down."""


class EndedError(AbsentError):
    """A process has ended: its port refuses connections."""

    def __init__(self) -> None:
        super().__init__("its process has ended")


@dataclasses.dataclass(eq=False)
class _Connection:
    """One end of a connection: what was received, and the deadline for the rest."""

    sock: socket.socket
    deadline: float
    inbox: bytearray = dataclasses.field(default_factory=bytearray)


class StatusServer:
    """This process' port. One thread serves all, because no thread can be started while a program exits."""

    def __init__(self, ip: str, status: WorkerStatus, secret: str) -> None:
        self._secret = _encoded(secret)
        self._status = status
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        self._listener = socket.create_server((ip, 0), family=family, backlog=1024)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        # Here and not in the thread: without a free descriptor the caller gets the error.
        self._selector = selectors.DefaultSelector()
        self._is_open = True
        self._thread = threading.Thread(target=self._serve, name="unisono-status-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._is_open = False
        # Wakes the thread.
        with contextlib.suppress(OSError):
            socket.create_connection(self._listener.getsockname()[:2], _TICK).close()
        self._thread.join()

    def _serve(self) -> None:
        with self._selector as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            while self._is_open:
                for key, _ in selector.select(_TICK):
                    if key.data is None:
                        self._accept(selector)
                    elif self._handle(key.data):
                        _drop(selector, key.data)
                _drop_expired(selector)
            for connection in _connections(selector):
                _drop(selector, connection)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Usually EMFILE. The connection stays in the kernel's queue and the listener stays readable:
            # without the pause this loop would use up a processor.
            _LOG.debug("A connection could not be accepted: %s", error)
            time.sleep(_RETRY_SECONDS)
            return
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, _Connection(sock, time.monotonic() + _SECONDS))

    def _handle(self, connection: _Connection) -> bool:
        """Read from a connection; return whether to close it: it was answered, or rejected."""
        try:
            question = _receive(connection, _QUESTION_BYTES)
            if question is None:
                return False
            secret = question.get("secret")
            if not isinstance(secret, str) or not hmac.compare_digest(_encoded(secret), self._secret):
                raise UnknownPeerError("it does not know the secret of this cluster")
            # Does not block: the answer is short, and the send buffer empty.
            connection.sock.sendall(frame(self._status.answer(question)))
        except BlockingIOError:
            return False
        except (OSError, UnknownPeerError) as error:
            _LOG.debug("A question was rejected: %s", error)
        except Exception:
            # The thread must keep running: without it the peers take this process for dead.
            _LOG.exception("A question could not be answered.")
        return True


def _encoded(secret: str) -> bytes:
    # JSON may hold half of a surrogate pair, which strict UTF-8 cannot encode.
    return secret.encode("utf-8", "surrogatepass")


def _receive(connection: _Connection, limit: int) -> dict[str, Any] | None:
    """Return the message of a connection, None while it is not complete.

    Raises:
        OSError: when the other end has closed.
        UnknownPeerError: when it is not a message, or longer than `limit` bytes.
    """
    data = connection.sock.recv(1 << 16)
    if not data:
        raise ConnectionResetError(errno.ECONNRESET, "closed without a message")
    connection.inbox += data
    return take_frame(connection.inbox, limit)


def _connections(selector: selectors.BaseSelector) -> list[_Connection]:
    """The open connections."""
    return [key.data for key in selector.get_map().values() if key.data]


def _drop_expired(selector: selectors.BaseSelector) -> None:
    """Close the connections whose deadline has passed, and the oldest where there are too many."""
    oldest_first = sorted(_connections(selector), key=lambda connection: connection.deadline)
    now = time.monotonic()
    for i, connection in enumerate(oldest_first):
        if now > connection.deadline or i < len(oldest_first) - _CONNECTIONS:
            _drop(selector, connection)


def _drop(selector: selectors.BaseSelector, connection: _Connection) -> None:
    selector.unregister(connection.sock)
    connection.sock.close()


@dataclasses.dataclass(frozen=True)
class Peers:
    """The processes of the cluster and how this one connects to them.

    Args:
        addresses: `"ip:port"` of each one's `StatusServer`, by process.
        timeout: seconds for an answer.
    """

    own: int
    addresses: tuple[str, ...]
    names: tuple[str, ...]
    secret: str
    timeout: float = _SECONDS

    @property
    def others(self) -> list[int]:
        """The numbers of the other processes."""
        return [p for p in range(len(self.addresses)) if p != self.own]

    def ask(self, process: int, question: Message) -> dict[str, Any]:
        """Return a process' answer.

        Raises:
            AbsentError: when it does not answer; `EndedError` when the process has ended.
        """
        answer = self.ask_all(question, [process])[process]
        if isinstance(answer, AbsentError):
            raise answer
        return answer

    def ask_all(self, question: Message, processes: Sequence[int]) -> dict[int, dict[str, Any] | AbsentError]:
        """Ask some processes at once; return each one's answer, or why there is none."""
        text = frame({**question, "secret": self.secret})
        deadline = time.monotonic() + self.timeout
        requests = {p: _PeerRequest(self.addresses[p], text, str(question["kind"])) for p in processes}
        with contextlib.ExitStack() as stack:
            selector = stack.enter_context(_Selector())
            for request in requests.values():
                stack.callback(request.close)
                request.connect(selector)
            while (pending := _unanswered(requests.values())) and time.monotonic() < deadline:
                # Wait for sockets, and until the next closed connection is due to be opened again.
                wake_at = min([deadline, *(r.retry_at for r in pending if r.sock is None)])
                for key, mask in selector.select(max(0.0, wake_at - time.monotonic())):
                    key.data.advance(selector, mask)
                for request in pending:
                    due = request.answer is None and time.monotonic() >= request.retry_at
                    if due and request.sock is None:
                        request.connect(selector)
        return {p: request.answer or request.timed_out(self.timeout) for p, request in requests.items()}


def _unanswered(requests: Iterable[_PeerRequest]) -> list[_PeerRequest]:
    return [request for request in requests if request.answer is None]


class _PeerRequest:
    """One question to one process, sent again when the connection is closed before the answer.

    Only a refused connection shows that a process has ended: a closed one may be a process whose queue was
    full, or whose answer was lost.
    """

    def __init__(self, address: str, text: bytes, kind: str) -> None:
        self._target = split_address(address)
        self._text, self._kind = text, kind
        self.sock: socket.socket | None = None
        self.retry_at = 0.0
        self.answer: dict[str, Any] | AbsentError | None = None
        self._inbox = bytearray()
        self._trouble = ""

    def connect(self, selector: selectors.BaseSelector) -> None:
        """Begin to connect; an error of the connection is reported when the question is sent."""
        family = socket.AF_INET6 if ":" in self._target[0] else socket.AF_INET
        self._inbox.clear()
        try:
            self.sock = socket.socket(family, socket.SOCK_STREAM)
            self.sock.setblocking(False)
            self.sock.connect_ex(self._target)
        except OSError as error:  # EMFILE, or a name that cannot be resolved
            self.close()
            self._retry(f"no connection can be opened to it ({_describe(error)})")
            return
        selector.register(self.sock, selectors.EVENT_WRITE, self)

    def advance(self, selector: selectors.BaseSelector, mask: int) -> None:
        """Send the question, or receive the answer."""
        if self.sock is None:
            return
        try:
            if mask & selectors.EVENT_WRITE:
                self._send(self.sock)
                selector.modify(self.sock, selectors.EVENT_READ, self)
                return
            message = _receive(_Connection(self.sock, 0.0, self._inbox), _ANSWER_BYTES)
            if message is None:
                return
            if problem := answer_problem(self._kind, message):
                raise UnknownPeerError(problem)
            self.answer = message
        except BlockingIOError:
            return
        except ConnectionRefusedError:
            self.answer = EndedError()
        except (ConnectionError, UnknownPeerError) as error:
            self._retry(f"it accepts connections but does not answer ({_describe(error)})")
        except OSError as error:
            self.answer = UnreachableError(f"its machine cannot be reached ({_describe(error)})")
        selector.unregister(self.sock)
        self.close()

    def _send(self, sock: socket.socket) -> None:
        if (code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)) != 0:
            raise OSError(code, os.strerror(code))
        # TCP's simultaneous open: a connection to a free port of the own machine may get that very port as
        # its source, and then it is connected to itself.
        if sock.getsockname()[1] == self._target[1] and _is_own(sock):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "connected to itself")
        sock.sendall(self._text)
        # The kernel accepts connections for a process that does not run.
        self._trouble = "its process is stopped, or its machine is down"

    def _retry(self, trouble: str) -> None:
        self._trouble = trouble
        self.retry_at = time.monotonic() + _RETRY_SECONDS

    def timed_out(self, seconds: float) -> AbsentError:
        """Return what is known of a process that has not answered."""
        silent = f"it did not answer within {seconds:g} s"
        if self._trouble:
            return AbsentError(f"{silent}: {self._trouble}")
        return UnreachableError(f"{silent}: its machine cannot be reached")

    def close(self) -> None:
        """Close the connection, where one is open."""
        if self.sock is not None:
            self.sock.close()
            self.sock = None


def _is_own(sock: socket.socket) -> bool:
    """Return whether both ends of a connection are one socket."""
    try:
        return bool(sock.getsockname() == sock.getpeername())
    except OSError:  # closed meanwhile
        return False


def _describe(error: Exception) -> str:
    code = error.errno if isinstance(error, OSError) else None
    return os.strerror(code).lower() if code else str(error)


def own_ip(address: str) -> str:
    """Return the IP address with which this machine reaches another one.

    Args:
        address: `"host:port"` of the other; nothing is sent to it.
    """
    found = socket.getaddrinfo(*split_address(address), type=socket.SOCK_DGRAM)[0]
    with socket.socket(*found[:3]) as sock:
        # Connecting a datagram socket sends nothing: the kernel only chooses the route.
        sock.connect(found[4])
        return str(sock.getsockname()[0])
