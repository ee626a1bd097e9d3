"""Clients and servers of one process: for tests, and for the chief's own worker.

They behave as `_transport`'s do: messages are packed, copied and parsed, a request waits until its
server has started, and fails when it closes. A test may lose or repeat messages.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from unisono._errors import ClusterError
from unisono.cluster_resolver._spec import Task
from unisono.rpc._calls import CLOSE_SECONDS, ClientId, Handler, PendingCalls, error_answer
from unisono.rpc._frames import DEFAULT_LIMIT, Frame, FrameError, total_bytes

_LOG = logging.getLogger("unisono")


class LoopbackNetwork:
    """Connects the clients and servers of a process by their addresses.

    Args:
        copies: returns how often a message is delivered: 0 loses it, 2 repeats it. It gets the message and
            whether it is an answer. By default each is delivered once.

    >>> from unisono.rpc._ops import Op
    >>> network = LoopbackNetwork()
    >>> rpc_server = network.rpc_server("ps0:1", lambda client, request: request.answer(Op.OK))
    >>> rpc_server.start()
    >>> rpc_client = network.rpc_client(Task("ps", 0), "ps0:1")
    >>> rpc_client.call(Frame(Op.STATUS, 5), timeout=10.0)
    Frame(OK, request 5, 0 arrays of 0 bytes)
    >>> rpc_client.close(); rpc_server.close()
    """

    def __init__(self, copies: Callable[[Frame, bool], int] | None = None) -> None:
        self._copies = copies
        self._lock = threading.Lock()
        self._rpc_servers: dict[str, LoopbackServer] = {}
        self._early: dict[str, list[tuple[LoopbackClient, Frame]]] = {}
        self._rpc_clients: dict[bytes, LoopbackClient] = {}
        self._numbers = itertools.count(1)

    def rpc_server(self, address: str, handler: Handler) -> LoopbackServer:
        """Return a server, which begins to answer with its `start`."""
        return LoopbackServer(self, address, handler)

    def rpc_client(self, task: Task, address: str, own: Task | None = None) -> LoopbackClient:
        """Return a client."""
        client = ClientId(b"%d" % next(self._numbers), own, is_same_user=True)
        rpc_client = LoopbackClient(self, task, address, client)
        with self._lock:
            self._rpc_clients[client.connection] = rpc_client
        return rpc_client

    def _open(self, rpc_server: LoopbackServer) -> None:
        with self._lock:
            if rpc_server.address in self._rpc_servers:
                raise ClusterError(
                    "An address must have one server. "
                    f"Received: {rpc_server.address}, which is in use. Close the other server first."
                )
            self._rpc_servers[rpc_server.address] = rpc_server
            early = self._early.pop(rpc_server.address, [])
        for rpc_client, frame in early:
            self._ask(rpc_client, frame)

    def _leave(self, rpc_server: LoopbackServer) -> None:
        with self._lock:
            if self._rpc_servers.get(rpc_server.address) is not rpc_server:
                return
            del self._rpc_servers[rpc_server.address]
            asking = [c for c in self._rpc_clients.values() if c.address == rpc_server.address]
        for rpc_client in asking:
            rpc_client._pending.fail_sent("the connection was lost")

    def _ask(self, rpc_client: LoopbackClient, frame: Frame) -> None:
        with self._lock:
            rpc_server = self._rpc_servers.get(rpc_client.address)
            if rpc_server is None:
                self._early.setdefault(rpc_client.address, []).append((rpc_client, frame))
                return
        if not rpc_client._pending.mark_sent(frame.request):
            return
        for _ in range(1 if self._copies is None else self._copies(frame, False)):
            rpc_server._inbox.put((rpc_client.client, _through_bytes(frame)))

    def _answer(self, client: ClientId, frame: Frame) -> None:
        with self._lock:
            rpc_client = self._rpc_clients.get(client.connection)
        if rpc_client is not None:
            for _ in range(1 if self._copies is None else self._copies(frame, True)):
                rpc_client._pending.settle(Frame.parse(_through_bytes(frame)))

    def _forget(self, rpc_client: LoopbackClient) -> None:
        with self._lock:
            self._rpc_clients.pop(rpc_client.client.connection, None)
            early = self._early.get(rpc_client.address, [])
            early[:] = [each for each in early if each[0] is not rpc_client]


class LoopbackServer:
    """Answers requests in a thread of its own."""

    def __init__(self, network: LoopbackNetwork, address: str, handler: Handler) -> None:
        self.address = address
        self._network, self._handler = network, handler
        self._inbox: queue.SimpleQueue[tuple[ClientId, list[bytes]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"unisono-loopback-{address}", daemon=True)
        self._closed = threading.Event()

    def start(self) -> None:
        """Begin to answer, with the requests that came before."""
        self._network._open(self)
        self._thread.start()

    def reply(self, client: ClientId, answer: Frame) -> None:
        """Answer a request whose handler returned None; from any thread."""
        if not self._closed.is_set():
            self._network._answer(client, answer)

    def close(self) -> None:
        """Stop answering; requests without an answer fail."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._inbox.put(None)
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join(CLOSE_SECONDS)
        self._network._leave(self)

    def _serve(self) -> None:
        while (item := self._inbox.get()) is not None and not self._closed.is_set():
            client, parts = item
            try:
                request = Frame.parse(parts)
            except FrameError as error:
                _LOG.debug("A message was rejected: %s", error)
                continue
            try:
                answer = self._handler(client, request)
            except Exception as error:
                _LOG.exception("The request %s of %s could not be answered.", request.op.name, client)
                answer = error_answer(request, error)
            if answer is not None:
                self.reply(client, answer)


class LoopbackClient:
    """Sends requests to the server of an address."""

    def __init__(self, network: LoopbackNetwork, task: Task, address: str, client: ClientId) -> None:
        self.task, self.address, self.client = task, address, client
        self._network = network
        self._pending = PendingCalls(task, address)

    def call(self, frame: Frame, timeout: float) -> Frame:
        """Send a request and wait for its answer.

        Raises:
            PeerLostError: when the answer does not come in time, or the server closes.
        """
        since = time.monotonic()
        return self._pending.wait(frame, self._send(frame, timeout), timeout, since)

    def send(self, frame: Frame, timeout: float | None = None) -> Future[Frame]:
        """Send a request; the future fails with `PeerLostError` after `timeout` seconds."""
        since = time.monotonic()
        future = self._send(frame, timeout)
        if timeout is not None:
            # What is left of it: the request may have waited for room.
            left = max(0.0, since + timeout - time.monotonic())
            timer = threading.Timer(left, lambda: self._pending.expire(time.monotonic()))
            timer.daemon = True
            timer.start()
            future.add_done_callback(lambda done: timer.cancel())
        return future

    def take_until(self, future: Future[Any], timeout: float | None = None) -> None:
        """Return: answers come in the server's thread."""

    def close(self) -> None:
        """Leave the network; requests without an answer fail."""
        self._network._forget(self)
        self._pending.refuse(self._pending.closed)

    def _send(self, frame: Frame, timeout: float | None) -> Future[Frame]:
        future = self._pending.add(frame, total_bytes(frame.parts(DEFAULT_LIMIT)), timeout)
        self._network._ask(self, frame)
        return future


def _through_bytes(frame: Frame) -> list[bytes]:
    # Copies: as over a network, what a server changes in place later is not seen by who has read it before.
    return [bytes(part) for part in frame.parts()]
