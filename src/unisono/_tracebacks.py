"""Shorten the tracebacks of errors that the library raises on purpose to the user's frames.

Set `UNISONO_TRACEBACK=full` in the environment to see all frames.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from unisono._errors import UnisonoError

_VARIABLE = "UNISONO_TRACEBACK"

#: Packages whose frames are not shown.
_PACKAGES = ("unisono", "keras", "jax", "jaxlib", "grain", "orbax")

#: Modules of the standard library through which these packages call a user's code.
_BETWEEN = (contextlib.__file__, functools.__file__)

_HINT = f"Unisono's own frames are not shown: set {_VARIABLE}=full to see them."


def is_user_code(filename: str) -> bool:
    """Return whether the code of a file is the user's, and not that of the libraries below."""
    if filename in _BETWEEN or filename.startswith("<frozen "):
        return False
    return not filename.startswith(tuple(_folders()))


def _folders() -> Iterator[str]:
    for name in _PACKAGES:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None:
            yield os.path.dirname(file) + os.sep


def user_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback of the user's frames only, or of all frames where none is the user's."""
    frames = []
    at = trace
    while at is not None:
        if is_user_code(at.tb_frame.f_code.co_filename):
            frames.append(at)
        at = at.tb_next
    shown: TracebackType | None = None
    for frame in reversed(frames):
        shown = TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shown or trace


def shorten(error: BaseException) -> None:
    """Reduce the traceback of a `UnisonoError` to the user's frames and add a note; leave other errors alone.

    Args:
        error: any error; its causes and contexts are shortened, too.
    """
    if not isinstance(error, UnisonoError) or os.environ.get(_VARIABLE, "").lower() == "full":
        return
    if _HINT not in getattr(error, "__notes__", ()):
        error.add_note(_HINT)
    # Causes and contexts may form a circle.
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        at.__traceback__ = user_frames(at.__traceback__)
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)


def install() -> None:
    """Shorten the errors that end a program or a cell of a notebook."""
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)
    # Another tool's handler stays: IPython has room for one.
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and not shell.custom_exceptions:
        shell.set_custom_exc((UnisonoError,), _show_in_notebook)


class _Hook:
    """Python's hook for errors that end the program.

    Args:
        before: the previous hook, which is called with the shortened error.
    """

    def __init__(self, before: Callable[[Any, Any, Any], Any]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        shorten(error)
        self._before(kind, error, error.__traceback__ if isinstance(error, UnisonoError) else trace)


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
