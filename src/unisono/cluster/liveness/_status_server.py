"""A port at which a thread of each process answers the others: is it running, and how far is it?

A main thread that waits in a collective answers nothing itself, and the error of a collective does not
say which process it waited for. Questions carry a secret that the processes agreed on when they met: other
programs that connect are not answered, and nothing that they send can end the thread.
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
from collections.abc import Mapping, Sequence
from typing import Any

from unisono._errors import ClusterError
from unisono.cluster.liveness._status import WorkerStatus, answer_problem
from unisono.cluster.rendezvous._protocol import UnknownPeerError, frame, take_frame

_LOG = logging.getLogger("unisono")

#: Seconds for a question to come, and for an answer by default. Processors may be busy.
_SECONDS = 10.0
#: Seconds between two looks at connections that say nothing.
_TICK = 1.0
#: Seconds before a question is sent again whose connection was closed without an answer.
_AGAIN = 0.05
#: Connections that are open at once; beyond them the oldest is closed, and a peer asks again.
_CONNECTIONS = 256
#: Bytes of a question at most: what a stranger can make this process keep, for each connection.
_QUESTION_BYTES = 1 << 16
#: Bytes of an answer at most.
_ANSWER_BYTES = 1 << 20


class AbsentError(ClusterError):
    """A process gives no answer; the text says what is known of it."""


class UnreachableError(AbsentError):
    """No connection to a process: its machine, or the way to it, is gone."""


class EndedError(AbsentError):
    """A process has ended: nobody listens at its port."""

    def __init__(self) -> None:
        super().__init__("its process has ended")


@dataclasses.dataclass(eq=False)
class _Connection:
    """One end of a connection: what was received, and until when more may be."""

    sock: socket.socket
    until: float
    inbox: bytearray = dataclasses.field(default_factory=bytearray)


class StatusServer:
    """This process' port; one thread answers all, for new ones cannot be started when a program ends.

    Args:
        ip: the interface.
        record: what it answers from.
        secret: what a question must hold.
    """

    def __init__(self, ip: str, record: WorkerStatus, secret: str) -> None:
        self._secret = _encoded(secret)
        self._record = record
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        self._listener = socket.create_server((ip, 0), family=family, backlog=1024)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._is_open = True
        self._thread = threading.Thread(target=self._serve, name="unisono-presence", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._is_open = False
        # Wakes the thread.
        with contextlib.suppress(OSError):
            socket.create_connection(self._listener.getsockname()[:2], _TICK).close()
        self._thread.join()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            while self._is_open:
                for key, _ in selector.select(_TICK):
                    if key.data is None:
                        self._accept(selector)
                    elif self._is_done(key.data):
                        _drop(selector, key.data)
                _drop_old(selector)
            for line in _lines(selector):
                _drop(selector, line)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Mostly no file descriptor is left: the connection stays in the kernel, and the selector is
            # ready at once.
            _LOG.debug("A connection could not be accepted: %s", error)
            time.sleep(_AGAIN)
            return
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, _Connection(sock, time.monotonic() + _SECONDS))

    def _is_done(self, line: _Connection) -> bool:
        """Read from a connection; return whether to close it: it was answered, or cannot be."""
        try:
            question = _received(line, _QUESTION_BYTES)
            if question is None:
                return False
            told = question.get("secret")
            if not isinstance(told, str) or not hmac.compare_digest(_encoded(told), self._secret):
                raise UnknownPeerError("it does not know the secret of this cluster")
            # A short text for an empty buffer: it does not block.
            line.sock.sendall(frame(self._record.answer(question)))
        except BlockingIOError:
            return False
        except (OSError, UnknownPeerError) as error:
            _LOG.debug("A question was rejected: %s", error)
        except Exception:
            # The thread must go on: without it the others take this process for dead.
            _LOG.exception("A question could not be answered.")
        return True


def _encoded(secret: str) -> bytes:
    # JSON may hold half of a surrogate pair, which strict UTF-8 cannot encode.
    return secret.encode("utf-8", "surrogatepass")


def _received(line: _Connection, limit: int) -> dict[str, Any] | None:
    """Return the message of a connection, None while it is not complete.

    Raises:
        OSError: when the other end has closed.
        UnknownPeerError: when it is not a message, or longer than `limit` bytes.
    """
    data = line.sock.recv(1 << 16)
    if not data:
        raise ConnectionResetError(errno.ECONNRESET, "closed without a message")
    line.inbox += data
    return take_frame(line.inbox, limit)


def _lines(selector: selectors.BaseSelector) -> list[_Connection]:
    """The open connections."""
    return [key.data for key in selector.get_map().values() if key.data]


def _drop_old(selector: selectors.BaseSelector) -> None:
    """Close the connections whose time is over, and the oldest where there are too many."""
    lines = sorted(_lines(selector), key=lambda line: line.until)
    now = time.monotonic()
    for i, line in enumerate(lines):
        if now > line.until or i < len(lines) - _CONNECTIONS:
            _drop(selector, line)


def _drop(selector: selectors.BaseSelector, line: _Connection) -> None:
    selector.unregister(line.sock)
    line.sock.close()


@dataclasses.dataclass(frozen=True)
class Peers:
    """All processes, as this one reaches them.

    Args:
        own: this process' number.
        addresses: `"ip:port"` of each one's `StatusServer`, by process.
        names: of each, for messages.
        secret: of the cluster.
        patience: seconds for an answer.
    """

    own: int
    addresses: tuple[str, ...]
    names: tuple[str, ...]
    secret: str
    patience: float = _SECONDS

    @property
    def others(self) -> list[int]:
        """The numbers of the other processes."""
        return [p for p in range(len(self.addresses)) if p != self.own]

    def ask(self, process: int, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return a process' answer.

        Raises:
            AbsentError: when it gives none; `EndedError` when there is no such process any more.
        """
        answer = self.ask_all(question, [process])[process]
        if isinstance(answer, AbsentError):
            raise answer
        return answer

    def ask_all(
        self, question: Mapping[str, Any], processes: Sequence[int]
    ) -> dict[int, dict[str, Any] | AbsentError]:
        """Return what each of some processes answers, or why it does not; all are asked at once."""
        text = frame({**question, "secret": self.secret})
        until = time.monotonic() + self.patience
        calls = {p: _PeerRequest(self.addresses[p], text, str(question["kind"])) for p in processes}
        with contextlib.ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            for call in calls.values():
                stack.callback(call.close)
                call.connect(selector)
            while (open_ := [c for c in calls.values() if c.answer is None]) and time.monotonic() < until:
                # Sockets are looked at, and closed connections opened again.
                begin = min([until, *(c.again_at for c in open_ if c.sock is None)])
                for key, mask in selector.select(max(0.0, begin - time.monotonic())):
                    key.data.go_on(selector, mask)
                for call in open_:
                    if call.sock is None and call.answer is None and time.monotonic() >= call.again_at:
                        call.connect(selector)
        return {p: call.answer or call.silence(self.patience) for p, call in calls.items()}


class _PeerRequest:
    """One question to one process, asked again where the connection is closed before the answer.

    Only a refused connection shows that a process has ended: a closed one may be a process whose queue was
    full, or whose answer was lost.

    Args:
        address: where it answers.
        text: the question, as a frame.
        kind: of the question, and of the answer.
    """

    def __init__(self, address: str, text: bytes, kind: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = host.strip("[]"), int(port)
        self._text, self._kind = text, kind
        self.sock: socket.socket | None = None
        self.again_at = 0.0
        self.answer: dict[str, Any] | AbsentError | None = None
        self._inbox = bytearray()
        self._trouble = ""

    def connect(self, selector: selectors.BaseSelector) -> None:
        """Begin to connect; what is wrong is reported when the question is sent."""
        family = socket.AF_INET6 if ":" in self._target[0] else socket.AF_INET
        self._inbox.clear()
        try:
            self.sock = socket.socket(family, socket.SOCK_STREAM)
            self.sock.setblocking(False)
            self.sock.connect_ex(self._target)
        except OSError as error:  # no descriptor is left, or the name is not known
            self.close()
            self._ask_again(f"no connection can be opened to it ({_described(error)})")
            return
        selector.register(self.sock, selectors.EVENT_WRITE, self)

    def go_on(self, selector: selectors.BaseSelector, mask: int) -> None:
        """Send the question, or receive the answer."""
        if self.sock is None:
            return
        try:
            if mask & selectors.EVENT_WRITE:
                self._send(self.sock)
                selector.modify(self.sock, selectors.EVENT_READ, self)
                return
            message = _received(_Connection(self.sock, 0.0, self._inbox), _ANSWER_BYTES)
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
            self._ask_again(f"it accepts connections, and does not answer ({_described(error)})")
        except OSError as error:
            self.answer = UnreachableError(f"its machine cannot be reached ({_described(error)})")
        selector.unregister(self.sock)
        self.close()

    def _send(self, sock: socket.socket) -> None:
        if (code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)) != 0:
            raise OSError(code, os.strerror(code))
        # On one machine a connection to a port where no process listens can be given that very port.
        if sock.getsockname()[1] == self._target[1] and _is_own(sock):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "connected to itself")
        sock.sendall(self._text)
        self._trouble = "it is stopped, or its machine is gone"

    def _ask_again(self, trouble: str) -> None:
        self._trouble = trouble
        self.again_at = time.monotonic() + _AGAIN

    def silence(self, seconds: float) -> AbsentError:
        """Return what is known of a process that has not answered.

        Args:
            seconds: how long it was asked.
        """
        none = f"it gives no sign of life within {seconds:g} s"
        if self._trouble:
            # The machine accepts connections for a process that does not run.
            return AbsentError(f"{none}: {self._trouble}")
        return UnreachableError(f"{none}: its machine cannot be reached")

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


def _described(error: Exception) -> str:
    code = error.errno if isinstance(error, OSError) else None
    return os.strerror(code).lower() if code else str(error)


def own_ip(address: str) -> str:
    """Return the IP address with which this machine reaches another one.

    Args:
        address: `"host:port"` of the other; nothing is sent to it.
    """
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(*found[:3]) as sock:
        sock.connect(found[4])
        return str(sock.getsockname()[0])
