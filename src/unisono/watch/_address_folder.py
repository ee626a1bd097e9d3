"""The job at an address: workers that train, or servers (`unisono serve`) that train for a client.

Which of the two it is, the first answer says. Each has a key of its own.

Tests: tests/unit/watch/test_address_folder.py, tests/cluster/test_watch_workers.py.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from unisono._errors import ClusterError, InvalidArgumentError
from unisono._system._environ import process_environ
from unisono.cluster import _watch_port as watch_port
from unisono.cluster_resolver._spec import Task, address_problem, split_address
from unisono.rpc._calls import PeerLostError, PeerRejectedError
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op
from unisono.rpc._transport._client import RpcClient
from unisono.rpc._transport._keys import FILE_VARIABLE, VARIABLE, WATCH_VARIABLES, ClusterKeys
from unisono.rpc._transport._local import is_loopback
from unisono.standalone import _protocol as standalone
from unisono.watch._log_folder import LogFolder
from unisono.watch._server_folder import JoinedFolder, ServerFolder
from unisono.watch._worker_folder import WorkerFolder

#: Seconds for the first answer; a handshake that is not answered ends after five.
_FIRST_SECONDS = 6.0


def folder_at(addresses: Sequence[str], key: Path | None = None) -> LogFolder:
    """Return the files of the job at some addresses.

    Args:
        addresses: `"host:port"` of workers, one of which knows the others, or of all its servers.
        key: the file of the key; None for the key in the environment.

    Raises:
        InvalidArgumentError: an address cannot be one.
        ClusterError: nothing of Unisono answers at an address, or it has another key, or there is none.
        MissingPackageError: without the extra `cluster`.
    """
    for address in addresses:
        if problem := address_problem(address):
            raise InvalidArgumentError(
                f"The address of a worker or a server must be HOST:PORT. Received: {address!r}: {problem}."
            )
    environ = dict(process_environ())
    if key is not None:
        if not key.is_file():
            raise InvalidArgumentError(
                f"The key for watching must be a file. Received: --key {key}, which is none. Write the path "
                "of the file that the job's tasks have."
            )
        for name in (VARIABLE, WATCH_VARIABLES[0]):
            environ.pop(name, None)
        environ |= {FILE_VARIABLE: str(key), WATCH_VARIABLES[1]: str(key)}
    rejected: PeerRejectedError | None = None
    for task, keys in _keys_for(environ, addresses[0]):
        try:
            is_worker = _is_worker(addresses[0], task, keys)
        except PeerRejectedError as error:
            rejected = error
            continue
        if is_worker:
            connect = functools.partial(RpcClient, task, keys=keys, limit=watch_port.LIMIT)
            return WorkerFolder(addresses, connect)
        clients = [RpcClient(standalone.SERVER, a, keys, standalone.LIMIT) for a in addresses]
        return JoinedFolder([ServerFolder(a, c) for a, c in zip(addresses, clients, strict=True)])
    raise ClusterError(
        f"The key must belong to the job at the address. Received: {_source(environ, key)}, which "
        f"{addresses[0]} does not take: {'' if rejected is None else rejected.why}. Write `--key FILE` with "
        f"the file that the workers have in {WATCH_VARIABLES[1]}, or the servers in {FILE_VARIABLE}; or, if "
        "another program listens there, the address of one of them. Of a cluster with parameter servers the "
        "chief answers."
    ) from rejected


def _keys_for(environ: Mapping[str, str], address: str) -> list[tuple[Task, ClusterKeys | None]]:
    """Return the keys to try, with the names of those that answer."""
    possible = [
        (watch_port.WATCHED, watch_port.read_watch_keys(environ, watch_port.WATCHER)),
        (standalone.SERVER, standalone.read_standalone_keys(environ, standalone.CLIENT)),
    ]
    known = [(task, keys) for task, keys in possible if keys is not None]
    if known or is_loopback(split_address(address)[0]):
        # On one machine, processes of one user need no key.
        return [*known] or [(watch_port.WATCHED, None)]
    raise ClusterError(
        f"A job on another machine is watched with a key. Received: {address}, and no key. Write "
        f"`unisono watch --key FILE {address}` with the file that its workers have in {WATCH_VARIABLES[1]}, "
        f"or its servers in {FILE_VARIABLE}."
    )


def _source(environ: Mapping[str, str], key: Path | None) -> str:
    if key is not None:
        return f"--key {key}"
    return " and ".join(n for n in (*WATCH_VARIABLES, VARIABLE, FILE_VARIABLE) if environ.get(n)) or "no key"


def _trouble(address: str, known: str) -> str:
    """Return why an address does not answer, as far as is known: connections of all kinds fail alike."""
    host, port = split_address(address)
    try:
        with socket.create_connection((host, port), 1.0):
            return "another program listens there, or a worker that does not show its progress"
    except OSError:
        return known


def _is_worker(address: str, task: Task, keys: ClusterKeys | None) -> bool:
    """Return whether a worker answers, and not a server."""
    with contextlib.closing(RpcClient(task, address, keys, watch_port.LIMIT)) as client:
        try:
            answer = client.call(Frame(Op.STATUS, 1), _FIRST_SECONDS)
        except PeerLostError as error:
            why = _trouble(address, error.why)
            raise ClusterError(
                "A worker or a server must answer at the address. Received: no answer of "
                f"{address} within {error.seconds:.0f} s ({why}). Write the address of a worker that has "
                f"{WATCH_VARIABLES[1]}, or of `unisono serve`. Workers answer once all have connected."
            ) from error
    return answer.op is Op.OK and "watch" in answer.meta
