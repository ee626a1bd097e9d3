"""With which code this program ends, as far as that can be known before it does.

Python says it to none of its exit handlers. Exceptions are noted by `_failure`, calls of `sys.exit`
here. `raise SystemExit(3)` and `os._exit(3)` are not seen.

Tests: tests/unit/strategies/test_exit_code.py.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any, NoReturn

from unisono.strategies.parameter_server._failure import is_at_prompt, program_has_failed

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
    """Return the code with which the program is about to end; for an exit handler.

    >>> expected_exit_code()
    0
    """
    if program_has_failed():
        return 1
    # In a notebook `sys.exit` ends a cell.
    status = _NOTED[0] if _NOTED and not is_at_prompt() else None
    if status is None:
        return 0
    # The system keeps the lowest eight bits: -1 becomes 255. A text is printed, and the code is 1.
    return status & 0xFF if isinstance(status, int) else 1
