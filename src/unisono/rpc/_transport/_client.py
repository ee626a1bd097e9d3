"""The end of a connection that asks: a chief or a worker, for each task that it talks to.

ZeroMQ would connect again by itself. It is not asked to: it gives up where keys differ, and does not say
which messages were lost with a connection. Here each attempt has a socket of its own (`_Link`), and what was
sent on it fails with it. One thread serves the links of all clients of a process.

Tests: tests/unit/rpc/test_transport.py.
"""

from __future__ import annotations

import collections
import dataclasses
import errno
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from unisono._errors import ClusterError, ContextError
from unisono.cluster_resolver._spec import Task, as_ip, split_address, with_port
from unisono.rpc._calls import BYTES_IN_FLIGHT, PeerRejectedError, PendingCalls
from unisono.rpc._frames import DEFAULT_LIMIT, Frame, FrameError, Part, total_bytes
from unisono.rpc._transport import _local as local
from unisono.rpc._transport import _sockets as sockets
from unisono.rpc._transport._client_thread import ClientThread, acquire_thread, release_thread
from unisono.rpc._transport._keys import HOW_TO_GIVE_A_KEY, ClusterKeys
from unisono.rpc._transport._local_channel import ChannelError, LocalChannel, connect
from unisono.rpc._transport._server import require_key
from unisono.rpc._transport._sockets import ZmqSocket
from unisono.rpc._transport._zmq import zmq

_LOG = logging.getLogger("unisono")

#: Seconds between two attempts to connect: at first, and at most.
_FIRST_RETRY, _LAST_RETRY = 0.05, 1.0
#: Handshakes in a row that the other end broke off, before keys are held to differ: a server that ends
#: at that moment looks the same, once.
_BROKEN_HANDSHAKES = 3
#: Seconds for an attempt: ZeroMQ ends the handshake itself, and reports it.
_BURST = 100
_ATTEMPT_SECONDS = sockets.HANDSHAKE_MS / 1000 + 2
#: Errors of a handshake that was not answered in time.
_TIMED_OUT = (errno.EAGAIN, errno.ETIMEDOUT)


class RpcClient:
    """Sends requests to one task, from any thread.

    It connects by itself, and again after the task was restarted at its address. A request waits until
    there is a connection. It fails when the connection is lost after it was sent: whether it was carried out
    is not known, and the caller may send it again with the same number.

    A client must not be used in a process that was forked after it was made.

    Args:
        limit: bytes of a request, or of an answer, at most; the same in all tasks.
        budget: bytes of requests without an answer at most; `send` waits beyond them.

    Raises:
        ClusterError: when the task is on another machine and there is no key.
    """

    def __init__(
        self,
        task: Task,
        address: str,
        keys: ClusterKeys | None = None,
        limit: int = DEFAULT_LIMIT,
        budget: int = BYTES_IN_FLIGHT,
    ) -> None:
        require_key(address, keys)
        self.task, self.address = task, address
        self._pending = PendingCalls(task, address, budget)
        self._process = os.getpid()
        self._thread = acquire_thread()
        self._link = _Link(self._thread, self._pending, _Way.of(task, address, keys, limit))
        self._is_open = True
        self._thread.mailbox.put(self._link.open)

    def call(self, frame: Frame, timeout: float) -> Frame:
        """Send a request and wait for its answer, which may be an ERROR.

        Raises:
            PeerLostError: when the answer does not come in time, or the connection was lost.
            PeerRejectedError: when the keys of the two tasks differ.
            FrameError: when the request has no place in a message.
        """
        since = time.monotonic()
        future = self.send(frame, timeout)
        self.take_until(future, since + timeout - time.monotonic())
        return self._pending.wait(frame, future, timeout, since)

    def take_until(self, future: Future[Any], timeout: float | None = None) -> None:
        """Take the answers that arrive for any client in the present thread, until a future is done.

        It returns at once where another thread does that already, or the connections are of another kind.
        """
        self._thread.take_until(future, timeout)

    def send(self, frame: Frame, timeout: float | None = None) -> Future[Frame]:
        """Send a request; its future gets the answer or the error, as `call`.

        A request whose number waits already is sent again, and has the same future.

        Args:
            frame: the request. Its arrays must not change until the answer is there.
            timeout: seconds until the future fails, also for room in the budget; None for no limit.

        Raises:
            PeerLostError: when there was no room in time.
            FrameError: when the request has no place in a message.
        """
        if os.getpid() != self._process:
            raise ContextError(
                "A client must be used in the process that made it. Received: a request in a process that "
                "was forked later. Start processes with 'spawn', and make clients in them."
            )
        parts = frame.parts(self._link.limit)
        # In the thread of the answers a wait for one would be without end.
        may_wait = not self._thread.is_present
        future = self._pending.add(frame, total_bytes(parts), timeout, may_wait)
        self._link.send(frame.request, parts)
        return future

    def close(self) -> None:
        """End the connection; requests without an answer fail. It returns within seconds."""
        if self._is_open and os.getpid() == self._process:
            self._is_open = False
            self._pending.refuse(self._pending.closed)
            self._thread.mailbox.put(self._link.close)
            release_thread(self._thread)


@dataclasses.dataclass(frozen=True)
class _Way:
    """Where a link leads: the task, its address, the file of its socket if it is on this machine."""

    task: Task
    address: str
    host: str
    port: int
    path: Path | None
    keys: ClusterKeys | None
    limit: int

    @classmethod
    def of(cls, task: Task, address: str, keys: ClusterKeys | None, limit: int) -> _Way:
        host, port = split_address(address)
        path = None
        if local.is_loopback(host):
            try:
                path = local.socket_path(address, local.socket_directory())
            except ClusterError:
                if keys is None:
                    raise
        return cls(task, address, host, port, path, keys, limit)


class _Link:
    """The connection of a client, or the attempts to have one; in the clients' thread."""

    def __init__(self, thread: ClientThread, pending: PendingCalls, way: _Way) -> None:
        self._thread, self._pending, self._way = thread, pending, way
        self.limit = way.limit
        self._unsent: collections.deque[tuple[int, Sequence[Part]]] = collections.deque()
        self._socket: ZmqSocket | None = None
        self._monitor: sockets.Monitor | None = None
        # A direct connection beside ZeroMQ's, which carries all messages where there is one.
        self._channel: LocalChannel | None = None
        # Of what waits, and of the direct connection: other threads send, too.
        self._sending = threading.RLock()
        self._is_connected = self._is_closed = self._is_local = self._was_there = False
        self._broken_handshakes = 0
        self._retry = _FIRST_RETRY
        # When to look after what has not happened by itself.
        self._next_look = math.inf

    def open(self) -> None:
        """Begin to connect."""
        self._thread.links.add(self)
        self._attempt()

    def close(self) -> None:
        """End the connection, or the attempts."""
        self._is_closed = True
        self._thread.links.discard(self)
        with self._sending:
            self._unsent.clear()
        self._hang_up()

    def send(self, request: int, parts: Sequence[Part]) -> None:
        """Send a request, now or when there is a connection; from any thread."""
        with self._sending:
            self._unsent.append((request, parts))
            if self._channel is not None:
                self._flush_channel(self._channel)
                self._thread.wake_by(self._pending.first_deadline)
                return
        self._thread.mailbox.put(self._flush)

    def _flush_channel(self, channel: LocalChannel) -> None:
        """Send what waits on the direct connection; with the lock."""
        while self._unsent:
            request, parts = self._unsent.popleft()
            # One that was given up meanwhile is not sent.
            if self._pending.mark_sent(request) and not channel.send(parts):
                self._watch_channel(channel)

    def _watch_channel(self, channel: LocalChannel) -> None:
        """Go on sending when there is room."""
        with self._sending:
            if channel is self._channel and self._thread.channels is not None:
                self._thread.channels.watch_room(channel.descriptor, not channel.flush())

    def _channel_ready(self, channel: LocalChannel) -> None:
        """Take what has come, in the thread that waits for it."""
        if channel.waiting:
            self._watch_channel(channel)
        try:
            self._settle(channel.receive())
        except ChannelError as error:
            with self._sending:
                # Else the end would be found again, and again, until the clients' thread hangs up.
                if channel is self._channel and self._thread.channels is not None:
                    self._thread.channels.unwatch(channel.descriptor)
            self._thread.mailbox.put(functools.partial(self._channel_failed, channel, str(error)))

    def _channel_failed(self, channel: LocalChannel, reason: str) -> None:
        if channel is self._channel:
            self._failed(reason)

    def tick(self, now: float) -> float:
        """Do what is due; return when the next thing will be."""
        following = self._pending.expire(now)
        if now >= self._next_look:
            self._next_look = math.inf
            if self._is_connected:
                self._flush()
            elif self._socket is None:
                self._attempt()
            else:
                self._failed("it did not connect in time")
        return min(following, self._next_look)

    def _flush(self) -> None:
        with self._sending:
            if self._channel is not None:
                self._flush_channel(self._channel)
            while self._unsent and self._is_connected and self._socket is not None:
                request, parts = self._unsent[0]
                # One that was given up meanwhile is not sent.
                if self._pending.mark_sent(request) and not sockets.send_parts(self._socket, parts):
                    self._next_look = time.monotonic() + _FIRST_RETRY
                    return
                self._unsent.popleft()

    def _receive(self) -> None:
        for _ in range(_BURST):
            received = None if self._socket is None else sockets.receive_parts(self._socket)
            if received is None:
                return
            self._settle([[part.buffer for part in received]])

    def _settle(self, messages: Sequence[Sequence[Part]]) -> None:
        for message in messages:
            try:
                self._pending.settle(Frame.parse(message, self._way.limit))
            except FrameError as error:
                _LOG.warning("An answer of %s was no message: %s", self._way.task, error)
                if error.request is not None:
                    self._pending.fail(error.request, error)

    # --- connecting

    def _attempt(self, by_tcp: bool = False) -> None:
        """Connect: by the file of a task on this machine, or by TCP."""
        way = self._way
        self._was_there = way.path is not None and way.path.exists()
        if way.path is not None and not by_tcp and (self._was_there or way.keys is None):
            self._dial(f"ipc://{way.path}")
        elif as_ip(way.host) is not None:
            self._dial(f"tcp://{way.address}")
        else:
            # A name server may take seconds, in which other links would wait.
            threading.Thread(target=self._resolve, name="unisono-resolves", daemon=True).start()

    def _resolve(self) -> None:
        try:
            place = f"tcp://{with_port(local.resolve(self._way.host), self._way.port)}"
        except OSError as error:
            reason = f"the name {self._way.host} has no address: {error.strerror or error}"
            self._thread.mailbox.put(functools.partial(self._failed, reason))
        else:
            self._thread.mailbox.put(functools.partial(self._dial, place))

    def _dial(self, place: str) -> None:
        if self._is_closed:
            return
        made = None
        try:
            made = sockets.new_socket(self._thread.context, zmq.DEALER, self._way.limit)
            monitor = sockets.Monitor(made)
        except zmq.ZMQError as error:
            # This process may not open more files.
            if made is not None:
                made.close()
            self._is_local = False
            self._failed(f"a socket cannot be made: {error.strerror}")
            return
        # What was not sent on this connection is sent on the next one, by `_flush`.
        made.immediate = True
        made.reconnect_ivl = -1
        made.connect_timeout = sockets.HANDSHAKE_MS
        self._is_local = place.startswith("ipc")
        if self._is_local:
            sockets.enlarge_buffers(made)
        elif self._way.keys is not None:
            sockets.secure_client(made, self._way.keys, self._way.task)
        self._socket, self._monitor = made, monitor
        self._thread.watch(made, self._receive)
        self._thread.watch(self._monitor.socket, self._notice)
        self._next_look = time.monotonic() + _ATTEMPT_SECONDS
        try:
            made.connect(place)
        except zmq.ZMQError as error:
            self._failed(f"{place}: {error.strerror}")

    def _notice(self) -> None:
        """Take what has happened to the connection."""
        monitor = self._monitor
        for event, value in [] if monitor is None else monitor.events():
            # The following events come from a socket that was given up.
            if self._monitor is not monitor:
                return
            self._take(event, value)

    def _take(self, event: int, value: int) -> None:
        way = self._way
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._broken_handshakes, self._retry, self._next_look = 0, _FIRST_RETRY, math.inf
            self._is_connected = True
            self._open_channel()
            self._pending.state = "connected"
            self._flush()
        elif event == zmq.EVENT_CONNECTED:
            # A server has its file before it listens on TCP: this one was started between the two looks.
            if not self._is_local and not self._was_there and way.path is not None and way.path.exists():
                self._hang_up()
                self._attempt()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._reject("it does not admit the key of this task")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._reject("it does not use keys, or is no task of Unisono")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._break_handshake(value)
        elif event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
            self._failed("the connection was lost" if self._is_connected else "connection refused")

    def _open_channel(self) -> None:
        way = self._way
        channel = connect(way.path, way.limit) if self._is_local and way.path is not None else None
        with self._sending:
            self._channel = channel
            if channel is not None and self._thread.channels is not None:
                self._thread.channels.watch(
                    channel.descriptor, functools.partial(self._channel_ready, channel)
                )

    def _break_handshake(self, number: int) -> None:
        if number in _TIMED_OUT:
            self._failed(f"it did not answer a handshake within {sockets.HANDSHAKE_MS / 1000:g} s")
            return
        # With another key the server cannot read what it gets, and closes without an answer.
        self._broken_handshakes += 1
        if self._broken_handshakes < _BROKEN_HANDSHAKES or self._is_local:
            self._failed("it broke off a handshake")
        else:
            self._reject("it cannot read messages that are encrypted with the key of this task")

    def _failed(self, reason: str) -> None:
        """Try again later; what was sent on the connection fails."""
        was_connected, was_local = self._is_connected, self._is_local and self._socket is not None
        if was_connected:
            # Answers that arrived before the end.
            self._receive()
            if self._channel is not None:
                self._settle(self._channel.receive_rest())
        self._hang_up()
        if self._is_closed:
            return
        self._pending.state = reason
        if was_connected:
            self._pending.fail_sent(reason)
        if was_local and not was_connected and self._way.keys is not None:
            self._attempt(by_tcp=True)
        else:
            self._next_look = time.monotonic() + self._retry
            self._retry = min(2 * self._retry, _LAST_RETRY)

    def _reject(self, reason: str) -> None:
        """Fail all requests: the keys differ."""
        self._hang_up()
        self._pending.state = reason
        task, address = self._way.task, self._way.address
        self._pending.fail_all(
            lambda: PeerRejectedError(
                "All tasks of a cluster must have one key. "
                f"Received: {task} at {address} rejects this task: {reason}. {HOW_TO_GIVE_A_KEY}",
                reason,
            )
        )
        with self._sending:
            self._unsent.clear()
        self._next_look = time.monotonic() + _LAST_RETRY

    def _hang_up(self) -> None:
        self._is_connected = False
        self._next_look = math.inf
        with self._sending:
            channel, self._channel = self._channel, None
            if channel is not None and self._thread.channels is not None:
                self._thread.channels.unwatch(channel.descriptor)
        if channel is not None:
            channel.close()
        if self._socket is not None and self._monitor is not None:
            self._thread.unwatch(self._socket)
            self._thread.unwatch(self._monitor.socket)
            self._monitor.close()
            self._socket.close()
        self._socket = self._monitor = None
