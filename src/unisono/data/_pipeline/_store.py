"""The storage of `cache()`: memory, or one file that appears only when it is complete.

The file has JSON headers and raw bytes; reading it executes nothing:

    magic line | element ... | offset of each element (int64) | number of elements | offset of the offsets |
    magic line

An element is the length of its header (uint64), the header, and the bytes of its components in sequence.

Tests: tests/unit/data/test_dataset_cache.py.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import functools
import json
import math
import os
import shutil
import struct
import tempfile
import threading
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

import numpy as np

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono._system._files import rename_durably
from unisono._system._json import UNREADABLE, parse_json
from unisono._system._object_store import Place, StorePath, written_locally
from unisono.data._pipeline._structure import Element, check_no_dataset, frozen, leaves, name_of

#: The structure of an element for JSON: None, "leaf", or a dict with the keys or the tuple's type and the
#: parts.
Tree: TypeAlias = "dict[str, Any] | Literal['leaf'] | None"

#: With the version of the format. At both ends: a file that was truncated or is still being written lacks the
#: second.
_MAGIC = b"unisono cache 1\n"
# Little-endian on every machine, like the offsets: a cache file may be shared by machines.
_LENGTH = struct.Struct("<Q")
_END = struct.Struct(f"<QQ{len(_MAGIC)}s")


class Store(abc.ABC):
    """Elements by position; complete once their number is known and all are stored."""

    @property
    @abc.abstractmethod
    def size(self) -> int | None:
        """Number of elements, None until complete."""

    @abc.abstractmethod
    def get(self, position: int) -> tuple[Element] | None:
        """Return the element in a tuple, because it may itself be None; None where it is not stored."""

    @abc.abstractmethod
    def put(self, position: int, element: Element) -> None:
        """Store an element."""

    @abc.abstractmethod
    def finish(self, size: int) -> None:
        """Make the store complete, if it holds `size` elements."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Drop all elements that are not in a complete file."""

    @abc.abstractmethod
    def fresh(self) -> Store:
        """Return an empty store of the same kind, for the same file if it has one."""


class MemoryStore(Store):
    """Stores elements in memory.

    >>> store = MemoryStore()
    >>> store.put(0, "a")
    >>> store.finish(1)
    >>> store.get(0), store.size
    (('a',), 1)
    """

    def __init__(self) -> None:
        self._elements: dict[int, tuple[Element]] = {}
        self._size: int | None = None

    @property
    def size(self) -> int | None:
        return self._size

    def get(self, position: int) -> tuple[Element] | None:
        return self._elements.get(position)

    def put(self, position: int, element: Element) -> None:
        # Read-only: a caller that wrote into an element would change it in all later passes.
        self._elements[position] = (frozen(element),)

    def finish(self, size: int) -> None:
        if len(self._elements) == size:
            self._size = size

    def clear(self) -> None:
        self._elements = {}
        self._size = None

    def fresh(self) -> Store:
        return MemoryStore()


class FileStore(Store):
    """Stores elements in one file, written under a temporary name, synced, and renamed when complete.

    Args:
        path: The file. If it exists it is read, and the pipeline before the cache does not run. Of one in an
            object store there is a copy on this machine as long as this object is used.
    """

    def __init__(self, path: Place) -> None:
        self._place, self._path = path, str(path)
        if isinstance(path, StorePath):
            folder = tempfile.mkdtemp(prefix="unisono-")
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            self._path = os.path.join(folder, path.name)
        # Reader threads share the position in the file.
        self._lock = threading.Lock()
        self._file: _PartialFile | _CompleteFile | None = None

    @property
    def size(self) -> int | None:
        with self._lock:
            file = self._opened()
            return len(file.offsets) if isinstance(file, _CompleteFile) else None

    def get(self, position: int) -> tuple[Element] | None:
        with self._lock:
            file = self._opened()
            return None if file is None else file.get(position)

    def put(self, position: int, element: Element) -> None:
        with self._lock:
            self._file = self._opened() or _PartialFile(self._path)
            if isinstance(self._file, _PartialFile):
                self._file.put(position, element)

    def finish(self, size: int) -> None:
        with self._lock:
            file = self._opened() or _PartialFile(self._path)
            if isinstance(file, _PartialFile) and len(file.offsets) == size:
                file.publish(self._path)
                self._file = None
                if isinstance(self._place, StorePath):
                    self._place.upload(Path(self._path))

    def clear(self) -> None:
        with self._lock:
            if isinstance(self._file, _PartialFile):
                self._file.discard()
                self._file = None

    def fresh(self) -> Store:
        return FileStore(self._place)

    def _opened(self) -> _PartialFile | _CompleteFile | None:
        # Not looked for once writing has started: another process may have published another order meanwhile.
        if self._file is None and self._is_there():
            self._file = _CompleteFile(self._path)
        return self._file

    def _is_there(self) -> bool:
        """True if the file is complete on this machine; an object of a store is copied here."""
        if not os.path.exists(self._path) and isinstance(self._place, StorePath):
            with contextlib.suppress(FileNotFoundError):
                self._place.download(Path(self._path))
        return os.path.exists(self._path)


def write_all(place: Place, elements: Iterable[Element]) -> None:
    """Write elements to one file, which replaces an existing one when it is complete."""
    if isinstance(place, StorePath):
        with written_locally(place) as aside:
            write_all(aside, elements)
        return
    path = str(place)
    part = _PartialFile(path)
    try:
        for position, element in enumerate(elements):
            part.put(position, element)
        part.publish(path)
    finally:
        # Does nothing after `publish`, which detaches it.
        part.discard()


class _ElementFile:
    """An open file, and where in it elements are."""

    def __init__(self, file: IO[bytes], offsets: Any) -> None:
        self._file, self.offsets = file, offsets

    def get(self, position: int) -> tuple[Element] | None:
        try:
            offset = int(self.offsets[position])
        except LookupError:
            return None
        try:
            self._file.seek(offset)
            return (_read(self._file),)
        except UNREADABLE as error:
            raise InvalidArgumentError(
                "The file of cache(filename), or of save(path), must hold elements as Unisono writes them. "
                f"Received: {self._file.name!r}, whose element {position} cannot be read "
                f"({type(error).__name__}: {error}). Delete the file, or pass another name."
            ) from error


class _CompleteFile(_ElementFile):
    """A complete file, open for reading."""

    def __init__(self, path: str) -> None:
        file = open(path, "rb")  # noqa: SIM115  (closed with this object)
        weakref.finalize(self, file.close)
        super().__init__(file, _read_offsets(file, path))


class _PartialFile(_ElementFile):
    """An incomplete file, removed unless it is published."""

    def __init__(self, path: str) -> None:
        folder, name = os.path.split(os.path.abspath(path))
        os.makedirs(folder, exist_ok=True)
        # In the folder of the file, because a rename is atomic only within one file system.
        handle, self._name = tempfile.mkstemp(prefix=f"{name}.", suffix=".part", dir=folder)
        super().__init__(os.fdopen(handle, "w+b"), {})
        # Runs when the object is collected, or the program ends. A function, not a method: a callback that
        # refers to the object would keep it alive.
        self.discard = weakref.finalize(self, _close_and_remove, self._file, self._name)
        self._file.write(_MAGIC)

    def put(self, position: int, element: Element) -> None:
        # Two iterators over one data set may both compute an element: the first copy stays.
        if position not in self.offsets:
            end = self._file.seek(0, os.SEEK_END)
            _write(self._file, element)
            self.offsets[position] = end

    def publish(self, path: str) -> None:
        # At the end: the number of elements is often unknown until the last one was written.
        start = self._file.seek(0, os.SEEK_END)
        offsets = [self.offsets[position] for position in range(len(self.offsets))]
        self._file.write(np.array(offsets, "<i8").tobytes() + _END.pack(len(offsets), start, _MAGIC))
        self._file.close()
        rename_durably(Path(self._name), Path(path).absolute())
        # The temporary name is gone: a finalizer that removes it would raise.
        self.discard.detach()


def _close_and_remove(file: IO[bytes], name: str) -> None:
    file.close()
    os.unlink(name)


def _read_offsets(file: IO[bytes], path: str) -> np.ndarray:
    length = file.seek(0, os.SEEK_END)
    if length >= _END.size:
        file.seek(length - _END.size)
        count, start, magic = _END.unpack(file.read(_END.size))
        # The arithmetic must agree, too: a truncated or concatenated file may end in the magic line by
        # chance.
        if magic == _MAGIC and start + 8 * count + _END.size == length:
            file.seek(start)
            return np.frombuffer(file.read(8 * count), "<i8")
    raise InvalidArgumentError(
        "The file of cache(filename) must be a complete cache, or not exist. "
        f"Received: filename={path!r}, {length} bytes that are not a complete cache. "
        "Delete the file, or pass another name."
    )


def _write(file: IO[bytes], element: Element) -> None:
    parts: list[bytes] = []
    described = {"leaves": [_leaf_header(*leaf, parts) for leaf in leaves(element)], "tree": _tree(element)}
    header = json.dumps(described).encode()
    file.writelines([_LENGTH.pack(len(header)), header, *parts])


def _read(file: IO[bytes]) -> Element:
    (length,) = _LENGTH.unpack(_exactly(file, _LENGTH.size))
    header = parse_json(_exactly(file, length))
    return _build(header["tree"], [_read_leaf(file, leaf) for leaf in header["leaves"]])


def _exactly(file: IO[bytes], size: int) -> bytes:
    """Return the next bytes of a file; more than it has are not asked for, which would take memory."""
    if not 0 <= size <= os.fstat(file.fileno()).st_size:
        raise ValueError(f"a part of {size} bytes, in a file that has fewer")
    data = file.read(size)
    if len(data) < size:
        raise ValueError("the file ends within it")
    return data


def _tree(element: Element) -> Tree:
    if isinstance(element, tuple):
        kind = [type(element).__name__, *getattr(element, "_fields", ())]
        return {"tuple": kind, "parts": [_tree(part) for part in element]}
    if isinstance(element, Mapping):
        return {"keys": list(element), "parts": [_tree(part) for part in element.values()]}
    return None if element is None else "leaf"


def _build(tree: Tree, parts: list[Any]) -> Element:
    if tree is None:
        return None
    if tree == "leaf":
        return parts.pop(0)
    built = [_build(part, parts) for part in tree["parts"]]
    if "keys" in tree:
        if len({type(key) for key in tree["keys"]}) > 1:
            raise TypeError("the keys of a dict are of several types")
        return dict(zip(tree["keys"], built, strict=True))
    name, *fields = tree["tuple"]
    return _named(name, tuple(fields))._make(built) if fields else tuple(built)


@functools.cache
def _named(name: str, fields: tuple[str, ...]) -> Any:
    # Cached, so that elements of one file have one class; the user's own class is not in the file.
    return collections.namedtuple(name, fields)


def _leaf_header(path: tuple[Any, ...], leaf: Any, parts: list[bytes]) -> dict[str, Any]:
    check_no_dataset(leaf, path, "written to a file")
    # As an object, because NumPy's own byte strings lose trailing zero bytes.
    array = np.asarray(leaf, object) if isinstance(leaf, bytes) else np.asarray(leaf)
    if array.dtype == object:
        strings = array.ravel().tolist()
        parts.extend(strings)
        return {"strings": [len(string) for string in strings], "shape": array.shape}
    # bfloat16 and its like: NumPy names them `V`, which says only how many bytes they have when read back.
    if array.dtype.kind == "V":
        raise InvalidTypeError(
            "The components that cache(filename) writes must have numpy's own dtypes. "
            f"Received: {name_of(path)} with dtype {array.dtype}. "
            "Write cache() to keep it in memory, or cast it with map()."
        )
    parts.append(array.tobytes())
    return {"dtype": array.dtype.str, "shape": array.shape}


def _read_leaf(file: IO[bytes], header: Mapping[str, Any]) -> np.ndarray | np.generic | bytes:
    shape = tuple(header["shape"])
    if "strings" in header:
        array = np.empty(len(header["strings"]), object)
        for index, length in enumerate(header["strings"]):
            array[index] = _exactly(file, length)
    else:
        dtype = np.dtype(header["dtype"])
        array = np.frombuffer(_exactly(file, dtype.itemsize * math.prod(shape)), dtype)
    # `[()]` makes a scalar of an array of rank 0, and leaves other arrays as they are.
    return array.reshape(shape)[()]
