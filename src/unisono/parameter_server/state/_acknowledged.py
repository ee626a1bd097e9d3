"""How far a server's log must reach: what was acknowledged is noted in a file of its own.

A log that ends early looks like one whose last change was cut off before it was answered. The note shows
which it was: it is written after the change and before the answer, and survives the process as the log does.

Tests: tests/unit/parameter_server/test_damage.py.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from unisono._types import Json
from unisono.parameter_server.state._checksums import checksum
from unisono.parameter_server.state._push import Array
from unisono.parameter_server.state._records import Record, boot_id, map_file

_MAGIC = b"UNPSACK2"
#: Magic, boot, number, updates, generation, checksum.
_NOTE = struct.Struct("<8s36sQQQQ")
#: Notes take turns at two places: one of them is complete at each moment.
_PLACE = 128


@dataclasses.dataclass(frozen=True)
class LogPosition:
    """How far a server's history is.

    Args:
        updates: pushes since the job began.
    """

    number: int = 0
    updates: int = 0
    generation: int = 0

    def after(self, kind: str, meta: dict[str, Json]) -> LogPosition:
        """Return the position behind one more change.

        >>> LogPosition(3, 2, 1).after("push", {})
        LogPosition(number=4, updates=3, generation=1)
        """
        updates = 0 if kind == "reset" else self.updates + (kind == "push")
        generation = meta["generation"] if kind == "generation" else self.generation
        return LogPosition(self.number + 1, updates, generation)


class AcknowledgedFile:
    """The file with the position of the last change that was acknowledged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes: Array | None = None
        self._boot = boot_id().encode()

    def note(self, position: LogPosition) -> None:
        """Note that a change is complete.

        Raises:
            OSError: the file is new, and the disk is full.
        """
        if self._bytes is None:
            self._bytes = map_file(self.path, 2 * _PLACE)
        fields = _NOTE.pack(
            _MAGIC, self._boot, position.number, position.updates, position.generation, 0
        )[:-8]  # fmt: skip
        note = fields + struct.pack("<Q", checksum(fields))
        at = _PLACE * (position.number % 2)
        self._bytes[at : at + len(note)] = np.frombuffer(note, np.uint8)

    def read(self) -> tuple[LogPosition, bool] | None:
        """Return the last position and whether it is of this boot; None without a complete note."""
        content = self.path.read_bytes() if self.path.exists() else b""
        found = []
        for at in (0, _PLACE):
            raw = content[at : at + _NOTE.size]
            if len(raw) == _NOTE.size and raw.startswith(_MAGIC):
                _, boot, *numbers, own = _NOTE.unpack(raw)
                if checksum(raw[:-8]) == own:
                    found.append(
                        (numbers[0], LogPosition(*numbers), boot.decode("ascii", "replace") == boot_id())
                    )
        return max(found)[1:] if found else None

    @property
    def is_empty(self) -> bool:
        """True where no note was completed: a new file consists of zeros; notes are copied to its begin."""
        content = self.path.read_bytes() if self.path.exists() else None
        return content is not None and len(content) in (0, 2 * _PLACE) and not any(content[_NOTE.size - 1 :])


def position_of(number: int, state: dict[str, Json], records: Sequence[Record]) -> LogPosition:
    """Return how far an image and the changes after it reach."""
    position = LogPosition(number, state["applied_count"], state["generation"])
    for _, kind, meta, _ in records:
        position = position.after(kind, meta)
    return position


def describe_loss(
    acknowledged: LogPosition | None, found: LogPosition, why: str, is_last: bool = True
) -> str:
    """Return the error for updates that are lost.

    Args:
        acknowledged: how far the server was; None where that is not known.
        found: how far what it has found, and can use, reaches.
        why: what is wrong, and where.
        is_last: whether no later update than `acknowledged` may have been there.
    """
    at_least = "" if is_last else "at least "
    if acknowledged is None:
        lost = "it is not known how many are lost"
    else:
        # Updates of an earlier job are none of these.
        kept = found.updates if found.generation == acknowledged.generation else 0
        count = max(0, acknowledged.updates - kept)
        lost = f"{at_least}{count} of {at_least}{acknowledged.updates} are lost"
    return (
        f"A parameter server must have all updates that it has acknowledged. Received: {lost} ({why}). "
        "Start the program again: its chief begins a new job, which continues from the program's last backup "
        "(`BackupAndRestore`, `Checkpoint`), or from the beginning where there is none."
    )
