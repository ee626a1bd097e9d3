"""The events of a job on servers that train for it, read over their ports with the cluster's key."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from unisono._errors import ClusterError
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op
from unisono.watch._log_folder import LocalFolder, LogFolder

#: Seconds for an answer, and in which a listing of files holds.
_ANSWER_SECONDS, _FRESH_SECONDS = 5.0, 0.3


class StatusClient(Protocol):
    """Sends requests to a server; see `unisono.rpc._transport._client.RpcClient`."""

    def call(self, frame: Frame, timeout: float) -> Frame:
        """Send a request, and wait for its answer."""


class ServerFolder:
    """The files of a job on one server.

    Args:
        address: of the server, for people.
        must_answer: whether it must answer now; else it may start later.

    Raises:
        ClusterError: it must answer and does not, or has another key.
    """

    def __init__(self, address: str, rpc_client: StatusClient, must_answer: bool = True) -> None:
        self.name = address
        self._rpc_client, self._numbers = rpc_client, itertools.count(1)
        self._files: dict[str, tuple[float, dict[str, list[float]]]] = {}
        if must_answer:
            self._listing("events")

    def names(self, folder: str) -> Sequence[str]:
        """Return the names of the files in a folder below it."""
        return sorted(self._known(folder))

    def read(self, name: str, start: int, most: int) -> bytes:
        """Return bytes of a file from a position on; none where there are none."""
        if "/" not in name:
            # Its client has them, and not the server.
            return b""
        try:
            answer = self._ask({"name": name, "offset": start})
        except ClusterError:
            return b""
        return answer.arrays[0].tobytes()[:most]

    def size(self, name: str) -> int:
        """Return the bytes of a file; 0 where there is none."""
        return int(self._fact(name, 0) or 0)

    def changed_at(self, name: str) -> float | None:
        """Return when a file was last written, by the clock there; None where there is none."""
        return self._fact(name, 1)

    def _fact(self, name: str, which: int) -> float | None:
        folder, _, file = name.rpartition("/")
        facts = self._known(folder).get(file) if folder else None
        return None if facts is None else facts[which]

    def _known(self, folder: str) -> dict[str, list[float]]:
        at, files = self._files.get(folder, (float("-inf"), {}))
        if time.monotonic() - at < _FRESH_SECONDS:
            return files
        try:
            return self._listing(folder)
        except ClusterError:
            # What is known stays; the tasks' heartbeats grow old.
            self._files[folder] = time.monotonic(), files
            return files

    def _listing(self, folder: str) -> dict[str, list[float]]:
        files: dict[str, list[float]] = self._ask({"folder": folder}).meta["files"]
        self._files[folder] = time.monotonic(), files
        return files

    def _ask(self, meta: dict[str, object]) -> Frame:
        answer = self._rpc_client.call(Frame(Op.STATUS, next(self._numbers), meta=meta), _ANSWER_SECONDS)
        if answer.op is not Op.OK:
            raise ClusterError(f"{self.name} answers: {answer.meta.get('text', 'an error')}")
        return answer


class JoinedFolder:
    """The files of several servers as one folder: each task writes on one of them."""

    def __init__(self, folders: Sequence[LogFolder]) -> None:
        self._folders = folders
        self.name = ", ".join(dict.fromkeys(folder.name for folder in folders))

    @property
    def local_root(self) -> Path | None:
        """The log folder of the launch, where that is one of them."""
        return next((each.root for each in self._folders if isinstance(each, LocalFolder)), None)

    def names(self, folder: str) -> Sequence[str]:
        """Return the names of the files in a folder below it."""
        return sorted({name for each in self._folders for name in each.names(folder)})

    def _owner(self, name: str) -> LogFolder:
        return next((each for each in self._folders if each.size(name)), self._folders[0])

    def read(self, name: str, start: int, most: int) -> bytes:
        """Return bytes of a file from a position on; none where there are none."""
        return self._owner(name).read(name, start, most)

    def size(self, name: str) -> int:
        """Return the bytes of a file; 0 where there is none."""
        return self._owner(name).size(name)

    def changed_at(self, name: str) -> float | None:
        """Return when a file was last written; None where there is none."""
        return self._owner(name).changed_at(name)
