"""With which code this program ends, as far as that can be known before it does: its tasks end with the same.

Python says it to none of its exit handlers. Exceptions that end the program and calls of `sys.exit` are noted
here. `raise SystemExit(3)` and `os._exit(3)` are not seen.

Tests: tests/unit/strategies/test_exit_code.py.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn


class _FailureHook:
    """Python's hook for exceptions that end the program, which notes that there was one.

    `sys.last_value` does not tell: IPython sets it for each cell that fails, and the launcher, which runs the
    program itself, never.
    """

    def __init__(self, before: Callable[[Any, Any, Any], Any]) -> None:
        self._before = before
        self.was_called = False

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.was_called = True
        self._before(kind, error, trace)


_HOOKS: list[_FailureHook] = []


def watch_program() -> None:
    """Note from now on whether an exception ends the program."""
    if not _HOOKS or sys.excepthook is not _HOOKS[-1]:
        _HOOKS.append(_FailureHook(sys.excepthook))
        sys.excepthook = _HOOKS[-1]


def program_has_failed() -> bool:
    """Return whether an exception has ended the program.

    At a prompt, where the hook is called for each line that fails, it is the user who ends the program.
    """
    return not is_at_prompt() and any(hook.was_called for hook in _HOOKS)


def is_at_prompt() -> bool:
    """Return whether the program is typed line by line."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


#: The argument of the last `sys.exit` in the main thread, in a list; empty before it.
_NOTED: list[Any] = []


def note_exits() -> None:
    """Note the argument of `sys.exit` from now on."""
    exit_before = sys.exit
    if getattr(exit_before, "notes_code", False):
        return

    @functools.wraps(exit_before)
    def exit_and_note(status: Any = None, /) -> NoReturn:
        # In other threads it ends the thread alone.
        if threading.current_thread() is threading.main_thread():
            _NOTED[:] = [status]
        exit_before(status)

    exit_and_note.notes_code = True  # type: ignore[attr-defined]
    sys.exit = exit_and_note


def expected_exit_code() -> int:
    """Return the code with which the program is about to end; for an exit handler."""
    if program_has_failed():
        return 1
    # In a notebook `sys.exit` ends a cell.
    status = _NOTED[0] if _NOTED and not is_at_prompt() else None
    if status is None:
        return 0
    # The system keeps the lowest eight bits: -1 becomes 255. A text is printed, and the code is 1.
    return status & 0xFF if isinstance(status, int) else 1
