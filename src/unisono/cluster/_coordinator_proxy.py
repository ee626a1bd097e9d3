"""A TCP proxy to JAX's coordination service, which keeps this process' connection open when the service dies.

The service runs in process 0. When a connection to it breaks, JAX aborts the process in C++, without an
exception. Behind the proxy the connection never breaks: the next collective fails instead, with an exception
from which the lost process can be found. It copies bytes and does not read them: gRPC is JAX's affair.

It serves this process alone, and opens the service's gate with the secret of the cluster.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable

from unisono.cluster._coordinator_gate import NONCE_BYTES, proof_of
from unisono.cluster_resolver._spec import split_address

_LOG = logging.getLogger("unisono")

#: Seconds in which the service must accept a connection: process 0 starts it after the rendezvous, as this
#: process starts its client.
_CONNECT_SECONDS = 30.0
#: Connections that are open at once: JAX needs one or two; a hostile program on this machine gets no more.
_CONNECTIONS = 32
#: Seconds before the next attempt to accept a connection when no descriptor is left.
_PAUSE = 0.1


class CoordinatorProxy:
    """A port of the loopback interface; the connections of this process are forwarded to a gate.

    Args:
        address: the `"host:port"` of a `CoordinatorGate`.
        secret: of the rendezvous.
    """

    def __init__(self, address: str, secret: str) -> None:
        self._target, self._secret = split_address(address), secret
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._free = threading.BoundedSemaphore(_CONNECTIONS)
        self._is_closed = False
        _start(self._accept)

    @property
    def address(self) -> str:
        """The address to connect to instead."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        """Stop accepting connections; open ones are kept."""
        self._is_closed = True
        # Closing alone does not wake a thread that is blocked in `accept`.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                near, _ = self._listener.accept()
            except OSError as error:  # closed, or EMFILE
                if not self._is_closed:
                    _LOG.debug("A connection could not be accepted: %s", error)
                    time.sleep(_PAUSE)
                continue
            # In this order: programs of others take no connection of this process' own.
            if not is_own(near) or not self._free.acquire(blocking=False):
                near.close()
                continue
            try:
                _start(self._serve, near)
            except RuntimeError as error:  # no further thread can be started
                _LOG.debug("A connection could not be served: %s", error)
                near.close()
                self._free.release()

    def _serve(self, near: socket.socket) -> None:
        try:
            with _connect(self._target) as far:
                for sock in (near, far):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._prove(far)
                _start(_forward_answers, far, near)
                _forward_requests(near, far)
        except (OSError, RuntimeError) as error:
            _LOG.warning("JAX's coordination service at %s:%d cannot be reached: %s", *self._target, error)
        finally:
            near.close()
            self._free.release()

    def _prove(self, far: socket.socket) -> None:
        """Answer the gate's random number."""
        nonce = b""
        while len(nonce) < NONCE_BYTES:
            data = far.recv(NONCE_BYTES - len(nonce))
            if not data:
                raise ConnectionError("the connection was closed at its beginning")
            nonce += data
        far.sendall(proof_of(self._secret, nonce))
        far.settimeout(None)


def is_own(near: socket.socket) -> bool:
    """Return whether the other end of a connection on this machine is a socket of this process, too.

    A connection has one pair of addresses on a machine, which no other process can have at the same time.
    """
    try:
        here, there = _ends_of(near)
    except OSError:  # it has ended
        return False
    return any(_ends_of_descriptor(int(name)) == (there, here) for name in os.listdir("/dev/fd"))


def _ends_of(connected: socket.socket) -> tuple[tuple[str, int], tuple[str, int]]:
    """Return the addresses of both ends of a connection, its own first."""
    own, other = connected.getsockname(), connected.getpeername()
    # gRPC connects from sockets that are for both versions of IP.
    return (own[0].removeprefix("::ffff:"), own[1]), (other[0].removeprefix("::ffff:"), other[1])


def _ends_of_descriptor(descriptor: int) -> tuple[tuple[str, int], tuple[str, int]] | None:
    """Return the addresses of a connection over IP; None where it is none, or is closed."""
    try:
        # Sockets alone: to close a second descriptor of a file drops the locks that this process has on it.
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            return _ends_of(sock) if sock.family in (socket.AF_INET, socket.AF_INET6) else None
    except OSError:
        return None


def _start(target: Callable[..., None], *args: object) -> None:
    threading.Thread(target=target, args=args, name="unisono-coordinator-proxy", daemon=True).start()


def _connect(target: tuple[str, int]) -> socket.socket:
    until = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            sock = socket.create_connection(target, _CONNECT_SECONDS)
        except ConnectionRefusedError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.02)
        else:
            return sock


def _forward_answers(far: socket.socket, near: socket.socket) -> None:
    """Forward from the service; when it closes, keep this process' connection open."""
    with contextlib.suppress(OSError):
        while data := far.recv(1 << 16):
            near.sendall(data)


def _forward_requests(near: socket.socket, far: socket.socket) -> None:
    """Forward to the service; once it is dead, discard what this process sends."""
    is_alive = True
    while data := _receive(near):
        if is_alive:
            try:
                far.sendall(data)
            except OSError:
                is_alive = False
    # This process has closed. Shut down, which wakes the other thread and ends the service's end; closing the
    # descriptor does neither while that thread is blocked in `recv`.
    with contextlib.suppress(OSError):
        far.shutdown(socket.SHUT_RDWR)
    far.close()
    near.close()


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except OSError:
        return b""
