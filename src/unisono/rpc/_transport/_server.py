"""The end of a connection that answers: a parameter server, or a worker that runs closures.

Tests: tests/unit/rpc/test_transport.py.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from unisono._errors import ClusterError
from unisono.cluster_resolver._spec import split_address, with_port
from unisono.rpc._calls import BYTES_IN_FLIGHT, CLOSE_SECONDS, ClientId, Handler, error_answer
from unisono.rpc._frames import DEFAULT_LIMIT, Frame, FrameError, Part, total_bytes
from unisono.rpc._ops import Op
from unisono.rpc._transport import _local as local
from unisono.rpc._transport import _sockets as sockets
from unisono.rpc._transport._keys import HOW_TO_GIVE_A_KEY, ClusterKeys
from unisono.rpc._transport._server_channels import ServerChannels
from unisono.rpc._transport._sockets import ZmqSocket
from unisono.rpc._transport._zmq import zmq

_LOG = logging.getLogger("unisono")

#: Messages of one socket in a row, before others have their turn.
_BURST = 100
#: Seconds in which an address may become free: the process that had it may just be ending.
_BIND_SECONDS = 3.0
#: Milliseconds after which an answer is tried again for which there was no room.
_BACKLOG_MS = 5
#: And a connection that could not be taken.
_PAUSE_MS = 1000
#: Bytes of a part as an object of Python, besides its content.
_OBJECT_BYTES = 100
#: Seconds between two warnings about clients that take no answers: hostile ones must not fill the log.
_WARN_SECONDS = 10.0
#: Seconds that a server stays after its last answer; ten times as long for one with large arrays.
_LINGER = 0.1


class RpcServer:
    """Answers the requests of clients, in a thread of its own.

    At a loopback address it listens on a socket in a file, which only processes of this user can reach, and
    with keys also on TCP for others, such as a container of the same machine. Elsewhere it listens on TCP
    and needs keys. It must not be used in a process that was forked after `start`.

    Args:
        address: `"host:port"`. With port 0 a free one is chosen, and `address` has it after `start`.
        handler: answers a request, or returns None and calls `reply` later. It runs in the server's
            thread: while it works no other request is answered. An exception becomes an answer ERROR.
        limit: bytes of a request, or of an answer, at most; the same in all tasks.
        budget: bytes of answers that wait to be sent to one client at most; more are dropped.

    Raises:
        ClusterError: when other machines could reach it without a key.
    """

    def __init__(
        self,
        address: str,
        handler: Handler,
        keys: ClusterKeys | None = None,
        limit: int = DEFAULT_LIMIT,
        budget: int = BYTES_IN_FLIGHT,
    ) -> None:
        require_key(address, keys)
        self.address = address
        #: Messages that were no requests.
        self.rejected = 0
        self._handler, self._keys = handler, keys
        self._limit, self._budget = limit, budget
        self._tasks = {str(task): task for task in keys.tasks} if keys else {}
        self._unsent: dict[bytes, int] = {}
        # Answers for which ZeroMQ had no room: they wait here, where their bytes are counted.
        self._backlog: dict[bytes, collections.deque[Sequence[Part]]] = {}
        self._sent_at = self._warned_at = -math.inf
        # Reentrant: a finalizer may run at any moment, also in the thread that has the lock.
        self._count_lock = threading.RLock()
        self._sockets: dict[bytes, ZmqSocket] = {}
        self._lock: local.AddressLock | None = None
        self._mailbox = sockets.Mailbox()
        self._channels: ServerChannels | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen and begin to answer.

        Raises:
            ClusterError: when the address cannot be used.
        """
        self._context: zmq.Context[ZmqSocket] = zmq.Context()
        host, port = split_address(self.address)
        if not port:
            self.address = with_port(host, local.free_port())
        try:
            # The file first: who finds the TCP port open finds the file, too, and takes that.
            if local.is_loopback(host):
                self._listen_locally()
            if self._keys is not None:
                self._listen_on_tcp(self._keys)
        except ClusterError:
            self._close_sockets()
            raise
        self._thread = threading.Thread(target=self._serve, name=f"unisono-{self.address}", daemon=True)
        self._thread.start()

    def reply(self, client: ClientId, answer: Frame) -> None:
        """Answer a request whose handler returned None; from any thread.

        An answer to a client that has gone is dropped.

        Raises:
            FrameError: when the answer has no place in a message.
        """
        parts = answer.parts(self._limit)
        if self._channels is not None and self._channels.send(client, parts):
            return
        if threading.current_thread() is self._thread:
            self._send(client, parts)
        else:
            self._mailbox.put(lambda: self._send(client, parts))

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Stop answering and free the address; returns within seconds, also while the handler works."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._mailbox.put(lambda: None)
        if self._thread is None:
            self._mailbox.close()
        elif threading.current_thread() is not self._thread:
            self._thread.join(seconds)
            if self._thread.is_alive():
                _LOG.warning("The server at %s closes when its handler returns.", self.address)

    def _listen_locally(self) -> None:
        try:
            directory = local.socket_directory()
        except ClusterError as error:
            if self._keys is None:
                raise
            _LOG.warning("%s Without it messages are encrypted.", error)
            return
        path = local.socket_path(self.address, directory)
        self._lock = local.AddressLock(path)
        if self._keys is None:
            # Nothing will listen there, but the port of another program is a mistake in the cluster.
            self._bind(local.check_port_is_free, f"tcp://{self.address}")
        # Before ZeroMQ's: who finds that finds this, too.
        self._channels = ServerChannels.listen(path, self._limit, self._budget, self._mailbox)
        made = sockets.new_socket(self._context, zmq.ROUTER, self._limit)
        sockets.enlarge_buffers(made)
        self._sockets[b"local"] = made
        self._bind(made.bind, f"ipc://{path}")
        # The directory keeps others out already.
        Path(path).chmod(0o600)

    def _listen_on_tcp(self, keys: ClusterKeys) -> None:
        made = sockets.new_socket(self._context, zmq.ROUTER, self._limit)
        self._sockets[b"tcp"] = made
        sockets.secure_server(made, keys)
        admit = sockets.authenticate(self._context, sockets.allowed_clients(keys))
        threading.Thread(target=admit, name=f"unisono-admits-{self.address}", daemon=True).start()
        host, port = split_address(self.address)
        try:
            ip = local.resolve(host)
        except OSError:
            ip = "*"
        try:
            self._bind(made.bind, f"tcp://{with_port(ip, port)}")
        except ClusterError as error:
            # The name or address of a service, which is not one of this machine's interfaces.
            if not isinstance(error.__cause__, zmq.ZMQError) or error.__cause__.errno != zmq.EADDRNOTAVAIL:
                raise
            ip = "*"
            self._bind(made.bind, f"tcp://*:{port}")
        if ip in ("*", "0.0.0.0", "::"):
            self._require_loopback(port)

    def _require_loopback(self, port: int) -> None:
        """Check that no task without a key has this port at a loopback address: clients would find that one.

        It listens on a file alone. One that is started later finds the TCP port taken.
        """
        try:
            directory = local.socket_directory()
        except ClusterError:  # no task of this user has a file there
            return
        for host in ("127.0.0.1", "::1"):
            local.AddressLock(local.socket_path(with_port(host, port), directory)).release()

    def _bind(self, bind: Callable[[str], object], place: str) -> None:
        deadline = time.monotonic() + _BIND_SECONDS
        while True:
            try:
                bind(place)
            except (zmq.ZMQError, OSError) as error:
                if error.errno == zmq.EADDRINUSE and time.monotonic() < deadline:
                    time.sleep(0.05)
                    continue
                raise ClusterError(
                    "A task must be able to listen at its address in the cluster. "
                    f"Received: {self.address}: {error.strerror} ({place}). Choose another port, or an "
                    "address of this machine."
                ) from error
            return

    def _serve(self) -> None:
        poller = zmq.Poller()
        for made in self._sockets.values():
            made.router_mandatory = True
            poller.register(made, zmq.POLLIN)
        poller.register(self._mailbox.descriptor, zmq.POLLIN)
        if self._channels is not None:
            self._channels.watch(poller)
        while not self._closing.is_set():
            ready = dict(poller.poll(self._longest_sleep()))
            if self._channels is not None:
                for client, received in self._channels.receive(ready):
                    self._take(client, received)
            if self._mailbox.descriptor in ready:
                self._mailbox.run()
            if self._backlog:
                self._send_backlog()
            for kind, made in self._sockets.items():
                if made in ready:
                    self._receive(kind, made)
        # Answers that were given before it was closed.
        self._mailbox.run()
        self._mailbox.close()
        self._wait_for_answers()
        self._close_sockets()

    def _longest_sleep(self) -> int | None:
        if self._backlog:
            return _BACKLOG_MS
        return _PAUSE_MS if self._channels is not None and self._channels.is_paused else None

    def _wait_for_answers(self) -> None:
        """Let the last answers reach their clients, such as that to END."""
        # ZeroMQ's own LINGER does not: of answers that were sent just before the socket was closed, 9 of 40
        # were lost with it (libzmq 4.3.5, 2026-11-22), and none after a pause.
        first, last = self._sent_at + _LINGER, time.monotonic() + 10 * _LINGER
        while (self._has_unsent() and time.monotonic() < last) or time.monotonic() < first:
            time.sleep(_LINGER / 10)

    def _has_unsent(self) -> bool:
        """Send what there is room for by now; return whether an answer is not sent yet."""
        self._send_backlog()
        return (self._channels is not None and not self._channels.flush()) or bool(self._unsent)

    def _close_sockets(self) -> None:
        for made in self._sockets.values():
            made.close()
        if self._channels is not None:
            self._channels.close()
        # Wakes the authenticator, and waits for its socket.
        self._context.term()
        if self._lock is not None:
            self._lock.release()

    def _receive(self, kind: bytes, made: ZmqSocket) -> None:
        for _ in range(_BURST):
            received = sockets.receive_parts(made)
            if received is None or self._closing.is_set():
                return
            self._take(self._client(kind, received), [part.buffer for part in received[1:]])

    def _take(self, client: ClientId, received: Sequence[Part]) -> None:
        try:
            self._handle(client, received)
        except Exception:
            # The thread must keep running: without it the task is lost for all.
            _LOG.exception("A message could not be handled.")

    def _client(self, kind: bytes, received: Sequence[zmq.Frame]) -> ClientId:
        connection = kind + b" " + received[0].bytes
        if kind == b"local" or len(received) < 2:
            return ClientId(connection, is_same_user=kind == b"local")
        # Of this message, and not remembered by the connection's name: a client chooses its name.
        try:
            name = str(received[1].get("User-Id"))
        except zmq.ZMQError:  # the authenticator gave none
            return ClientId(connection)
        return ClientId(connection, self._tasks.get(name))

    def _handle(self, client: ClientId, received: Sequence[Part]) -> None:
        try:
            request = Frame.parse(received, self._limit)
        except FrameError as error:
            self.rejected += 1
            _LOG.debug("A message of %s was rejected: %s", client, error)
            # An explanation for an honest client of another version. It does not wait if the client takes no
            # answers: a million of them would be 256 MB (the budget) of memory.
            if error.request is not None and client.connection not in self._backlog:
                rejection = error_answer(Frame(Op.ERROR, error.request), error).parts()
                if self._channels is None or not self._channels.send(client, rejection, may_wait=False):
                    self._hand_over(client.connection, rejection)
            return
        try:
            answer = self._handler(client, request)
            parts = None if answer is None else answer.parts(self._limit)
        except Exception as error:
            _LOG.exception("The request %s of %s could not be answered.", request.op.name, client)
            parts = error_answer(request, error).parts()
        if parts is not None:
            self._send(client, parts)

    def _send(self, client: ClientId, parts: Sequence[Part]) -> None:
        if self._channels is not None and self._channels.send(client, parts):
            return
        connection = client.connection
        waiting = self._unsent.get(connection, 0)
        if waiting and waiting + total_bytes(parts) > self._budget:
            if time.monotonic() > self._warned_at + _WARN_SECONDS:
                self._warned_at = time.monotonic()
                _LOG.warning("%s does not take its answers: %d bytes wait, one is dropped.", client, waiting)
            return
        for part in parts:
            if _is_shared(part):
                self._count(connection, len(part))
                weakref.finalize(part, self._count, connection, -len(part)).atexit = False
        if connection in self._backlog or not self._hand_over(connection, parts):
            self._backlog.setdefault(connection, collections.deque()).append(parts)
            self._count(connection, _queued_bytes(parts))

    def _hand_over(self, connection: bytes, parts: Sequence[Part]) -> bool:
        """Give an answer to ZeroMQ; return False while its queue for the client is full."""
        kind, _, name = connection.partition(b" ")
        made = self._sockets.get(kind)
        # A client that has gone asks again.
        with contextlib.suppress(zmq.ZMQError):
            if made is not None and not sockets.send_parts(made, [name, *parts]):
                return False
            self._sent_at = time.monotonic()
        return True

    def _send_backlog(self) -> None:
        for connection, waiting in list(self._backlog.items()):
            while waiting and self._hand_over(connection, waiting[0]):
                self._count(connection, -_queued_bytes(waiting.popleft()))
            if not waiting:
                del self._backlog[connection]

    def _count(self, connection: bytes, size: int) -> None:
        # Also called by the thread in which ZeroMQ drops what it has sent.
        with self._count_lock:
            left = self._unsent.get(connection, 0) + size
            if left:
                self._unsent[connection] = left
            else:
                self._unsent.pop(connection, None)


def _is_shared(part: Part) -> bool:
    """Return whether ZeroMQ reads a part where it is; it copies shorter ones."""
    return isinstance(part, memoryview) and len(part) >= zmq.COPY_THRESHOLD


def _queued_bytes(parts: Sequence[Part]) -> int:
    """Return the size of an answer in the backlog, without the parts that are counted anyway."""
    return sum(_OBJECT_BYTES + len(part) * (not _is_shared(part)) for part in parts)


def require_key(address: str, keys: ClusterKeys | None) -> None:
    """Check that a task which other machines can reach has keys."""
    host, _ = split_address(address)
    if keys is None and not local.is_loopback(host):
        raise ClusterError(
            "A task that other machines can reach must have the key of its cluster. "
            f"Received: {address}, and no key. {HOW_TO_GIVE_A_KEY} On one machine write 'localhost' "
            "instead: no key is needed there."
        )


_LOG = logging.getLogger("unisono")

#: Seconds for which a task refuses the others before it ends: they may be started a little later.
_REFUSES = 60.0
#: The same after the first one was refused: the others ask at about the same time, and each one three times.
_REFUSES_ON = 2.0
#: The monitor's events for a client with a key.
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)
#: Bytes of a message, which is never read.
_LIMIT = 1 << 10


def require_key_or_refuse(address: str, keys: ClusterKeys | None) -> None:
    """Check that a task which other machines can reach has keys; without them, refuse clients for a while.

    It cannot read what clients with a key send. They cannot take a handshake without keys, and end at once
    with an error, where they would try to connect until their time is over.
    """
    try:
        require_key(address, keys)
    except ClusterError as error:
        _LOG.error("%s The tasks that connect are told so for %g s.", error, _REFUSES)
        _refuse(address)
        raise


def _refuse(address: str) -> None:
    """Break off handshakes at an address."""
    context: zmq.Context[sockets.ZmqSocket] = zmq.Context()
    made = sockets.new_socket(context, zmq.ROUTER, _LIMIT)
    # One message of each connection is taken, and none is read.
    made.rcvhwm = 1
    monitor = sockets.Monitor(made)
    try:
        _bind(made, address)
        end = time.monotonic() + _REFUSES
        while (left := end - time.monotonic()) > 0:
            ready = monitor.socket.poll(max(1, int(1000 * left)))
            if ready and any(event in _FAILED for event, _ in monitor.events()):
                end = min(end, time.monotonic() + _REFUSES_ON)
    except zmq.ZMQError as error:
        # Another program's port: who asks there learns something else.
        _LOG.warning("Tasks that ask %s cannot be told: %s", address, error.strerror)
    finally:
        monitor.close()
        made.close()
        context.term()


def _bind(made: sockets.ZmqSocket, address: str) -> None:
    host, port = split_address(address)
    try:
        made.bind(f"tcp://{with_port(local.resolve(host), port)}")
    except (OSError, zmq.ZMQError):
        # The name or address of a service, which is not one of this machine's interfaces.
        made.bind(f"tcp://*:{port}")
