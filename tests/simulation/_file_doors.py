"""Python's calls for files, on simulated disks: `pathlib`, `shutil` and `open` run on them unchanged.

Only paths below `ROOT` are simulated. Each call gives `gate` the chance to let others run, to fail, or to end
the process that makes it; a process that has ended changes nothing any more, whatever its `finally` does.

Tests: tests/unit/test_simulated_files.py.
"""

import builtins
import errno
import hashlib
import io
import itertools
import mmap
import os
import secrets
import shutil
import socket
import tempfile
import uuid

import greenlet
import pytest

from tests.simulation._disk import File, Folder, stat_of

ROOT = "/simulated"
#: Numbers of simulated files, which no real one has.
_FIRST_NUMBER = 1 << 24


#: Calls that a full disk refuses.
_NEEDS_ROOM = ("mkdir", "create", "write", "fallocate", "PUT")


def wipe(path):
    """Return a path without its first folder, `ROOT`."""
    return os.fspath(path)[len(ROOT) :].strip("/")


class Machine:
    """A machine: what its processes see below `ROOT`, and how often they die there.

    Args:
        disks: by the first folder below `ROOT`.
        own: those that lose what was not flushed when the machine loses its power.
        risk: the probability, for each call, that its process is killed.
        power: the same, that the machine loses its power.
        errors: the same, that a disk's call fails.
        latency: seconds for which a call waits for the disk, at most.
    """

    def __init__(self, world, name, disks, own=(), risk=0.0, power=0.0, errors=0.0, latency=0.0):
        self.world, self.name, self.disks, self.own = world, name, dict(disks), own
        self.risk, self.power, self.errors, self.latency = risk, power, errors, latency
        #: Returns the number of the error with which a call for a path fails, 0 for none.
        self.refusal = lambda name, path: 0
        self.processes = []
        self.power_losses = 0

    def process(self, name, body):
        """Start a process on this machine."""
        process = self.world.process(name, body)
        process.own["machine"] = self
        self.processes.append(process)
        return process

    @property
    def boot(self):
        """What identifies this boot of the machine, in 36 characters as Linux says it."""
        return f"{self.name}-{self.power_losses}".ljust(36, "-")

    def is_alive(self, pid):
        """Return whether a process runs."""
        return any(p.pid == pid and not p.is_dead for p in self.processes)

    def lose_power(self):
        """End all processes, and lose what was not flushed."""
        self.power_losses += 1
        self.world.note("power", self.name, self.name, "lost its power")
        for name in self.own:
            self.disks[name].lose_power()
        own = self.world.current.process if self.world.current is not None else None
        # The process that runs now last: this does not return then.
        for process in sorted(self.processes, key=lambda process: process is own):
            process.kill()


class FileDoors:
    """Replaces Python's calls for files, while its block runs.

    Args:
        world: whose present process makes a call, on the `Machine` that started it.
        machine: of processes that none has started, as the checker.
    """

    def __init__(self, world, machine):
        self.world, self._machine = world, machine
        self._names_drawn = itertools.count(1)
        self._numbers = itertools.count(_FIRST_NUMBER)
        self._opened = {}
        self._real = {}
        self._patches = pytest.MonkeyPatch()

    @property
    def machine(self):
        """The machine of the process that runs now."""
        return self.world.current.process.own.get("machine", self._machine)

    def gate(self, name, path):
        """Let others run before a call, or let the process end, or the call fail."""
        world, fiber = self.world, self.world.current
        # What has ended, with or without its world, changes nothing in its `finally`.
        if fiber is None or world.is_over or fiber.process.is_dead:
            raise greenlet.GreenletExit
        machine = self.machine
        if machine is self._machine:
            return
        if machine.latency:
            world.sleep(world.uniform(0.0, machine.latency))
        else:
            world.give_way()
        if world.fault(machine.risk, "kill"):
            fiber.process.kill()
        if world.fault(machine.power, "power"):
            machine.lose_power()
        if number := machine.refusal(name, path):
            raise OSError(number, os.strerror(number), path)
        if world.fault(machine.errors, "disk"):
            kinds = (errno.EIO, errno.ENOSPC) if name in _NEEDS_ROOM else (errno.EIO,)
            number = world.pick(kinds, "fault kind")
            world.note("fault", machine.name, machine.name, f"{name} {path}: {os.strerror(number)}")
            raise OSError(number, os.strerror(number), path)

    def __enter__(self):
        for name in (
            "open", "close", "fsync", "mkdir", "rename", "replace", "unlink", "remove", "rmdir", "scandir",
            "listdir", "stat", "lstat", "fstat", "access", "utime", "readlink", "posix_fallocate",
            "pwrite", "ftruncate",
        ):  # fmt: skip
            self._real[name] = getattr(os, name)
            self._patches.setattr(os, name, getattr(self, f"_{name}"))
        self._real["io.open"], self._real["mmap"] = io.open, mmap.mmap
        self._patches.setattr(mmap, "mmap", self._mmap)
        self._patches.setattr(io, "open", self._io_open)
        self._patches.setattr(builtins, "open", self._io_open)
        self._patches.setattr(shutil, "_use_fd_functions", False)
        self._patches.setattr(tempfile, "tempdir", f"{ROOT}/tmp")
        self._patches.setattr(tempfile, "_get_candidate_names", lambda: (self._hex(4) for _ in range(99)))
        for module, name, new in (
            (os, "getpid", lambda: self.world.current.process.pid),
            (os, "kill", self._kill),
            (socket, "gethostname", lambda: self.machine.name),
            (uuid, "uuid4", lambda: uuid.UUID(self._hex(16))),
            (secrets, "token_hex", lambda nbytes=None: self._hex(nbytes or 32)),
        ):
            self._patches.setattr(module, name, new)
        return self

    def __exit__(self, *_):
        self._patches.undo()

    def _hex(self, nbytes):
        # No choice of the world: nothing depends on them, but for the order of names.
        return hashlib.sha256(str(next(self._names_drawn)).encode()).hexdigest()[: 2 * nbytes]

    # --- which disk --------------------------------------------------------------------------

    def _call(self, name, path):
        """Return the disk of a path, and the path on it; None where it is a real one."""
        text = os.fspath(path) if not isinstance(path, int) else ""
        if isinstance(text, bytes) or not text.startswith(ROOT):
            return None
        self.gate(name, text)
        machine = self.machine
        first, _, rest = wipe(text).partition("/")
        if first not in machine.disks:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), text)
        return machine.disks[first], rest, machine.name

    # --- `os` --------------------------------------------------------------------------------

    def _mkdir(self, path, mode=0o777, *, dir_fd=None):
        if (at := self._call("mkdir", path)) is None:
            return self._real["mkdir"](path, mode, dir_fd=dir_fd)
        at[0].make_folder(*at[1:])
        return None

    def _rename(self, path, other, *, src_dir_fd=None, dst_dir_fd=None):
        if (at := self._call("rename", path)) is None:
            return self._real["rename"](path, other)
        at[0].rename(at[1], wipe(other).partition("/")[2], at[2])
        return None

    def _replace(self, path, other, *, src_dir_fd=None, dst_dir_fd=None):
        if not str(path).startswith(ROOT):
            return self._real["replace"](path, other)
        self._rename(path, other)
        return None

    def _unlink(self, path, *, dir_fd=None):
        if (at := self._call("unlink", path)) is None:
            return self._real["unlink"](path, dir_fd=dir_fd)
        at[0].delete(*at[1:])
        return None

    _remove = _unlink

    def _rmdir(self, path, *, dir_fd=None):
        if (at := self._call("rmdir", path)) is None:
            return self._real["rmdir"](path, dir_fd=dir_fd)
        at[0].delete(*at[1:], is_folder=True)
        return None

    def _stat(self, path, *, dir_fd=None, follow_symlinks=True):
        if isinstance(path, int) and path >= _FIRST_NUMBER:
            return stat_of(self._opened[path][0])
        if str(path) == ROOT:
            return stat_of(Folder(1))
        if (at := self._call("stat", path)) is None:
            return self._real["stat"](path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
        return stat_of(at[0].find(*at[1:]))

    def _lstat(self, path, *, dir_fd=None):
        if not str(path).startswith(ROOT):
            return self._real["lstat"](path, dir_fd=dir_fd)
        return self._stat(path)

    def _access(self, path, mode, **options):
        try:
            if (at := self._call("access", path)) is None:
                return self._real["access"](path, mode, **options)
            at[0].find(*at[1:])
        except OSError:
            return False
        return True

    def _utime(self, path, *args, **options):
        if (at := self._call("utime", path)) is None:
            return self._real["utime"](path, *args, **options)
        at[0].find(*at[1:]).mtime_ns = at[0].now_ns()
        return None

    def _readlink(self, path, **options):
        if (at := self._call("readlink", path)) is None:
            return self._real["readlink"](path, **options)
        at[0].find(*at[1:])
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))

    def _listdir(self, path="."):
        if (at := self._call("listdir", path)) is None:
            return self._real["listdir"](path)
        return sorted(self._names(at, path))

    def _names(self, at, path):
        folder = at[0].find(*at[1:])
        if not isinstance(folder, Folder):
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        names = dict(at[0].names(folder, at[2]))
        # A file system lists names in any order.
        return {name: names[name] for name in sorted(names, reverse=bool(self.world.choose(2, "disk")))}

    def _scandir(self, path="."):
        if (at := self._call("scandir", path)) is None:
            return self._real["scandir"](path)
        return _Entries([_Entry(os.fspath(path), name, node) for name, node in self._names(at, path).items()])

    # --- open files --------------------------------------------------------------------------

    def _open(self, path, flags, mode=0o777, *, dir_fd=None):
        if (at := self._call("open", path)) is None:
            return self._real["open"](path, flags, mode, dir_fd=dir_fd)
        disk, below, host = at
        if flags & os.O_CREAT:
            node = disk.create(below, host, exclusive=bool(flags & os.O_EXCL))
        else:
            node = disk.find(below, host)
        number = next(self._numbers)
        self._opened[number] = node, os.fspath(path)
        return number

    def _close(self, number):
        if number < _FIRST_NUMBER:
            return self._real["close"](number)
        self._opened.pop(number, None)
        return None

    def _fsync(self, number):
        if not isinstance(number, int) or number < _FIRST_NUMBER:
            return self._real["fsync"](number)
        node, path = self._opened[number]
        self._call("fsync", path)
        node.flush()
        return None

    def _fstat(self, number):
        if number < _FIRST_NUMBER:
            return self._real["fstat"](number)
        if number not in self._opened:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return stat_of(self._opened[number][0])

    def _posix_fallocate(self, number, offset, size):
        if number < _FIRST_NUMBER:
            return self._real["posix_fallocate"](number, offset, size)
        node, path = self._opened[number]
        disk, *_ = self._call("fallocate", path)
        if (more := offset + size - len(node.data)) > 0:
            disk.take_room(more, path)
            node.truncate(offset + size)
        return None

    def _pwrite(self, number, piece, offset):
        if number < _FIRST_NUMBER:
            return self._real["pwrite"](number, piece, offset)
        node, path = self._opened[number]
        disk, *_ = self._call("write", path)
        disk.take_room(len(piece), path)
        node.write(offset, bytes(piece))
        node.mtime_ns = disk.now_ns()
        return len(piece)

    def _ftruncate(self, number, size):
        if number < _FIRST_NUMBER:
            self._real["ftruncate"](number, size)
            return
        node, path = self._opened[number]
        self._call("write", path)
        node.truncate(size)

    def _mmap(self, number, size, *args, **options):
        if number < _FIRST_NUMBER:
            return self._real["mmap"](number, size, *args, **options)
        node, path = self._opened[number]
        self._call("mmap", path)
        if options.get("offset") or size > len(node.data):
            raise ValueError("mmap length is greater than file size")
        return node.map().view(size, options.get("access") == mmap.ACCESS_READ)

    def number_of(self, raw):
        """Return a number for a file that was opened as an object."""
        number = next(self._numbers)
        self._opened[number] = raw._node, raw.name
        return number

    def _io_open(self, path, mode="r", buffering=-1, encoding=None, errors=None, newline=None, **options):
        if isinstance(path, int) or not str(path).startswith(ROOT):
            return self._real["io.open"](path, mode, buffering, encoding, errors, newline, **options)
        kind = mode.replace("b", "").replace("t", "")
        disk, below, host = self._call("open" if kind[0] == "r" else "create", path)
        if kind[0] == "r":
            node = disk.find(below, host)
            if not isinstance(node, File):
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        else:
            node = disk.create(below, host, exclusive=kind[0] == "x")
        if kind[0] == "w" and node.data:
            node.truncate(0)
        raw = _RawFile(self, node, os.fspath(path), disk, kind)
        if kind[0] == "a":
            raw.seek(0, io.SEEK_END)
        if buffering == 0:
            return raw
        if "+" in kind:
            binary = io.BufferedRandom(raw)
        else:
            binary = io.BufferedReader(raw) if kind[0] == "r" else io.BufferedWriter(raw)
        return binary if "b" in mode else io.TextIOWrapper(binary, encoding or "utf-8", errors, newline)

    def _kill(self, pid, number):
        if number:
            raise AssertionError(f"a simulated process sends a signal to {pid}")
        if not self.machine.is_alive(pid):
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))


class _RawFile(io.RawIOBase):
    """An open file without a buffer."""

    def __init__(self, doors, node, path, disk, kind):
        super().__init__()
        self._doors, self._node, self.name, self._disk, self._kind = doors, node, path, disk, kind
        self._owner, self._at, self._number = doors.world.current.process, 0, None

    def readable(self):
        return self._kind[0] == "r" or "+" in self._kind

    def writable(self):
        return self._kind[0] != "r" or "+" in self._kind

    def seekable(self):
        return True

    def fileno(self):
        if self._number is None:
            self._number = self._doors.number_of(self)
        return self._number

    def close(self):
        if self._number is not None:
            self._doors._opened.pop(self._number, None)
        super().close()

    def seek(self, offset, whence=io.SEEK_SET):
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._node.data)}[whence]
        return self._at

    def tell(self):
        return self._at

    def readinto(self, buffer):
        node = self._node
        if self._disk.lag and not node.links and node.deleted_by != self._doors.machine.name:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), self.name)
        piece = self._node.data[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def write(self, piece):
        # A buffer that is collected with its dead process writes nothing.
        if self._owner.is_dead or self._doors.world.is_over:
            return len(piece)
        self._doors.gate("write", self.name)
        piece = bytes(piece)
        self._disk.take_room(len(piece), self.name)
        self._node.write(self._at, piece)
        self._node.mtime_ns = self._disk.now_ns()
        self._at += len(piece)
        return len(piece)

    def truncate(self, size=None):
        size = self._at if size is None else size
        self._node.truncate(size)
        return size


class _Entries:
    """What `os.scandir` returns."""

    def __init__(self, entries):
        self._entries = iter(entries)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._entries)

    def close(self):
        """Do nothing."""


class _Entry:
    """An entry of `os.scandir`."""

    def __init__(self, folder, name, node):
        self.name, self.path, self._node = name, f"{folder.rstrip('/')}/{name}", node

    def __fspath__(self):
        return self.path

    def is_dir(self, *, follow_symlinks=True):
        return isinstance(self._node, Folder)

    def is_file(self, *, follow_symlinks=True):
        return isinstance(self._node, File)

    def is_symlink(self):
        return False

    def is_junction(self):
        return False

    def stat(self, *, follow_symlinks=True):
        return stat_of(self._node)

    def inode(self):
        return self._node.number
