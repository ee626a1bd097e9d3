"""Keras' old spellings, over Keras 3.

Tests: tests/unit/tf/test_keras.py.
"""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np

from unisono._types import PyTree, UserValue
from unisono.export import export_saved_model, load_from_saved_model


def add_methods() -> None:
    """Give Keras' objects the names that TensorFlow 2 had for what they do."""
    if not hasattr(keras.metrics.Metric, "reset_states"):
        keras.metrics.Metric.reset_states = lambda self: self.reset_state()
    if not hasattr(keras.optimizers.Optimizer, "lr"):
        keras.optimizers.Optimizer.lr = property(
            lambda self: self.learning_rate,
            lambda self, value: setattr(self, "learning_rate", value),
            doc="The learning rate.",
        )


class Reduction:
    """The names of a loss's reductions."""

    AUTO = "sum_over_batch_size"
    NONE = None
    SUM = "sum"
    SUM_OVER_BATCH_SIZE = "sum_over_batch_size"


class SaveOptions:
    """Options of saving, which have no meaning here.

    Args:
        **options: any.
    """

    def __init__(self, **options: UserValue) -> None:
        self.options = options


def get_value(x: PyTree) -> np.ndarray:
    """Return a variable's or tensor's numbers.

    Args:
        x: the variable.

    >>> float(get_value(2.5))
    2.5
    """
    return np.asarray(keras.ops.convert_to_numpy(x))


def set_value(x: keras.Variable, value: PyTree) -> None:
    """Set a variable.

    Args:
        x: the variable.
        value: its new value.
    """
    x.assign(value)


class ModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras' callback, for paths as TensorFlow 2 has them.

    Keras 3 demands `.weights.h5` or `.keras` at the end of the path; it is added.

    Args:
        filepath: of the checkpoints.
        save_weights_only: whether weights alone are saved.
        *args: those of `keras.callbacks.ModelCheckpoint`.
        **kwargs: likewise.
    """

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        path = os.fspath(filepath)
        end = ".weights.h5" if save_weights_only else ".keras"
        if not path.endswith((end, ".h5")):
            path += end
        super().__init__(path, monitor, verbose, save_best_only, save_weights_only, *args, **kwargs)


def SyncBatchNormalization(**kwargs: Any) -> keras.layers.BatchNormalization:  # noqa: N802 (TensorFlow's name)
    """Return a `BatchNormalization` whose statistics are those of all replicas.

    Args:
        **kwargs: those of the layer.
    """
    layer = keras.layers.BatchNormalization(**kwargs)
    # Not in the constructor: outside of a strategy Keras rejects it on JAX.
    layer.synchronized = True
    return layer


def save_model(
    obj: keras.Model, export_dir: str, signatures: UserValue = None, options: UserValue = None
) -> None:
    """Export a model, as `tf.saved_model.save` does.

    Args:
        obj: the model.
        export_dir: the directory.
        signatures: are not used.
        options: are not used.
    """
    export_saved_model(obj, export_dir)


def load_model(export_dir: str, tags: UserValue = None, options: UserValue = None) -> Any:
    """Load what `save_model` wrote.

    Args:
        export_dir: the directory.
        tags: are not used.
        options: are not used.
    """
    return load_from_saved_model(export_dir)
