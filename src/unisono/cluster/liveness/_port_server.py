"""A port at which a thread answers one question of each connection, whatever other programs send there.

Tests: tests/unit/cluster/test_peer_monitor.py, tests/unit/cluster/test_hostile.py.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import errno
import logging
import selectors
import socket
import threading
import time

from unisono.cluster.rendezvous._protocol import UnknownPeerError

_LOG = logging.getLogger("unisono")

#: Seconds for a question to arrive, and again for its answer to leave. Both take 0.1 ms, but the processors
#: may be busy with the compilers of several processes.
_SECONDS = 10.0
#: Seconds between two looks for connections whose time is over.
_TICK = 1.0
#: Seconds before a connection is accepted again where no descriptor is free.
_RETRY_SECONDS = 0.05
#: Connections that are open at once; beyond them the oldest is closed, and a peer retries.
_CONNECTIONS = 256


@dataclasses.dataclass(eq=False)
class _Connection:
    """One end of a connection: what was received, what is left to send, and the deadline for the rest."""

    sock: socket.socket
    deadline: float
    inbox: bytearray = dataclasses.field(default_factory=bytearray)
    outbox: bytearray = dataclasses.field(default_factory=bytearray)


class PortServer(abc.ABC):
    """A port of this process. One thread serves all, because no thread can be started while a program exits.

    Args:
        listener: accepts the connections; this server closes it.
    """

    def __init__(self, listener: socket.socket, name: str) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        # Here and not in the thread: without a free descriptor the caller gets the error.
        self._selector = selectors.DefaultSelector()
        self._is_open = True
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @abc.abstractmethod
    def _answer(self, inbox: bytearray) -> bytes | None:
        """Return the answer to what was received so far, None while the question is not complete.

        Raises:
            UnknownPeerError: it cannot become a question.
        """

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
                    elif self._handle(selector, key.data):
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

    def _handle(self, selector: selectors.BaseSelector, connection: _Connection) -> bool:
        """Read from a connection or write to it; return whether to close it: it was answered, or rejected."""
        try:
            if not connection.outbox:
                receive(connection.sock, connection.inbox)
                answer = self._answer(connection.inbox)
                if answer is None:
                    return False
                connection.outbox += answer
                connection.deadline = time.monotonic() + _SECONDS
                # From now on only what is written counts.
                selector.modify(connection.sock, selectors.EVENT_WRITE, connection)
            return send_part(connection.sock, connection.outbox)
        except BlockingIOError:
            return False
        except (OSError, UnknownPeerError) as error:
            _LOG.debug("A question was rejected: %s", error)
        except Exception:
            # The thread must keep running: without it this process is taken for dead.
            _LOG.exception("A question could not be answered.")
        return True


def receive(sock: socket.socket, inbox: bytearray) -> None:
    """Append what has arrived.

    Raises:
        OSError: the other end has closed.
    """
    data = sock.recv(1 << 16)
    if not data:
        raise ConnectionResetError(errno.ECONNRESET, "closed without a message")
    inbox += data


def send_part(sock: socket.socket, outbox: bytearray) -> bool:
    """Send and remove what the kernel takes at once; return whether nothing is left.

    `sendall` of a socket that does not block gives up when the kernel's buffer is full, and does not say how
    much was sent.
    """
    with contextlib.suppress(BlockingIOError):
        while outbox:
            del outbox[: sock.send(outbox)]
    return not outbox


def _connections(selector: selectors.BaseSelector) -> list[_Connection]:
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
