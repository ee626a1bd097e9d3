"""A process' own way to JAX' coordination service, which stays open when the service dies.

JAX ends a process in C++, without an exception, as soon as its connection to the service breaks,
which runs in process 0. Behind a relay the connection never breaks: the next collective fails instead,
with an exception that can say who is missing.

Tests: tests/unit/cluster/test_peer_monitor.py.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time

_LOG = logging.getLogger("unisono")

#: Seconds in which the service must accept a connection; it starts at the same time as this process.
_CONNECT_SECONDS = 30.0
#: Connections that are open at once: JAX needs one or two, and another program of this machine gets no more.
_CONNECTIONS = 32
#: Seconds before another connection is accepted, where no descriptor or thread is left.
_PAUSE = 0.1


class CoordinatorProxy:
    """A port of the loopback interface whose connections lead to an address elsewhere.

    Args:
        address: `"host:port"`.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = host.strip("[]"), int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._free = threading.BoundedSemaphore(_CONNECTIONS)
        self._is_closed = False
        _start(self._accept)

    @property
    def address(self) -> str:
        """Where this process connects instead."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        """Accept no more connections; those that are open stay."""
        self._is_closed = True
        # Wakes the thread that accepts, which closing alone does not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                near, _ = self._listener.accept()
            except OSError as error:  # closed, or no descriptor is left
                if not self._is_closed:
                    _LOG.debug("A connection could not be accepted: %s", error)
                    time.sleep(_PAUSE)
                continue
            if not self._free.acquire(blocking=False):
                near.close()
                continue
            try:
                _start(self._serve, near)
            except RuntimeError as error:  # no thread is left
                _LOG.debug("A connection could not be served: %s", error)
                near.close()
                self._free.release()

    def _serve(self, near: socket.socket) -> None:
        try:
            far = _connected(self._target)
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _start(_to_this_process, far, near)
            _to_the_service(near, far)
        except (OSError, RuntimeError) as error:
            _LOG.warning("JAX' coordination service at %s:%d cannot be reached: %s", *self._target, error)
        finally:
            near.close()
            self._free.release()


def _start(target: object, *args: object) -> None:
    threading.Thread(target=target, args=args, name="unisono-relay", daemon=True).start()  # type: ignore[arg-type]


def _connected(target: tuple[str, int]) -> socket.socket:
    until = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            sock = socket.create_connection(target, _CONNECT_SECONDS)
        except ConnectionRefusedError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.02)
        else:
            sock.settimeout(None)
            return sock


def _to_this_process(far: socket.socket, near: socket.socket) -> None:
    """Pass on what the service says; when it ends, this process hears nothing of it."""
    with contextlib.suppress(OSError):
        while data := far.recv(1 << 16):
            near.sendall(data)


def _to_the_service(near: socket.socket, far: socket.socket) -> None:
    """Pass on what this process says; what a dead service does not hear is thrown away."""
    is_heard = True
    while data := _received(near):
        if is_heard:
            try:
                far.sendall(data)
            except OSError:
                is_heard = False
    # This process is done. Closing alone does not wake the other thread, nor tell the service.
    with contextlib.suppress(OSError):
        far.shutdown(socket.SHUT_RDWR)
    far.close()
    near.close()


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except OSError:
        return b""
