"""`tensorflow_datasets` without TensorFlow: its builders prepare and describe, `unisono.data` reads.

Tests: tests/unit/tf/test_datasets.py.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from unisono._errors import InvalidArgumentError, UnsupportedError
from unisono.data import _build
from unisono.data._dataset import Dataset
from unisono.data._pipeline._plan import PipelineIterator
from unisono.data._pipeline._structure import TensorSpec
from unisono.data._readers import FilePart, TFRecordSource
from unisono.data._signature import conform
from unisono.tf.adapters._files import decode_image

#: The format in which data are prepared: its records are found by their position.
_FORMAT = "array_record"

#: The package's default number of files that are read in turn.
_FILES_IN_TURN = 16


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
    if used is read:
        return
    # All modules of the package have this object as `tf`; it imports TensorFlow when it is first needed.
    vars(lazy)["_module"] = importlib.import_module("unisono.tf")
    reader.__init__ = _initializing(reader.__init__)
    reader._as_dataset = read
    images.decode_example_np = _decoding(decode)
    core.DatasetBuilder.download_and_prepare = _preparing(prepare)
    for module in (package, package.public_api, utilities):
        module.as_numpy = as_numpy


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


def read(
    builder: Any, split: Any, decoders: Any = None, read_config: Any = None, shuffle_files: bool = False
) -> Dataset:
    """Return the data set of a split of a prepared builder.

    Args:
        builder: of the package.
        split: such as `"train[:80%]"`.
        decoders: of features, in place of their own.
        read_config: the package's `ReadConfig`.
        shuffle_files: whether to shuffle the records of several files, anew in each iteration.

    Raises:
        InvalidArgumentError: the split has no examples.
        UnsupportedError: a feature is no array, or the files are of a format that is not read here.
    """
    features = builder.info.features
    if hasattr(decoders, "extract_features"):
        raise UnsupportedError(
            "Examples are decoded whole. Received: decoders=PartialDecoding(…). "
            "Write `dataset.map(lambda example: {name: example[name] for name in names})`."
        )
    # Decoders may return anything: the first element says what.
    signature = None if decoders else _signature(features.get_tensor_info())

    def decode(record: bytes) -> Any:
        decoded = features.deserialize_example_np(record, decoders=decoders)
        return decoded if signature is None else conform(decoded, signature)

    parts = builder.info.splits[split].file_instructions
    if not parts:
        raise InvalidArgumentError(
            "A split must have examples. "
            f"Received: split={split!r} of {builder.info.full_name!r}, which has none. Write a larger part."
        )
    records = _ordered(
        _records(builder, split, parts, read_config), read_config, shuffle_files and len(parts) > 1
    )
    threads = read_config.num_parallel_calls_for_decode
    return Dataset(_build.mapped(records.node, decode, threads, signature), read_config.options)


def _records(builder: Any, split: Any, parts: Any, config: Any) -> Dataset:
    """Return the records of a split, as bytes."""
    from tensorflow_datasets import core, decode

    form = core.FileFormat.from_value(config.file_format or builder.info.file_format)
    if form == core.FileFormat.ARRAY_RECORD:
        raw = decode.DeserializeMethod.RAW_BYTES
        source = builder.as_data_source(split, deserialize_method=raw, file_format=form)
        return Dataset.from_source(source)
    if form != core.FileFormat.TFRECORD:
        raise UnsupportedError(
            "Data sets are read from ArrayRecord and TFRecord files. "
            f"Received: files of the format {form.value} in {str(builder.data_dir)!r}. "
            f"Write `Dataset.from_source(tfds.data_source({builder.name!r}, split=…))`."
        )
    cycle = config.interleave_cycle_length
    if not isinstance(cycle, int):
        cycle = 1 if builder.info.disable_shuffling else _FILES_IN_TURN
    names = [FilePart(os.fspath(part.filename), part.skip, part.take) for part in parts]
    return Dataset.from_source(TFRecordSource(names, cycle, config.interleave_block_length or 1))


def _ordered(records: Dataset, config: Any, shuffle: bool) -> Dataset:
    if config.add_tfds_id:
        raise UnsupportedError(
            "Examples have no `tfds_id` here. Received: ReadConfig(add_tfds_id=True). "
            "Write `dataset.enumerate()`."
        )
    if shuffle:
        size = len(records)
        records = records.shuffle(size, config.shuffle_seed, config.shuffle_reshuffle_each_iteration)
    if config.input_context:
        context = config.input_context
        records = records.shard(context.num_input_pipelines, context.input_pipeline_id)
    return records.repeat() if config.repeat_filenames else records


def _signature(info: Any, path: tuple[str, ...] = ()) -> Any:
    """Return the spec of the elements that features describe."""
    if isinstance(info, dict):
        return {name: _signature(part, (*path, name)) for name, part in info.items()}
    if info.dataset_lvl or (info.sequence_rank > 1 and None in info.shape[1:]):
        raise UnsupportedError(
            "The features of a data set must be arrays. "
            f"Received: {'/'.join(path)!r}, which is ragged or a data set. Write `tfds.data_source(name, "
            "split=…)`, and `unisono.data.Dataset.from_generator` around a loop over it that pads."
        )
    return TensorSpec(info.shape, info.np_dtype)


def as_numpy(dataset: Any) -> Any:
    """Return data sets, and tensors, as ones of plain NumPy arrays; what `tfds.as_numpy` is here."""
    return jax.tree.map(_plain, dataset)


def _plain(part: Any) -> Any:
    if not isinstance(part, Dataset):
        return part if isinstance(part, bytes) else np.asarray(part)[()]
    plain = Dataset(part.node, part.options())
    plain.iterator_class = PipelineIterator
    return plain
