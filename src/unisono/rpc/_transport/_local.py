"""Addresses, and the sockets in files through which processes of one user on one machine talk.

The kernel keeps other users out: the files are in a directory that its owner alone may enter. That replaces
encryption, which reaches 0.23 GB/s here, and makes a task on this machine usable without keys.

Tests: tests/unit/rpc/test_transport.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from unisono._errors import ClusterError
from unisono._system._files import own_folder_problem
from unisono.cluster_resolver._spec import as_ip, split_address
from unisono.rpc._ports import listen

#: Not `tempfile.gettempdir()`: TMPDIR may differ between the tasks of a job, and its path may be longer than
#: the 107 bytes of a socket's name.
_PARENT = "/tmp"
#: Seconds for an attempt to connect that only asks whether a process listens.
_PROBE_SECONDS = 1.0

_TAKEN: set[Path] = set()
_TAKEN_LOCK = threading.Lock()


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine, by its text alone.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "10.0.0.1", "node1")]
    [True, True, True, False, False]
    """
    ip = as_ip(host)
    return host.lower() == "localhost" if ip is None else ip.is_loopback


def resolve(host: str) -> str:
    """Return an IP address of a host.

    Raises:
        OSError: when there is none.
    """
    if as_ip(host) is not None:
        return host
    addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    # IPv4 first: `localhost` is often both, and servers listen on 127.0.0.1.
    return str(min(addresses, key=lambda each: each[0] != socket.AF_INET)[4][0])


def free_port() -> int:
    """Return a port that no process of this machine listens on."""
    with listen("127.0.0.1") as probe:
        return int(probe.getsockname()[1])


def check_port_is_free(address: str) -> None:
    """Do nothing where no process listens at the TCP port of a loopback address.

    Raises:
        OSError: one does, with the error number `EADDRINUSE`.
    """
    host, port = split_address(address.removeprefix("tcp://"))
    try:
        ip = resolve(host)
        with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as probe:
            # Connections of an earlier process that are being closed are no obstacle.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((ip, port))
    except OSError as error:
        # Without IPv6, or below port 1024, the socket's file can be used as anywhere.
        if error.errno == errno.EADDRINUSE:
            raise


def is_refused(address: str) -> bool:
    """Return whether the system of an address says that no process listens there.

    A process that is stopped, a network that is slow, and a name without an address do not count.
    """
    host, port = split_address(address)
    try:
        if is_loopback(host) and _takes_connections(socket_path(address, socket_directory())):
            return False
        socket.create_connection((resolve(host), port), _PROBE_SECONDS).close()
    except (OSError, ClusterError) as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def _takes_connections(path: Path) -> bool:
    """Return whether a process listens on a socket's file."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except OSError as error:
            # Others mean that too many connect at this moment.
            return not isinstance(error, (ConnectionRefusedError, FileNotFoundError))
    return True


def socket_directory(parent: str = _PARENT) -> Path:
    """Return the directory of this user's sockets, which is created where it is missing."""
    path = Path(parent) / f"unisono-sockets-{os.geteuid()}"
    if problem := own_folder_problem(path, denied=0o077):
        raise ClusterError(
            "The directory of the sockets between tasks must belong to this user, and no other may enter it. "
            f"Received: {path}: {problem}. Remove it, or have its owner remove it."
        )
    return path


def socket_path(address: str, directory: Path) -> Path:
    """Return the file of the socket of a loopback address.

    >>> socket_path("localhost:2222", Path("/tmp/d")), socket_path("[::1]:80", Path("/tmp/d"))
    (PosixPath('/tmp/d/127.0.0.1-2222'), PosixPath('/tmp/d/..1-80'))
    """
    host, port = split_address(address)
    host = "127.0.0.1" if host.lower() == "localhost" else host.replace(":", ".")
    return directory / f"{host}-{port}"


def remove_sockets(addresses: Iterable[str]) -> None:
    """Remove the files of loopback addresses whose processes have ended: sockets, locks and markers."""
    with contextlib.suppress(ClusterError, OSError):  # a directory that is another user's holds none of them
        directory = socket_directory()
        names = {socket_path(address, directory).name for address in addresses}
        for path in directory.iterdir():
            # A socket's own, or one beside it, such as its `.lock`.
            if names & {path.name, path.name.rpartition(".")[0]}:
                path.unlink(missing_ok=True)


class AddressLock:
    """Makes a process the only listener on a socket's file.

    ZeroMQ removes a file that is there and binds its own. The kernel drops the lock when the process ends,
    also by SIGKILL: what the file of an earlier process left is removed, and a living one's is not.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._name = path.with_suffix(f"{path.suffix}.lock")
        with _TAKEN_LOCK:
            # Locks are of the process: it would get its own a second time. A lock of the file itself would be
            # inherited by children that are forked, and outlive this process.
            self._file = None if path in _TAKEN else self._locked()
            if self._file is None:
                raise ClusterError(
                    "A task must be the only one at its address. "
                    f"Received: {path.name.replace('-', ':')}, where the process {self._owner()} listens. "
                    "End that process, or choose another port."
                )
            _TAKEN.add(path)
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}")
        self._file.flush()

    def _locked(self) -> IO[str] | None:
        """Return the file of the lock, None where another process has it."""
        while True:
            file = self._name.open("a+")
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_at_its_name(file):
                    return file
            except OSError:
                file.close()
                return None
            # Its last owner has removed it between the two calls.
            file.close()

    def _is_at_its_name(self, file: IO[str]) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self._name.stat())
        except FileNotFoundError:
            return False

    def _owner(self) -> str:
        # Not by its file: the kernel drops a lock of this process when it closes the file a second time.
        if self._path in _TAKEN:
            return str(os.getpid())
        try:
            return self._name.read_text() or "?"
        except OSError:
            return "?"

    def release(self) -> None:
        """Remove the socket, and let another process listen."""
        with _TAKEN_LOCK:
            if self._file is not None:
                # While the lock is held: no other process has made its own files by then.
                self._path.unlink(missing_ok=True)
                self._name.unlink(missing_ok=True)
                self._file.close()
                self._file = None
                _TAKEN.discard(self._path)
