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
import os
import selectors
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any

from unisono._errors import ClusterError
from unisono.cluster.liveness._port_server import PortServer, receive, send_part
from unisono.cluster.liveness._status import WorkerStatus, answer_problem
from unisono.cluster.rendezvous._protocol import Message, UnknownPeerError, frame, take_frame
from unisono.cluster_resolver._spec import split_address
from unisono.rpc._ports import listen

#: Seconds for an answer by default. It takes 0.1 ms, but the processors may be busy with the compilers of
#: several processes.
_SECONDS = 10.0
#: Seconds before a question is sent again whose connection was closed without an answer.
_RETRY_SECONDS = 0.05
#: Without a route, such as that of an interface whose cable is out, the kernel refuses at once.
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
#: Bytes of a question at most: what an unknown peer can make this process keep, per connection.
_QUESTION_BYTES = 1 << 16
#: Bytes of an answer at most.
_ANSWER_BYTES = 1 << 20
#: Processes that are asked at once: each needs a descriptor here, and the other end accepts so many.
_AT_ONCE = 256
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


class StatusServer(PortServer):
    """This process' port for its peers."""

    def __init__(self, ip: str, status: WorkerStatus, secret: str) -> None:
        self._secret = _encoded(secret)
        self._status = status
        super().__init__(listen(ip, backlog=1024), "unisono-status-server")

    def _answer(self, inbox: bytearray) -> bytes | None:
        question = take_frame(inbox, _QUESTION_BYTES)
        if question is None:
            return None
        secret = question.get("secret")
        if not isinstance(secret, str) or not hmac.compare_digest(_encoded(secret), self._secret):
            raise UnknownPeerError("it does not know the secret of this cluster")
        return frame(self._status.answer(question))


def _encoded(secret: str) -> bytes:
    # JSON may hold half of a surrogate pair, which strict UTF-8 cannot encode.
    return secret.encode("utf-8", "surrogatepass")


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
        """Ask some processes, many at once; return each one's answer, or why there is none."""
        text = frame({**question, "secret": self.secret})
        # The next ones first: processes that all ask all would otherwise begin with the same ones.
        turn = sorted(processes, key=lambda p: (p - self.own) % len(self.addresses))
        found: dict[int, dict[str, Any] | AbsentError] = {}
        for i in range(0, len(turn), _AT_ONCE):
            found |= self._ask_at_once(text, str(question["kind"]), turn[i : i + _AT_ONCE])
        return {p: found[p] for p in processes}

    def _ask_at_once(
        self, text: bytes, kind: str, processes: Sequence[int]
    ) -> dict[int, dict[str, Any] | AbsentError]:
        deadline = time.monotonic() + self.timeout
        requests = {p: _PeerRequest(self.addresses[p], text, kind) for p in processes}
        with contextlib.ExitStack() as stack:
            selector = stack.enter_context(_Selector())
            for request in requests.values():
                stack.callback(request.close)
                request.connect(selector)
            is_over = False
            while (pending := _unanswered(requests.values())) and not is_over:
                # One more look afterwards: this process may not have run while the answers arrived.
                is_over = time.monotonic() >= deadline
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
        #: The rest of the question; it is sent in parts where it is larger than the kernel's buffer.
        self._outbox = bytearray()
        self._trouble = ""

    def connect(self, selector: selectors.BaseSelector) -> None:
        """Begin to connect; an error of the connection is reported when the question is sent."""
        family = socket.AF_INET6 if ":" in self._target[0] else socket.AF_INET
        self._inbox.clear()
        self._outbox[:] = self._text
        try:
            self.sock = socket.socket(family, socket.SOCK_STREAM)
            self.sock.setblocking(False)
            if (code := self.sock.connect_ex(self._target)) not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
        except OSError as error:  # EMFILE, a name that cannot be resolved, or no route
            self.close()
            if error.errno in _NO_ROUTE:
                self.answer = UnreachableError(f"its machine cannot be reached ({_describe(error)})")
            else:
                self._retry(f"no connection can be opened to it ({_describe(error)})")
            return
        selector.register(self.sock, selectors.EVENT_WRITE, self)

    def advance(self, selector: selectors.BaseSelector, mask: int) -> None:
        """Send the question, or receive the answer."""
        if self.sock is None:
            return
        try:
            if mask & selectors.EVENT_WRITE:
                if not self._send(self.sock):
                    return
                selector.modify(self.sock, selectors.EVENT_READ, self)
                return
            receive(self.sock, self._inbox)
            message = take_frame(self._inbox, _ANSWER_BYTES)
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

    def _send(self, sock: socket.socket) -> bool:
        """Send what the kernel takes of the question; return whether all of it was sent."""
        if (code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)) != 0:
            raise OSError(code, os.strerror(code))
        # TCP's simultaneous open: a connection to a free port of the own machine may get that very port as
        # its source, and then it is connected to itself.
        if sock.getsockname()[1] == self._target[1] and _is_own(sock):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "connected to itself")
        is_sent = send_part(sock, self._outbox)
        # The kernel accepts connections for a process that does not run. One that has closed them does.
        self._trouble = self._trouble or "its process is stopped, or its machine is down"
        return is_sent

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
    """Return the IP address with which this machine reaches another one."""
    found = socket.getaddrinfo(*split_address(address), type=socket.SOCK_DGRAM)[0]
    with socket.socket(*found[:3]) as sock:
        # Connecting a datagram socket sends nothing: the kernel only chooses the route.
        sock.connect(found[4])
        return str(sock.getsockname()[0])
