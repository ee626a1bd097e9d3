"""Names of files that stand in a file, a message or a listing: the one place that says where they may lead.

A manifest, the keys of a bucket or a request can hold any text. Before a byte is written, and before a file
is read, each name is checked here: it must lead to a file below the folder to which it belongs.

Tests: tests/unit/system/test_file_names.py.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from unisono._errors import InvalidArgumentError

#: Bytes of a whole name, as object stores limit their keys, and of a part, as file systems do.
_LONGEST, _LONGEST_PART = 1000, 255
#: Folders in each other.
_DEEPEST = 50
_DRIVE = re.compile(r"[A-Za-z]:")


def name_problem(name: object) -> str | None:
    """Return why a name leads to no file below its folder; None if it does.

    >>> name_problem("data-1a2b3c4d/facts.json"), name_problem("../../.bashrc")
    (None, "it has a part '..'")
    """
    if not isinstance(name, str):
        return "it is not a text"
    if name.startswith("/") or _DRIVE.match(name):
        return "it is absolute"
    # Windows takes a backslash for a separator.
    if "\\" in name or any(ord(character) < 32 for character in name):
        return "it has a backslash or a control character"
    # Half of a surrogate pair, which JSON may hold.
    if any(0xD800 <= ord(character) <= 0xDFFF for character in name):
        return "it is not Unicode"
    parts = name.split("/")
    strange = next((part for part in parts if part in ("", ".", "..")), None)
    if strange is not None:
        return f"it has a part {strange!r}"
    longest = max(len(part.encode()) for part in parts)
    is_long = longest > _LONGEST_PART or len(name.encode()) > _LONGEST or len(parts) > _DEEPEST
    return "it is too long" if is_long else None


def names_problem(names: Iterable[object]) -> str | None:
    """Return the problem of the names of several files below one folder, or None.

    >>> names_problem(["a", "a/b"])
    "the file 'a' is also the folder of 'a/b'"
    """
    known = set()
    for name in names:
        if (problem := name_problem(name)) is not None:
            return f"the name {_shown(name)} leads to no file below: {problem}"
        known.add(str(name))
    # By what macOS and Windows, which neglect the case and the composition of letters, take them for.
    as_one: dict[str, str] = {}
    for name in sorted(known):
        parts = name.split("/")
        for i in range(1, len(parts) + 1):
            path = "/".join(parts[:i])
            if path in known and i < len(parts):
                return f"the file {path!r} is also the folder of {name!r}"
            if (other := as_one.setdefault(_folded(path), path)) != path:
                return f"the names {_shown(other)} and {_shown(path)} are one file on some systems"
    return None


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def paths_below(folder: Path, names: Iterable[str], source: object) -> dict[str, Path]:
    """Return the paths of several files below a folder, by their names.

    Args:
        folder: to which the names are relative.
        names: with `/` between their parts; from outside.
        source: where the names stand, for the error.

    Raises:
        InvalidArgumentError: a name is absolute, has a part `..`, leads through a link, cannot name a file
            on this machine, or differs from another one by case or the composition of letters alone.

    >>> paths_below(Path("/run"), ["a/b"], "")
    {'a/b': PosixPath('/run/a/b')}
    """
    given = list(names)
    problem = names_problem(given)
    paths = {} if problem else {name: folder / name for name in given}
    for name, path in paths.items():
        own = [path, *path.parents][: name.count("/") + 1]
        if any(each.is_symlink() for each in own):
            problem = f"the name {_shown(name)} leads through a link"
    if problem:
        raise InvalidArgumentError(
            f"The files of {source} must lie below it: their names are relative, without `..`, links, drives "
            f"and backslashes, and differ by more than case. Received: {problem}. Nothing was written. Do "
            "not read it, if it is not your own; otherwise rename or delete this file."
        )
    return paths


def _shown(name: object) -> str:
    return ascii(name)[:200]
