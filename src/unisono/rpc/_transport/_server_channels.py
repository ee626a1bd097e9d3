"""The direct connections of a server: who is connected, what has come, and what waits to be sent.

Tests: tests/unit/rpc/test_local_channel.py.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.rpc._calls import ClientId
from unisono.rpc._frames import Part
from unisono.rpc._transport import _shared_memory as shared
from unisono.rpc._transport._local_channel import ChannelError, ChannelListener, LocalChannel, NoFilesError
from unisono.rpc._transport._sockets import Mailbox
from unisono.rpc._transport._zmq import zmq

_LOG = logging.getLogger("unisono")

#: Seconds between two warnings about clients that take no answers.
_WARN_SECONDS = 10.0


class ServerChannels:
    """The direct connections of a server; in its thread, but for `send`."""

    def __init__(self, listener: ChannelListener, budget: int, mailbox: Mailbox) -> None:
        self._listener, self._budget, self._mailbox = listener, budget, mailbox
        self._poller: zmq.Poller | None = None
        self._channels: dict[bytes, LocalChannel] = {}
        self._clients: dict[int, ClientId] = {}
        self._warned_at = -math.inf
        #: True if connections wait that cannot be accepted now. They are tried again, and not polled for: the
        #: poller would find them again at once, and for ever.
        self.is_paused = False

    @classmethod
    def listen(cls, path: Path, limit: int, budget: int, mailbox: Mailbox) -> ServerChannels | None:
        """Listen beside ZeroMQ's socket; return None where the system has no shared memory for it."""
        if not shared.IS_AVAILABLE:
            return None
        try:
            return cls(ChannelListener(path, limit), budget, mailbox)
        except OSError as error:
            _LOG.warning("A direct socket beside %s could not be made: %s.", path, error)
            return None

    def watch(self, poller: zmq.Poller) -> None:
        """Let a poller say what is ready."""
        self._poller = poller
        poller.register(self._listener.descriptor, zmq.POLLIN)

    def receive(self, ready: Mapping[Any, int]) -> Iterator[tuple[ClientId, list[Part]]]:
        """Yield the messages that have come, and take new connections."""
        for descriptor in [d for d in ready if d in self._clients]:
            client = self._clients[descriptor]
            channel = self._channels[client.connection]
            if ready[descriptor] & zmq.POLLOUT and channel.flush():
                self._watch(channel, zmq.POLLIN)
            if not ready[descriptor] & ~zmq.POLLOUT:
                continue
            try:
                for message in channel.receive():
                    yield client, message
            except ChannelError as error:
                # Clients read that the connection was lost, and to look here.
                level = logging.WARNING if isinstance(error, NoFilesError) else logging.DEBUG
                _LOG.log(level, "The connection of %s has ended: %s.", client, error)
                self._drop(descriptor)
        if self._listener.descriptor in ready or self.is_paused:
            self._accept()

    def _accept(self) -> None:
        try:
            while (accepted := self._listener.accept()) is not None:
                self._add(*accepted)
        except OSError as error:
            self._pause(error)
            return
        if self.is_paused and self._poller is not None:
            self.is_paused = False
            self._poller.register(self._listener.descriptor, zmq.POLLIN)

    def _pause(self, error: OSError) -> None:
        if not self.is_paused and self._poller is not None:
            self.is_paused = True
            self._poller.unregister(self._listener.descriptor)
            _LOG.warning(
                "A connection waits that cannot be taken: %s. It is tried again. See `ulimit -n`.",
                error.strerror,
            )

    def _add(self, name: bytes, channel: LocalChannel) -> None:
        self._channels[name] = channel
        self._clients[channel.descriptor] = ClientId(name, is_same_user=True)
        self._watch(channel, zmq.POLLIN)

    def _watch(self, channel: LocalChannel, events: int) -> None:
        if self._poller is not None and channel.descriptor in self._clients:
            self._poller.register(channel.descriptor, events)

    def _drop(self, descriptor: int) -> None:
        if self._poller is not None:
            self._poller.unregister(descriptor)
        self._channels.pop(self._clients.pop(descriptor).connection).close()

    def send(self, client: ClientId, parts: Sequence[Part], may_wait: bool = True) -> bool:
        """Send an answer, from any thread; return whether the client has a direct connection, or had one.

        Args:
            may_wait: whether the answer may wait until the client takes earlier ones; else it is dropped.
        """
        if not client.connection.startswith(b"channel "):
            return False
        channel = self._channels.get(client.connection)
        # A client that has gone asks again.
        if channel is None or (channel.waiting and not may_wait):
            return True
        if channel.waiting > self._budget:
            if time.monotonic() > self._warned_at + _WARN_SECONDS:
                self._warned_at = time.monotonic()
                _LOG.warning(
                    "%s does not take its answers: %d bytes wait, one is dropped.", client, channel.waiting
                )
            return True
        if not channel.send(parts):
            self._mailbox.put(lambda: self._watch(channel, zmq.POLLIN | zmq.POLLOUT))
        return True

    def flush(self) -> bool:
        """Send what waits; return whether nothing waits any more."""
        # Each one: who takes nothing must not keep others from their answers.
        return not [channel for channel in list(self._channels.values()) if not channel.flush()]

    def close(self) -> None:
        """End all connections; what the kernel has already reaches the clients."""
        for descriptor in list(self._clients):
            self._drop(descriptor)
        self._listener.close()
