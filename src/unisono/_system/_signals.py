"""Signals that ask a process to end: note them for a while, pass them on, restore what was there before.

`fit`, a preemption handler and an evaluator answer SIGTERM with work that takes a while: end the step, save,
leave. A `SignalWatch` notes that the signal arrived, and its owner looks at the note between two steps. What
the process did about the signal before is called the earlier handler below:

- A Python function is called once, in the main thread, after the work is done and before the process ends.
  Not at once: handlers end the process (`sys.exit`, or SIG_DFL and `os.kill`, as coverage.py's does), and
  then nothing would be saved. What it raises does not replace an exception that is ending the program.
- SIG_DFL and SIG_IGN are not applied while the watch lasts: the work takes their place.
- Another watch notes the signal at the same moment. Watches may be nested and may end in any order.
- A forked child does what the process did before the watch; so `Process.terminate` ends it.
- A handler that the program installs while the watch lasts is left in place, with a warning. If it calls the
  watch's handler, that still notes the signal, and passes it on after the watch.
- A handler that was not installed from Python (a C library's) can neither be called nor restored; a warning
  says so, and SIG_DFL takes its place.

Python runs handlers in the main thread between two instructions: a signal that arrives while a long function
of C++ computes is noted when that function returns.

SIGINT has needs of its own (`_system/_interrupts`): there a signal is put off by microseconds, in each step.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self, TypeAlias

from unisono._errors import ContextError
from unisono._system._interrupts import in_main_thread

_LOG = logging.getLogger("unisono")

#: A process that exits with this code has saved its state and requests a restart: the code of TensorFlow's
#: PreemptionCheckpointHandler.
RESTART_WANTED = 42

#: A function, SIG_DFL or SIG_IGN (which are integers); None for a handler that is not Python's.
_Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None


class SignalWatch:
    """Note signals from its creation until `close`, and leave the process alive meanwhile.

    Args:
        note: called when a signal arrives, between two instructions of any code: it must only set something.

    Raises:
        ContextError: outside of the main thread.

    >>> noted = []
    >>> with SignalWatch(lambda: noted.append("saving is due"), signal.SIGTERM):
    ...     signal.raise_signal(signal.SIGTERM)
    >>> noted
    ['saving is due']
    """

    def __init__(self, note: Callable[[], None], *numbers: signal.Signals) -> None:
        if not in_main_thread():
            raise ContextError(
                f"A handler of {_names(numbers)} must be installed in the main thread. Received: thread "
                f"{threading.current_thread().name!r}. Install it there."
            )
        self._note = note
        self._is_active = True
        self._process = os.getpid()
        #: Signals that were noted and not yet passed on to the earlier handler.
        self._pending: set[int] = set()
        # Complete before anything is installed: a signal may arrive after the first of several.
        self._earlier: dict[int, _Handler] = {number: signal.getsignal(number) for number in numbers}
        try:
            for number in self._earlier:
                self._install(number)
        except BaseException:
            self.restore()
            raise

    def _install(self, number: int) -> None:
        signal.signal(number, self._receive)
        if self._earlier[number] is None:
            _LOG.warning(
                "The handler of %s was not installed from Python: it is replaced and cannot be restored.",
                _names([number]),
            )

    @property
    def _is_forked(self) -> bool:
        """True if another process, a parent of this one, installed the watch."""
        return os.getpid() != self._process

    def _receive(self, number: int, frame: FrameType | None) -> None:
        earlier = self._earlier_of(number)
        if not self._is_active or self._is_forked:
            if callable(earlier):
                earlier(number, frame)
            elif earlier != signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self._note()
        if _watch_of(earlier) is None:
            self._pending.add(number)
        elif callable(earlier):
            earlier(number, frame)

    def pass_on(self) -> None:
        """Call the earlier handlers of the signals that arrived, now that what they asked for is done.

        Nothing outside of the main thread, where handlers do not run, and in a forked child.

        Raises:
            BaseException: what a handler raises.
        """
        while self._pending and in_main_thread() and not self._is_forked:
            number = self._pending.pop()
            earlier = self._earlier_of(number)
            if callable(earlier):
                earlier(number, None)

    def restore(self) -> None:
        """Put the earlier handlers back. From another thread the watch passes signals on instead."""
        if not self._is_active:
            return
        self._is_active = False
        for number in self._earlier:
            handler = signal.getsignal(number)
            if handler == self._receive:
                # Python allows it in the main thread alone; the garbage collector may run in any.
                if in_main_thread():
                    signal.signal(number, self._earlier_of(number) or signal.SIG_DFL)
            elif _watch_of(handler) is None and handler != self._earlier[number]:
                _LOG.warning(
                    "%s has a new handler, installed while the signal was watched: it is left in place.",
                    _names([number]),
                )

    def close(self) -> None:
        """Put the earlier handlers back, and call them where a signal arrived that was not passed on.

        Raises:
            BaseException: what a handler raises.
        """
        self.restore()
        self.pass_on()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except BaseException as raised:
            if error is None:
                raise
            _LOG.info("The program ends with %r; its signal handler raised %r.", error, raised)

    def _earlier_of(self, number: int) -> _Handler:
        """Return the earlier handler; ended watches' are passed over."""
        earlier = self._earlier[number]
        watch = _watch_of(earlier)
        while watch is not None and not watch._is_active:
            earlier = watch._earlier[number]
            watch = _watch_of(earlier)
        return earlier


def _watch_of(handler: _Handler) -> SignalWatch | None:
    watch = getattr(handler, "__self__", None)
    return watch if isinstance(watch, SignalWatch) else None


def _names(numbers: tuple[signal.Signals, ...] | list[int]) -> str:
    return " and ".join(signal.Signals(number).name for number in numbers)
