"""How a process learns that it is about to be ended: by SIGTERM, or from a function that a thread polls.

Source of the name of `PreemptionWatcher`:
https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/PreemptionWatcher
"""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
import weakref
from collections.abc import Callable

from unisono._system._signals import SignalWatch
from unisono.collectives._process_group import joined_group

_POLL_SECONDS = 1.0


@dataclasses.dataclass
class PreemptionNotice:
    """A flag that the process is about to be ended, set by a signal handler or a thread, read between steps.

    Args:
        at: when the notice arrived, None before.
        error: what the thread failed with.
    """

    clock: Callable[[], float]
    at: float | None = None
    error: BaseException | None = None

    def record(self) -> None:
        """Note that the process is about to be ended; the first notice sets the time."""
        if self.at is None:
            self.at = self.clock()


class PollWatch:
    """Call a function each second in a thread, until it returns True or is stopped."""

    def __init__(self, notice: PreemptionNotice, is_ending: Callable[[], bool]) -> None:
        self._notice, self._is_ending = notice, is_ending
        self._stopped = threading.Event()
        # A daemon: the user's function may block, and must not keep the program from ending.
        threading.Thread(target=self._poll, name="unisono-preemption", daemon=True).start()

    def _poll(self) -> None:
        try:
            while not self._stopped.is_set():
                if self._is_ending():
                    self._notice.record()
                    return
                self._stopped.wait(_POLL_SECONDS)
        except Exception as error:
            # Raised by the handler after the next step, in the main thread.
            self._notice.error = error

    def stop(self) -> None:
        """Stop calling the function."""
        self._stopped.set()


class PreemptionWatcher:
    """Notes SIGTERM from its creation on, for a program that decides itself what to do then.

    The process continues after SIGTERM, and should save and end soon. Signals to other workers are not
    noted: when such a worker ends, this one receives a `ClusterError`. To save and end after the same step
    on all workers, use `PreemptionCheckpointHandler` or `BackupAndRestore(save_before_preemption=True)`.

    Raises:
        ContextError: outside of the main thread.

    >>> watcher = PreemptionWatcher()
    >>> watcher.preemption_message is None
    True
    >>> watcher.close()
    """

    def __init__(self) -> None:
        self._notice = PreemptionNotice(time.monotonic)
        self._watch = SignalWatch(self._notice.record, signal.SIGTERM)
        # The watch does not refer to this object, which can so be collected.
        self._restore = weakref.finalize(self, self._watch.restore)

    @property
    def preemption_message(self) -> str | None:
        """The notice that was received, or None."""
        if self._notice.at is None:
            return None
        who = joined_group().own_name
        return f"{who} received SIGTERM {time.monotonic() - self._notice.at:.0f} s ago"

    def block_until_worker_exit(self) -> None:
        """Return at once: in TensorFlow, it keeps a coordinator from connecting to workers that end."""

    def close(self) -> None:
        """Restore the handler that SIGTERM had before; it is called if the signal arrived meanwhile."""
        self._restore()
        self._watch.pass_on()
