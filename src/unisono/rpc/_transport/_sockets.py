"""ZeroMQ's sockets with the options that this library needs, and what wakes a thread that polls them.

Tests: tests/unit/rpc/test_transport.py.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from unisono.cluster_resolver._spec import Task
from unisono.rpc._frames import Part
from unisono.rpc._transport._keys import ClusterKeys
from unisono.rpc._transport._zmq import parse_monitor_message, z85, zmq

_LOG = logging.getLogger("unisono")

ZmqSocket: TypeAlias = "zmq.Socket[bytes]"

#: Milliseconds: a handshake takes 1 here, but processors may be busy with compilers.
HANDSHAKE_MS = 5000
#: Milliseconds between two heartbeats, and without any message before a connection is given up. The process
#: may be stopped, or its machine gone: a process that ends is noticed at once. ZeroMQ's own threads send
#: them; what runs in Python does not matter. A large part delays them: 1 GiB takes 9 s at 1 Gbit/s.
_HEARTBEAT_MS = 2000
_LOST_MS = 15_000
#: Messages that wait in ZeroMQ to be sent to one connection. Others wait in a server's backlog or a client's
#: queue, which count bytes: 1000 messages with copied parts have 64 MB at most.
_SEND_MESSAGES = 1000
#: Messages that wait to be handled, for each connection; the next ones stay in the sender's queue.
_RECEIVE_MESSAGES = 64

#: Bytes of the kernel's buffers of a connection in a file, where 208 KiB are usual: 80 MB came with 2.1 to
#: 2.5 GB/s instead of 1.2 to 1.7 (2 cores, 2026-11-22). TCP sizes its buffers itself.
_FILE_BUFFER = 4 << 20

_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_MONITORS = itertools.count()


def new_socket(context: zmq.Context[ZmqSocket], kind: int, limit: int) -> ZmqSocket:
    """Return a socket.

    Args:
        limit: bytes of one part at most. ZeroMQ closes a connection that announces more, without reading it.
    """
    made = context.socket(kind)
    made.linger = 0
    made.maxmsgsize = limit
    made.sndhwm, made.rcvhwm = _SEND_MESSAGES, _RECEIVE_MESSAGES
    made.handshake_ivl = HANDSHAKE_MS
    if kind != zmq.ROUTER:
        # Not on the side that answers: libzmq 4.3.5 aborts the process where a client with a full queue goes
        # away while this side stands still for one of its own heartbeats (`!_io_error`, libzmq issue 4364;
        # 2026-11-22: a flood of hostile frames did it). A client's heartbeat says for how long it counts.
        made.heartbeat_ivl = _HEARTBEAT_MS
    made.heartbeat_timeout, made.heartbeat_ttl = _LOST_MS, _LOST_MS
    made.ipv6 = True
    return made


def enlarge_buffers(made: ZmqSocket) -> None:
    """Make a socket fast that connects processes of this machine by a file."""
    made.sndbuf = made.rcvbuf = _FILE_BUFFER


def secure_server(made: ZmqSocket, keys: ClusterKeys) -> None:
    """Encrypt a socket that answers, and let only clients connect that `Authenticator` knows."""
    made.curve_server = True
    made.curve_secretkey = z85.encode(keys.server_secret(keys.own))
    # ZeroMQ asks the authenticator where there is a domain.
    made.zap_domain = b"unisono"


def secure_client(made: ZmqSocket, keys: ClusterKeys, server: Task) -> None:
    """Encrypt a socket that asks a task."""
    secret = z85.encode(keys.client_secret(keys.own))
    made.curve_secretkey, made.curve_publickey = secret, zmq.curve_public(secret)
    made.curve_serverkey = zmq.curve_public(z85.encode(keys.server_secret(server)))


def allowed_clients(keys: ClusterKeys) -> dict[bytes, Task]:
    """Return the task of each public key that may ask."""
    secrets = {task: z85.encode(keys.client_secret(task)) for task in keys.tasks}
    return {z85.decode(zmq.curve_public(secret)): task for task, secret in secrets.items()}


def authenticate(context: zmq.Context[ZmqSocket], allowed: dict[bytes, Task]) -> Callable[[], None]:
    """Return the loop that answers whether a client may connect; it ends with the context.

    In a thread of its own: a handler that compiles a program for seconds must not delay a handshake beyond
    its limit. The protocol is ZAP, https://rfc.zeromq.org/spec/27/.
    """
    made = context.socket(zmq.REP)
    made.linger = 0
    made.bind("inproc://zeromq.zap.01")

    def run() -> None:
        with made, contextlib.suppress(zmq.ContextTerminated):
            while True:
                version, number, _, _, _, _, *credentials = made.recv_multipart()
                task = allowed.get(credentials[0]) if credentials else None
                verdict = (
                    [b"400", b"unknown key", b""] if task is None else [b"200", b"OK", str(task).encode()]
                )
                made.send_multipart([version, number, *verdict, b""])

    return run


class Monitor:
    """Reports what happens to the connection of a socket."""

    def __init__(self, watched: ZmqSocket) -> None:
        self._watched = watched
        address = f"inproc://unisono-monitor-{next(_MONITORS)}"
        watched.monitor(address, _EVENTS)
        self.socket = watched.context.socket(zmq.PAIR)
        self.socket.linger = 0
        self.socket.connect(address)

    def events(self) -> list[tuple[int, int]]:
        """Return the kinds and values of the events since the last call."""
        events = []
        with contextlib.suppress(zmq.Again):
            while True:
                event: Any = parse_monitor_message(self.socket.recv_multipart(zmq.NOBLOCK))
                events.append((int(event["event"]), int(event["value"])))
        return events

    def close(self) -> None:
        """End the reports; before the socket is closed."""
        self._watched.disable_monitor()
        self.socket.close()


class Mailbox:
    """Functions that other threads want to have called in a thread that polls sockets."""

    def __init__(self) -> None:
        # Sockets and not a pipe: a number that is written to could be another file's by then.
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self.descriptor = self._reader.fileno()
        self._functions: collections.deque[Callable[[], None]] = collections.deque()
        self._is_signalled = False

    def put(self, function: Callable[[], None]) -> None:
        """Have a function called; it is dropped where the thread has ended."""
        self._functions.append(function)
        # One byte wakes the thread for all that came meanwhile. `run` resets the flag before it takes the
        # functions: none can be left behind. The byte may arrive after `run` has reset the flag.
        if not self._is_signalled:
            self._is_signalled = True
            with contextlib.suppress(OSError):
                self._writer.send(b"x")

    def run(self) -> None:
        """Call the functions that wait; whenever `descriptor` is ready."""
        # Whatever the flag says: a byte that is left wakes the thread again at once, and for ever.
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)
        self._is_signalled = False
        while self._functions:
            function = self._functions.popleft()
            try:
                function()
            except Exception:
                # The thread must keep running: without it no other message is handled.
                _LOG.exception("A message could not be sent.")

    def close(self) -> None:
        """Close both ends; in the thread that polls."""
        self._reader.close()
        self._writer.close()


def send_parts(made: ZmqSocket, parts: Sequence[Part]) -> bool:
    """Send a message without waiting; return whether it could be queued.

    Parts of 64 KiB and more are not copied: they must not change until ZeroMQ drops them.
    """
    try:
        made.send_multipart(parts, zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return False
    return True


def receive_parts(made: ZmqSocket) -> list[zmq.Frame] | None:
    """Return the parts of the next message, None where none waits."""
    try:
        return made.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
