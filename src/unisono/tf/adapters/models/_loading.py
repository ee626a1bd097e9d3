"""`load_model` of directories that `Model.save` wrote, and of files with an optimizer's state.

Tests: tests/unit/tf/test_saving.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import h5py
import keras

from unisono._saved._directory import is_saved
from unisono.export import load_from_saved_model

#: Short names of losses that files in HDF5 hold, and that Keras 3 does not find in them.
_LOSSES = {
    "mse": keras.losses.mean_squared_error,
    "mae": keras.losses.mean_absolute_error,
    "mape": keras.losses.mean_absolute_percentage_error,
    "msle": keras.losses.mean_squared_logarithmic_error,
}


def load_model(
    filepath: Any, custom_objects: Any = None, *args: object, options: object = None, **kwargs: object
) -> Any:
    """Load a model: a file of Keras, or a directory that `Model.save` wrote.

    Args:
        filepath: the path.
        custom_objects: by name, what Keras does not know.
        *args: those of `keras.models.load_model`.
        options: are not used.
        **kwargs: those of `keras.models.load_model`.
    """
    if isinstance(filepath, (str, os.PathLike)) and is_saved(filepath):
        return load_from_saved_model(filepath, custom_objects)
    if not str(filepath).endswith((".h5", ".hdf5")):
        return keras.models.load_model(filepath, custom_objects, *args, **kwargs)
    model = keras.models.load_model(filepath, {**_LOSSES, **(custom_objects or {})}, *args, **kwargs)
    if getattr(model, "optimizer", None) is not None:
        _restore_optimizer(model, filepath)
    return model


def _restore_optimizer(model: Any, filepath: Any) -> None:
    """Build the optimizer of a model from HDF5 with all variables: Keras 3 forgets those of layers."""
    optimizer = model.optimizer
    if not optimizer.built or not model.trainable_variables:
        return
    with h5py.File(filepath, "r") as file:
        state = [group[name][()] for group, name in _weights(file["optimizer_weights"])]
    whole = type(optimizer).from_config(optimizer.get_config())
    whole.build(model.trainable_variables)
    if [value.shape for value in state] == [tuple(variable.shape) for variable in whole.variables]:
        for variable, value in zip(whole.variables, state, strict=True):
            variable.assign(value)
    model.optimizer = whole


def _weights(group: Any) -> Iterator[tuple[Any, Any]]:
    # Keras divides a long list of names.
    lists = [name for name in group.attrs if name.startswith("weight_names")]
    for part in sorted(lists, key=lambda name: (len(name), name)):
        for name in group.attrs[part]:
            yield group, name
