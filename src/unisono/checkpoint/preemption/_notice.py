"""How a process learns that it is about to be ended: by SIGTERM, or from a function that a thread polls."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from unisono._errors import ContextError

_POLL_SECONDS = 1.0


@dataclasses.dataclass
class PreemptionNotice:
    """Word of the end, as a signal handler or a thread leaves it.

    Args:
        clock: seconds.
        at: when it came, None before.
        error: what the thread failed with.
    """

    clock: Callable[[], float]
    at: float | None = None
    error: BaseException | None = None

    def give(self) -> None:
        """The end is near; the first word counts."""
        if self.at is None:
            self.at = self.clock()


class SignalWatch:
    """Hears SIGTERM until it is stopped, and gives the old answer after that.

    Args:
        notice: where to leave the word.

    Raises:
        ContextError: outside of the main thread.
    """

    def __init__(self, notice: PreemptionNotice) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ContextError(
                "A handler of SIGTERM must be made in the main thread. Received: thread "
                f"{threading.current_thread().name!r}. Make it there, or pass "
                "`TerminationConfig(termination_watcher_fn=...)`, which needs no signal."
            )
        self._notice = notice
        self._is_active = True
        # None for one that was not set from Python, which cannot be set again.
        self._before = signal.signal(signal.SIGTERM, self._arrived) or signal.SIG_DFL

    def _arrived(self, number: int, frame: Any) -> None:
        if self._is_active:
            self._notice.give()
        elif callable(self._before):
            self._before(number, frame)
        elif self._before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def stop(self) -> None:
        """Give the old answer from now on."""
        self._is_active = False
        # Another thread may collect the garbage, and cannot set signals; and what was set later stays.
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) == self._arrived:
            signal.signal(signal.SIGTERM, self._before)


class PollWatch:
    """Asks a function each second in a thread, until it says yes or is stopped.

    Args:
        notice: where to leave the word.
        is_ending: the function.
    """

    def __init__(self, notice: PreemptionNotice, is_ending: Callable[[], bool]) -> None:
        self._notice, self._is_ending = notice, is_ending
        self._stopped = threading.Event()
        threading.Thread(target=self._poll, name="unisono-preemption", daemon=True).start()

    def _poll(self) -> None:
        try:
            while not self._stopped.is_set():
                if self._is_ending():
                    self._notice.give()
                    return
                self._stopped.wait(_POLL_SECONDS)
        except Exception as error:
            self._notice.error = error

    def stop(self) -> None:
        """Ask no more."""
        self._stopped.set()
