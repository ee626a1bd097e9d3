"""Arrivals on the direct connections of a process's clients, and the thread that reads them.

A thread that waits for an answer takes what arrives itself: handed over by the clients' thread, an answer
wakes two threads instead of one. So a step of an MLP of 0.8 MB has 10.7 switches of threads instead of 15.0
(2 workers, 1 server, 2 cores, 2026-11-22). The clients' thread takes what arrives while no other one waits,
and watches deadlines always.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_LOG = logging.getLogger("unisono")

#: Seconds for which the end of the clients' thread waits for a thread that takes answers.
_END_WITHIN = 5.0


class ChannelEvents:
    """Calls functions when connections are ready, in the thread that waits, or else in the clients'."""

    def __init__(self) -> None:
        self._channels = select.epoll()
        # Ready whenever the one above is, but silent while another thread waits for that.
        self._gate = select.epoll()
        self._gate.register(self._channels, select.EPOLLIN)
        #: For the poller of the clients' thread.
        self.descriptor = self._gate.fileno()
        self._actions: dict[int, Callable[[], None]] = {}
        self._turn = threading.Lock()
        #: The thread that takes what arrives, while it does.
        self._taker: int | None = None
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._bell_lock = threading.Lock()
        self.watch(self._bell, self._silence)
        self._is_closed = False

    def watch(self, descriptor: int, action: Callable[[], None]) -> None:
        """Call a function whenever a connection has something to read; from any thread."""
        self._actions[descriptor] = action
        self._channels.register(descriptor, select.EPOLLIN)

    def watch_room(self, descriptor: int, is_wanted: bool) -> None:
        """Also call the function when there is room to send, or not any more; from any thread.

        Nothing happens for a connection that is not watched any more: a failed one may still be given
        messages, until the clients' thread ends it. `unwatch` must not run in another thread meanwhile.
        """
        if descriptor in self._actions:
            self._channels.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if is_wanted else 0))

    def unwatch(self, descriptor: int) -> None:
        """Undo `watch`, if it has not been undone; from any thread, before the connection is closed."""
        if self._actions.pop(descriptor, None) is not None:
            self._channels.unregister(descriptor)

    @property
    def is_mine(self) -> bool:
        """True if the present thread reads what arrives: it must not wait for an answer."""
        return self._taker == threading.get_ident()

    def receive(self) -> None:
        """Take what has arrived, unless another thread does; in the clients' thread."""
        if self._turn.acquire(blocking=False):
            try:
                self._act(0.0)
            finally:
                self._turn.release()

    def take_until(self, future: Future[Any], timeout: float | None = None) -> None:
        """Take what arrives until a future is done; return at once where another thread does that.

        Not in the main thread: the functions that are called here must not be left half done, as by
        KeyboardInterrupt.
        """
        if future.done() or threading.current_thread() is threading.main_thread():
            return
        if not self._turn.acquire(blocking=False):
            return
        try:
            self._taker = threading.get_ident()
            # It may fail in another thread, as at its deadline.
            future.add_done_callback(self._ring)
            self._gate.modify(self._channels, 0)
            deadline = None if timeout is None else time.monotonic() + timeout
            while not future.done() and not self._is_closed:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._act(left)
        finally:
            self._taker = None
            self._gate.modify(self._channels, select.EPOLLIN)
            self._turn.release()

    def close(self) -> None:
        """End; in the clients' thread."""
        with self._bell_lock:
            self._is_closed = True
            os.eventfd_write(self._bell, 1)
        # A thread that still takes answers keeps the files.
        if self._turn.acquire(timeout=_END_WITHIN):
            self._actions.clear()
            self._gate.close()
            self._channels.close()
            os.close(self._bell)

    def _act(self, seconds: float | None) -> None:
        for descriptor, _ in self._channels.poll(seconds):
            # One may be unwatched by the action of another.
            action = self._actions.get(descriptor)
            if action is None:
                continue
            try:
                action()
            except Exception:
                # It concerns a message, and not the thread that happens to take it.
                _LOG.exception("A message could not be handled.")

    def _ring(self, done: Future[Any]) -> None:
        if self._taker is None or self.is_mine:
            return
        with self._bell_lock:
            # Behind `close` the number may be another file's.
            if not self._is_closed:
                os.eventfd_write(self._bell, 1)

    def _silence(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
