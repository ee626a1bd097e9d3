"""The port at which a worker answers `unisono watch`: for watchers with the key for watching.

The status servers of the workers can end a job, and their secret stays between them. This port has a key of
its own, and one request, which reads: the events of this task, from a byte on. It listens at the address of
the task in the cluster, which is free again once JAX has started.

======  ======================================  ============================================================
STATUS  nothing                                 the facts of `WatchPort.facts`
STATUS  `file`, `offset`: what is known of it   the facts, `file`, `size`; a blob, from 0 on of another file
STATUS  the same, and `until`: `end`            the same, `exit_code`, `text`: when the program ends
======  ======================================  ============================================================

Tests: tests/unit/cluster/test_watch_port.py, tests/cluster/test_watch_workers.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono._errors import ClusterError, InvalidArgumentError
from unisono._system._environ import process_environ
from unisono._system._files import own_folder_problem
from unisono._system._task_reports import process_events
from unisono.cluster_resolver._base import whole_of
from unisono.cluster_resolver._spec import ClusterSpec, Task, split_address, with_port
from unisono.rpc import _fields as fields
from unisono.rpc._calls import ClientId, error_answer
from unisono.rpc._frames import Frame, blob
from unisono.rpc._ops import Op
from unisono.rpc._transport._keys import WATCH_VARIABLES, ClusterKeys, read_keys
from unisono.rpc._transport._server import RpcServer

_LOG = logging.getLogger("unisono")

#: The names by which keys are derived, which no task of a cluster has.
WATCHED, WATCHER = Task("watched", 0), Task("watcher", 0)
#: Bytes of events in one message, and of a message at most.
CHUNK, LIMIT = 4 << 20, 16 << 20
#: Watchers that are told the end.
_MOST_WATCHERS = 64
_EVENTS = "UNISONO_EVENTS"


def read_watch_keys(environ: Mapping[str, str], own: Task) -> ClusterKeys | None:
    """Return the keys of a watched task or of a watcher, None without a secret.

    Raises:
        ClusterError: the secret is none, or others may read its file.
    """
    keys = read_keys(environ, own, ClusterSpec({}), WATCH_VARIABLES)
    return None if keys is None else ClusterKeys(keys.secret, own, (WATCHER,))


class WatchPort:
    """Shows the events of this process to watchers, from `listen` to `end`.

    Args:
        own: the name of this task, such as `"worker:0"`.
        tasks: the address in the cluster of each task that can be watched, by its name.

    Raises:
        ClusterError: the key for watching cannot be used, or no folder for the events.
    """

    def __init__(self, own: str, tasks: Mapping[str, str]) -> None:
        environ = process_environ()
        self._own, self._tasks = own, dict(tasks)
        self._keys = read_watch_keys(environ, WATCHED)
        self._generation = whole_of("UNISONO_GENERATION", environ)
        self._is_own_file = not environ.get(_EVENTS)
        if self._is_own_file:
            # No launcher has asked for events.
            environ[_EVENTS] = str(_events_file(tasks[own], self._generation))
            process_events.cache_clear()
        self._file = Path(environ[_EVENTS])
        self._began = time.time()
        self._started = _time_in(self._file.stem) or self._began
        self._lock = threading.Lock()
        #: Who waits for the end, and knows how much: each one's last request, by its connection.
        self._waiting: dict[bytes, tuple[ClientId, Frame]] = {}
        #: How the program ends, once it does: who asks from then on until the port is closed is told at once.
        self._ended: dict[str, Any] | None = None
        self._server: RpcServer | None = None

    def listen(self, ip: str) -> None:
        """Begin to answer, at an IP address of this host and the port of the task's address.

        A job that cannot be watched trains all the same.
        """
        address = with_port(ip, split_address(self._tasks[self._own])[1])
        server = RpcServer(address, self._handle, self._keys, LIMIT, budget=LIMIT)
        try:
            server.start()
        except ClusterError as error:
            server.close()
            _LOG.warning("This task cannot be watched by `unisono watch`: %s", error)
            return
        self._server = server

    def end(self, exit_code: int, text: str = "") -> None:
        """Tell watchers that the program ends, and close the port; does nothing the second time.

        Args:
            text: why; by default the error that ends the program, if one does.
        """
        # The hook of `_system/_program_end`, if no other tool has taken its place.
        error: BaseException | None = getattr(sys.excepthook, "error", None)
        if not text and error is not None:
            text = f"{type(error).__name__}: {error}"
        server, self._server = self._server, None
        if server is None:
            return
        # What was written since the last second, so that they see the last step.
        flush = getattr(process_events(), "flush", None)
        if flush is not None:
            flush()
        ended = {"exit_code": exit_code, "text": text[:300]}
        with self._lock:
            self._ended, waiting = ended, self._waiting
        for client, request in waiting.values():
            server.reply(client, self._answer(request, ended))
        server.close()
        if self._is_own_file and not exit_code:
            # What cleans up temporary folders may have removed it.
            with contextlib.suppress(OSError):
                _remove_all(self._file.parent)
                self._file.parent.rmdir()

    def facts(self) -> dict[str, Any]:
        """Return the facts that a watcher gets besides the events."""
        argv = [Path(sys.argv[0]).name or "python", *sys.argv[1:]]
        return {
            "watch": self._own,
            "tasks": self._tasks,
            "title": argv[0],
            "command": shlex.join(argv),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "generation": self._generation,
            "started": self._started,
            "began": self._began,
            "now": time.time(),
        }

    def _handle(self, client: ClientId, request: Frame) -> Frame | None:
        try:
            if request.op is not Op.STATUS:
                raise InvalidArgumentError(
                    f"A training worker answers `unisono watch` alone. Received: {request.op.name}. Programs "
                    "are started at the addresses of `unisono serve`."
                )
            if request.meta.get("until") != "end":
                return self._answer(request, {})
            # Now, and not when the program ends.
            _offset_of(request)
        except InvalidArgumentError as error:
            return error_answer(request, error)
        with self._lock:
            ended = self._ended
            if ended is None:
                self._waiting.pop(client.connection, None)
                self._waiting[client.connection] = client, request
                while len(self._waiting) > _MOST_WATCHERS:
                    del self._waiting[next(iter(self._waiting))]
        return None if ended is None else self._answer(request, ended)

    def _answer(self, request: Frame, more: Mapping[str, Any]) -> Frame:
        """Return an answer with the facts, and the events that were asked for."""
        facts, offset = self.facts() | dict(more), _offset_of(request)
        if offset is None:
            return request.answer(Op.OK, facts)
        try:
            with self._file.open("rb") as file:
                state = os.fstat(file.fileno())
                # After a removed file the next one has the same path.
                name = f"{self._file.name} {state.st_ino}"
                if request.meta.get("file") != name or offset > state.st_size:
                    offset = 0
                file.seek(offset)
                data = file.read(CHUNK)
        except OSError:
            # Before the first event, or it was removed: what the watcher knows of it stays.
            return request.answer(Op.OK, facts | {"size": 0}, [blob(b"")])
        facts |= {"file": name, "offset": offset, "size": state.st_size}
        return request.answer(Op.OK, facts, [blob(data)])


def _offset_of(request: Frame) -> int | None:
    """Return from which byte on a watcher wants the events, None where it wants none."""
    if "offset" not in request.meta:
        return None
    return fields.whole(request.meta, "offset", least=0, most=1 << 50)


def _events_file(address: str, generation: int) -> Path:
    """Return the file for the events of a task without a launcher; a restarted one goes on in the old one."""
    parent = Path(tempfile.gettempdir()) / f"unisono-events-{os.geteuid()}"
    folder = parent / address.replace(":", "-").replace("/", "-")
    for path in (parent, folder):
        if problem := own_folder_problem(path, denied=0o077):
            raise ClusterError(
                "The folder of the events that `unisono watch` reads must belong to this user, and no other "
                f"may enter it. Received: {path}: {problem}. Remove it, or set TMPDIR to another folder."
            )
    before = sorted(folder.glob("*.jsonl"))
    if generation and before:
        return before[-1]
    _remove_all(folder)
    return folder / f"{time.time_ns()}.jsonl"


def _time_in(name: str) -> float | None:
    return int(name) / 1e9 if name.isdecimal() and len(name) < 21 else None


def _remove_all(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink(missing_ok=True)
