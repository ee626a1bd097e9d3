"""Memory that two processes of one user share, for the large arrays of the messages between them.

The sender copies arrays into a segment, and the receiver reads them there: no other copy is made. A segment
is a file in memory without a name. Its first byte says whether the receiver still uses it: the sender sets it
before it sends the message, and the receiver resets it when the last array is gone. Until then the sender
does not touch the segment, so that no array is ever seen half written.

Tests: tests/unit/rpc/test_local_channel.py.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Any

import numpy as np

#: True if the system has files in memory that cannot be cut short under a reader, and wakes threads by files.
IS_AVAILABLE = hasattr(os, "memfd_create") and hasattr(fcntl, "F_SEAL_SHRINK") and hasattr(os, "eventfd")

#: Where the arrays of a segment begin.
FIRST = 4096
#: How many segments a sender has on a connection at most, and their bytes: twice the bytes in flight, or
#: three of the largest message.
SLOTS = 16
_BYTES = 512 << 20

_Bytes = np.ndarray[Any, Any]


def rounded(size: int) -> int:
    """Return the size of a segment for so many bytes, at most an eighth larger.

    >>> rounded(10), rounded(70_000), rounded(2_000_000)
    (65536, 73728, 2097152)
    """
    step = 1 << max(12, (size - 1).bit_length() - 4)
    return max(1 << 16, -(-size // step) * step)


class Segment:
    """Memory of a sender.

    Raises:
        OSError: the system has no room.
    """

    def __init__(self, slot: int, size: int) -> None:
        self.slot, self.size = slot, size
        #: Until the receiver has it; it is closed then.
        self.descriptor: int | None = os.memfd_create("unisono", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size)
            # A reader of a file that becomes shorter would be killed.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
            self.memory: _Bytes = np.frombuffer(mmap.mmap(self.descriptor, size), np.uint8)
        except BaseException:
            self.close()
            raise

    @property
    def is_free(self) -> bool:
        """True if the receiver uses it no more."""
        return not self.memory[0]

    def close(self) -> None:
        """Close the file; the memory lives as long as it is used."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class OutgoingSegments:
    """The segments of a sender on one connection."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}

    def acquire(self, nbytes: int) -> Segment | None:
        """Return a segment that is marked as used; None where the receiver holds too many."""
        size = rounded(FIRST + nbytes)
        free = [s for s in self._segments.values() if s.is_free]
        fitting = [s for s in free if s.size >= size]
        segment = min(fitting, key=lambda s: s.size) if fitting else self._made(size, free)
        if segment is not None:
            segment.memory[0] = 1
        return segment

    def _made(self, size: int, free: list[Segment]) -> Segment | None:
        bound = max(_BYTES, 3 * size)
        # Segments that are too small make room.
        while free and (len(self._segments) == SLOTS or self._total() + size > bound):
            self._drop(free.pop().slot)
        if len(self._segments) == SLOTS or self._total() + size > bound:
            return None
        slot = next(i for i in range(SLOTS) if i not in self._segments)
        try:
            made = self._segments[slot] = Segment(slot, size)
        except OSError:
            return None
        return made

    def _total(self) -> int:
        return sum(s.size for s in self._segments.values())

    def _drop(self, slot: int) -> None:
        self._segments.pop(slot).close()

    def close(self) -> None:
        """Give the segments up; the receiver's arrays live on."""
        for slot in list(self._segments):
            self._drop(slot)


class _SegmentRelease:
    """Lives as long as one of the arrays of a message; then the sender may use the segment again."""

    def __init__(self, memory: _Bytes) -> None:
        self._memory = memory

    def __del__(self) -> None:
        self._memory[0] = 0


class _SegmentBytes(np.ndarray[Any, Any]):
    """The bytes of a segment.

    A class of its own: NumPy replaces the base of an array by the base's base where that is a plain array,
    and would drop what is between them, which is `_MessageBytes`.
    """


class _MessageBytes(np.ndarray[Any, Any]):
    """The bytes of a segment as one message uses them."""

    release: object = None


class IncomingSegments:
    """The segments of a receiver on one connection."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._memories: dict[int, _Bytes] = {}

    def adopt(self, slot: int, descriptor: int) -> None:
        """Map a segment that the sender has made, in place of an earlier one of its number.

        Raises:
            ValueError: it is too large, or no file in memory that keeps its size.
            OSError: it cannot be mapped.
        """
        if slot >= SLOTS:
            raise ValueError(f"A segment's number must be below {SLOTS}. Received: {slot}.")
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("A segment must keep its size. Received: a file that may become shorter.")
        size = os.fstat(descriptor).st_size
        if not FIRST < size <= 2 * (self._limit + (1 << 16)):
            raise ValueError(f"A segment must hold one message. Received: {size} bytes.")
        self._memories[slot] = np.frombuffer(mmap.mmap(descriptor, size), np.uint8).view(_SegmentBytes)

    def borrow(self, slot: int, places: list[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of arrays; when the last of them is gone, the sender may write there again."""
        memory = self._memories.get(slot)
        if memory is None:
            raise ValueError(f"A message must name a segment that was sent. Received: {slot}.")
        whole = memory.view(_MessageBytes)
        whole.release = _SegmentRelease(memory)
        # Parts of one view, which lives as long as any of them.
        view, borrowed = memoryview(whole.data), []
        for begin, length in places:
            if begin < FIRST or begin + length > len(memory):
                raise ValueError(
                    f"An array must lie within its segment of {len(memory)} bytes. Received: {length} from "
                    f"{begin} on."
                )
            borrowed.append(view[begin : begin + length])
        return borrowed

    def close(self) -> None:
        """Give the segments up; arrays in them live on."""
        self._memories.clear()
