"""Names of `tf.io`, for editors and type checkers; `python -m tools.stubs` makes this file."""

import builtins as _b
from typing import Any as _Any
from unisono.tf.adapters._records import (
    FixedLenFeature as FixedLenFeature,
    FixedLenSequenceFeature as FixedLenSequenceFeature,
    TFRecordWriter as TFRecordWriter,
)
from unisono.tf.io import (
    gfile as gfile,
)

def decode_csv(records: _Any, record_defaults: _Any, field_delim: _b.str = ..., use_quote_delim: _b.bool = ..., na_value: _b.str = ..., select_cols: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return the columns of lines of CSV, each an array of the lines' shape."""
def decode_image(contents: _b.bytes, channels: _b.int = ..., name: _b.str | None = ..., **kwargs: _Any) -> _Any:
    """Return the pixels of an image file: an array of shape [height, width, channels], uint8."""
def decode_jpeg(contents: _b.bytes, channels: _b.int = ..., name: _b.str | None = ..., **kwargs: _Any) -> _Any:
    """Return the pixels of an image file: an array of shape [height, width, channels], uint8."""
def decode_png(contents: _b.bytes, channels: _b.int = ..., name: _b.str | None = ..., **kwargs: _Any) -> _Any:
    """Return the pixels of an image file: an array of shape [height, width, channels], uint8."""
def decode_raw(input_bytes: _Any, out_type: _Any, little_endian: _b.bool = ..., name: _b.str | None = ...) -> _Any:
    """Return bytes as numbers, in `Dataset.map`."""
def encode_jpeg(image: _Any, format: _b.str = ..., quality: _b.int = ..., name: _b.str | None = ..., **kwargs: _Any) -> _Any:
    """Return a JPEG file of pixels of shape [height, width, channels], uint8, as a tensor of bytes."""
def encode_png(image: _Any, compression: _b.int = ..., name: _b.str | None = ...) -> _Any:
    """Return a PNG file of pixels of shape [height, width, channels], as a tensor of bytes."""
def parse_example(serialized: _Any, features: _Any, name: _b.str | None = ...) -> _Any:
    """Return the features of a batch of records, as NumPy arrays by name; in `Dataset.map`."""
def parse_single_example(serialized: _Any, features: _Any, name: _b.str | None = ...) -> _Any:
    """Return the features of a record, as NumPy arrays by name; in `Dataset.map`."""
def read_file(filename: _Any, name: _b.str | None = ...) -> _Any:
    """Return what a file holds; in datasets, and outside of functions."""
def write_file(filename: _Any, contents: _b.bytes | _b.str, name: _b.str | None = ...) -> _Any:
    """Write a file, and make the directories that it lies in."""
