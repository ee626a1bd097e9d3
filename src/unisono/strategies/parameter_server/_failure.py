"""Whether an exception has ended this program: the chief's tasks end with the same outcome.

Tests: tests/unit/strategies/test_failure.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any


class _FailureHook:
    """Python's hook for exceptions that end the program, which notes that there was one.

    `sys.last_value` does not tell: IPython sets it for each cell that fails, and the launcher, which runs the
    program itself, never.

    Args:
        before: the previous hook.
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
