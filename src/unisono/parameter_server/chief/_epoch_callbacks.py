"""Keras' callbacks of epochs that have a hook for batches, in which they do nothing.

Where a callback has such a hook, Keras reads a step's logs before it asks for the next step: workers would
take turns. With `ModelCheckpoint`, at its defaults, all 72 steps of a `fit` ran one at a time (2026-11-22).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras

from unisono.training._fit_extension import flat_callbacks, overrides

#: In these hooks a callback with `save_freq="epoch"` does nothing.
_IDLE = (
    keras.callbacks.ModelCheckpoint.on_train_batch_end,
    keras.callbacks.BackupAndRestore.on_train_batch_end,
)
_OTHERS = ("on_batch_end", "on_test_batch_end", "on_predict_batch_end")


@contextlib.contextmanager
def epoch_callbacks(callbacks: object) -> Iterator[None]:
    """Tell Keras, within a block, which callbacks need no batch's logs: they are `async_safe`.

    >>> save = keras.callbacks.ModelCheckpoint("{epoch}.keras")
    >>> with epoch_callbacks([save]):
    ...     save.async_safe
    True
    >>> hasattr(save, "async_safe")
    False
    """
    marked = [c for c in flat_callbacks(callbacks) if _is_idle(c) and not hasattr(c, "async_safe")]
    for callback in marked:
        callback.async_safe = True
    try:
        yield
    finally:
        for callback in marked:
            del callback.async_safe


def _is_idle(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback saves at the ends of epochs alone, as Keras has written it."""
    is_keras = getattr(callback.on_train_batch_end, "__func__", None) in _IDLE
    return is_keras and callback.save_freq == "epoch" and not overrides(callback, *_OTHERS)
