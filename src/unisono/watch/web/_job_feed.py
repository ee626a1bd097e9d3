"""The events for the page of a job: all of the job first, then its changes, twice a second at most.

One thread reads the job for all pages, and only while there is one.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator

from unisono.watch.web._json_changes import change_of

_LOG = logging.getLogger("unisono")

#: Seconds between two changes; a job that takes long to read is read less often, so that it takes a tenth of
#: the time.
PERIOD = 0.5
_SHARE = 0.1
#: Seconds between two changes at most: on a machine that is busy with the job, one look may take seconds.
_LONGEST = 5.0
#: Seconds after which a page without news gets a sign of life: a connection that is gone is noticed by it.
_ALIVE = 15.0
#: Changes that are kept for a page that was disconnected; it gets all where they do not reach back.
_KEPT = 64
#: Milliseconds after which a browser connects again.
_RETRY = 1000


class JobFeed:
    """Server-sent events of a job.

    Args:
        read: returns the job as JSON has it.
        is_behind: returns whether `read` has left something, and is called again without a pause.
    """

    def __init__(
        self, read: Callable[[], dict[str, object]], is_behind: Callable[[], bool] = lambda: False
    ) -> None:
        self._read, self._is_behind = read, is_behind
        # Of another server, a number of an event means nothing.
        self._name = secrets.token_hex(4)
        self._state: dict[str, object] | None = None
        self._version = 0
        self._changes: collections.deque[tuple[int, str]] = collections.deque(maxlen=_KEPT)
        self._pages = 0
        self._last: str | None = None
        self._reads = self._is_open = True
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._follow, name="unisono-page-feed", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while self._await_pages():
            began = time.monotonic()
            try:
                self._take(self._read())
            except Exception:
                # Without the thread, pages would show an old state as the present one.
                _LOG.exception("A page cannot be updated.")
            took = time.monotonic() - began
            with self._news:
                pause = 0.0 if self._is_behind() else min(_LONGEST, max(PERIOD, took / _SHARE) - took)
                self._news.wait_for(lambda: not self._reads, pause)

    def _await_pages(self) -> bool:
        """Wait for a page; return whether there is one."""
        with self._news:
            self._news.wait_for(lambda: self._pages or not self._reads)
            return self._reads

    def _take(self, state: dict[str, object]) -> None:
        change = None if self._state is None else change_of(self._state, state)
        if self._state is not None and change is None:
            return
        with self._news:
            self._state = state
            self._version += 1
            if change is not None:
                self._changes.append((self._version, _json(change)))
            self._news.notify_all()

    def events(self, last_id: str = "") -> Iterator[bytes]:
        """Give the events for a page, until the feed ends.

        Args:
            last_id: of the last event that the page has received before it lost the connection.
        """
        with self._page():
            yield f"retry: {_RETRY}\n\n".encode()
            name, _, number = last_id.partition("-")
            known = int(number) if name == self._name and number.isdigit() and len(number) < 10 else 0
            while True:
                with self._news:
                    has_news = self._await_news(known)
                    is_open, version = self._is_open, self._version
                    state, changes, last = self._state, list(self._changes), self._last
                later = [(i, text) for i, text in changes if i > known]
                if known and known < version and len(later) == version - known:
                    for i, text in later:
                        yield self._event("change", text, i)
                elif known < version and state is not None:
                    yield self._event("full", _json(state), version)
                elif not has_news:
                    yield b": alive\n\n"
                known = version
                if not is_open:
                    if last is not None:
                        yield self._event("end", last, version)
                    return

    def _await_news(self, known: int) -> bool:
        return self._news.wait_for(lambda: known < self._version or not self._is_open, _ALIVE)

    @contextlib.contextmanager
    def _page(self) -> Iterator[None]:
        with self._news:
            self._pages += 1
            self._news.notify_all()
        try:
            yield
        finally:
            with self._news:
                self._pages -= 1

    def _event(self, kind: str, text: str, number: int) -> bytes:
        return f"event: {kind}\nid: {self._name}-{number}\ndata: {text}\n\n".encode()

    def end(self, last: Callable[[], dict[str, object]] | None = None) -> None:
        """End the events; pages that are connected get a last one.

        Args:
            last: returns the job and the logs, as a page has them that is a file.
        """
        with self._news:
            self._reads = False
            self._news.notify_all()
        self._thread.join()
        text = None if last is None else _json(last())
        with self._news:
            self._last, self._is_open = text, False
            self._news.notify_all()


def _json(value: object) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
