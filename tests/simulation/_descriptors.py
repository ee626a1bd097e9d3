"""Descriptors of processes of one machine: sockets in files, epoll, eventfd, and files in memory.

Code gets them instead of those of `os`, `select`, `socket`, `mmap` and `fcntl`. Each process has numbers of
its own, the lowest free one first: what a process closes too early is another one's soon. Each call is a
point at which others may run. Sockets keep few bytes, send and receive parts of what they are given, deliver
what was sent before they were closed, and are reset where something was left unread.

Tests: tests/unit/test_simulated_transport.py.
"""

import array
import errno
import heapq
import os
import select
import socket
import struct

import greenlet
import zmq

from tests.simulation._primitives import _StandInModule
from tests.simulation._world import DATA, Overdue, Violation

_FIRST = 1000
_LAST = 1400
#: Looks at one moment, after which a thread is taken to run in circles.
_MOST_LOOKS = 5000


def failure(code):
    """Return the error of a number."""
    return OSError(code, os.strerror(code))


class Machine:
    """The kernel of the machine on which the processes of a world run.

    Args:
        buffer: bytes that a connection keeps in a direction.
        no_descriptor: the probability that a process may not open more files, at each that it opens.
        is_short: whether sockets send and receive less than they could.
    """

    def __init__(self, world, buffer=1 << 20, no_descriptor=0.0, is_short=False):
        self.world, self.buffer, self.no_descriptor, self.is_short = world, buffer, no_descriptor, is_short
        #: The sockets that listen, by path.
        self.listeners = {}
        #: When somebody has looked last, and how often at that moment.
        self._looked_at, self._looks = 0.0, 0

    # --- processes -------------------------------------------------------------------------------

    def own(self, process=None):
        """Return what the kernel knows of a process: its open files, free numbers, and who waits."""
        process = process or self.world.current.process
        if "files" not in process.own:
            process.own["files"] = {}
            process.own["numbers"] = list(range(_FIRST, _LAST))
            process.own["waiters"] = []
            process.at_end(lambda: self._release(process))
        return process.own

    def _release(self, process):
        for file in list(process.own["files"].values()):
            file.released()
        process.own["files"].clear()

    def notify(self, process):
        """Let all that wait in a process look again."""
        waiters = self.own(process)["waiters"]
        while waiters:
            self.world.wake(waiters)

    def wait(self, look, seconds, why):
        """Return what a function finds, as soon as it finds something, or when the time is over."""
        world = self.world
        waiters = self.own()["waiters"]
        self._looks = self._looks + 1 if self._looked_at == world.now else 0
        self._looked_at = world.now
        if self._looks > _MOST_LOOKS:
            self.fail(Overdue(f"A thread looks again and again at {world.now:.3f} s."))
        end = None if seconds is None or seconds < 0 else world.now + seconds
        while not (found := look()):
            left = None if end is None else end - world.now
            if left is not None and left <= 0:
                break
            world.block(waiters, left, why)
        return found

    def fail(self, error):
        """Let the run fail: threads that go on after each error would not let it end."""
        self.world.fail(error)
        raise greenlet.GreenletExit

    def lacks(self):
        """Return whether the present process may not open another file: one with `own["lacks"]` alone."""
        return "lacks" in self.own() and self.world.fault(self.no_descriptor, "no descriptor")

    def open(self, file):
        """Give a file the lowest free number of the present process."""
        own = self.own()
        if self.lacks():
            raise failure(errno.EMFILE)
        number = heapq.heappop(own["numbers"])
        own["files"][number] = file
        return number

    def at(self, number):
        """Return the file of a number."""
        found = self.own()["files"].get(number)
        if found is None:
            raise failure(errno.EBADF)
        return found

    def close(self, number):
        """Close a number, as `os.close`. One that is not open could be another thread's file."""
        self.world.give_way()
        own = self.own()
        file = own["files"].pop(number, None)
        if file is None:
            self.world.fail(Violation(f"The descriptor {number} is closed, and is not open."))
            raise failure(errno.EBADF)
        heapq.heappush(own["numbers"], number)
        file.released()

    # --- what modules get ------------------------------------------------------------------------

    def of_os(self, **more):
        """Return what stands in for `os`."""
        names = {
            "close": self.close,
            "eventfd": lambda value, flags=0: self.open(_Bell(self)),
            "eventfd_write": lambda number, value: self.at(number).write(value),
            "eventfd_read": lambda number: self.at(number).read(),
            "memfd_create": lambda name, flags=0: self.open(_Memory()),
            "ftruncate": lambda number, size: self.at(number).resize(size),
            "fstat": lambda number: self.at(number),
            "getpid": lambda: self.world.current.process.pid,
            **more,
        }
        return _StandInModule(os, names)

    def of_select(self):
        """Return what stands in for `select`."""
        return _StandInModule(select, {"epoll": lambda: _Epoll(self)})

    def of_socket(self, **more):
        """Return what stands in for `socket`."""
        names = {
            "socket": lambda family=socket.AF_UNIX, kind=socket.SOCK_STREAM: UnixSocket(self),
            "socketpair": self._pair,
        }
        return _StandInModule(socket, {**names, **more})

    def of_mmap(self):
        """Return what stands in for `mmap`."""
        import mmap

        return _StandInModule(mmap, {"mmap": lambda number, size: self.at(number).content})

    def of_fcntl(self):
        """Return what stands in for `fcntl`."""
        import fcntl

        return _StandInModule(fcntl, {"fcntl": lambda number, command, value=0: fcntl.F_SEAL_SHRINK})

    def _pair(self):
        one, other = UnixSocket(self), UnixSocket(self)
        one.peer, other.peer = other, one
        return one, other


class _File:
    """Something that has a number."""

    is_closed = is_readable = has_room = has_hung_up = False

    def released(self):
        self.is_closed = True


class _Memory(_File):
    """A file in memory."""

    content = b""

    def resize(self, size):
        self.content = bytearray(size)

    @property
    def st_size(self):
        return len(self.content)


class _Bell(_File):
    """An eventfd."""

    def __init__(self, machine):
        self.machine, self.process, self.count = machine, machine.world.current.process, 0

    is_readable = property(lambda self: self.count > 0)

    def write(self, value):
        self.machine.world.give_way()
        self.count += value
        self.machine.notify(self.process)

    def read(self):
        self.machine.world.give_way()
        if not self.count:
            raise BlockingIOError(errno.EAGAIN, "nothing to read")
        count, self.count = self.count, 0
        return count


class _Epoll(_File):
    """An epoll object; it is level-triggered."""

    def __init__(self, machine):
        self.machine, self._watched = machine, {}
        self._process = machine.world.current.process
        self._number = machine.open(self)

    is_readable = property(lambda self: bool(self._ready()))

    def fileno(self):
        return self._number

    def close(self):
        if not self.is_closed:
            self.machine.close(self._number)

    def _number_of(self, item):
        if self.is_closed:
            raise ValueError("I/O operation on closed epoll object")
        self.machine.world.give_way()
        return item if isinstance(item, int) else item.fileno()

    def register(self, item, mask):
        number = self._number_of(item)
        file = self.machine.at(number)
        if self._known(number) is file:
            raise failure(errno.EEXIST)
        self._watched[number] = file, mask
        self.machine.notify(self._process)

    def modify(self, item, mask):
        number = self._number_of(item)
        file = self.machine.at(number)
        if self._known(number) is not file:
            raise failure(errno.ENOENT)
        self._watched[number] = file, mask
        self.machine.notify(self._process)

    def unregister(self, item):
        number = self._number_of(item)
        if self._known(number) is not self.machine.own()["files"].get(number, 0):
            raise failure(errno.ENOENT)
        del self._watched[number]

    def poll(self, timeout=None, maxevents=-1):
        if self.is_closed:
            raise ValueError("I/O operation on closed epoll object")
        self.machine.world.give_way()
        return self.machine.wait(self._ready, timeout, "epoll")

    def _known(self, number):
        # The kernel forgets a file with its last number.
        file = self._watched.get(number, (None,))[0]
        return None if file is None or file.is_closed else file

    def _ready(self):
        found = []
        for number, (file, mask) in self._watched.items():
            if file.is_closed:
                continue
            events = select.EPOLLIN * file.is_readable | select.EPOLLOUT * file.has_room
            events = (events & mask) | select.EPOLLHUP * file.has_hung_up
            if events:
                found.append((number, events))
        return found


class Poller:
    """What stands in for `zmq.Poller`: it watches sockets of ZeroMQ, and numbers."""

    def __init__(self, machine):
        self._machine, self._watched = machine, {}

    def register(self, item, flags):
        self._watched[item] = flags

    def unregister(self, item):
        del self._watched[item]

    def poll(self, timeout=None):
        self._machine.world.give_way()
        # What other threads register is polled for from the next call on.
        watched = dict(self._watched)
        seconds = None if timeout is None else timeout / 1000
        return self._machine.wait(lambda: self._ready(watched), seconds, "a poller")

    def _ready(self, watched):
        found = []
        for item, flags in watched.items():
            file = self._machine.own()["files"].get(item) if isinstance(item, int) else item
            if file is None or file.is_closed:
                self._machine.fail(Violation(f"A poller watches what is closed: {item}."))
            events = (zmq.POLLIN * file.is_readable | zmq.POLLOUT * file.has_room) & flags
            if file.has_hung_up:
                events |= zmq.POLLERR
            if events:
                found.append((item, events))
        return found


class UnixSocket(_File):
    """A socket in a file, or one of a pair. None of its calls waits."""

    def __init__(self, machine):
        self.machine, self.world = machine, machine.world
        self.process = self.world.current.process
        self.peer, self._queue, self._path = None, None, None
        #: What has arrived: bytes, and the files that lie before the first of them.
        self._inbox, self._size = [], 0
        self._is_shut = self._was_reset = False
        self._number = machine.open(self)

    @property
    def is_readable(self):
        return bool(self._inbox or self._queue) or self._has_ended

    @property
    def has_room(self):
        return self.peer is not None and (self._has_ended or self.peer._size < self.machine.buffer)

    has_hung_up = property(lambda self: self._has_ended)

    @property
    def _has_ended(self):
        return self._queue is None and self.peer is not None and (self._is_shut or self.peer.is_closed)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def fileno(self):
        return -1 if self.is_closed else self._number

    def setblocking(self, is_blocking):
        assert not is_blocking

    def setsockopt(self, *_):
        self._step()

    def getsockopt(self, level, option, size):
        return struct.pack("3i", self.peer.process.pid, os.geteuid(), 0)

    def _step(self):
        self.world.give_way()
        if self.is_closed:
            raise failure(errno.EBADF)

    def close(self):
        if not self.is_closed:
            self.machine.close(self._number)

    def released(self):
        super().released()
        if self._queue is not None:
            if self.machine.listeners.get(self._path) is self:
                del self.machine.listeners[self._path]
            for waiting in self._queue:
                waiting.released()
        if self.peer is not None:
            if self._inbox:
                self.peer._was_reset = True
            self._inbox.clear()
            self.machine.notify(self.peer.process)

    # --- connections -----------------------------------------------------------------------------

    def bind(self, path):
        self._step()
        if os.path.lexists(path):
            raise failure(errno.EADDRINUSE)
        with open(path, "xb"):
            self._path = path

    def listen(self, backlog):
        self._queue = []
        self.machine.listeners[self._path] = self

    def connect(self, path):
        self._step()
        listener = self.machine.listeners.get(path)
        if not os.path.exists(path):
            raise failure(errno.ENOENT)
        if listener is None:
            raise failure(errno.ECONNREFUSED)
        if self.world.fault(self.machine.no_descriptor, "full backlog"):
            raise BlockingIOError(errno.EAGAIN, "too many connect")
        other = UnixSocket.__new__(UnixSocket)
        other.machine, other.world, other.process = self.machine, self.world, listener.process
        other._queue = other._path = None
        other._inbox, other._size, other._is_shut, other._was_reset = [], 0, False, False
        other.peer, self.peer = self, other
        listener._queue.append(other)
        self.machine.notify(listener.process)

    def accept(self):
        self._step()
        if not self._queue:
            raise BlockingIOError(errno.EAGAIN, "none connects")
        self._queue[0]._number = self.machine.open(self._queue[0])
        return self._queue.pop(0), ""

    def shutdown(self, how):
        self._step()
        self._is_shut = True
        if self.peer is not None:
            self.peer._is_shut = True
            self.machine.notify(self.peer.process)
        self.machine.notify(self.process)

    # --- bytes -----------------------------------------------------------------------------------

    def send(self, data):
        return self.sendmsg([data], ())

    def sendmsg(self, buffers, ancillary):
        self._step()
        (data,) = buffers
        if self.peer is None or self._has_ended:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        room = min(len(data), self.machine.buffer - self.peer._size)
        if room <= 0:
            raise BlockingIOError(errno.EAGAIN, "no room")
        if self.machine.is_short and room > 1:
            room -= self.world.choose(room, DATA)
        files = [self.machine.at(n) for _, _, numbers in ancillary for n in numbers]
        self.peer._inbox.append([bytes(data[:room]), files])
        self.peer._size += room
        self.machine.notify(self.peer.process)
        # Who reads it may do so before this thread goes on.
        self.world.give_way()
        return room

    def recv(self, size):
        data, files = self._take(size)
        assert not files
        return data

    def recvmsg_into(self, buffers, ancillary_size, flags):
        (buffer,) = buffers
        data, files = self._take(len(buffer))
        buffer[: len(data)] = data
        numbers, result = array.array("i"), 0
        for file in files:
            try:
                numbers.append(self.machine.open(file))
            except OSError:
                result = socket.MSG_CTRUNC
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers.tobytes())] if numbers else []
        return len(data), ancillary, result, None

    def _take(self, size):
        self._step()
        if not self._inbox:
            if self._was_reset:
                self._was_reset = False
                raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
            if self._has_ended:
                return b"", []
            raise BlockingIOError(errno.EAGAIN, "nothing to read")
        if self.machine.is_short and size > 1:
            size -= self.world.choose(size, DATA)
        taken, files = b"", []
        # Files end a call: no byte of behind them is read with them.
        while self._inbox and len(taken) < size and not files:
            entry = self._inbox[0]
            piece = entry[0][: size - len(taken)]
            files, entry[1] = entry[1], []
            taken += piece
            entry[0] = entry[0][len(piece) :]
            if not entry[0]:
                self._inbox.pop(0)
        self._size -= len(taken)
        if self.peer is not None:
            self.machine.notify(self.peer.process)
        return taken, files
