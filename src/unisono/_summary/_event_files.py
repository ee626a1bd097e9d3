"""Event files that TensorBoard reads. This is the only file that imports the `tensorboard` package.

As in `tf.summary` of TensorFlow 2, every value is a tensor with the metadata of the plugin that shows it.
Source: https://github.com/tensorflow/tensorboard, `plugins/*/metadata.py`

Tests: tests/unit/test_summary.py.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from unisono._errors import ContextError, InvalidArgumentError, MissingPackageError
from unisono._system._object_store import StorePath, store_path
from unisono._types import ArrayLike

try:
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from PIL import Image
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.compat.tensorflow_stub.io import gfile
    from tensorboard.plugins.histogram import metadata as histograms
    from tensorboard.plugins.image import metadata as images
    from tensorboard.plugins.scalar import metadata as scalars
    from tensorboard.plugins.text import metadata as texts
    from tensorboard.summary.writer.record_writer import RecordWriter
    from tensorboard.util import tensor_util
except ImportError as error:
    raise MissingPackageError(
        "Summaries need the packages `tensorboard` and `pillow`. Received: "
        f"{type(error).__name__}: {error}. Write `pip install unisono[tensorboard]`."
    ) from error

_LOG = logging.getLogger("unisono")

#: Pillow's modes for 1, 2, 3 and 4 channels.
_PNG_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}


#: Makes the names of one process' files different: two may be created within a second.
_numbers = itertools.count()


def writer_of_records(file: BinaryIO) -> RecordWriter:
    """Return a writer of TFRecords into a file, with their lengths and checksums."""
    return RecordWriter(file)


class EventFile:
    """One file of events in a directory.

    It replaces `tensorboard`'s own `EventFileWriter`, which imports TensorFlow wherever that is installed
    (seconds, and hundreds of megabytes), and starts a thread.

    Args:
        logdir: the directory, also one in an object store; created where it is missing.
        max_queue: the number of buffered events at which they are written.
        flush_seconds: the age of the buffer, in seconds, at which the next event causes a write.
    """

    def __init__(self, logdir: str, max_queue: int, flush_seconds: float) -> None:
        self._logdir = logdir
        self._max_queue, self._flush_seconds = max_queue, flush_seconds
        self._lock = threading.Lock()
        self._pending: list[bytes] = []
        self._flushed_at = time.monotonic()
        self._is_open = True
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        name = f"{name}.{next(_numbers)}"
        try:
            store = store_path(logdir)
            if store is None:
                gfile.makedirs(logdir)
                self._file = gfile.GFile(os.path.join(logdir, name), "wb")
            else:
                # Only a `flush` and the age of the buffer cause a write, which uploads the whole file.
                self._max_queue, self._file = sys.maxsize, _ObjectFile(store / name)
        except OSError as error:
            raise InvalidArgumentError(
                "The directory of summaries must be one that can be made and written. Received: "
                f"{logdir!r} ({error.strerror or error}). Name another directory."
            ) from error
        self._append(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        self.flush()

    def add(self, kind: str, tag: str, step: int, data: ArrayLike, **options: int) -> None:
        """Write one value; safe to call from any thread."""
        metadata, encode = _KINDS[kind]
        tensor = tensor_util.make_tensor_proto(encode(data, **options))
        summary = summary_pb2.Summary()
        summary.value.add(tag=tag, metadata=metadata(), tensor=tensor)
        with self._lock:
            if not self._is_open:
                raise ContextError(
                    f"A summary writer must be open. Received: {tag!r} for the closed writer of "
                    f"{self._logdir!r}. Create a new one with `create_file_writer`."
                )
            self._append(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))
            is_late = time.monotonic() - self._flushed_at > self._flush_seconds
            if is_late or len(self._pending) >= self._max_queue:
                self._write_pending()

    def flush(self) -> None:
        """Write the buffered events; do nothing for a closed file."""
        with self._lock:
            if self._is_open:
                self._write_pending()

    def close(self) -> None:
        """Flush and close the file; do nothing if it is closed."""
        with self._lock:
            if self._is_open:
                self._write_pending()
                self._file.close()
                self._is_open = False

    def _append(self, event: event_pb2.Event) -> None:
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._pending.append(record.getvalue())

    def _write_pending(self) -> None:
        if self._pending:
            self._file.write(b"".join(self._pending))
            self._file.flush()
            self._pending.clear()
        self._flushed_at = time.monotonic()


class _ObjectFile:
    """A file in an object store: each `flush` writes the object anew, with all that was written so far.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: StorePath) -> None:
        self._path, self._content = path, io.BytesIO()
        self._is_behind = False
        path.write_bytes(b"")

    def write(self, content: bytes) -> None:
        self._content.write(content)
        self._is_behind = True

    def flush(self) -> None:
        try:
            self._path.write_bytes(self._content.getvalue())
            self._is_behind = False
        except OSError as error:
            # Training is worth more than its log, and the next one writes these events, too.
            _LOG.warning("Events for TensorBoard could not be written. %s", error)

    def close(self) -> None:
        if self._is_behind:
            self.flush()
        self._content.close()


def read_scalars(logdir: str) -> dict[int, dict[str, float]]:
    """Return the numbers that the event files of a directory hold, by step and tag.

    A record at the end of a file that is not whole yet, as its writer is at it, does not count, and nothing
    that follows a damaged one.
    """
    scalars: dict[int, list[tuple[float, str, float]]] = {}
    names = gfile.listdir(logdir) if gfile.isdir(logdir) else []
    for name in sorted(n for n in names if ".tfevents." in n):
        for event in _events(os.path.join(logdir, name)):
            for value in event.summary.value:
                number = _number(value)
                if number is not None:
                    scalars.setdefault(event.step, []).append((event.wall_time, value.tag, number))
    return {
        step: {tag: number for _, tag, number in sorted(scalars[step], key=lambda x: x[0])}
        for step in sorted(scalars)
    }


def _events(path: str) -> Iterator[event_pb2.Event]:
    """Return the events of a file: records of a length, its checksum, the event, its checksum."""
    with gfile.GFile(path, "rb") as file:
        content = file.read()
    at = 0
    while at + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        if at + 16 + length > len(content):
            return
        try:
            yield event_pb2.Event.FromString(content[at + 12 : at + 12 + length])
        except DecodeError as error:
            _LOG.warning("%s is damaged from byte %d on (%s): what follows is not read.", path, at, error)
            return
        at += 16 + length


def _number(value: summary_pb2.Summary.Value) -> float | None:
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor") or value.metadata.plugin_data.plugin_name not in ("scalars", ""):
        return None
    try:
        array = tensor_util.make_ndarray(value.tensor)
    except (TypeError, ValueError, ArithmeticError):
        # Of a dtype that there is not, or with fewer bytes than its shape says.
        return None
    return float(array) if array.ndim == 0 and array.dtype.kind in "fiub" else None


def histogram(data: ArrayLike, buckets: int = 30) -> npt.NDArray[np.float64]:
    """Count values in buckets of equal width, as TensorBoard's histogram plugin expects them.

    Args:
        data: real numbers, of any shape. Values that are not finite are left out.

    Returns:
        An array of shape `(buckets, 3)`: left edge, right edge, count. Where all values are equal,
        they are counted in the last bucket.

    >>> histogram(np.array([0.0, 1.0, 1.5, 2.0]), buckets=2).tolist()
    [[0.0, 1.0, 1.0], [1.0, 2.0, 3.0]]
    """
    values = np.asarray(data).astype(np.float64).ravel()
    values = values[np.isfinite(values)]
    if values.size == 0:
        return np.zeros((buckets, 3))
    low, high = values.min(), values.max()
    edges = np.linspace(low, high, buckets + 1)
    if low == high:
        counts = np.zeros(buckets)
        counts[-1] = values.size
    else:
        width = (high - low) / buckets
        index = np.minimum((values - low) // width, buckets - 1).astype(np.int64)
        counts = np.bincount(index, minlength=buckets).astype(np.float64)
    return np.stack([edges[:-1], edges[1:], counts], axis=1)


def pngs(data: ArrayLike, max_outputs: int = 3) -> npt.NDArray[np.object_]:
    """Encode images as PNG files, as TensorBoard's image plugin expects them.

    Args:
        data: images of shape `(k, height, width, channels)` with 1 to 4 channels; uint8, or floats from 0
            to 1, which are cut off there.
    """
    pixels = np.asarray(data)[:max_outputs]
    if pixels.dtype != np.uint8:
        # Scale by 255.5 and truncate: the rounding of `tf.image.convert_image_dtype`.
        pixels = np.clip(np.nan_to_num(pixels.astype(np.float32)) * 255.5, 0, 255).astype(np.uint8)
    _, height, width, channels = pixels.shape
    encoded = [str(width).encode(), str(height).encode()]
    for picture in pixels:
        file = io.BytesIO()
        Image.frombytes(_PNG_MODES[channels], (width, height), picture.tobytes()).save(file, "png")
        encoded.append(file.getvalue())
    return np.array(encoded, dtype=object)


def _scalar(data: ArrayLike) -> npt.NDArray[np.float32]:
    return np.asarray(data).astype(np.float32)


def _text(data: ArrayLike) -> npt.NDArray[np.object_]:
    return np.array(data, dtype=object)


def _plugin(module: ModuleType) -> Callable[[], summary_pb2.SummaryMetadata]:
    return lambda: module.create_summary_metadata(display_name=None, description=None)


def _keras_model() -> summary_pb2.SummaryMetadata:
    # The graph plugin draws a model's JSON, but has no function that creates this metadata.
    content = summary_pb2.SummaryMetadata.PluginData(plugin_name="graph_keras_model", content=b"1")
    return summary_pb2.SummaryMetadata(plugin_data=content)


#: For each kind of summary: the metadata of its plugin, and the encoder of its data.
_KINDS: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "scalar": (_plugin(scalars), _scalar),
    "histogram": (_plugin(histograms), histogram),
    "image": (_plugin(images), pngs),
    "text": (_plugin(texts), _text),
    "keras_model": (_keras_model, _text),
}
