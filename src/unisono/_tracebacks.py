"""Shorten the tracebacks of errors that end a program: the library's frames between the user's are not shown.

Set `UNISONO_TRACEBACK=full` in the environment to see all frames.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from types import TracebackType
from typing import TypeVar

from unisono._errors import UnisonoError

_Error = TypeVar("_Error", bound=BaseException)

_VARIABLE = "UNISONO_TRACEBACK"

#: Packages whose frames are not shown.
_PACKAGES = ("unisono", "keras", "jax", "jaxlib", "grain", "orbax")

#: Modules of the standard library through which these packages call a user's code.
_BETWEEN = (contextlib.__file__, functools.__file__, importlib.__file__)

_STANDARD = os.path.dirname(os.__file__) + os.sep

_HINT = f"Unisono's own frames are not shown: set {_VARIABLE}=full to see them."


def is_user_code(filename: str) -> bool:
    """Return whether the code of a file is the user's, and not that of the libraries below."""
    if filename in _BETWEEN or filename.startswith("<frozen "):
        return False
    return not filename.startswith(_folders())


def is_program(filename: str) -> bool:
    """Return whether the code of a file is the user's program, and not that of any library."""
    return is_user_code(filename) and "site-packages" not in filename and not filename.startswith(_STANDARD)


@contextlib.contextmanager
def warning_at_program() -> Iterator[None]:
    """Let warnings in a block name the line of the user's program that led there, and no library's.

    `skip_file_prefixes` of `warnings.warn` does so from Python 3.12 on, and for one's own warnings.
    """
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            yield
    finally:
        frame = sys._getframe()
        while not is_program(frame.f_code.co_filename) and frame.f_back is not None:
            frame = frame.f_back
        registry = frame.f_globals.setdefault("__warningregistry__", {})
        for one in found:
            warnings.warn_explicit(
                one.message, one.category, frame.f_code.co_filename, frame.f_lineno, registry=registry
            )


@functools.cache
def _folders() -> tuple[str, ...]:
    # Not from `sys.modules`: a package whose import has failed is not there.
    specs = [importlib.util.find_spec(name) for name in _PACKAGES]
    return tuple(os.path.dirname(spec.origin) + os.sep for spec in specs if spec is not None and spec.origin)


def user_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback of the user's frames only, or of all frames where none is the user's."""
    return _linked([f for f in frames_of(trace) if is_user_code(f.tb_frame.f_code.co_filename)]) or trace


def frames_of(trace: TracebackType | None) -> Iterator[TracebackType]:
    """Return the parts of a traceback, the outermost first."""
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _linked(frames: list[TracebackType]) -> TracebackType | None:
    shown: TracebackType | None = None
    for frame in reversed(frames):
        shown = TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shown


def _without_libraries_between(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the libraries' frames above the last frame of the user's program.

    What stands below is where another library, or this one, failed.
    """
    frames = list(frames_of(trace))
    of_program = [is_program(frame.tb_frame.f_code.co_filename) for frame in frames]
    last = max((i for i, is_own in enumerate(of_program) if is_own), default=0)
    hidden = [not is_user_code(frame.tb_frame.f_code.co_filename) for frame in frames[:last]]
    if not any(hidden):
        return trace
    return _linked([f for f, hide in zip(frames, hidden + [False] * len(frames), strict=False) if not hide])


_EXPLAINED = "_unisono_is_explained"


def mark_explained(error: _Error) -> _Error:
    """Note that an error, or its notes, say what to write: the frames below the user's do not help then."""
    setattr(error, _EXPLAINED, True)
    return error


def is_explained(error: BaseException) -> bool:
    """Return whether an error was marked by `mark_explained`."""
    return getattr(error, _EXPLAINED, False)


def add_advice(error: BaseException, note: str) -> None:
    """Add a note that says what to write to another library's error, above the notes of others."""
    error.__notes__ = [note, *getattr(error, "__notes__", ())]
    mark_explained(error)


def shorten(error: BaseException) -> None:
    """Reduce the traceback of an error that is explained to the user's frames, and add a note.

    Explained are `UnisonoError`s and what `mark_explained` marks. Another error keeps the frames below the
    user's last one, where it was raised.

    Args:
        error: any error; its causes and contexts are shortened, too.
    """
    if os.environ.get(_VARIABLE, "").lower() == "full":
        return
    has_advice = isinstance(error, UnisonoError) or is_explained(error)
    keep = user_frames if has_advice else _without_libraries_between
    # Causes and contexts may form a circle.
    seen: set[int] = set()
    at: BaseException | None = error
    is_shorter = has_advice
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        kept = keep(at.__traceback__)
        is_shorter |= kept is not at.__traceback__
        at.__traceback__ = kept
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    if is_shorter and _HINT not in getattr(error, "__notes__", ()):
        error.add_note(_HINT)
