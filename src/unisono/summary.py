"""Summaries for TensorBoard, as `tf.summary` writes them, without TensorFlow.

The first replica of a compiled step sends the step's summaries while the program runs. The default writer,
the condition (`record_if`) and the default step are those at the time of the step's call. Where there was no
default writer when the step was compiled, nothing is sent.
Source: https://www.tensorflow.org/api_docs/python/tf/summary

Tests: tests/unit/test_summary.py, tests/virtual/test_summary.py.
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from unisono._checks import whole_number
from unisono._errors import ContextError, InvalidArgumentError
from unisono._summary._recording import (
    Condition,
    HostData,
    Step,
    SummaryWriter,
    changed,
    checked_step,
    get_defaults,
    is_tracing,
    record,
    replace_default_step,
)
from unisono._system._object_store import given_place
from unisono._types import ArrayLike

__all__ = [
    "SummaryWriter", "create_file_writer", "create_noop_writer", "experimental", "get_step",
    "histogram", "image", "record_if", "scalar", "set_step", "text",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


def create_file_writer(
    logdir: str | os.PathLike[str], max_queue: int = 10, flush_millis: int = 120_000
) -> SummaryWriter:
    """Return a writer of a new event file in a directory.

    Args:
        logdir: the directory; created where it is missing. Also one in an object store, `s3://bucket/logs` or
            `gs://bucket/logs`, to which summaries go with each `flush`, and after `flush_millis`.
        max_queue: the number of summaries that are buffered before they are written.
        flush_millis: milliseconds after which buffered summaries are written with the next one.

    Raises:
        MissingPackageError: when the packages of `unisono[tensorboard]` are missing.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as logdir:
    ...     writer = create_file_writer(logdir)
    ...     with writer.as_default():
    ...         written = scalar("loss", 0.5, step=1)
    ...     writer.close()
    >>> written
    True
    """
    _check_positive("max_queue", max_queue)
    _check_positive("flush_millis", flush_millis)
    from unisono._summary._event_files import EventFile

    return SummaryWriter(EventFile(str(given_place(logdir)), max_queue, flush_millis / 1000))


def create_noop_writer() -> SummaryWriter:
    """Return a writer that drops all summaries, for the processes of a cluster that write none.

    >>> with create_noop_writer().as_default(step=1):
    ...     scalar("loss", 0.5)
    True
    """
    return SummaryWriter(None)


def set_step(step: Step | None) -> None:
    """Set the default step of summaries.

    Args:
        step: an integer, a variable of an integer, or None for no default.

    Raises:
        ContextError: in a compiled step, where it would take effect while tracing only.

    >>> set_step(3)
    >>> get_step()
    3
    >>> set_step(None)
    """
    if is_tracing():
        raise ContextError(
            "`set_step` must be called outside of compiled code. Received: a call while a step is traced. "
            "Write `summary.scalar(name, data, step=step)`, or `with writer.as_default(step):` inside."
        )
    replace_default_step(None if step is None else checked_step(step))


def get_step() -> ArrayLike:
    """Return the default step, or None.

    >>> get_step() is None
    True
    """
    return get_defaults().step


#: The names of `tf.summary.experimental`.
experimental = types.SimpleNamespace(get_step=get_step, set_step=set_step)


@contextlib.contextmanager
def record_if(condition: Condition) -> Iterator[None]:
    """Write the summaries of a block only if a condition holds.

    Args:
        condition: a bool, or a function that returns one and is called for each summary. In a
            step, a function that returns a traced bool becomes part of the program; a
            function that returns a Python bool is called again at each run, in another thread.

    >>> with create_noop_writer().as_default(step=1), record_if(lambda: False):
    ...     scalar("loss", 0.5)
    False
    """
    if not callable(condition) and np.shape(condition) != ():
        raise InvalidArgumentError(
            "A condition must be a bool or a function that returns one. Received: "
            f"condition={condition!r}. Write `record_if(lambda: step % 100 == 0)`."
        )
    with changed(condition=condition):
        yield


# --- summaries ---------------------------------------------------------------------------------


def scalar(name: str, data: ArrayLike, step: Step | None = None) -> bool:
    """Write one number to the default writer.

    Args:
        name: its tag in TensorBoard.
        data: a real scalar, or an array of shape `()`.
        step: the position on the horizontal axis: an integer, or an array or a variable of one. None
            takes the default step.

    Returns:
        Whether something was written; in a compiled step, whether the program will send it.

    Raises:
        InvalidArgumentError: when there is a default writer but no step, or `data` is not a scalar.
        InvalidTypeError: when `data` is a per-replica value.

    >>> scalar("loss", 0.5, step=1)  # no default writer
    False
    """

    def check(shape: tuple[int, ...], dtype: DTypeLike) -> bool:
        return shape == () and _is_real(dtype)

    return record("scalar", name, data, step, check, "one real number")


def histogram(name: str, data: ArrayLike, step: Step | None = None, buckets: int = 30) -> bool:
    """Write the distribution of an array's values to the default writer.

    Args:
        name: its tag in TensorBoard.
        data: real numbers, of any shape. Infinite values and NaN are left out.
        step: as for `scalar`.
        buckets: the number of buckets of equal width.

    Returns:
        As `scalar`.

    Raises:
        InvalidArgumentError: when there is a default writer but no step, or `buckets` is not positive.
        InvalidTypeError: when `data` is a per-replica value.

    >>> histogram("weights", [1.0, 2.0], step=1)
    False
    """
    _check_positive("buckets", buckets)
    return record(
        "histogram", name, data, step, lambda _, dtype: _is_real(dtype), "real numbers", buckets=buckets
    )


def image(name: str, data: ArrayLike, step: Step | None = None, max_outputs: int = 3) -> bool:
    """Write images to the default writer.

    Args:
        name: their tag in TensorBoard.
        data: images of shape `(k, height, width, channels)` with 1 to 4 channels; uint8, or floats
            that are clipped to the range from 0 to 1.
        step: as for `scalar`.
        max_outputs: the most images to write.

    Returns:
        As `scalar`.

    Raises:
        InvalidArgumentError: when there is a default writer but no step, or for another shape.
        InvalidTypeError: when `data` is a per-replica value.

    >>> image("digits", np.zeros((1, 8, 8, 1)), step=1)
    False
    """
    _check_positive("max_outputs", max_outputs)

    def check(shape: tuple[int, ...], dtype: DTypeLike) -> bool:
        is_pixels = dtype == np.uint8 or jnp.issubdtype(dtype, jnp.floating)
        return len(shape) == 4 and 1 <= shape[-1] <= 4 and is_pixels

    what = "uint8 or floats of shape (k, height, width, channels) with 1 to 4 channels"
    if isinstance(data, jax.Array) and data.ndim == 4 and get_defaults().writer is not None:
        data = data[:max_outputs]  # before the transfer to the host: the other images stay on the device
    return record("image", name, data, step, check, what, max_outputs=max_outputs)


def text(name: str, data: ArrayLike, step: Step | None = None) -> bool:
    """Write text, which TensorBoard renders as Markdown, to the default writer.

    Args:
        name: its tag in TensorBoard.
        data: a string, or a list or nested list of strings, which is shown as a table.
        step: as for `scalar`.

    Returns:
        As `scalar`.

    Raises:
        InvalidArgumentError: when there is a default writer but no step, or `data` is not text.

    >>> text("notes", "**started**", step=1)
    False
    """
    if isinstance(data, jax.Array) or np.asarray(data).dtype.kind not in "SU":
        raise InvalidArgumentError(
            f"The data of text {name!r} must be strings. Received: {data!r}. Write `scalar` for a number, "
            "or `str(...)` to show it as text."
        )
    return record("text", name, HostData(data), step, None, "text")


def _is_real(dtype: DTypeLike) -> bool:
    return dtype == np.bool_ or jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)


def _check_positive(name: str, value: object) -> None:
    if whole_number(value, 1) is None:
        raise InvalidArgumentError(
            f"`{name}` must be an integer of at least 1. Received: {name}={value!r}. Leave it out for the "
            "default."
        )
