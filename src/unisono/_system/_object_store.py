"""Paths in object stores: the one place that imports fsspec, when a path such as `s3://bucket/run` is used.

A store has objects and no folders: a folder is what objects' names have in common, and exists while one of
them does. An object is written whole or not at all, and nothing can be renamed.

Tests: tests/virtual/checkpoint/test_object_store.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from unisono._checks import local_path
from unisono._errors import InvalidArgumentError, MissingPackageError
from unisono._system._file_names import paths_below
from unisono._system._packages import require_packages

#: A scheme: the extra that installs its client, and the client's package.
_CLIENTS = {"s3": ("s3", "s3fs"), "gs": ("gcs", "gcsfs")}
#: Further schemes of fsspec, for stores that can be written to and are not on this machine.
_OTHER_STORES = (
    "abfs", "adl", "az", "box", "dbfs", "dropbox", "gcs", "gdrive", "hdfs", "hf", "lakefs", "memory", "oci",
    "oss", "s3a", "sftp", "smb", "ssh", "tos", "webdav", "webhdfs",
)  # fmt: skip
_SCHEMES = frozenset({*_CLIENTS, *_OTHER_STORES})
_ADDRESS = re.compile(r"(?P<scheme>[a-z0-9]+)://(?P<key>.+)")

#: A misspelt address.
_NEARLY = re.compile(r"(?P<scheme>[a-zA-Z0-9]+):/+(?P<key>.+)")


class ObjectStat(NamedTuple):
    """A store's facts of an object, by the names of `os.stat`.

    Args:
        tag: another one where the object was written again.
    """

    st_size: int
    st_mtime_ns: int
    tag: str

    @property
    def st_mtime(self) -> float:
        """When it was written, by the store's clock, in seconds."""
        return self.st_mtime_ns / 1e9


@dataclasses.dataclass(frozen=True)
class StorePath:
    """The name of an object, or of what is below it, with those methods of `pathlib.Path` that are needed.

    Every method asks the store: nothing is cached, because other processes write there, too. Clients
    repeat requests that fail. What fails for good is an `OSError` that names the path and the cause.

    Args:
        scheme: of `_CLIENTS` or `_OTHER_STORES`.
        key: the bucket and the name in it, without a slash at either end.

    >>> path = StorePath("s3", "bucket/run") / "ckpt-1"
    >>> str(path), path.name, path.parent == StorePath("s3", "bucket/run")
    ('s3://bucket/run/ckpt-1', 'ckpt-1', True)
    """

    scheme: str
    key: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.key}"

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(self.scheme, f"{self.key}/{name}")

    @property
    def name(self) -> str:
        """The part behind the last slash."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> StorePath:
        """The part before the last slash; of a bucket, itself."""
        return StorePath(self.scheme, self.key.rpartition("/")[0] or self.key)

    def with_name(self, name: str) -> StorePath:
        """Return the path with another last part."""
        return self.parent / name

    def absolute(self) -> StorePath:
        """Return the path itself: an address is absolute."""
        return self

    # --- reading ------------------------------------------------------------------------------

    def find(self, prefix: str = "") -> dict[str, ObjectStat]:
        """Return the objects below, by their names from here on.

        Args:
            prefix: how these names begin: only such objects are listed, a thousand by a request.

        Raises:
            OSError: the store does not answer, or there is no such bucket.
        """
        with self._client() as (client, key):
            # Others list all, or know no such argument.
            options = {"prefix": prefix} if self.scheme in _CLIENTS else {}
            objects = client.find(key, detail=True, **options)
            below = {name[len(key) + 1 :]: info for name, info in objects.items()}
            # Some programs make objects that stand for folders.
            return {
                name: _stat(client, info)
                for name, info in below.items()
                if name and name[-1] != "/" and name.startswith(prefix)
            }

    def children(self) -> dict[str, ObjectStat | None]:
        """Return the entries directly below: names of objects, and of folders with None; none if absent."""
        with contextlib.suppress(FileNotFoundError), self._client() as (client, key):
            entries = {i["name"].rstrip("/"): i for i in client.ls(key, detail=True)}
            entries.pop(key, None)
            return {
                name.rpartition("/")[2]: None if info["type"] == "directory" else _stat(client, info)
                for name, info in entries.items()
            }
        return {}

    def glob(self, pattern: str) -> list[StorePath]:
        """Return the objects directly below whose names have a pattern with one `*`."""
        names = self.find(pattern.partition("*")[0])
        return [self / name for name in names if "/" not in name and fnmatchcase(name, pattern)]

    def stat(self) -> ObjectStat:
        """Return the store's facts of the object."""
        with self._client() as (client, key):
            info = client.info(key)
            if info["type"] == "directory":
                raise FileNotFoundError(errno.ENOENT, "no object", str(self))
            return _stat(client, info)

    def is_file(self) -> bool:
        """Return whether there is an object of this name."""
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def exists(self) -> bool:
        """Return whether there is an object of this name, or one below it."""
        try:
            with self._client() as (client, key):
                client.info(key)
        except FileNotFoundError:
            return False
        return True

    #: A folder exists while an object below it does.
    is_dir = exists

    def read_bytes(self) -> bytes:
        """Return the object's content.

        Raises:
            FileNotFoundError: there is none.
        """
        with self._client() as (client, key):
            return bytes(client.cat_file(key))

    def read_text(self) -> str:
        """Return the object's content as text."""
        return self.read_bytes().decode()

    def download(self, file: Path) -> None:
        """Copy the object into a file, whose name is the caller's own; its folder is made."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with self._client() as (client, key):
            client.get_file(key, str(file))

    def download_below(self, folder: Path, names: Iterable[str], *, missing_ok: bool = False) -> None:
        """Copy objects that lie below into files of the same names below a folder.

        Args:
            names: from here on; from a listing or a file, and checked before anything is written.
            missing_ok: whether an object that is not there is left out.

        Raises:
            InvalidArgumentError: a name would lead to a file elsewhere.
            FileNotFoundError: without `missing_ok`, an object is not there.
        """
        for name, file in paths_below(folder, names, self).items():
            with contextlib.suppress(FileNotFoundError) if missing_ok else contextlib.nullcontext():
                (self / name).download(file)

    # --- writing ------------------------------------------------------------------------------

    def write_bytes(self, content: bytes, *, is_new: bool = False) -> None:
        """Write the object: other processes see all of it or nothing.

        Args:
            is_new: whether an object of this name is an error, where the store can tell.

        Raises:
            FileExistsError: with `is_new`, there is one.
        """
        with self._client() as (client, key):
            client.pipe_file(key, content, mode="create" if is_new else "overwrite")

    def upload(self, file: Path) -> None:
        """Copy a file into the object."""
        with self._client() as (client, key):
            client.put_file(str(file), key)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object."""
        try:
            with self._client() as (client, key):
                client.rm_file(key)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: a store has no folders."""

    def rmtree(self) -> None:
        """Delete all objects below."""
        for name in self.find():
            (self / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _client(self) -> Iterator[tuple[Any, str]]:
        """Yield the scheme's client of fsspec, and its name for this path; translate what it raises."""
        _require_client(self.scheme, str(self))
        import fsspec

        try:
            # The same object each time: fsspec keeps it by its arguments, and makes a new one after a fork.
            yield fsspec.core.url_to_fs(str(self), use_listings_cache=False, **_options(self.scheme))
        # The clients' own errors, of which a missing key is no `OSError`, and most others name no path.
        except Exception as error:
            number = getattr(error, "errno", None)
            if isinstance(error, FileNotFoundError):
                number = errno.ENOENT
            elif isinstance(error, FileExistsError):
                number = errno.EEXIST
            cause = f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"
            raise OSError(number or errno.EIO, cause, str(self)) from error


#: Where files lie: on a file system of this machine, or in an object store.
Place: TypeAlias = Path | StorePath


def place_of(path: str | os.PathLike[str] | StorePath) -> Place:
    """Return the absolute path of a file or directory, also of one in an object store.

    Raises:
        UnsupportedError: it is an address of another kind.
        InvalidArgumentError: a part of the address is empty, or is `.` or `..`.
        MissingPackageError: the client of the store is not installed.

    >>> place_of("/run"), str(place_of("gs://bucket/run/"))
    (PosixPath('/run'), 'gs://bucket/run')
    """
    return given_place(path).absolute()


def given_place(path: str | os.PathLike[str] | StorePath) -> Place:
    """Return the path as it is given; `place_of` says what is raised."""
    if isinstance(path, StorePath):
        return path
    return store_path(path) or local_path(path)


def store_path(path: str | os.PathLike[str]) -> StorePath | None:
    """Return the path of what lies in an object store; None for all others.

    Raises:
        InvalidArgumentError: a part of it is empty, or is `.` or `..`.
        MissingPackageError: the client of the store is not installed.
    """
    match = _ADDRESS.fullmatch(str(path))
    if match is None or match["scheme"] not in _SCHEMES:
        _check_no_address(path)
        return None
    key = match["key"].strip("/")
    # To a store these are names like all others; its client lists nothing below an empty one.
    if not {"", ".", ".."}.isdisjoint(key.split("/")):
        raise InvalidArgumentError(
            "An address in an object store must have a bucket and names with one slash between them, without "
            f"`.` and `..`. Received: {str(path)!r}. Write `{match['scheme']}://bucket/run-7`."
        )
    _require_client(match["scheme"], str(path))
    return StorePath(match["scheme"], key)


def _check_no_address(path: object) -> None:
    """Refuse what would be a folder `s3:` on this machine."""
    match = _NEARLY.fullmatch(str(path))
    if match is not None and match["scheme"].lower() in _SCHEMES:
        key = match["key"].strip("/") or "bucket/run-7"
        raise InvalidArgumentError(
            "An address in an object store must be a string that begins with a scheme in lower case and two "
            "slashes, of which a `Path` keeps one, and names a bucket. Received: "
            f"{path!r}. Write `'{match['scheme'].lower()}://{key}'`."
        )


def _require_client(scheme: str, path: str) -> None:
    """Check that the client of a scheme is installed."""
    what = f"A path such as {path}"
    if scheme in _CLIENTS:
        require_packages(what, *_CLIENTS[scheme])
        return
    require_packages(what, "s3", "fsspec")
    from fsspec.registry import get_filesystem_class, known_implementations

    try:
        get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:  # ValueError: this version of fsspec does not know it
        package = known_implementations.get(scheme, {"class": "fsspec"})["class"].partition(".")[0]
        raise MissingPackageError(
            f"{what} needs a package of fsspec's. Received: {error}. Write: pip install {package}",
            name=package,
        ) from error


@contextlib.contextmanager
def local_copy(place: Place) -> Iterator[Path]:
    """Yield a path itself, or a temporary one with a copy of what lies in an object store there or below.

    Raises:
        FileNotFoundError: there is nothing in the store.
        InvalidArgumentError: an object below has a name that is none of a file below.
    """
    if isinstance(place, Path):
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="unisono-") as aside:
        copy = Path(aside) / place.name
        names = place.find()
        place.download_below(copy, names)
        if not names:
            place.download(copy)
        yield copy


@contextlib.contextmanager
def written_locally(path: StorePath, marker: str | None = None) -> Iterator[Path]:
    """Yield a temporary path of the same name, and upload at the end what was written there and beside it.

    Args:
        marker: the file that is uploaded last.
    """
    with tempfile.TemporaryDirectory(prefix="unisono-") as aside:
        yield Path(aside) / path.name
        files = [file for file in sorted(Path(aside).rglob("*")) if file.is_file()]
        for file in sorted(files, key=lambda file: file.name == marker):
            (path.parent / file.relative_to(aside).as_posix()).upload(file)


@contextlib.contextmanager
def folder_of(path: str) -> Iterator[str]:
    """Yield a folder to write into: the path's, or one whose files are uploaded at the end."""
    store = store_path(path)
    with contextlib.nullcontext(path) if store is None else written_locally(store) as folder:
        yield str(folder)


def _options(scheme: str) -> dict[str, Any]:
    """Return a client's arguments besides the user's configuration."""
    if scheme != "gs":
        return {}
    import aiohttp

    # By itself gcsfs waits 5 minutes for each of its 6 tries, also where a server never answers.
    return {"requests_timeout": aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=60.0)}


def _stat(client: Any, info: dict[str, Any]) -> ObjectStat:
    written = info.get("LastModified") or info.get("last_modified") or info.get("mtime")
    if not isinstance(written, datetime):
        written = client.modified(info["name"])
    nanoseconds = round(written.timestamp() * 1e9)
    return ObjectStat(info["size"], nanoseconds, str(info.get("ETag") or info.get("etag") or nanoseconds))
