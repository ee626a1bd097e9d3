"""A file system in memory, which keeps after a loss of power what POSIX promises, and no more.

What a live process sees is one state; what has reached the platters is another. A file's bytes reach them
with `fsync` of the file, the names in a folder with `fsync` of the folder; everything else may be there after
a crash, or be torn, or be gone, whichever the seed draws. A process that is killed loses nothing that it has
written. Names that another host has changed may be seen late where the disk is NFS.

Tests: tests/unit/test_simulated_files.py.
"""

import dataclasses
import errno
import itertools
import math
import os
import stat

from tests.simulation._pages import Pages

_ROOT_MODE = 0o755


@dataclasses.dataclass(eq=False)
class File:
    """A file: its bytes as processes see them, those on the platters, and the changes between the two."""

    number: int
    mtime_ns: int = 0
    links: int = 0
    #: The host that has deleted it.
    deleted_by: str = ""
    data: bytearray | Pages = dataclasses.field(default_factory=bytearray)
    saved: bytes = b""
    changes: list = dataclasses.field(default_factory=list)

    def write(self, offset, piece):
        """Put bytes at an offset."""
        _cut(self.data, max(len(self.data), offset))
        self.data[offset : offset + len(piece)] = piece
        self.changes.append(("write", offset, bytes(piece)))

    def truncate(self, size):
        """Cut or fill up to a size."""
        _cut(self.data, size)
        self.changes.append(("truncate", size))

    def map(self):
        """Return the bytes as mappings share them: what is written there is no change that is noted here."""
        if not isinstance(self.data, Pages):
            self.data = Pages(self.data)
        return self.data

    def flush(self):
        """Bring all to the platters."""
        self.saved, self.changes = bytes(self.data), []

    def write_back(self, choose):
        """Let the system bring some pages of a mapped file to the platters."""
        if isinstance(self.data, Pages):
            self.saved = self.data.write_back(self.saved, choose)

    def lose_power(self, choose):
        """Keep what is on the platters, and of each later change all, nothing or a part."""
        if isinstance(self.data, Pages):
            self.saved = self.data.lose_power(self.saved, choose)
            self.data, self.changes = bytearray(self.saved), []
            return
        data = bytearray(self.saved)
        for kind, at, *piece in self.changes:
            # Kept, lost, torn, or its size without its bytes, as the size is another change.
            fate = choose(4)
            if fate == 1:
                continue
            if kind == "truncate":
                _cut(data, at)
                continue
            whole = piece[0]
            kept = whole if fate == 0 else whole[: choose(len(whole) + 1)]
            _cut(data, max(len(data), at + (len(whole) if fate == 3 else len(kept))))
            data[at : at + len(kept)] = kept
        self.data, self.saved, self.changes = data, bytes(data), []


def _cut(data, size):
    if size <= len(data):
        del data[size:]
    else:
        data.extend(bytes(size - len(data)))


@dataclasses.dataclass(eq=False)
class Folder:
    """A folder: its names as processes see them, those on the platters, and the changes between the two."""

    number: int
    mtime_ns: int = 0
    links: int = 1
    deleted_by: str = ""
    names: dict = dataclasses.field(default_factory=dict)
    saved: dict = dataclasses.field(default_factory=dict)
    changes: list = dataclasses.field(default_factory=list)

    def change(self, *changed):
        """Apply one change, which a crash keeps whole or not at all: (name, what it names from now on)."""
        _apply(self.names, changed)
        self.changes.append(changed)

    def flush(self):
        """Bring all names to the platters."""
        self.saved, self.changes = dict(self.names), []

    def lose_power(self, choose):
        """Keep the names on the platters, and of the later changes all, the first ones, or any."""
        names, kept = dict(self.saved), self.changes
        if (fate := choose(3)) == 1:
            kept = kept[: choose(len(kept) + 1)]
        elif fate == 2:
            kept = [changed for changed in kept if not choose(2)]
        for changed in kept:
            _apply(names, changed)
        self.names, self.saved, self.changes = names, dict(names), []


def _apply(names, changed):
    for name, node in changed:
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class Disk:
    """A disk that some hosts share.

    Args:
        world: its choices say what a crash leaves; its wall clock dates files.
        lag: seconds for which a host may not see what another one has changed; 0 but for NFS.
    """

    def __init__(self, world, lag=0.0):
        self.world, self.lag = world, lag
        self._numbers = itertools.count(2)
        self.root = Folder(1)
        self._seen = {}
        self.room = math.inf

    # --- finding ----------------------------------------------------------------------------

    def names(self, folder, host):
        """The names in a folder as a host sees them, which is its own changes at least."""
        if not self.lag:
            return folder.names
        now, seen = self.world.now, self._seen.setdefault(host, {})
        kept = seen.get(folder.number)
        if kept is None or now >= kept[1]:
            # Not seen for a while: from the server, and believed for a time that is drawn.
            kept = seen[folder.number] = dict(folder.names), now + self.world.uniform(0.0, self.lag)
        return kept[0]

    def find(self, path, host):
        """Return what a path names.

        Raises:
            OSError: there is nothing, or a part of the path is no folder.
        """
        node = self.root
        for part in _parts(path):
            if not isinstance(node, Folder):
                raise _error(errno.ENOTDIR, path)
            folder, node = node, self.names(node, host).get(part)
            if node is not None and not node.links:
                # Another host has deleted it: the system asks the server again before it gives up.
                self._seen[host].pop(folder.number)
                node = folder.names.get(part)
            if node is None:
                raise _error(errno.ENOENT, path)
        return node

    def place(self, path, host):
        """Return the folder that holds a path's last name, and the name."""
        *before, name = _parts(path)
        folder = self.find("/".join(before), host)
        if not isinstance(folder, Folder):
            raise _error(errno.ENOTDIR, path)
        return folder, name

    # --- changing ---------------------------------------------------------------------------

    def _change(self, folder, host, *changed):
        """Change names on the server; this host sees it at once, the others when they look again."""
        folder.change(*changed)
        folder.mtime_ns = self.now_ns()
        if self.lag and (kept := self._seen.get(host, {}).get(folder.number)) is not None:
            _apply(kept[0], changed)

    def now_ns(self):
        """When a file is written now."""
        return int(self.world.wall * 1e9)

    def create(self, path, host, exclusive=False):
        """Return the file of a path, which is made where it is missing."""
        folder, name = self.place(path, host)
        # The server decides whether there is one.
        known = folder.names.get(name)
        if known is None:
            known = File(next(self._numbers), self.now_ns(), 1)
            self._change(folder, host, (name, known))
        elif exclusive:
            raise _error(errno.EEXIST, path)
        elif isinstance(known, Folder):
            raise _error(errno.EISDIR, path)
        return known

    def make_folder(self, path, host):
        """Make a folder."""
        folder, name = self.place(path, host)
        if name in folder.names:
            # The server has said so: Linux forgets then what it believed of the name.
            self._seen.get(host, {}).pop(folder.number, None)
            raise _error(errno.EEXIST, path)
        self._change(folder, host, (name, Folder(next(self._numbers), self.now_ns())))

    def rename(self, path, other, host):
        """Give a file or folder another name, at which nothing is, or a file, or an empty folder."""
        (folder, name), (target, new) = self.place(path, host), self.place(other, host)
        node, there = folder.names.get(name), target.names.get(new)
        if node is None:
            raise _error(errno.ENOENT, path)
        if there is node:
            return
        if isinstance(there, Folder):
            if not isinstance(node, Folder):
                raise _error(errno.EISDIR, other)
            if there.names:
                raise _error(errno.ENOTEMPTY, other)
        elif there is not None and isinstance(node, Folder):
            raise _error(errno.ENOTDIR, other)
        if there is not None:
            there.links, there.deleted_by = 0, host
        if folder is target:
            self._change(folder, host, (name, None), (new, node))
        else:
            self._change(target, host, (new, node))
            self._change(folder, host, (name, None))

    def delete(self, path, host, is_folder=False):
        """Delete a file or an empty folder."""
        folder, name = self.place(path, host)
        node = folder.names.get(name)
        if node is None:
            raise _error(errno.ENOENT, path)
        if isinstance(node, Folder) != is_folder:
            raise _error(errno.ENOTDIR if is_folder else errno.EISDIR, path)
        if is_folder and node.names:
            raise _error(errno.ENOTEMPTY, path)
        node.links, node.deleted_by = 0, host
        self._change(folder, host, (name, None))

    def lose_power(self):
        """Leave what a crash of the machine that holds the disk leaves."""
        self._seen.clear()
        waiting, seen = [self.root], set()
        while waiting:
            node = waiting.pop()
            if node.number in seen:
                continue
            seen.add(node.number)
            node.links = 1
            node.lose_power(lambda n: self.world.choose(n, "disk"))
            if isinstance(node, Folder):
                waiting += node.names.values()

    def write_back(self):
        """Let the system bring some pages of mapped files to the platters, as it does from time to time."""
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            if isinstance(node, Folder):
                waiting += node.names.values()
            else:
                node.write_back(lambda n: self.world.choose(n, "disk"))

    def take_room(self, nbytes, path):
        """Take room for bytes.

        Raises:
            OSError: the disk is full.
        """
        if nbytes > self.room:
            raise _error(errno.ENOSPC, path)
        self.room -= nbytes

    # --- for checkers -----------------------------------------------------------------------

    def listing(self, path="", host=None):
        """The paths of all files below, for a checker."""
        found = []
        node = self.root if not path else self.find(path, host)
        waiting = [(path, node)]
        while waiting:
            at, node = waiting.pop()
            if isinstance(node, File):
                found.append(at)
            else:
                waiting += [(f"{at}/{name}", inner) for name, inner in node.names.items()]
        return sorted(found)


def _parts(path):
    text = str(path)
    if ".." in text:
        # There are no symbolic links.
        text = os.path.normpath(text)
    return [part for part in text.split("/") if part]


def _error(number, path):
    return OSError(number, os.strerror(number), str(path))


def stat_of(node):
    """The system's facts of a file or folder."""
    is_folder = isinstance(node, Folder)
    mode = stat.S_IFDIR | _ROOT_MODE if is_folder else stat.S_IFREG | 0o644
    size = 4096 if is_folder else len(node.data)
    seconds = node.mtime_ns / 1e9
    facts = (mode, node.number, 1, 1, os.geteuid(), os.getegid(), size, *(int(seconds),) * 3)
    times = {"st_atime_ns": node.mtime_ns, "st_mtime_ns": node.mtime_ns, "st_ctime_ns": node.mtime_ns}
    return os.stat_result((*facts, seconds, seconds, seconds), times)
