"""Files and directories of Keras' utilities: images as a data set, read with Grain, and downloads.

Tests: tests/unit/tf/test_directories.py.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np

from unisono.data._pipeline._structure import TensorSpec
from unisono.tf.adapters._elements import TensorDataset


def image_dataset_from_directory(*args: object, **kwargs: object) -> Any:
    """Return a data set of the images below a directory, with `class_names` and `file_paths`.

    Returns:
        A data set; with `subset="both"` a list of two.
    """
    read = keras.utils.image_dataset_from_directory
    given = inspect.signature(read).bind(*args, **kwargs)
    given.apply_defaults()
    batch_size, shuffle = given.arguments["batch_size"], given.arguments["shuffle"]
    given.arguments.update(format="grain", batch_size=None)
    made = read(*given.args, **given.kwargs)
    buffer = 8 * batch_size if batch_size else 1024
    if isinstance(made, list):
        train, validation = made
        return [_dataset(train, shuffle, buffer, batch_size), _dataset(validation, False, buffer, batch_size)]
    return _dataset(made, shuffle, buffer, batch_size)


def _dataset(images: Any, shuffle: bool, buffer: int, batch_size: int | None) -> Any:
    def elements() -> Iterator[Any]:
        for element in images:
            yield jax.tree.map(np.asarray, element)

    first = next(elements())
    spec = jax.tree.map(lambda leaf: TensorSpec(leaf.shape, leaf.dtype), first)
    made: Any = TensorDataset.from_generator(elements, output_signature=spec)
    made = made.assert_cardinality(len(images.file_paths))
    if shuffle:
        # Another order in each epoch.
        made = made.shuffle(buffer)
    if batch_size is not None:
        made = made.batch(batch_size)
    made.class_names, made.file_paths = images.class_names, images.file_paths
    return made


def get_file(*args: object, **kwargs: object) -> Any:
    """Return the path of a downloaded file, as Keras does; what it held lies next to it, too.

    Keras 3 extracts an archive into a directory of its own, and returns that. Earlier versions, whose paths
    programs put together, extracted it next to the file.

    Returns:
        A path; of an archive with one file the archive's, which programs change into the file's.
    """
    path: str = keras.utils.get_file(*args, **kwargs)
    if os.path.isdir(path):
        folder = Path(path)
        archive = folder.parent / inspect.signature(keras.utils.get_file).bind(*args, **kwargs).arguments.get(
            "fname", ""
        )
        all_held = list(folder.iterdir())
        for held in all_held:
            beside = folder.parent / held.name
            # As for a name without an ending, which is that of the directory.
            if not beside.exists() and not beside.is_symlink():
                beside.symlink_to(os.path.relpath(held, folder.parent), held.is_dir())
        if len(all_held) == 1 and all_held[0].is_file() and archive.is_file():
            return str(archive)
    return path
