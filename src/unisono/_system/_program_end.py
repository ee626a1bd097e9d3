"""The end of the program: what its last error is turned into, and with which code it ends.

Python has one hook for errors that end a program, and says the code to none of its exit handlers. Errors and
calls of `sys.exit` are noted here; `raise SystemExit(3)` and `os._exit(3)` are not seen.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from unisono._errors import UnisonoError
from unisono._tracebacks import shorten

#: Functions that are given the error that ends a program, in this order. Each may add notes to it, or return
#: the error to show in its place.
EXPLAINERS: list[Callable[[BaseException], BaseException | None]] = []


class _ExceptionHook:
    """Python's hook for errors that end the program: explains, shortens and notes them.

    `sys.last_value` does not tell that there was one: IPython sets it for each cell that fails, and the
    launcher, which runs the program itself, never.
    """

    def __init__(
        self, before: Callable[[type[BaseException], BaseException, TracebackType | None], object]
    ) -> None:
        self._before = before
        self.error: BaseException | None = None

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # A hook that another tool has set calls this one after a later one of these.
        is_done = any(hook.error is error for hook in _HOOKS)
        self.error = error
        if not is_done:
            for explain in EXPLAINERS:
                error = explain(error) or error
            shorten(error)
        self.error = error
        # An error that was not raised has no traceback of its own.
        self._before(type(error), error, error.__traceback__ or trace)


_HOOKS: list[_ExceptionHook] = []


def watch_program() -> None:
    """Set the hook, unless it is there; a tool may have set its own in its place.

    In a notebook the errors of cells are shortened.
    """
    if not _HOOKS or sys.excepthook is not _HOOKS[-1]:
        _HOOKS.append(_ExceptionHook(sys.excepthook))
        sys.excepthook = _HOOKS[-1]
    # Another tool's handler stays: IPython has room for one.
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and not shell.custom_exceptions:
        shell.set_custom_exc((UnisonoError,), _show_in_notebook)


def _show_in_notebook(
    shell: Any,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
    tb_offset: int | None = None,
) -> None:
    shorten(error)
    # IPython skips its own first frame.
    shell.showtraceback((kind, error, error.__traceback__), tb_offset=tb_offset)


def program_has_failed() -> bool:
    """Return whether an error has ended the program.

    At a prompt, where the hook is called for each line that fails, it is the user who ends the program.
    """
    return not is_at_prompt() and any(hook.error is not None for hook in _HOOKS)


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
