"""Where Ctrl-C is put off for a moment, so that it never costs the state of a training step.

A step donates its state: from its start until the new state is stored, neither exists under a name.
Python raises `KeyboardInterrupt` between any two instructions, so also there. And where it is raised in
the callback of a weak reference, in a `__del__`, or where Keras reads logs, it is discarded, so that
training continued.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes enums of handlers: 15 us a section
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, TypeAlias, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])
_Handler: TypeAlias = Callable[[int, FrameType | None], object]

#: A function of Keras that discards every exception: it reads logs.
_DISCARDS = "pythonify_logs"

#: Seconds after which a second signal is obeyed wherever it arrives.
_PATIENCE = 1.0


def in_main_thread() -> bool:
    """Return whether this thread is the one in which Python installs and runs signal handlers."""
    return threading.current_thread() is threading.main_thread()


class Interrupts:
    """SIGINT in the main thread: put off in some sections, and delivered where they end.

    What delivers it is the handler that the program has set, Python's own by default.

    >>> interrupts = Interrupts()
    >>> with contextlib.suppress(KeyboardInterrupt), interrupts.put_off():
    ...     signal.raise_signal(signal.SIGINT)
    ...     print("the section ends first")
    the section ends first
    """

    def __init__(self) -> None:
        #: True if a signal waits to be delivered.
        self.pending = False
        self._since = 0.0
        self._held = 0
        self._before: _Handler | None = None
        self._hook: Callable[[sys.UnraisableHookArgs], object] = sys.unraisablehook
        self._interruptible: set[CodeType] = set()

    def interruptible(self, function: _F) -> _F:
        """Mark a function in which nothing is put off, although a section calls it; return it."""
        self._interruptible.add(function.__code__)
        return function

    @contextlib.contextmanager
    def put_off(self) -> Iterator[None]:
        """Surround a short section at whose end the signal is delivered; nothing outside the main thread."""
        if not in_main_thread():
            yield
            return
        is_outermost = self._install()
        self._held += 1
        try:
            yield
        except KeyboardInterrupt:
            self.pending = False
            raise
        finally:
            self._held -= 1
            before = self._before
            if is_outermost:
                self._uninstall()
            if not self._held:
                self._pass_on(before)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Surround the long part of a section, in which nothing is put off."""
        if not in_main_thread():
            yield
            return
        held, self._held = self._held, 0
        try:
            yield
        finally:
            self._held = held

    @contextlib.contextmanager
    def at_checks(self) -> Iterator[None]:
        """Surround a section, perhaps a long one, in which the signal is delivered by `check` alone."""
        if not in_main_thread():
            yield
            return
        is_outermost = self._install()
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            if not self._held:
                try:
                    self.check()
                finally:
                    if is_outermost:
                        self._uninstall()

    def check(self) -> None:
        """Deliver a signal that was put off, also in a section; nothing outside the main thread.

        Where Keras would discard the exception, the signal waits on, and the next call delivers it.
        """
        if not self.pending or not in_main_thread():
            return
        if _is_discarding(sys._getframe(1)) and self._before is signal.default_int_handler:
            raise KeyboardInterrupt
        self._pass_on(self._before)

    def deliver(self) -> None:
        """Deliver a signal that was put off, unless a section still runs; nothing outside the main thread."""
        if in_main_thread() and not self._held:
            self._pass_on(self._before)

    def _pass_on(self, handler: _Handler | None) -> None:
        if self.pending and handler is not None:
            self.pending = False
            handler(signal.SIGINT, None)

    def _install(self) -> bool:
        """Take SIGINT over; return whether this call did."""
        if self._before is not None:
            return False
        before = _signal.getsignal(signal.SIGINT)
        if not callable(before):
            return False  # ignored, or the end of the process
        self._before, self._hook = before, sys.unraisablehook
        sys.unraisablehook = self._discarded
        _signal.signal(signal.SIGINT, self._signalled)
        return True

    def _uninstall(self) -> None:
        before, self._before = self._before, None
        # The program may have set others meanwhile.
        if sys.unraisablehook == self._discarded:
            sys.unraisablehook = self._hook
        if before is not None and _signal.getsignal(signal.SIGINT) == self._signalled:
            _signal.signal(signal.SIGINT, before)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        insists = self.pending and time.monotonic() - self._since > _PATIENCE
        if not insists and self._must_wait(frame):
            if not self.pending:
                self._since = time.monotonic()
            self.pending = True
        elif self._before is not None:
            self._before(number, frame)

    def _discarded(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Note an interrupt that Python discards, as every exception that has no caller."""
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            self.pending, self._since = True, time.monotonic()
        else:
            self._hook(unraisable)

    def _must_wait(self, frame: FrameType | None) -> bool:
        if _is_discarding(frame):
            return True
        held = self._held > 0
        while held and frame is not None:
            held = frame.f_code not in self._interruptible
            frame = frame.f_back
        return held


def _is_discarding(frame: FrameType | None) -> bool:
    """Return whether a frame runs below a function that discards every exception."""
    while frame is not None and frame.f_code.co_name != _DISCARDS:
        frame = frame.f_back
    return frame is not None


#: Those of this process.
INTERRUPTS = Interrupts()
