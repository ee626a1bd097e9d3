"""Commits: directories that are complete or do not exist, whatever dies while they are written.

A commit is written aside, every file is hashed into a manifest, all is flushed to the disk, and
one rename makes it visible. What a reader finds under a commit's name is either what was written
or is recognized as damaged: a file that is missing, cut, or has a flipped bit.

Orbax renames as well, but flushes nothing to the disk: after a power loss its directory can be
there without its contents.

In an object store nothing is renamed: `_uploads` writes there.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from unisono._errors import CheckpointError
from unisono._system._files import flush, flush_tree, make_folder, swap_folder
from unisono._system._object_store import ObjectStat, Place, StorePath
from unisono._system._task_reports import process_events
from unisono.checkpoint.commits import _uploads
from unisono.checkpoint.commits._manifests import (
    MANIFEST,
    Manifest,
    check_files,
    make_manifest,
    read_manifest,
)

_LOG = logging.getLogger("unisono")
#: How often a directory is listed that changes while it is read.
_MOST_LOOKS = 10

#: The contents of a commit.
Content = TypeVar("Content")

#: Errors of the system that a directory gives whose path, or whose owner, is another than was meant.
_WRONG_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST)

_ASIDE = re.compile(
    r"^\.(?P<name>.+)\.(?P<host>[^@]+)@(?P<pid>\d+)\.[0-9a-f]{8}\.(?P<kind>partial|replaced)$"
)


def write_commit(
    directory: Place,
    name: str,
    write: Callable[[Path], None],
    check: Callable[[Path], None] | None = None,
    *,
    replaces: bool = False,
) -> Place:
    """Make `directory/name` from what `write` puts into an empty folder, all of it or nothing.

    Args:
        name: of the commit; must not exist, but for `replaces`.
        check: gets the folder before it becomes visible, complete; raises to refuse it.
        replaces: whether another commit may have the name; it is deleted when the new one is complete.

    Raises:
        CheckpointError: the commit exists, or the disk is full or fails; nothing is left then.
    """
    target = directory / name
    with translated_errors(target), process_events().span("save"):
        if isinstance(target, StorePath):
            _uploads.upload_commit(target, write, check, replaces)
        else:
            _rename_commit(target, write, check, replaces)
    return target


def _rename_commit(
    target: Path, write: Callable[[Path], None], check: Callable[[Path], None] | None, replaces: bool
) -> None:
    directory = target.parent
    aside = _aside(target)
    try:
        with _placed(directory):
            make_folder(directory)
        if target.exists() and not (replaces and (target / MANIFEST).is_file()):
            raise CheckpointError(
                f"A checkpoint must have a new name. Received: {target}, which exists. Use the next number."
            )
        with _placed(directory):
            aside.mkdir()
        write(aside)
        # The order is the guarantee: complete, on the disk, checked, and only then visible under its name.
        (aside / MANIFEST).write_text(make_manifest(aside)[1])
        flush_tree(aside)
        if check is not None:
            check(aside)
        if replaces and target.exists():
            # `sweep` puts the other one back if this process dies in between.
            swap_folder(aside, target, aside.with_suffix(".replaced"))
            # Before the old one is deleted: a power loss must not undo the names and keep the deletions.
            flush(directory)
            _remove(aside.with_suffix(".replaced"))
        else:
            os.rename(aside, target)
        # A rename is a change of the directory: without this flush a power loss may undo it.
        flush(directory)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _aside(target: Path) -> Path:
    # Beside the target, since a rename is atomic only within one file system. The dot hides it from readers;
    # by host and process `sweep` knows what a dead writer has left, and what is still being written.
    return target.with_name(
        f".{target.name}.{socket.gethostname()}@{os.getpid()}.{uuid.uuid4().hex[:8]}.partial"
    )


def place_aside(target: Place) -> Path:
    """Return a new path for what will be moved into a commit; on a file system `sweep` deletes it."""
    if isinstance(target, Path):
        return _aside(target)
    return Path(tempfile.gettempdir()) / f"unisono-{uuid.uuid4().hex}"


@contextlib.contextmanager
def translated_errors(target: Place) -> Iterator[None]:
    """Raise errors of the disk as `CheckpointError`s."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            raise _translated(error, target) from error
        # Orbax and TensorStore wrap the system's error in their own, which have no `errno`.
        if "RESOURCE_EXHAUSTED" in str(error) or os.strerror(errno.ENOSPC) in str(error):
            raise CheckpointError(_full(target)) from error
        raise


def _full(target: Place) -> str:
    where = (
        target if isinstance(target, Path) else f"{tempfile.gettempdir()}, from where {target} is uploaded"
    )
    return (
        f"A checkpoint needs room on the disk. Received: a full one, at {where}. Earlier checkpoints are "
        "as they were. Free space, or keep fewer with `max_to_keep`."
    )


def _translated(error: OSError, target: Place) -> CheckpointError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CheckpointError(_full(target))
    return CheckpointError(
        f"A checkpoint must be written completely. Received: {error} at {target}. "
        "Earlier ones are as they were."
    )


def read_commit(path: Place, read: Callable[[Path], Content]) -> Content:
    """Check a commit, and read it; once more where another one has taken its name meanwhile.

    Args:
        read: gets the folder with what was written into it: of an object store a copy.

    Raises:
        CheckpointError: something is missing, cut or changed; it names the first such file.
        OSError: the object store does not answer.
    """
    if not isinstance(path, Path):
        with _uploads.downloaded(path) as folder:
            return read(folder)
    for _ in range(_MOST_LOOKS):
        manifest = read_manifest(path)
        try:
            content = read(check_files(path, manifest, path))
        except CheckpointError:
            if not _is_replaced(path, manifest):
                raise
            continue
        # Otherwise some of its files may be the other one's.
        if not _is_replaced(path, manifest):
            return content
    raise CheckpointError(
        f"A checkpoint must stay as it is while it is read. Received: {path}, which was replaced "
        f"{_MOST_LOOKS} times meanwhile. Save with new names, or less often."
    )


def _is_replaced(path: Path, manifest: Manifest) -> bool:
    try:
        return read_manifest(path) != manifest
    except CheckpointError:
        # Deleted, or about to be replaced for the second time: the next look says which.
        return True


@contextlib.contextmanager
def reached(place: Place) -> Iterator[None]:
    """Translate errors of an object store that does not answer: they are no damage of a checkpoint."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError) or isinstance(place, Path):
            raise
        # Clients of some stores list every place where they have looked for a library.
        first = next(iter(str(error).splitlines()), "")
        raise CheckpointError(
            f"The store of checkpoints must answer. Received: {first:.300}. See whether it can be reached "
            "from this machine, whether there is such a bucket, and which credentials are used."
        ) from None


def check_place(directory: Place, *, writes: bool) -> None:
    """Check that commits can lie in a directory, which is made where this process writes.

    In an object store, this process claims the directory if it writes, and else with its next commit.

    Raises:
        CheckpointError: when it is not a directory, or cannot be made, read or written.
    """
    try:
        if isinstance(directory, StorePath):
            _uploads.check_directory(directory, writes=writes)
            return
        if writes:
            make_folder(directory)
        # `mkdir` succeeds for a directory that exists and cannot be read.
        with os.scandir(directory):
            pass
        if writes and not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "files cannot be made there")
    except FileNotFoundError as error:
        if writes or isinstance(directory, StorePath):
            raise _no_place(directory, error) from None
    # `ValueError`: Python rejects a path with a null byte.
    except (OSError, ValueError) as error:
        raise _no_place(directory, error) from None


@contextlib.contextmanager
def _placed(directory: Path) -> Iterator[None]:
    """Say what a directory must be that cannot be made or written to; a full disk is another error."""
    try:
        yield
    except OSError as error:
        if error.errno not in _WRONG_PLACE:
            raise
        raise _no_place(directory, error) from None


def _no_place(directory: Place, error: OSError | ValueError) -> CheckpointError:
    why = getattr(error, "strerror", None) or str(error)
    return CheckpointError(
        f"Checkpoints need a directory that can be read and written. Received: {str(directory)!r} ({why}). "
        "Pass another one."
    )


def manifests(directory: Place) -> Mapping[str, os.stat_result | ObjectStat]:
    """The complete commits of a directory by name, and what is known of their manifests.

    Raises:
        OSError: the directory cannot be read, or the object store does not answer.
    """
    if isinstance(directory, StorePath):
        return _uploads.manifests(directory)
    stats = {}
    for path in _entries(directory):
        # Names with a dot are being written or deleted. Others may be deleted meanwhile.
        if not path.name.startswith("."):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                stats[path.name] = (path / MANIFEST).stat()
    return stats


def commits(directory: Place, prefix: str) -> list[tuple[int, Place]]:
    """The commits `prefix-N` of a directory with their numbers, oldest first; damaged ones too."""
    if isinstance(directory, StorePath):
        names: Iterable[str] = _uploads.commits_of(directory, f"{prefix}-")
    else:
        names = (path.name for path in _entries(directory) if path.is_dir())
    return [(number, directory / name) for number, name in _numbered(names, prefix)]


def newest_number(directory: Place, prefix: str) -> int:
    """The highest number of a name `prefix-N` in a directory, whatever has that name; 0 for none."""
    # Also plain files and damaged commits: the next commit must not get a name that exists.
    if isinstance(directory, StorePath):
        with reached(directory):
            names = {key.partition("/")[0] for key in directory.find(f"{prefix}-")}
    else:
        names = {path.name for path in _entries(directory)}
    return max((number for number, _ in _numbered(names, prefix)), default=0)


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _numbered(names: Iterable[str], prefix: str) -> list[tuple[int, str]]:
    pattern = re.compile(rf"{re.escape(prefix)}-(\d+)")
    return sorted((int(match[1]), match[0]) for name in names if (match := pattern.fullmatch(name)))


def _first_good(
    every: Sequence[tuple[int, Place]], read: Callable[[Path], Content]
) -> tuple[tuple[Place, Content] | None, CheckpointError | None]:
    """Return the newest undamaged one of some commits, and the error of the first that was passed over."""
    first: CheckpointError | None = None
    for _, path in reversed(every):
        try:
            content = read_commit(path, read)
        except CheckpointError as error:
            first = first or error
            _LOG.warning("%s Falling back to the one before.", error)
            continue
        if first is not None:
            _LOG.warning("Restoring from %s, the newest checkpoint that is as it was written.", path)
        return (path, content), first
    return None, first


def newest_good(
    directory: Place, prefix: str, read: Callable[[Path], Content]
) -> tuple[Place, Content] | None:
    """Read the newest undamaged commit, and log each damaged one that is passed over.

    Args:
        read: gets the folder with its files; a `CheckpointError` of it says that the commit is damaged.

    Raises:
        CheckpointError: there are commits and all are damaged.
        OSError: the object store does not answer.
    """
    every, first = commits(directory, prefix), None
    for _ in range(_MOST_LOOKS):
        found, first = _first_good(every, read)
        if found is not None:
            return found
        # A process that goes on until it sees the fence may have replaced all that were listed meanwhile.
        again = commits(directory, prefix)
        if again == every:
            break
        every = again
    if first is not None:
        raise CheckpointError(
            f"One of the checkpoints in {directory} must be as it was written. Received: {len(every)}, all "
            f"damaged; the newest: {first} Move them away to start from scratch."
        )
    return None


def delete_commit(path: Place) -> None:
    """Delete a commit so that it is never seen half deleted."""
    if isinstance(path, StorePath):
        with reached(path):
            _uploads.delete_upload(path)
        return
    aside = _aside(path)
    try:
        # `sweep` finds the new name, if this process dies before all is deleted.
        os.rename(path, aside)
    except FileNotFoundError:
        return
    # Otherwise a power loss may undo the name, and keep what is deleted below it.
    flush(path.parent)
    _remove(aside)


def _remove(aside: Path) -> None:
    """Delete a commit that was set aside; of a symbolic link the link alone, its target is someone else's."""
    if aside.is_symlink():
        aside.unlink(missing_ok=True)
    else:
        shutil.rmtree(aside, ignore_errors=True)


def is_taken(directory: Place) -> bool:
    """Return whether another process has claimed a directory of an object store; it is logged."""
    other = _uploads.other_writer(directory) if isinstance(directory, StorePath) else None
    if other is not None:
        _LOG.warning("%s writes into %s now: this process leaves it as it is.", other, directory)
    return other is not None


def leave(directory: Place) -> None:
    """Delete a directory if nothing is in it; in an object store, the note that this process writes there."""
    with contextlib.suppress(OSError):
        if isinstance(directory, StorePath):
            _uploads.leave(directory)
        else:
            directory.rmdir()


def sweep(directory: Place) -> list[Path]:
    """Delete what processes of this machine that are dead have left half written; return what was.

    A commit that one of them was replacing gets its name again, unless the new one has it. In an object store
    the first commit of a process does so.
    """
    swept: list[Path] = []
    if isinstance(directory, StorePath):
        return swept
    for path in sorted(_entries(directory)):
        match = _ASIDE.match(path.name)
        # On a shared disk, a process id of another machine says nothing about a process here.
        if match and match["host"] == socket.gethostname() and not _is_alive(int(match["pid"])):
            if match["kind"] == "replaced" and not (directory / match["name"]).exists():
                os.rename(path, directory / match["name"])
            else:
                swept.append(path)
    if swept:
        # The dead process may not have flushed the names that it gave: a power loss must not undo them, and
        # keep what is deleted here.
        flush(directory)
    for path in swept:
        _remove(path)
    if swept:
        # After a power loss a remainder that is back could be taken for a commit that was being replaced.
        flush(directory)
    return swept


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to another user
        return True
    return True
