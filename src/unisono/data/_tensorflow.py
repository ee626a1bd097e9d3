"""Data sets under TensorFlow's names: loops with other elements, and what `tensorflow_datasets` has prepared.

Tests: tests/unit/tf/test_elements.py and test_datasets.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax

from unisono._errors import InvalidArgumentError, UnsupportedError
from unisono.data import _build
from unisono.data._dataset import Dataset
from unisono.data._iterator import DistributedIterator
from unisono.data._pipeline._plan import PipelineIterator
from unisono.data._pipeline._structure import TensorSpec
from unisono.data._readers import FilePart, TextLineDataset, TFRecordDataset, TFRecordSource
from unisono.data._signature import conform

__all__ = ["TFRecordDataset", "TextLineDataset", "ViewIterator", "as_plain", "read"]

#: The default number of files that `tensorflow_datasets` reads in turn.
_FILES_IN_TURN = 16


class ViewIterator(PipelineIterator):
    """The iterator of a loop that gives components in another form, with TensorFlow 1's methods."""

    #: From a component to that form; a subclass has it.
    view: Callable[[Any], Any]

    def __next__(self) -> Any:
        return jax.tree.map(self.view, super().__next__())

    get_next: Any = DistributedIterator.get_next
    get_next_as_optional: Any = DistributedIterator.get_next_as_optional


def as_plain(dataset: Dataset) -> Dataset:
    """Return a data set whose loops and functions get the arrays of NumPy themselves."""
    return Dataset._of(dataset)


def read(
    builder: Any, split: Any, decoders: Any = None, read_config: Any = None, shuffle_files: bool = False
) -> Dataset:
    """Return the data set of a split of a prepared builder of `tensorflow_datasets`.

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
    return Dataset(_build.mapped(records._node, decode, threads, signature), read_config.options)


def _records(builder: Any, split: Any, parts: Any, config: Any) -> Dataset:
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
