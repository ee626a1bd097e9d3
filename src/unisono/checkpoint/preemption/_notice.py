"""How a process learns that it is about to be ended: by SIGTERM, or from a function that a thread polls."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

_POLL_SECONDS = 1.0


@dataclasses.dataclass
class PreemptionNotice:
    """Whether the process is about to be ended: set by a signal handler or a thread, read between two steps.

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
