"""Where a server notes its changes before it applies them: nowhere, or in files that survive the process.

The files are a log, two images, tables, and a note of how far they must reach.

Tests: tests/unit/parameter_server/test_store.py, tests/unit/parameter_server/test_durable.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from unisono._errors import CheckpointError, ClusterError
from unisono._system._files import replace_file
from unisono._types import Json
from unisono.parameter_server.state._acknowledged import AcknowledgedFile, LogPosition
from unisono.parameter_server.state._container import Container, ImageFile, read_container
from unisono.parameter_server.state._push import Array
from unisono.parameter_server.state._records import Record, RecordFile, boot_id, map_file, read_records
from unisono.parameter_server.state._variables import TABLE, StoredSpec
from unisono.rpc._frames import ALIGNMENT, aligned

#: The size of the log: for a model of 0.8 MB an image is written every 20 pushes.
LOG_BYTES = 16 << 20
#: The smallest size.
_LEAST = 1 << 20
#: The log has room for at least so many pushes as large as the largest. Not for other changes: they are few,
#: and the one that creates a model with its slots has three times the bytes of a push with Adam. Memory that
#: was never used before is costly: 80 MB of log took 0.17 s the first time, and 0.01 s from then on (a
#: virtual machine with 2 cores, 2026-11-22).
_CHANGES = 8
#: Arrays of so many bytes are copied to where programs read them.
_LARGE = 1 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class TableMemory:
    """Where a table lies.

    Args:
        rows: of the variable's shape and dtype.
        checksums: one for each row; None where they need none.
    """

    rows: Array
    checksums: Array | None = None
    is_filled: bool = False


class Journal:
    """Where changes are noted before they are applied.

    This one keeps nothing: what is not in a snapshot is lost with the process.
    """

    def __init__(self) -> None:
        self._scratch = np.empty(0, np.uint8)

    def begin(self, nbytes: int, recurs: bool = False) -> None:
        """Make room for a change, whose arrays have so many bytes; the state is complete at this moment."""

    def stage(self, arrays: Sequence[Array]) -> list[Array]:
        """Take the next arrays of a change; return them as programs read them without a copy of their own."""
        size = ALIGNMENT + sum(aligned(a.nbytes) for a in arrays if a.nbytes >= _LARGE)
        if size > self._scratch.nbytes:
            self._scratch = np.empty(size, np.uint8)
        begin = -self._scratch.ctypes.data % ALIGNMENT
        staged = []
        for array in arrays:
            if array.nbytes < _LARGE:
                staged.append(array)
                continue
            # JAX copies an unaligned array into new pages: 52 ms for 80 MB instead of 18 (2026-11-22).
            place = self._scratch[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
            np.copyto(place, array)
            staged.append(place)
            begin += aligned(array.nbytes)
        return staged

    def commit(self, kind: str, meta: dict[str, Json]) -> None:
        """Complete a change: it is not lost from here on."""

    def abort(self) -> None:
        """Forget what was staged."""

    def table(self, key: str, spec: StoredSpec) -> TableMemory:
        """Return memory for a table, of zeros, or with its rows."""
        return TableMemory(np.zeros(spec.shape, spec.dtype))

    def keep_program(self, digest: str, blob: bytes) -> None:
        """Keep a program."""


class FileJournal(Journal):
    """Notes changes in files that survive the process.

    Args:
        log_bytes: the size of a file of the log; 0 keeps no log.
    """

    def __init__(self, directory: Path, log_bytes: int) -> None:
        super().__init__()
        self.directory = directory
        #: How far the history is.
        self.position = LogPosition()
        self.is_replaying = False
        self._log_bytes = log_bytes
        self._images = [ImageFile(directory / f"image-{i}") for i in range(2)]
        #: Which image is written next.
        self._turn = 0
        self._log = directory / "log"
        self._records = RecordFile(self._log)
        #: How far the history is that a restart must find.
        self.acknowledged = AcknowledgedFile(directory / "acknowledged")
        #: The programs whose files are complete.
        self.kept_programs: set[str] = set()
        #: Returns the state at this moment; set by the server.
        self.state = lambda: ({}, [])  # type: ignore[var-annotated]

    @property
    def has_log(self) -> bool:
        """Whether changes are logged."""
        return self._log_bytes > 0

    # what the store calls

    def begin(self, nbytes: int, recurs: bool = False) -> None:
        """Make room for a change; the state must be complete at this moment."""
        if self.has_log and not self.is_replaying and not self._records.has_room(nbytes):
            self.begin_log((_CHANGES if recurs else 1) * aligned(nbytes) + _LEAST)

    def stage(self, arrays: Sequence[Array]) -> list[Array]:
        """Copy arrays to the log, and return them there."""
        if not self.has_log or self.is_replaying:
            return super().stage(arrays)
        return self._records.stage(arrays)

    def commit(self, kind: str, meta: dict[str, Json]) -> None:
        """Complete a change: a process that is killed from here on does not lose it."""
        if not self.is_replaying:
            if self.has_log:
                self._records.commit(kind, meta)
            self.position = self.position.after(kind, meta)
            if self.has_log:
                self.acknowledged.note(self.position)

    def abort(self) -> None:
        """Forget what was staged."""
        if self.has_log and not self.is_replaying:
            self._records.abort()

    def table(self, key: str, spec: StoredSpec) -> TableMemory:
        """Return the rows of a table and their checksums, in a mapped file where there is a log.

        Raises:
            CheckpointError: the file of a table that the log speaks of is not there.
        """
        if not self.has_log:
            return super().table(key, spec)
        path = self.directory / f"table-{key}"
        begin = aligned(spec.nbytes)
        size = begin + 4 * spec.shape[0]
        if self.is_replaying and (not path.exists() or path.stat().st_size < size):
            raise CheckpointError(f"A table's rows must be there. Received: no {path} of {size} bytes.")
        memory = map_file(path, size)
        rows = memory[: spec.nbytes].view(spec.dtype).reshape(spec.shape)
        return TableMemory(rows, memory[begin:size].view(np.uint32), self.is_replaying)

    def keep_program(self, digest: str, blob: bytes) -> None:
        """Write a program to a file."""
        path = self.directory / f"program-{digest}"
        # Not whether there is a file: it may be damaged.
        if digest not in self.kept_programs:
            replace_file(path, blob, durable=True)
            self.kept_programs.add(digest)

    # files

    def begin_log(self, size: int = _LEAST) -> None:
        """Write an image of the present state, and begin the log after it.

        Raises:
            ClusterError: there is no room; the image and the log that were there remain.
        """
        if not self.has_log:
            return
        try:
            # Not in a thread: while it reads the values, an update needs new memory for them.
            state, arrays = self.state()
            # The first note is there before the first image: files without one are not complete.
            self.acknowledged.note(self.position)
            self._images[self._turn].write(self.position.number, state, arrays)
            # From here on the log before is not needed, nor the other image.
            self._records.begin(max(size, self._log_bytes), self.position.number + 1)
        except OSError as error:
            raise ClusterError(
                f"A server's log needs room in {self.directory}. Received: {error}. Free space; the changes "
                "until now are kept."
            ) from error
        self._turn = 1 - self._turn
        tables = {v["number"] for v in state["variables"] if v["kind"] == TABLE}

        def is_kept(key: str) -> bool:
            lineage, _, number = key.rpartition("-")
            # A table may just be made, and not be part of the state yet.
            return lineage == state["lineage"] and (int(number) in tables or int(number) >= state["next"])

        self.sweep_tables(is_kept)

    def read_image(self) -> Container | None:
        """Return the newest complete image of this boot, or None."""
        found = []
        for turn, image in enumerate(self._images):
            try:
                container = read_container(image.path)
            except (CheckpointError, FileNotFoundError):
                continue
            if container.boot == boot_id():
                found.append((container.number, turn, container))
        if not found or not self.has_log:
            return None
        _, turn, container = max(found, key=lambda f: f[0])
        # The other one is written over first.
        self._turn = 1 - turn
        return container

    @property
    def last_number(self) -> int:
        """The highest number of an image, or of a change of the log, that can be read; 0 for none."""
        numbers = [0, *(record[0] for record in read_records(self._log)[0])]
        for image in self._images:
            with contextlib.suppress(CheckpointError, FileNotFoundError):
                numbers.append(read_container(image.path).number)
        return max(numbers)

    def changes(self, after: int) -> tuple[list[Record], str]:
        """Return the changes of the log that follow one of them, and why there are no more."""
        records, why = read_records(self._log)
        following = [record for record in records if record[0] > after]
        if following and following[0][0] > after + 1:
            return [], f"{self._log} begins with change {following[0][0]}, behind the image of change {after}"
        return following, why

    @property
    def has_files(self) -> bool:
        """Whether a log was kept in the directory."""
        return any(path.exists() for path in self._files)

    @property
    def is_new(self) -> bool:
        """True where a server was killed before it had written its first note."""
        others = [path for path in self._files if path != self.acknowledged.path]
        return self.acknowledged.is_empty and not any(path.exists() for path in others)

    @property
    def _files(self) -> list[Path]:
        return [self._log, self.acknowledged.path, *(image.path for image in self._images)]

    def sweep_tables(self, is_kept: Callable[[str], bool]) -> None:
        """Remove the files of tables that no longer exist."""
        for path in self.directory.glob("table-*"):
            if not is_kept(path.name.removeprefix("table-")):
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the log and its images."""
        for path in self._files:
            path.unlink(missing_ok=True)
