"""The thread that serves the connections of all clients of a process.

Tests: tests/unit/rpc/test_transport.py.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from unisono.rpc._calls import CLOSE_SECONDS
from unisono.rpc._transport import _shared_memory as shared
from unisono.rpc._transport import _sockets as sockets
from unisono.rpc._transport._channel_events import ChannelEvents
from unisono.rpc._transport._sockets import ZmqSocket
from unisono.rpc._transport._zmq import zmq

if TYPE_CHECKING:
    from unisono.rpc._transport._client import _Link

_LOG = logging.getLogger("unisono")


class ClientThread(threading.Thread):
    """The thread in which all links of a process live."""

    def __init__(self) -> None:
        super().__init__(name="unisono-clients", daemon=True)
        self.users = 0
        self.context: zmq.Context[ZmqSocket] = zmq.Context()
        # ZeroMQ's default is 1,023, and a link needs three: a chief could have no more than 341 tasks.
        self.context.set(zmq.MAX_SOCKETS, int(self.context.get(zmq.SOCKET_LIMIT)))
        self.mailbox = sockets.Mailbox()
        self.links: set[_Link] = set()
        self._poller = zmq.Poller()
        #: By socket, or by its number in the kernel.
        self._actions: dict[ZmqSocket | int, Callable[[], None]] = {}
        self._is_stopping = False
        #: Until when the thread sleeps at most; infinity while it finds that out.
        self._wakes_at = math.inf
        self._poller.register(self.mailbox.descriptor, zmq.POLLIN)
        #: Of direct connections; None where there are none.
        self.channels = ChannelEvents() if shared.IS_AVAILABLE else None
        if self.channels is not None:
            self.watch(self.channels.descriptor, self.channels.receive)

    def watch(self, made: ZmqSocket | int, action: Callable[[], None]) -> None:
        """Call a function whenever a socket has something to read."""
        self._actions[made] = action
        self._poller.register(made, zmq.POLLIN)

    def unwatch(self, made: ZmqSocket | int) -> None:
        """Undo `watch`."""
        del self._actions[made]
        self._poller.unregister(made)

    def wake_by(self, moment: float) -> None:
        """Let the thread look at its links when that time comes; from any thread."""
        # Rarely true: a deadline lies behind earlier requests'. So a request costs no wake-up.
        if moment < self._wakes_at:
            self.mailbox.put(lambda: None)

    @property
    def is_present(self) -> bool:
        """True if the present thread reads answers: it must not wait for one."""
        return threading.current_thread() is self or (self.channels is not None and self.channels.is_mine)

    def take_until(self, future: Future[Any], timeout: float | None = None) -> None:
        """Take answers in the present thread, where it may; see `ChannelEvents.take_until`."""
        if self.channels is not None:
            self.channels.take_until(future, timeout)

    def stop(self) -> None:
        """End the thread."""
        self._is_stopping = True

    def run(self) -> None:
        """Serve the links."""
        while not self._is_stopping:
            try:
                self._turn()
            except Exception:
                # The thread must keep running: without it no request is ever answered.
                _LOG.exception("A message could not be handled.")
        for link in list(self.links):
            link.close()
        if self.channels is not None:
            self.channels.close()
        self.mailbox.close()
        self.context.term()

    def _turn(self) -> None:
        # First: a deadline that is set while the links are asked wakes the thread again.
        self._wakes_at = math.inf
        now = time.monotonic()
        # A link that is closed in its turn changes the set. A minute: `poll` takes no infinity.
        wake = min((link.tick(now) for link in tuple(self.links)), default=math.inf)
        self._wakes_at = min(wake, now + 60.0)
        readable = dict(self._poller.poll(math.ceil(1000 * max(0.0, self._wakes_at - now))))
        for ready in readable:
            # A socket may have been closed by the action of another one.
            action = self._actions.get(ready)
            if action is not None:
                action()
        if self.mailbox.descriptor in readable:
            self.mailbox.run()


_GUARD = threading.Lock()
_THREAD: ClientThread | None = None


def acquire_thread() -> ClientThread:
    """Return the thread, which is started where there is none; `release_thread` gives it back."""
    global _THREAD
    with _GUARD:
        if _THREAD is None:
            _THREAD = ClientThread()
            _THREAD.start()
        _THREAD.users += 1
        return _THREAD


def release_thread(thread: ClientThread) -> None:
    """End the thread with its last user."""
    global _THREAD
    with _GUARD:
        thread.users -= 1
        if thread.users:
            return
        if _THREAD is thread:
            _THREAD = None
    _end(thread)


def _end(thread: ClientThread) -> None:
    thread.mailbox.put(thread.stop)
    # The thread waits for the reader of answers, which may close the last client for one of them.
    if not thread.is_present:
        thread.join(CLOSE_SECONDS)


@atexit.register
def _end_with_process() -> None:
    # Clients that were not closed: ZeroMQ's threads end before the interpreter takes their memory away.
    if _THREAD is not None:
        _end(_THREAD)


def _forget_thread() -> None:
    """Begin without clients in a forked process, which has their memory, but not their thread."""
    global _THREAD, _GUARD
    if _THREAD is not None:
        # Its pollers are the parent's: a wait here would keep the parent's thread asleep.
        _THREAD.channels = None
    _THREAD, _GUARD = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_thread)
