"""A direct connection between two processes of one user: messages on a socket in a file, arrays beside it.

It runs beside a connection of ZeroMQ, which says whether the other process is there and answers heartbeats.
A message through ZeroMQ wakes three threads, and one here: a thread writes to the socket itself, and the
kernel wakes the reader. Large arrays lie in memory that both processes share (`_shared_memory`). With
both, an MLP of 0.8 MB trains at 460 steps/s instead of 365, with 3.4 ms of CPU time a step instead of 4.4 (2
workers, 1 server, 2 cores, 2026-11-22).

A message is: magic `UNPL`, number of its segment u8 (255 for none), whether the segment's file comes with the
message u8, 0 u16, number of parts u32, bytes of the parts that follow u64; for each part its length and
where it begins in the segment, u64 each, 0 for a part that follows; then these parts.
"""

from __future__ import annotations

import array
import collections
import contextlib
import errno
import os
import socket
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from unisono.rpc._frames import MAX_ARRAYS, MAX_RANK, Part, aligned
from unisono.rpc._transport import _shared_memory as shared

#: Parts of this size lie in shared memory: smaller ones cost less in the message itself.
SHARED_FROM = 1 << 15

_MAGIC = b"UNPL"
_PREFIX = struct.Struct("<4sBBHIQ")
_PLACE = struct.Struct("<QQ")
_NO_SEGMENT = 255
#: Bytes of one call that receives, for which a connection has memory, and of the kernel's buffers.
_PIECE = 1 << 16
_BUFFER = 4 << 20
_ANCILLARY = socket.CMSG_SPACE(4 * shared.SLOTS) if hasattr(socket, "CMSG_SPACE") else 0
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
#: Parts that follow, besides the arrays: header and `meta`.
_BESIDE = (2 + 8 * (MAX_RANK + 1)) * MAX_ARRAYS + (1 << 21)


class ChannelError(Exception):
    """The connection has ended, or the other end has sent what is no message."""


class NoFilesError(ChannelError):
    """This process could not take the file of a segment: the connection ends here, not at the other end."""

    def __init__(self) -> None:
        super().__init__("this process may not open more files, see `ulimit -n`")


class LocalChannel:
    """One end of a connection; may be used by several threads."""

    def __init__(self, connected: socket.socket, limit: int) -> None:
        connected.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connected.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
        self._socket, self._limit = connected, limit
        self.descriptor = connected.fileno()
        self._lock = threading.RLock()
        self._outgoing, self._incoming = shared.OutgoingSegments(), shared.IncomingSegments(limit)
        #: Messages for which the kernel had no room, each with the file of its segment.
        self._backlog: collections.deque[tuple[memoryview, shared.Segment | None]] = collections.deque()
        #: Bytes that wait.
        self.waiting = 0
        # Kept: `recv` allocates as much as it asks for, which took 30 of the 330 µs of a call (2026-11-22).
        self._piece = memoryview(bytearray(_PIECE))
        # While one thread receives, another may close: the number of the socket may be another file's then.
        self._receiving = threading.RLock()
        self._received = bytearray()
        self._needed = _PREFIX.size
        self._descriptors: collections.deque[int] = collections.deque()
        self._is_closed = False

    # --- sending

    def send(self, parts: Sequence[Part]) -> bool:
        """Send a message; return whether all of it is on its way. Else `flush` goes on, once there is room.

        The parts may change as soon as this returns. What is sent on a connection that has ended is dropped.
        """
        with self._lock:
            if self._is_closed:
                return True
            data, segment = self._packed(parts)
            self._backlog.append((memoryview(data), segment))
            self.waiting += len(data)
            # Where others wait already, who has sent them flushes.
            return len(self._backlog) == 1 and self.flush()

    def _packed(self, parts: Sequence[Part]) -> tuple[bytes, shared.Segment | None]:
        """Return a message, and its segment where the receiver does not have that yet."""
        sizes = [len(part) for part in parts]
        room = sum([aligned(size) for size in sizes if size >= SHARED_FROM])
        segment = self._outgoing.acquire(room) if room else None
        places, inline, at = [], [], shared.FIRST
        for part, size in zip(parts, sizes, strict=True):
            if segment is not None and size >= SHARED_FROM:
                # Not by a memoryview, which copies with the interpreter's lock.
                np.copyto(segment.memory[at : at + size], np.frombuffer(part, np.uint8))
                places.append(_PLACE.pack(size, at))
                at += aligned(size)
            else:
                places.append(_PLACE.pack(size, 0))
                inline.append(part)
        is_new = segment is not None and segment.descriptor is not None
        slot = _NO_SEGMENT if segment is None else segment.slot
        prefix = _PREFIX.pack(_MAGIC, slot, is_new, 0, len(parts), sum(map(len, inline)))
        return b"".join([prefix, *places, *inline]), segment if is_new else None

    def flush(self) -> bool:
        """Send what waits; return whether nothing waits any more."""
        with self._lock:
            while self._backlog and not self._is_closed:
                data, segment = self._backlog[0]
                try:
                    sent = self._sent(data, segment)
                except (BlockingIOError, InterruptedError):
                    return False
                except OSError:
                    # The other end has gone, or the kernel takes no more files (ETOOMANYREFS). What follows
                    # half a message is none: the connection ends, and who receives here finds it out.
                    with contextlib.suppress(OSError):
                        self._socket.shutdown(socket.SHUT_RDWR)
                    self._drop_backlog()
                    return True
                if segment is not None:
                    segment.close()
                self.waiting -= sent
                if sent == len(data):
                    self._backlog.popleft()
                else:
                    self._backlog[0] = data[sent:], None
            return True

    def _sent(self, data: memoryview, segment: shared.Segment | None) -> int:
        if segment is None or segment.descriptor is None:
            return self._socket.send(data)
        file = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [segment.descriptor]))
        return self._socket.sendmsg([data], [file])

    def _drop_backlog(self) -> None:
        self._backlog.clear()
        self.waiting = 0

    # --- receiving

    def receive(self) -> list[list[Part]]:
        """Return the messages that have come.

        Raises:
            ChannelError: the connection has ended, or its bytes are no messages; it is to be closed.
        """
        with self._receiving:
            return self._received_messages() or []

    def receive_rest(self) -> list[list[Part]]:
        """Return the messages that had come when the connection ended; it is to be closed.

        More than one call receives: a message may be larger than that.
        """
        rest: list[list[Part]] = []
        with self._receiving, contextlib.suppress(ChannelError):
            while (messages := self._received_messages()) is not None:
                rest += messages
        return rest

    def _received_messages(self) -> list[list[Part]] | None:
        """Return the messages that a piece completes; None where nothing has come."""
        try:
            size, ancillary, flags, _ = self._socket.recvmsg_into([self._piece], _ANCILLARY, _CLOSE_ON_EXEC)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            raise ChannelError(error.strerror or str(error)) from error
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._descriptors.extend(array.array("i", content[: len(content) // 4 * 4]))
        if flags & socket.MSG_CTRUNC:
            raise NoFilesError
        if not size:
            raise ChannelError("the connection was lost")
        if len(self._descriptors) > shared.SLOTS:
            raise ChannelError("files without messages")
        if not self._received and size >= self._needed:
            # Almost always it is one whole message, which needs no other copy.
            message, used = self._next(self._piece[:size])
            messages = [] if message is None else [message]
            if used == size:
                return messages
            self._received += self._piece[used:size]
        else:
            self._received += self._piece[:size]
            messages = []
        while len(self._received) >= self._needed:
            with memoryview(self._received) as received:
                message, used = self._next(received)
            del self._received[:used]
            if message is not None:
                messages.append(message)
        return messages

    def _next(self, received: memoryview) -> tuple[list[Part] | None, int]:
        """Return the next message, None while a part of it is missing, and how many bytes it has."""
        magic, slot, is_new, zero, count, inline = _PREFIX.unpack_from(received)
        if magic != _MAGIC or zero or is_new > 1 or count > MAX_ARRAYS + 2:
            raise ChannelError("it sends no messages")
        if inline > self._limit + _BESIDE:
            raise ChannelError(f"a message of {inline} bytes")
        begin = _PREFIX.size + count * _PLACE.size
        self._needed = begin + inline
        if len(received) < self._needed:
            return None, 0
        data = bytes(received[: self._needed])
        self._needed = _PREFIX.size
        if is_new:
            self._adopt(slot)
        places = [*_PLACE.iter_unpack(data[_PREFIX.size : begin])]
        return self._parts(slot, data, begin, places), len(data)

    def _adopt(self, slot: int) -> None:
        if not self._descriptors:
            raise ChannelError("a segment without its file")
        descriptor = self._descriptors.popleft()
        try:
            self._incoming.adopt(slot, descriptor)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise NoFilesError from error
            raise ChannelError(str(error)) from error
        finally:
            os.close(descriptor)

    def _parts(self, slot: int, data: bytes, at: int, places: list[tuple[int, int]]) -> list[Part]:
        inside = [(begin, length) for length, begin in places if begin]
        if sum(length for _, length in inside) > self._limit:
            raise ChannelError("a message above the limit")
        try:
            borrowed = iter(self._incoming.borrow(slot, inside)) if inside else iter(())
        except ValueError as error:
            raise ChannelError(str(error)) from error
        view = memoryview(data)
        parts: list[Part] = []
        for length, begin in places:
            if begin:
                parts.append(next(borrowed))
                continue
            if at + length > len(data):
                raise ChannelError("parts that are longer than their message")
            parts.append(view[at : at + length])
            at += length
        if at != len(data):
            raise ChannelError("a message that is longer than its parts")
        return parts

    def close(self) -> None:
        """End the connection; arrays that were received stay."""
        with self._receiving, self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._drop_backlog()
            self._outgoing.close()
            self._incoming.close()
            self._socket.close()
            while self._descriptors:
                os.close(self._descriptors.popleft())


def channel_path(path: Path) -> Path:
    """Return the file of the direct socket beside ZeroMQ's.

    >>> channel_path(Path("/tmp/d/127.0.0.1-2222"))
    PosixPath('/tmp/d/127.0.0.1-2222.channel')
    """
    return path.with_name(f"{path.name}.channel")


def connect(path: Path, limit: int) -> LocalChannel | None:
    """Connect to a server of this user; return None where it has no direct socket."""
    if not shared.IS_AVAILABLE:
        return None
    try:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:
        return None
    made.setblocking(False)
    try:
        made.connect(str(channel_path(path)))
    except OSError:
        # Also EAGAIN: too many others connect at this moment.
        made.close()
        return None
    return LocalChannel(made, limit)


class ChannelListener:
    """Takes the direct connections of a server; in the server's thread, but for `send`.

    Args:
        path: of ZeroMQ's socket; this process has its lock.

    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self._limit = limit
        self._path = channel_path(path)
        # What an earlier process has left.
        self._path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            self._socket.bind(str(self._path))
            self._path.chmod(0o600)
            self._socket.listen(128)
        except OSError:
            self._socket.close()
            raise
        self.descriptor = self._socket.fileno()
        self._count = 0

    def accept(self) -> tuple[bytes, LocalChannel] | None:
        """Return a name and a connection; None where none waits any more.

        Raises:
            OSError: one waits, and cannot be taken now: this process may not open more files.
        """
        try:
            connected, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return None
        if _user_of(connected) != os.geteuid():
            connected.close()
            return None
        self._count += 1
        return b"channel %d" % self._count, LocalChannel(connected, self._limit)

    def close(self) -> None:
        """Stop listening; while the address is locked."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        self._socket.close()


def _user_of(connected: socket.socket) -> int:
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[1])
