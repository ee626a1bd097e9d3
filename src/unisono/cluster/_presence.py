"""A port at which each process answers the others, by a thread: who is here, and how far has it come?

A main thread that waits in a collective hears and says nothing, and the error of a collective does not
tell which process it waited for. Like the network itself this is for processes that trust each other; a
common secret keeps strangers out.
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
from unisono.cluster._meeting import StrangerError, frame, take_frame
from unisono.cluster._record import Record

_LOG = logging.getLogger("unisono")

#: Seconds for a question to come, and for an answer by default. Processors may be busy.
_SECONDS = 10.0
#: Seconds between two looks at connections that say nothing.
_TICK = 1.0


class AbsentError(ClusterError):
    """A process gives no answer; the text says what is known of it."""


class UnreachableError(AbsentError):
    """No connection to a process: its machine, or the way to it, is gone."""


class EndedError(AbsentError):
    """A process has ended: nobody listens at its port."""

    def __init__(self) -> None:
        super().__init__("its process has ended")


@dataclasses.dataclass
class _Line:
    """One end of a connection: what has come, and until when it may come."""

    sock: socket.socket
    until: float
    is_connected: bool = False
    inbox: bytearray = dataclasses.field(default_factory=bytearray)

    def receive(self) -> dict[str, Any] | None:
        """The message, None while it is not complete.

        Raises:
            OSError: when the other end has closed.
            StrangerError: when it is no message.
        """
        data = self.sock.recv(1 << 16)
        if not data:
            raise ConnectionResetError
        self.inbox += data
        return take_frame(self.inbox)


class Presence:
    """This process' port; one thread answers all, for new ones cannot be started when a program ends.

    Args:
        ip: the interface.
        record: what it answers from.
    """

    def __init__(self, ip: str, record: Record) -> None:
        #: What a question must hold; nobody is answered before it is known.
        self.secret = ""
        self._record = record
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        self._listener = socket.create_server((ip, 0), family=family, backlog=1024)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._is_open = True
        self._thread = threading.Thread(target=self._serve, name="unisono-presence", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more."""
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
                    elif self._hear(key.data):
                        _drop(selector, key.data)
                for line in [key.data for key in selector.get_map().values() if key.data]:
                    if time.monotonic() > line.until:
                        _drop(selector, line)
            for line in [key.data for key in selector.get_map().values() if key.data]:
                _drop(selector, line)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            _LOG.debug("A question could not be heard: %s", error)
            return
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, _Line(sock, time.monotonic() + _SECONDS))

    def _hear(self, line: _Line) -> bool:
        """Whether the connection is of no more use: the question is answered, or none comes."""
        try:
            question = line.receive()
            if question is None:
                return False
            told = str(question.get("secret")).encode()
            if not self.secret or not hmac.compare_digest(told, self.secret.encode()):
                raise StrangerError("it does not know the secret of this cluster")
            # A short text for an empty buffer: it does not block.
            line.sock.sendall(frame(self._record.answer(question)))
        except (OSError, StrangerError) as error:
            _LOG.debug("A question could not be answered: %s", error)
        return True


def _drop(selector: selectors.BaseSelector, line: _Line) -> None:
    selector.unregister(line.sock)
    line.sock.close()


@dataclasses.dataclass(frozen=True)
class Peers:
    """All processes, as this one reaches them.

    Args:
        own: this process' number.
        addresses: `"ip:port"` of each one's `Presence`, by process.
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
        answers: dict[int, dict[str, Any] | AbsentError] = {}
        lines: dict[int, _Line] = {}
        until = time.monotonic() + self.patience
        with contextlib.ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            for process in processes:
                line = _Line(stack.enter_context(_calling(self.addresses[process])), until)
                lines[process] = line
                selector.register(line.sock, selectors.EVENT_WRITE, (process, line))
            while len(answers) < len(processes) and (left := until - time.monotonic()) > 0:
                for key, mask in selector.select(left):
                    process, line = key.data
                    answer = _turn(line, mask, text)
                    if answer is not None:
                        answers[process] = answer
                        selector.unregister(line.sock)
                    elif mask & selectors.EVENT_WRITE:
                        selector.modify(line.sock, selectors.EVENT_READ, key.data)
        return {p: answers.get(p) or self._silent(lines[p]) for p in processes}

    def _silent(self, line: _Line) -> AbsentError:
        none = f"it gives no sign of life within {self.patience:g} s"
        if line.is_connected:
            # The machine accepts connections for a process that does not run.
            return AbsentError(f"{none}: it is stopped, or its machine is gone")
        return UnreachableError(f"{none}: its machine cannot be reached")


def _calling(address: str) -> socket.socket:
    """A socket on the way to an address."""
    host, _, port = address.rpartition(":")
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    # What is wrong is told when it is written to.
    sock.connect_ex((host.strip("[]"), int(port)))
    return sock


def _turn(line: _Line, mask: int, text: bytes) -> dict[str, Any] | AbsentError | None:
    """Send the question, or receive the answer; None while there is none."""
    try:
        if mask & selectors.EVENT_WRITE:
            line.sock.sendall(text)
            line.is_connected = True
            return None
        return line.receive()
    except BlockingIOError:
        return None
    except (ConnectionError, StrangerError):
        return EndedError()
    except OSError as error:
        return UnreachableError(
            f"its machine cannot be reached ({os.strerror(error.errno or errno.EIO).lower()})"
        )


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
