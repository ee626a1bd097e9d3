"""The storage of `cache()`: memory, or one file that appears only when it is complete.

Tests: tests/unit/data/test_dataset_cache.py.
"""

from __future__ import annotations

import abc
import contextlib
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from unisono._system._files import rename_durably
from unisono._system._object_store import Place, StorePath, written_locally
from unisono.data._pipeline import _records
from unisono.data._pipeline._structure import Element, frozen


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
        """Drop all elements, except those of a complete file."""

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
        self._part: _PartialFile | None = None
        self._whole: _CompleteFile | None = None

    @property
    def size(self) -> int | None:
        with self._lock:
            whole = self._open_whole()
            return None if whole is None else len(whole.offsets)

    def get(self, position: int) -> tuple[Element] | None:
        with self._lock:
            source = self._open_whole() or self._part
            return None if source is None else source.get(position)

    def put(self, position: int, element: Element) -> None:
        with self._lock:
            if self._open_whole() is None:
                self._open_part().put(position, element)

    def finish(self, size: int) -> None:
        with self._lock:
            if self._open_whole() is None and len(self._open_part().offsets) == size:
                self._open_part().publish(self._path)
                self._part = None
                if isinstance(self._place, StorePath):
                    self._place.upload(Path(self._path))

    def clear(self) -> None:
        with self._lock:
            if self._part is not None:
                self._part.discard()
                self._part = None

    def fresh(self) -> Store:
        return FileStore(self._place)

    def _open_part(self) -> _PartialFile:
        if self._part is None:
            self._part = _PartialFile(self._path)
        return self._part

    def _open_whole(self) -> _CompleteFile | None:
        # Not checked once writing has started: another process may have published another order meanwhile.
        if self._whole is None and self._part is None and self._is_there():
            self._whole = _CompleteFile(self._path)
        return self._whole

    def _is_there(self) -> bool:
        """Whether the file is complete on this machine; one in a store is copied here."""
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


class _CompleteFile:
    """A complete file, open for reading."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "rb")  # noqa: SIM115  (closed with this object)
        self._close = weakref.finalize(self, self._file.close)
        self.offsets = _records.read_offsets(self._file, path)

    def get(self, position: int) -> tuple[Element] | None:
        if position >= len(self.offsets):
            return None
        return (_records.read(self._file, int(self.offsets[position])),)


class _PartialFile:
    """An incomplete file, removed unless it is published."""

    def __init__(self, path: str) -> None:
        folder, name = os.path.split(os.path.abspath(path))
        os.makedirs(folder, exist_ok=True)
        # In the folder of the file, because a rename is atomic only within one file system.
        handle, self._name = tempfile.mkstemp(prefix=f"{name}.", suffix=".part", dir=folder)
        self._file = os.fdopen(handle, "w+b")
        # Runs when the object is collected, or the program ends. A function, not a method: a callback that
        # refers to the object would keep it alive.
        self.discard = weakref.finalize(self, _close_and_remove, self._file, self._name)
        self.offsets: dict[int, int] = {}
        _records.begin(self._file)

    def get(self, position: int) -> tuple[Element] | None:
        if position not in self.offsets:
            return None
        return (_records.read(self._file, self.offsets[position]),)

    def put(self, position: int, element: Element) -> None:
        # Two iterators over one data set may both compute an element: the first copy stays.
        if position not in self.offsets:
            self.offsets[position] = _records.append(self._file, element)

    def publish(self, path: str) -> None:
        _records.end(self._file, [self.offsets[position] for position in range(len(self.offsets))])
        self._file.close()
        rename_durably(Path(self._name), Path(path).absolute())
        # The temporary name is gone: a finalizer that removes it would raise.
        self.discard.detach()


def _close_and_remove(file: IO[bytes], name: str) -> None:
    file.close()
    os.unlink(name)
