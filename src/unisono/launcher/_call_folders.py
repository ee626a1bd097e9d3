"""The folder of a function's call, which is removed with its end, also where its process is killed.

A killed process removes nothing: the next call does. Each folder has a file that its process keeps locked;
the kernel drops the lock with the process, so that an id which another process has by then means nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "unisono-call-"
_OWNER = "owner"


@contextmanager
def call_folder(parent: Path | None = None) -> Iterator[Path]:
    """Make a folder for the files of a call, and remove it; remove those of processes that were killed.

    Args:
        parent: where it is made; None for the system's temporary directory.
    """
    place = Path(tempfile.gettempdir()) if parent is None else parent
    _remove_abandoned(place)
    root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    # Not a lock of `lockf`, which belongs to the process: a second call in another thread would get it.
    with (root / _OWNER).open("w") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        # What has no content yet was not locked yet.
        file.write(f"{os.getpid()}\n")
        file.flush()
        try:
            yield root
        finally:
            shutil.rmtree(root)


def _remove_abandoned(place: Path) -> None:
    for root in place.glob(f"{PREFIX}*"):
        # Of other users, of another file system, or removed meanwhile.
        with contextlib.suppress(OSError):
            if root.lstat().st_uid == os.geteuid() and _is_abandoned(root / _OWNER):
                shutil.rmtree(root)


def _is_abandoned(owner: Path) -> bool:
    with owner.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return bool(file.read())
