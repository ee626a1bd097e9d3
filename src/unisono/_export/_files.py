"""Artefacts on disk: written to a temporary path and renamed, and read with verified checksums.

An artefact is a directory with data files and `manifest.json`, which holds the sizes and SHA-256 sums of
the files and of itself. Formats have a version: a reader accepts its own and older ones.

Tests: tests/unit/test_export_files.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from unisono._errors import InvalidArgumentError, UnisonoError
from unisono._system._files import flush, flush_tree, swap_folder
from unisono._system._json import MALFORMED, parse_json
from unisono._system._object_store import Place, written_locally

MANIFEST = "manifest.json"


class FileRecord(TypedDict):
    """A file's entry in a manifest."""

    bytes: int
    sha256: str


def seal(kind: str, version: int, body: Mapping[str, object]) -> str:
    """Return the text of a manifest."""
    digest = _digest_of(kind, version, body)
    record = {"format": kind, "version": version, "sha256": digest, "body": body}
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"


def unseal(text: bytes, file: Path, kind: str, version: int) -> dict[str, Any]:
    """Return the body of a manifest.

    Raises:
        InvalidArgumentError: when the manifest is damaged, of another kind, or newer.
    """
    try:
        record = parse_json(text)
        found_format, number, digest, body = (record[k] for k in ("format", "version", "sha256", "body"))
        known = isinstance(found_format, str) and isinstance(number, int) and isinstance(body, dict)
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(file, f"{type(error).__name__}: {error}") from error
    if not known:
        raise damaged(file, f"format={found_format!r}, version={number!r}")
    if found_format != kind:
        raise InvalidArgumentError(
            f"{str(file)!r} must describe an artefact of the format {kind!r}. Received: {found_format!r}. "
            "`unisono.export.load` reads artefacts of `export(..., format='stablehlo')`, and "
            "`load_from_saved_model` those of `export_saved_model`."
        )
    # Before the checksum, whose rules a newer version may change.
    if number > version:
        raise InvalidArgumentError(
            f"{str(file)!r} must have a format version of at most {version}. Received: version={number}. "
            "Install the newer version of Unisono that wrote it: `pip install --upgrade unisono`."
        )
    if digest != _digest_of(found_format, number, body):
        raise damaged(file, "content that does not match its own checksum")
    return dict(body)


def _digest_of(kind: str, version: int, body: Mapping[str, object]) -> str:
    # One text for one content: the digest must not depend on the order or the spaces of the file.
    text = json.dumps([kind, version, body], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def damaged(file: Path, received: str) -> InvalidArgumentError:
    """Return the error for a file that has changed since it was written."""
    return InvalidArgumentError(
        f"{str(file)!r} must be unchanged since it was written. Received: {received}. Copy the artefact "
        "again, or export the model again."
    )


@contextlib.contextmanager
def read_as_written(file: Path) -> Iterator[None]:
    """Raise what the contents of an artefact cause that no version has written as a clear error.

    Its checksums say that it was not changed by accident, and not who has written it.

    Raises:
        InvalidArgumentError: the block has read what it does not expect.
    """
    try:
        yield
    except UnisonoError:
        raise
    except MALFORMED as error:
        raise damaged(file, f"contents of another form ({type(error).__name__}: {error})") from error


def describe_files(folder: Path, names: Sequence[str]) -> dict[str, FileRecord]:
    """Return the size in bytes and the SHA-256 sum of each file."""
    records: dict[str, FileRecord] = {}
    for name in names:
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        records[name] = {"bytes": (folder / name).stat().st_size, "sha256": digest}
    return records


def read_manifest(folder: Path, kind: str, version: int) -> dict[str, Any]:
    """Return the body of the manifest of an artefact."""
    file = folder / MANIFEST
    try:
        text = file.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(
            f"An artefact must be a directory with {MANIFEST!r}. Received: {str(folder)!r}, without "
            f"{str(file)!r}. A `.keras` file is loaded by `keras.saving.load_model`."
        ) from error
    return unseal(text, file, kind, version)


def read_file(folder: Path, name: str, files: Mapping[str, FileRecord]) -> bytes:
    """Return the content of a file of an artefact.

    Raises:
        InvalidArgumentError: when it is missing or truncated, or does not match its checksum.
    """
    file = folder / name
    try:
        data = file.read_bytes()
    except OSError as error:
        problem = "no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        raise damaged(file, problem) from error
    # Before the checksum, because "truncated" says more than "changed".
    if len(data) != files[name]["bytes"]:
        raise damaged(file, f"{len(data)} bytes instead of {files[name]['bytes']}")
    if hashlib.sha256(data).hexdigest() != files[name]["sha256"]:
        raise damaged(file, "content that does not match its checksum")
    return data


@contextlib.contextmanager
def replace_atomically(path: Path, marker: str | None = None) -> Iterator[Path]:
    """Yield a temporary path beside `path`, and rename it to `path` at the end.

    A process that dies leaves at most a hidden file or directory beside `path`, never a part of an artefact.

    Raises:
        InvalidArgumentError: when something else is at `path`.
    """
    _check_replaceable(path, marker)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside `path`, because a rename is atomic only within one file system; random, so that two processes do
    # not write to one.
    aside = path.parent / f".{secrets.token_hex(4)}.{path.name}"
    try:
        yield aside
        flush_tree(aside)
        if path.is_dir():
            old = path.parent / f".{path.name}.{secrets.token_hex(4)}.old"
            swap_folder(aside, path, old)
            shutil.rmtree(old)
        else:
            aside.replace(path)
        flush(path.parent)
    finally:
        if aside.is_dir():
            shutil.rmtree(aside)
        else:
            aside.unlink(missing_ok=True)


@contextlib.contextmanager
def written_at(place: Place, marker: str | None = None) -> Iterator[Path]:
    """Yield the path itself, or for one in an object store a temporary one, which is uploaded at the end.

    The marker is uploaded last; what an earlier artefact had besides is deleted.

    Args:
        marker: for a directory, the file whose presence marks an artefact that may be replaced.

    Raises:
        InvalidArgumentError: when something else is there in the store.
    """
    if isinstance(place, Path):
        yield place
        return
    before = {} if marker is None else place.find()
    if marker is not None:
        _check_replaceable(place, marker)
    with written_locally(place, marker) as aside:
        yield aside
        written = {file.relative_to(aside).as_posix() for file in aside.rglob("*")}
    for name in before.keys() - written:
        (place / name).unlink(missing_ok=True)


def _check_replaceable(path: Place, marker: str | None) -> None:
    if marker is None:
        fits, wanted = not path.is_dir(), "a file"
    else:
        empty = isinstance(path, Path) and path.is_dir() and not any(path.iterdir())
        fits = not path.exists() or empty or (path / marker).is_file()
        wanted = f"a new or empty directory, or one with {marker!r}"
    if not fits:
        raise InvalidArgumentError(
            f"`path` must be {wanted}, so that nothing else is overwritten. Received: path={str(path)!r}. "
            "Pass another path, or remove what is there."
        )
