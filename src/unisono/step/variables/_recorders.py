"""The recorders of the tapes that record a thread's operations: core code tells them what it reads.

Tests: tests/unit/step/eager/test_recording.py.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Protocol, TypeVar

import jax
import keras

from unisono._errors import TapeError

Recording = TypeVar("Recording")


class ReadListener(Protocol):
    """Notes what the code of a thread does, for the tapes that record there."""

    def read(self, variable: keras.Variable) -> None:
        """Note that a variable is read."""

    def read_as(self, variable: keras.Variable, value: jax.Array) -> None:
        """Note that a variable is read whose value was computed while no tape recorded."""

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Return a block in which no tape records."""


class _Thread(threading.local):
    """The recorders of a thread: one, and one more for each traced function in which a tape is entered."""

    def __init__(self) -> None:
        self.recorders: list[ReadListener] = []


THREAD = _Thread()


def current_recorder() -> ReadListener | None:
    """Return the recorder of this thread, if a tape records."""
    recorders = THREAD.recorders
    return recorders[-1] if recorders else None


def note_read(variable: keras.Variable) -> None:
    """Tell the tapes that a variable is read; must be called before its value is taken."""
    if THREAD.recorders:
        THREAD.recorders[-1].read(variable)


def read_as(variable: keras.Variable, value: jax.Array) -> jax.Array:
    """Tell the tapes that a variable is read whose value is computed; return the value.

    Args:
        value: computed while no tape recorded.
    """
    if THREAD.recorders:
        THREAD.recorders[-1].read_as(variable, value)
    return value


def not_recorded() -> contextlib.AbstractContextManager[None]:
    """Let no tape record in a block."""
    recorder = current_recorder()
    return contextlib.nullcontext() if recorder is None else recorder.paused()


def require_recording(recording: Recording | None) -> Recording:
    """Return a tape's recording."""
    if recording is None:
        raise TapeError(
            "A tape that is not persistent gives one gradient, after it was entered. Received: a tape that "
            "was not entered, or a second call. Write `with unisono.GradientTape(persistent=True) as tape:`."
        )
    return recording
