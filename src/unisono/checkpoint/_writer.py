"""A thread that writes one thing after the other beside training."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 (registers its end before ours, so that ours comes first)
import logging
import queue
import threading
import weakref
from collections.abc import Callable

from unisono._errors import CheckpointError
from unisono._system._interrupts import INTERRUPTS
from unisono._system._object_store import Place

_LOG = logging.getLogger("unisono")
_END = None


class BackgroundWriter:
    """Runs jobs in order in one thread, which starts with the first job and ends with `close`."""

    def __init__(self, directory: Place, name: str = "unisono-checkpoint") -> None:
        self.directory, self._name = directory, name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._unfinished = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """True if a job is waiting or running."""
        with self._idle:
            return self._unfinished > 0

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after those before it; an error of it is raised by the next `wait`.

        Raises:
            RuntimeError: the system starts no more threads.
        """
        # Interrupted in between, `wait` would wait for ever, and `close` for a thread that has not started.
        with INTERRUPTS.put_off():
            if self._thread is None:
                # Not a daemon: what is being written becomes complete.
                thread = threading.Thread(target=self._work, name=self._name)
                thread.start()
                self._thread = thread
                _WORKING.add(self)
            with self._idle:
                self._unfinished += 1
            self._jobs.put(job)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for all jobs.

        Raises:
            BaseException: the first error of a job since the last call.
            CheckpointError: the time is over.
        """
        with self._idle:
            if not self._idle.wait_for(lambda: self._unfinished == 0, timeout):
                raise CheckpointError(
                    f"A checkpoint must be written within {timeout:g} s. Received: {self._unfinished} "
                    "unfinished. See whether the disk answers, or pass a longer timeout."
                )
            error, self._error = self._error, None
        if error is not None:
            raise error

    def settle(self) -> None:
        """Wait for all jobs; errors stay for `wait`."""
        with self._idle:
            self._idle.wait_for(lambda: self._unfinished == 0)

    def close(self) -> None:
        """Finish all jobs and end the thread; errors stay for `wait`."""
        if self._thread is not None:
            self._jobs.put(_END)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not _END:
            error: BaseException | None = None
            try:
                job()
            # Everything: an error that ended the thread would leave `wait` waiting for ever.
            except BaseException as caught:
                error = caught
            with self._idle:
                self._unfinished -= 1
                self._error = self._error or error
                self._idle.notify_all()


_WORKING: weakref.WeakSet[BackgroundWriter] = weakref.WeakSet()


def settle(directory: Place) -> None:
    """Wait for everything that this process is writing to a directory, whichever object began it."""
    # A copy, since a weak set may shrink while it is read.
    for writer in list(_WORKING):
        if writer.directory == directory:
            writer.settle()


def _finish() -> None:
    """A program that ends without `close` ends when all is written."""
    for writer in list(_WORKING):
        writer.close()
        try:
            writer.wait()
        except Exception as error:
            _LOG.error("The last checkpoint of this program could not be written: %s", error)


# Python calls `atexit` functions when no pool of threads works any more, and Orbax writes with one:
# https://github.com/python/cpython/issues/86813
getattr(threading, "_register_atexit", atexit.register)(_finish)
