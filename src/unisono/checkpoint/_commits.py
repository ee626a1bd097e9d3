"""Commits: directories that are complete or do not exist, whatever dies while they are written.

A commit is written aside, every file is hashed into a manifest, all is flushed to the disk, and
one rename makes it visible. What a reader finds under a commit's name is either what was written
or is recognized as damaged: a file that is missing, cut, or has a flipped bit.

Orbax renames as well, but flushes nothing to the disk: after a power loss its directory can be
there without its contents.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import stat
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from unisono._errors import CheckpointError
from unisono._system._files import flush, flush_tree, swap_folder
from unisono._types import Json

_LOG = logging.getLogger("unisono")

MANIFEST = "MANIFEST.json"
FORMAT = 1


class FileEntry(TypedDict):
    """A file of a commit in its manifest."""

    bytes: int
    sha256: str


class Manifest(TypedDict):
    """What a manifest says, but for its hash of itself."""

    format: int
    files: dict[str, FileEntry]


_ASIDE = re.compile(
    r"^\.(?P<name>.+)\.(?P<host>[^@]+)@(?P<pid>\d+)\.[0-9a-f]{8}\.(?P<kind>partial|replaced)$"
)


def write_commit(
    directory: Path,
    name: str,
    write: Callable[[Path], None],
    check: Callable[[Path], None] | None = None,
    *,
    replaces: bool = False,
) -> Path:
    """Make `directory/name` from what `write` puts into an empty folder, all of it or nothing.

    Args:
        name: of the commit; must not exist, but for `replaces`.
        write: gets the folder to fill.
        check: gets the folder before it becomes visible, complete; raises to refuse it.
        replaces: whether another commit may have the name; it is deleted when the new one is complete.

    Raises:
        CheckpointError: the commit exists, or the disk is full or fails; nothing is left then.
    """
    target = directory / name
    # Beside the target, since a rename is atomic only within one file system. The dot hides it from readers;
    # by host and process `sweep` knows what a dead writer has left, and what is still being written.
    aside = directory / f".{name}.{socket.gethostname()}@{os.getpid()}.{uuid.uuid4().hex[:8]}.partial"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if target.exists() and not (replaces and (target / MANIFEST).is_file()):
            raise CheckpointError(
                f"A checkpoint must have a new name. Received: {target}, which exists. Use the next number."
            )
        aside.mkdir()
        write(aside)
        # The order is the guarantee: complete, on the disk, checked, and only then visible under its name.
        _write_manifest(aside)
        flush_tree(aside)
        if check is not None:
            check(aside)
        if replaces and target.exists():
            # `sweep` puts the other one back if this process dies in between.
            swap_folder(aside, target, aside.with_suffix(".replaced"))
            _remove(aside.with_suffix(".replaced"))
        else:
            os.rename(aside, target)
        # A rename is a change of the directory: without this flush a power loss may undo it.
        flush(directory)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            raise _translated(error, target) from error
        # Orbax and TensorStore wrap the system's error in their own, which have no `errno`.
        if "RESOURCE_EXHAUSTED" in str(error) or os.strerror(errno.ENOSPC) in str(error):
            raise CheckpointError(_full(target)) from error
        raise
    return target


def _full(target: Path) -> str:
    return (
        f"A checkpoint needs room on the disk. Received: a full one, at {target}. Earlier checkpoints are "
        "as they were. Free space, or keep fewer with `max_to_keep`."
    )


def _translated(error: OSError, target: Path) -> CheckpointError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CheckpointError(_full(target))
    return CheckpointError(
        f"A checkpoint must be written completely. Received: {error} at {target}. "
        "Earlier ones are as they were."
    )


def check_commit(path: Path) -> None:
    """Read every file of a commit and compare it with the manifest.

    Raises:
        CheckpointError: something is missing, cut or changed; it names the first such file.
    """
    manifest = _read_manifest(path)
    for name, entry in manifest["files"].items():
        file = path / name
        try:
            found = file.stat()
            if not stat.S_ISREG(found.st_mode):
                # Reading a pipe would wait for ever.
                raise _damaged(path, f"{name} is not a file")
            # The size first: a file that was cut is found without reading it.
            if found.st_size != entry["bytes"]:
                raise _damaged(path, f"{name} has {found.st_size} bytes instead of {entry['bytes']}")
            if _hash(file) != entry["sha256"]:
                raise _damaged(path, f"{name} has other contents than were written")
        except FileNotFoundError:
            raise _damaged(path, f"{name} is missing") from None
        # `CheckpointError` is itself an `OSError`, which the next clause would catch.
        except CheckpointError:
            raise
        except OSError as error:
            raise _damaged(path, f"{name} cannot be read ({error.strerror or error})") from None


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"A checkpoint must be as it was written. Received: {path}, where {what}. Restore an earlier one."
    )


def _read_manifest(path: Path) -> Manifest:
    if not path.is_dir():
        raise CheckpointError(
            f"A checkpoint must exist to be restored. Received: {path}, where there is no directory. "
            "Pass what `save` returned, or `manager.latest_checkpoint`."
        )
    try:
        if not stat.S_ISREG((path / MANIFEST).stat().st_mode):
            raise _damaged(path, f"{MANIFEST} is not a file")
        found = json.loads((path / MANIFEST).read_text())
        # The manifest's hash of itself: otherwise a flipped bit here would be blamed on another file.
        own = found.pop("sha256")
    except FileNotFoundError:
        raise _damaged(path, f"{MANIFEST} is missing") from None
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise _damaged(path, f"{MANIFEST} cannot be read ({error!r})") from None
    if _hash_json(found) != own:
        raise _damaged(path, f"{MANIFEST} has other contents than were written")
    manifest: Manifest = found
    if manifest["format"] > FORMAT:
        raise CheckpointError(
            f"A checkpoint must have format {FORMAT} or older. Received: {path} with format "
            f"{manifest['format']}. Install a newer unisono."
        )
    return manifest


def check_place(directory: Path, *, writes: bool) -> None:
    """Check that commits can lie in a directory, which is made where this process writes.

    Args:
        writes: whether this process writes there; else it may be missing.

    Raises:
        CheckpointError: when it is not a directory, or cannot be made, read or written.
    """
    try:
        if writes:
            directory.mkdir(parents=True, exist_ok=True)
        # `mkdir` succeeds for a directory that exists and cannot be read.
        with os.scandir(directory):
            pass
        if writes and not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "files cannot be made there")
    except FileNotFoundError as error:
        if writes:
            raise _no_place(directory, error) from None
    # `ValueError`: Python rejects a path with a null byte.
    except (OSError, ValueError) as error:
        raise _no_place(directory, error) from None


def _no_place(directory: Path, error: OSError | ValueError) -> CheckpointError:
    why = getattr(error, "strerror", None) or str(error)
    return CheckpointError(
        f"Checkpoints need a directory that can be read and written. Received: {str(directory)!r} ({why}). "
        "Pass another one."
    )


def commits(directory: Path, prefix: str) -> list[tuple[int, Path]]:
    """The commits `prefix-N` of a directory with their numbers, oldest first; damaged ones too."""
    pattern = re.compile(rf"{re.escape(prefix)}-(\d+)")
    found = []
    if directory.is_dir():
        for path in directory.iterdir():
            match = pattern.fullmatch(path.name)
            if match and path.is_dir():
                found.append((int(match[1]), path))
    return sorted(found)


def newest_number(directory: Path, prefix: str) -> int:
    """The highest number of a name `prefix-N` in a directory, whatever has that name; 0 for none."""
    pattern = re.compile(rf"{re.escape(prefix)}-(\d+)")
    # Also plain files and damaged commits: the next commit must not get a name that exists.
    names = (path.name for path in directory.iterdir()) if directory.is_dir() else ()
    return max((int(match[1]) for name in names if (match := pattern.fullmatch(name))), default=0)


def newest_good(directory: Path, prefix: str) -> tuple[int, Path] | None:
    """The newest commit that is as it was written; each damaged one that is passed over is logged.

    Raises:
        CheckpointError: there are commits and all are damaged.
    """
    every = commits(directory, prefix)
    first: CheckpointError | None = None
    for number, path in reversed(every):
        try:
            check_commit(path)
        except CheckpointError as error:
            first = first or error
            _LOG.warning("%s Falling back to the one before.", error)
            continue
        if first is not None:
            _LOG.warning("Restoring from %s, the newest checkpoint that is as it was written.", path)
        return number, path
    if first is not None:
        raise CheckpointError(
            f"One of the checkpoints in {directory} must be as it was written. Received: {len(every)}, all "
            f"damaged; the newest: {first} Move them away to start from scratch."
        )
    return None


def delete_commit(path: Path) -> None:
    """Delete a commit so that it is never seen half deleted."""
    aside = path.with_name(
        f".{path.name}.{socket.gethostname()}@{os.getpid()}.{uuid.uuid4().hex[:8]}.partial"
    )
    try:
        # The new name is one that `sweep` finds, if this process dies before all is deleted.
        os.rename(path, aside)
    except FileNotFoundError:
        return
    _remove(aside)


def _remove(aside: Path) -> None:
    """Delete a commit that was set aside; of a symbolic link the link alone, its target is someone else's."""
    if aside.is_symlink():
        aside.unlink(missing_ok=True)
    else:
        shutil.rmtree(aside, ignore_errors=True)


def sweep(directory: Path) -> list[Path]:
    """Delete what processes of this machine that are dead have left half written; return what was.

    A commit that one of them was replacing gets its name again, unless the new one has it.
    """
    swept = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        match = _ASIDE.match(path.name)
        # On a shared disk, a process id of another machine says nothing about a process here.
        if match and match["host"] == socket.gethostname() and not _is_alive(int(match["pid"])):
            if match["kind"] == "replaced" and not (directory / match["name"]).exists():
                os.rename(path, directory / match["name"])
                continue
            _remove(path)
            swept.append(path)
    return swept


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # The process lives and belongs to another user.
    except PermissionError:
        return True
    return True


def _write_manifest(folder: Path) -> None:
    files: dict[str, FileEntry] = {
        str(file.relative_to(folder)): {"bytes": file.stat().st_size, "sha256": _hash(file)}
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    manifest: Manifest = {"format": FORMAT, "files": files}
    (folder / MANIFEST).write_text(json.dumps({**manifest, "sha256": _hash_json(manifest)}, indent=1))


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _hash_json(value: Json) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
