"""The manifest of a commit: the size and hash of each of its files, and of itself.

Tests: tests/unit/checkpoint/test_commits.py.
"""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path
from typing import NotRequired, TypedDict

from unisono._checks import whole_number
from unisono._errors import CheckpointError
from unisono._system._file_names import name_problem, names_problem
from unisono._system._json import parse_json
from unisono._system._object_store import Place
from unisono._types import Json

MANIFEST = "MANIFEST.json"
FORMAT = 1


class FileEntry(TypedDict):
    """A file of a commit in its manifest."""

    bytes: int
    sha256: str


class Manifest(TypedDict):
    """The contents of a manifest, but for its hash of itself.

    Args:
        files: by their paths from the manifest on.
        folder: which of the folders beside the manifest holds them; absent where they lie beside it.
    """

    format: int
    files: dict[str, FileEntry]
    folder: NotRequired[str]


def make_manifest(root: Path, folder: str = "") -> tuple[Manifest, str]:
    """Return the manifest of all files below `root`, and its text."""
    files: dict[str, FileEntry] = {
        str(file.relative_to(root)): {"bytes": file.stat().st_size, "sha256": _hash(file)}
        for file in sorted(root.rglob("*"))
        if file.is_file()
    }
    manifest: Manifest = {"format": FORMAT, "files": files}
    if folder:
        manifest["folder"] = folder
    return manifest, json.dumps({**manifest, "sha256": _hash_json(manifest)}, indent=1)


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a commit.

    Raises:
        CheckpointError: there is no commit, or no manifest that is as it was written.
    """
    try:
        # Also what cannot be asked for, as in a folder of another user.
        if not path.is_dir():
            raise of_keras(path) if path.suffix in (".h5", ".keras") and path.is_file() else absent(path)
        if not stat.S_ISREG((path / MANIFEST).stat().st_mode):
            raise damaged(path, f"{MANIFEST} is not a file")
        return parse_manifest(path, (path / MANIFEST).read_text())
    except FileNotFoundError:
        below = sorted(folder.parent.name for folder in path.glob(f"*/{MANIFEST}"))
        if below:
            raise CheckpointError(
                f"A checkpoint must be named. Received: {path}, a directory of {len(below)}. Write `restore("
                f"unisono.checkpoint.latest_checkpoint({str(path)!r}))`, or {str(path / below[-1])!r}."
            ) from None
        raise damaged(path, f"{MANIFEST} is missing") from None
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def parse_manifest(path: Place, text: str | bytes) -> Manifest:
    """Parse the text of a manifest.

    Raises:
        CheckpointError: it is not as it was written.
    """
    try:
        parsed = parse_json(text)
        # The manifest's hash of itself: otherwise a flipped bit here would be blamed on another file.
        own = parsed.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _unreadable(path, error) from None
    if _hash_json(parsed) != own:
        raise damaged(path, f"{MANIFEST} has other contents than were written")
    version = whole_number(parsed.get("format"), 1)
    # Before the rest, whose form a newer version may change.
    if version is not None and version > FORMAT:
        raise CheckpointError(
            f"A checkpoint must have format {FORMAT} or older. Received: {path} with format "
            f"{version}. Install a newer unisono."
        )
    problem = "its format is no number" if version is None else _problem_of(parsed)
    if problem is not None:
        # A hash says that nothing was changed by accident, and not who has written it.
        raise damaged(path, f"{MANIFEST} is none: {problem}")
    manifest: Manifest = parsed
    return manifest


def _problem_of(manifest: dict[str, Json]) -> str | None:
    files, folder = manifest.get("files"), manifest.get("folder")
    if not isinstance(files, dict):
        return "`files` is no object"
    for name, entry in files.items():
        is_entry = isinstance(entry, dict) and isinstance(entry.get("sha256"), str)
        if not is_entry or whole_number(entry.get("bytes"), 0) is None:
            return f"the entry of {ascii(name)[:100]} is not a size and a hash"
    folder_problem = None if folder is None else name_problem(folder)
    return names_problem(files) or (folder_problem and f"its folder leads nowhere below: {folder_problem}")


def check_files(root: Path, manifest: Manifest, path: Place) -> Path:
    """Read every file of a commit and compare it with the manifest; return the folder in which they lie.

    Raises:
        CheckpointError: something is missing, cut or changed; it names the first such file.
    """
    for name, entry in manifest["files"].items():
        file = root / name
        try:
            status = file.stat()
            if not stat.S_ISREG(status.st_mode):
                # Reading a pipe would wait for ever.
                raise damaged(path, f"{name} is not a file")
            # The size first: a cut file is noticed without reading it.
            if status.st_size != entry["bytes"]:
                raise damaged(path, f"{name} has {status.st_size} bytes instead of {entry['bytes']}")
            if _hash(file) != entry["sha256"]:
                raise damaged(path, f"{name} has other contents than were written")
        except FileNotFoundError:
            raise damaged(path, f"{name} is missing") from None
        # `CheckpointError` is itself an `OSError`, which the next clause would catch.
        except CheckpointError:
            raise
        except OSError as error:
            raise damaged(path, f"{name} cannot be read ({error.strerror or error})") from None
    return root / manifest.get("folder", "")


def of_keras(path: Place) -> CheckpointError:
    """The error for a file of Keras, which is no checkpoint."""
    return CheckpointError(
        f"A checkpoint is a directory that `Checkpoint.save` has written. Received: {path}, a file of Keras. "
        f"Write `keras.models.load_model({str(path)!r})` in the scope, or `model.load_weights` for weights."
    )


def absent(path: Place) -> CheckpointError:
    """The error for a path without a checkpoint."""
    return CheckpointError(
        f"A checkpoint must exist to be restored. Received: {path}, where there is no directory. "
        "Pass what `save` returned, or `manager.latest_checkpoint`."
    )


def damaged(path: Place, what: str) -> CheckpointError:
    """The error for a checkpoint that has changed."""
    return CheckpointError(
        f"A checkpoint must be as it was written. Received: {path}, where {what}. Restore an earlier one."
    )


def _unreadable(path: Place, error: Exception) -> CheckpointError:
    return damaged(path, f"{MANIFEST} cannot be read ({error!r})")


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _hash_json(value: Json) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
