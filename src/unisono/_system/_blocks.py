"""Settings for a block: a value of a context variable or an attribute, a pause of the garbage collector.

Tests: tests/unit/test_context.py.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def set_for_block(variable: ContextVar[T], value: T) -> Iterator[T]:
    """Give a context variable a value for a block, which the block gets."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


@contextlib.contextmanager
def set_attribute(owner: object, name: str, value: object) -> Iterator[None]:
    """Give an object's attribute a value for a block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


_LOCK = threading.Lock()
#: Blocks that run, in all threads, and whether the collector ran before the first of them.
_pauses, _was_enabled = 0, False


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause Python's garbage collector.

    While JAX traces, nearly all objects stay alive, and the collector visits them again and again: it took a
    fifth of the time in which Keras' step of 150 dense layers was traced and lowered (1.9 s of CPU, 1.5
    without; jax 0.10.2, 2026-11-23).
    """
    global _pauses, _was_enabled
    with _LOCK:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _LOCK:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()
