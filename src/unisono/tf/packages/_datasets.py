"""`tensorflow_datasets` without TensorFlow: its builders prepare and describe, `unisono.data` reads."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from unisono._errors import UnsupportedError
from unisono.data._dataset import Dataset
from unisono.data._tensorflow import as_plain, read
from unisono.tf.adapters._elements import TensorDataset
from unisono.tf.adapters._files import decode_image

#: The format in which data are prepared: its records are found by their position.
_FORMAT = "array_record"


def adapt(package: Any) -> None:
    """Let `tensorflow_datasets` use `unisono.tf` in place of TensorFlow, and give Unisono's data sets.

    Raises:
        UnsupportedError: the package's version lacks what is replaced here.
    """
    try:
        core = package.core
        reader = core.dataset_builder.FileReaderBuilder
        images, utilities = core.features.Image, core.dataset_utils
        lazy = core.lazy_imports_utils.tensorflow
        prepare, decode = core.DatasetBuilder.download_and_prepare, images.decode_example_np
        used = reader._as_dataset
    except AttributeError as error:
        raise UnsupportedError(
            "`unisono.tf` must know the version of tensorflow_datasets. "
            f"Received: {getattr(package, '__version__', 'one that fails')} ({error}). Write "
            "`pip install tensorflow-datasets==4.9.10`."
        ) from None
    if used is _read:
        return
    # All modules of the package have this object as `tf`; it imports TensorFlow when it is first needed.
    vars(lazy)["_module"] = importlib.import_module("unisono.tf")
    reader.__init__ = _initializing(reader.__init__)
    reader._as_dataset = _read
    images.decode_example_np = _decoding(decode)
    core.DatasetBuilder.download_and_prepare = _preparing(prepare)
    for module in (package, package.public_api, utilities):
        module.as_numpy = as_numpy


@functools.wraps(read)
def _read(*args: Any, **kwargs: Any) -> TensorDataset:
    return TensorDataset._of(read(*args, **kwargs))


def _initializing(initialize: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(initialize)
    def __init__(self: Any, *, file_format: Any = None, **kwargs: object) -> None:  # noqa: N807
        initialize(self, file_format=file_format, **kwargs)
        if file_format is None and not self.is_prepared():
            self.info.set_file_format(_FORMAT, override=True, override_if_initialized=True)

    return __init__


def _preparing(prepare: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(prepare)
    def download_and_prepare(self: Any, **kwargs: object) -> None:
        try:
            prepare(self, **kwargs)
        except Exception as error:
            error.add_note(
                f"The data set {self.info.full_name!r} must be in {str(self.data_dir)!r}, and could not be "
                "prepared there. Where a network or TensorFlow is missing here, write elsewhere `tfds build "
                f"{self.name} --data_dir={self.data_dir_root}`, and copy the folder to this machine."
            )
            raise

    return download_and_prepare


def _decoding(decode: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(decode)
    def decode_example_np(self: Any, example: bytes) -> Any:
        channels = self.shape[-1] or 0
        if self.np_dtype != np.uint8 or channels not in (0, 1, 3, 4):
            return decode(self, example)
        # As TensorFlow does: a grey image among colored ones gets their channels.
        return decode_image(example, channels)

    return decode_example_np


def as_numpy(dataset: Any) -> Any:
    """Return data sets, and tensors, as ones of plain NumPy arrays; what `tfds.as_numpy` is here."""
    return jax.tree.map(_plain, dataset)


def _plain(part: Any) -> Any:
    if not isinstance(part, Dataset):
        return part if isinstance(part, bytes) else np.asarray(part)[()]
    return as_plain(part)
