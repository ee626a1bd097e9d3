"""Commits in object stores, which rename nothing: the manifest is uploaded last, and is what makes them one.

    ckpt-7/data-1a2b3c4d/facts.json …   in a folder of this upload alone
    ckpt-7/MANIFEST.json                names the folder, with sizes and hashes
    .writer                             the process that writes into this directory

Readers see a commit when its manifest is there, and what an interrupted upload has left never. An upload
overwrites nothing of another one, so that a process that was replaced, and is still at it, cannot damage what
its successor has written. Nor does its commit appear: before it writes the manifest it reads `.writer`, which
the successor has overwritten. What no manifest names is deleted by the process that notices, or by the next
writer there.

Tests: tests/virtual/checkpoint/test_object_store.py, tests/cluster/test_object_store.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from unisono._errors import CheckpointError
from unisono._system._object_store import ObjectStat, StorePath
from unisono.checkpoint.commits._manifests import (
    MANIFEST,
    absent,
    check_files,
    damaged,
    make_manifest,
    parse_manifest,
)

_WRITER = ".writer"
#: The files of one upload of a commit.
_DATA = re.compile(r"data-[0-9a-f]{8}/.+")


@dataclasses.dataclass
class _WriterClaim:
    """That this process writes into a directory.

    Args:
        swept: the series in which the remains of earlier processes were deleted.
    """

    text: bytes
    swept: set[str] = dataclasses.field(default_factory=set)


#: By process, too: a forked child does not write in the name of its parent.
_CLAIMS: dict[tuple[int, StorePath], _WriterClaim] = {}


def claim(directory: StorePath) -> None:
    """Note in a directory that this process writes there, and no earlier one any more."""
    made = _WriterClaim(f"process {os.getpid()} of {socket.gethostname()} ({secrets.token_hex(8)})".encode())
    (directory / _WRITER).write_bytes(made.text)
    _CLAIMS[os.getpid(), directory] = made


def check_directory(directory: StorePath, *, writes: bool) -> None:
    """Check that a directory can be read, and claim it; without `writes`, the next commit claims it.

    Raises:
        OSError: the store does not answer, there is no such bucket, or access is denied.
    """
    # A bucket that is missing is an error here, a directory is not.
    directory.find(_WRITER)
    if writes:
        claim(directory)
    else:
        _CLAIMS.pop((os.getpid(), directory), None)


def leave(directory: StorePath) -> None:
    """Delete the note of this process: it writes no more."""
    if other_writer(directory) is None:
        (directory / _WRITER).unlink(missing_ok=True)
        _CLAIMS.pop((os.getpid(), directory), None)


def other_writer(directory: StorePath) -> str | None:
    """Return which process has claimed a directory after this one; None where this one has it."""
    own = _CLAIMS.get((os.getpid(), directory))
    try:
        holder = (directory / _WRITER).read_bytes()
    except FileNotFoundError:
        return None
    return None if own is not None and holder == own.text else holder.decode(errors="replace")


def _require_claim(directory: StorePath) -> None:
    other = other_writer(directory)
    if other is not None:
        raise CheckpointError(
            f"One process may write checkpoints into a directory at a time. Received: {directory}, where "
            f"{other} has begun to write after this one, which leaves all as it is. End one of the two, or "
            "pass another directory."
        )


def upload_commit(
    target: StorePath, write: Callable[[Path], None], check: Callable[[Path], None] | None, replaces: bool
) -> None:
    """Make a commit of what `write` puts into an empty local folder; see `_commits.write_commit`.

    Raises:
        OSError: the store does not take it, or the claim is lost; nothing of it can be seen then.
    """
    directory = target.parent
    if (os.getpid(), directory) not in _CLAIMS:
        claim(directory)
    _sweep(directory, target.name)
    before = target.find()
    is_other = any(key != MANIFEST and not _DATA.match(key) for key in before)
    if not replaces if MANIFEST in before else is_other:
        raise CheckpointError(
            f"A checkpoint must have a new name. Received: {target}, which exists. Use the next number."
        )
    with tempfile.TemporaryDirectory(prefix="unisono-") as aside:
        folder = f"data-{secrets.token_hex(4)}"
        (Path(aside) / folder).mkdir()
        write(Path(aside) / folder)
        manifest, text = make_manifest(Path(aside), folder)
        try:
            for name in manifest["files"]:
                (target / name).upload(Path(aside) / name)
            if check is not None:
                with _downloaded(target, text.encode()) as downloaded:
                    check(downloaded)
            _require_claim(directory)
        except BaseException:
            with contextlib.suppress(OSError):
                _delete(target, manifest["files"])
            raise
    _write_manifest(target / MANIFEST, text.encode(), is_new=not replaces)
    if not replaces:
        _withdraw_if_replaced(target, manifest["files"])
    _delete(target, filter(_DATA.match, before))


def _withdraw_if_replaced(target: StorePath, names: Iterable[str]) -> None:
    """Take a new commit back if a successor has begun just before it, and deleted what had no manifest yet.

    Raises:
        CheckpointError: there is a successor.
    """
    if other_writer(target.parent) is None:
        return
    if not set(names) <= target.find().keys():
        _delete(target, [MANIFEST, *names])
    _require_claim(target.parent)


def _write_manifest(path: StorePath, text: bytes, *, is_new: bool) -> None:
    try:
        path.write_bytes(text, is_new=is_new)
    except OSError:
        # The request may have been carried out, and its answer lost: the client repeats it then, and is told
        # that there is such an object. If not, the next process that writes here deletes what was uploaded.
        with contextlib.suppress(FileNotFoundError):
            if path.read_bytes() == text:
                return
        raise


def _delete(root: StorePath, names: Iterable[str]) -> None:
    for name in names:
        (root / name).unlink(missing_ok=True)


def _sweep(directory: StorePath, name: str) -> None:
    """Delete, once, what processes that wrote here before have left of this series without a manifest.

    Raises:
        CheckpointError: another process has claimed the directory.
    """
    swept = _CLAIMS[os.getpid(), directory].swept
    series = re.sub(r"\d+$", "", name)
    if series in swept:
        return
    swept.add(series)
    left: dict[str, list[str]] = {}
    complete = set()
    pattern = re.compile(rf"({re.escape(series)}\d*)/({_DATA.pattern}|{re.escape(MANIFEST)})")
    for key in directory.find(series):
        match = pattern.fullmatch(key)
        if match and match[2] == MANIFEST:
            complete.add(match[1])
        elif match:
            left.setdefault(match[1], []).append(match[2])
    remains = left.keys() - complete
    if remains:
        # What a successor is uploading has no manifest yet, either: it has claimed the directory before.
        _require_claim(directory)
    for commit in remains:
        _delete(directory / commit, left[commit])


def delete_upload(path: StorePath) -> None:
    """Delete a commit, its manifest first.

    Raises:
        CheckpointError: another process has claimed the directory.
    """
    names = path.find()
    # After the list: whatever a successor has written there, it has claimed the directory before.
    _require_claim(path.parent)
    _delete(path, sorted(names, key=lambda name: name != MANIFEST))


@contextlib.contextmanager
def downloaded(path: StorePath) -> Iterator[Path]:
    """Yield a local folder with what was written into a commit, checked.

    Raises:
        CheckpointError: there is none, or it is not as it was written.
        OSError: the store does not answer.
    """
    try:
        text = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise (damaged(path, f"{MANIFEST} is missing") if path.exists() else absent(path)) from None
    with _downloaded(path, text) as root:
        yield check_files(root, parse_manifest(path, text), path)


@contextlib.contextmanager
def _downloaded(path: StorePath, text: bytes) -> Iterator[Path]:
    """Yield a local copy of a commit whose manifest has this text; what is missing there is missing here."""
    with tempfile.TemporaryDirectory(prefix="unisono-") as aside:
        root = Path(aside)
        path.download_below(root, parse_manifest(path, text)["files"], missing_ok=True)
        (root / MANIFEST).write_bytes(text)
        yield root


def commits_of(directory: StorePath, prefix: str) -> dict[str, ObjectStat]:
    """The commits whose names begin so, and what the store knows of their manifests."""
    keys = ((*key.partition("/"), stat) for key, stat in directory.find(prefix).items())
    return {name: stat for name, _, rest, stat in keys if rest == MANIFEST}


def manifests(directory: StorePath) -> dict[str, ObjectStat]:
    """The commits of all series in a directory, and what the store knows of their manifests.

    It lists only what begins as a folder directly below does: other objects in the directory are not read.
    """
    folders = [name for name, stat in directory.children().items() if stat is None and name[0] != "."]
    if not folders:
        # A bucket that is missing is an error, a directory is not.
        directory.find(_WRITER)
    stats: dict[str, ObjectStat] = {}
    for series in {re.sub(r"\d+$", "", name) for name in folders}:
        stats |= commits_of(directory, series)
    return stats
