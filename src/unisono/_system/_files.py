"""Files that are replaced atomically, and flushed to the disk: the one place that calls `os.fsync`.

A file is written under another name in the same folder and renamed: a reader sees the old content or the
new one, never a part. What must outlive a crash of the machine is flushed before the rename, and its folder
after it.

Tests: tests/unit/system/test_replaced_files.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from pathlib import Path

from unisono._system._object_store import Place, StorePath

#: With these, network and user-space file systems say that they cannot flush a folder.
_CANNOT_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


def replace_file(path: Place, content: str | bytes, *, durable: bool) -> None:
    """Write a file so that every reader sees the old content or the new one.

    Args:
        path: of the file; its folder must be there. Also one in an object store, which is durable by itself.
        content: text, which is written as UTF-8, or bytes.
        durable: whether it must outlive a crash of the machine, which costs a wait for the disk.

    Raises:
        OSError: it cannot be written; the old file is unchanged then, and nothing else is left.
    """
    data = content.encode() if isinstance(content, str) else content
    if isinstance(path, StorePath):
        path.write_bytes(data)
        return
    # In the same folder, because a rename is atomic only within one file system; by process and thread,
    # because several may write.
    aside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        aside.write_bytes(data)
        if durable:
            rename_durably(aside, path)
        else:
            aside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def rename_durably(aside: Path, path: Path) -> None:
    """Rename a file that is complete, so that after a crash of the machine its content is complete, too.

    Args:
        path: its path from now on, in a folder on the same file system; a file that is there is replaced.
    """
    # Before the rename: otherwise a crash can leave the new name without content.
    flush(aside)
    aside.replace(path)
    flush(path.parent)


def swap_folder(aside: Path, path: Path, before: Path) -> None:
    """Rename a complete folder to the name of another one, which gets the name `before`.

    Raises:
        OSError: it cannot be renamed; the other one has its name again then.
    """
    # `rename` does not replace a folder that is not empty.
    path.rename(before)
    try:
        aside.rename(path)
    # Also at Ctrl-C: the folder that was there must be back.
    except BaseException:
        before.rename(path)
        raise


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder where it is missing, with those above it, so that a crash of the machine leaves it there.

    To flush what is in a folder does not flush its own name, which stands in the folder above.

    Args:
        mode: of a new folder, not of those above it.

    Raises:
        OSError: it cannot be made.
    """
    missing = [folder for folder in path.parents if not folder.exists()]
    path.mkdir(mode, parents=True, exist_ok=True)
    # The one above also where the folder is there: who made it may have died before this.
    for folder in dict.fromkeys([path.parent, *(folder.parent for folder in missing)]):
        # A folder that may be entered and not be read.
        with contextlib.suppress(PermissionError):
            flush(folder)


def own_folder_problem(path: Path, denied: int) -> str:
    """Make a folder where it is missing; return why this user must not rely on it, empty where nothing is.

    Args:
        denied: the bits of its mode that others must not have.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Not of what a link points to: another user may have made it.
        state = path.lstat()
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISDIR(state.st_mode):
        return "it is not a directory"
    if state.st_uid != os.geteuid():
        return f"it belongs to the user {state.st_uid}"
    return f"its mode is {stat.S_IMODE(state.st_mode):04o}" if state.st_mode & denied else ""


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, from the system's buffers to the disk.

    A file system that cannot flush folders makes names durable by itself, or not at all: that is passed over.

    Raises:
        OSError: a file could not be flushed.
    """
    is_folder = path.is_dir()
    if is_folder and os.name == "nt":  # Windows cannot open a folder
        return
    # Windows flushes only what is open for writing; others open a folder in no other mode than reading.
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not is_folder or error.errno not in _CANNOT_FLUSH:
            raise
    finally:
        os.close(descriptor)


def flush_tree(path: Path) -> None:
    """Flush a file, or all that is in a folder: files first, then the folders that name them, inside out."""
    for inner in sorted(path.rglob("*"), key=lambda p: -len(p.parts)):
        flush(inner)
    flush(path)
