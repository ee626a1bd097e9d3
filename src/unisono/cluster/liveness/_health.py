"""Whether this process answers, and whether it has met its cluster: over HTTP, for probes without a key.

The answers have a status and nothing else of the process.

Tests: tests/unit/cluster/test_health.py, tests/cluster/test_kubernetes.py.
"""

from __future__ import annotations

import functools
import socket
from http import HTTPStatus

from unisono._errors import InvalidArgumentError
from unisono._system._environ import process_environ
from unisono.cluster.liveness._port_server import PortServer
from unisono.cluster.rendezvous._protocol import UnknownPeerError
from unisono.cluster_resolver._spec import read_index

#: The variable with the port; without it nothing listens.
HEALTH_VARIABLE = "UNISONO_HEALTH_PORT"
#: Answered with 200 as long as the process answers at all; and with 503 until it has met its cluster.
LIVE, READY = "/livez", "/healthz"

#: Bytes of a request at most.
_REQUEST_BYTES = 1 << 13


class HealthServer(PortServer):
    """The port for probes, on all interfaces: the kubelet connects from the node."""

    def __init__(self, port: int) -> None:
        self.is_ready = False
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        super().__init__(
            socket.create_server(("", port), family=family, dualstack_ipv6=both), "unisono-health"
        )

    def _answer(self, inbox: bytearray) -> bytes | None:
        if b"\r\n\r\n" not in inbox:
            if len(inbox) > _REQUEST_BYTES:
                raise UnknownPeerError("its request is too long")
            return None
        status = self._status_of(bytes(inbox).partition(b"\r\n")[0].split(b" "))
        body = f"{status.phrase}\n"
        lines = (
            f"HTTP/1.1 {status.value} {status.phrase}",
            "Content-Type: text/plain",
            f"Content-Length: {len(body)}",
            "Connection: close",
        )
        return "\r\n".join((*lines, "", body)).encode()

    def _status_of(self, line: list[bytes]) -> HTTPStatus:
        if len(line) != 3 or not line[2].startswith(b"HTTP/1."):
            return HTTPStatus.BAD_REQUEST
        if line[0] != b"GET":
            return HTTPStatus.METHOD_NOT_ALLOWED
        if line[1] not in (LIVE.encode(), READY.encode()):
            return HTTPStatus.NOT_FOUND
        is_well = self.is_ready or line[1] == LIVE.encode()
        return HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE


@functools.cache
def process_health() -> HealthServer | None:
    """Return the port of this process, which listens from the first call on; None without the variable."""
    text = process_environ().get(HEALTH_VARIABLE)
    if not text:
        return None
    port, problem = read_index(text), "it is not a number from 1 to 65535"
    if port is not None and 1 <= port <= 65535:
        try:
            return HealthServer(port)
        except OSError as error:
            problem = error.strerror or str(error)
    raise InvalidArgumentError(
        f"{HEALTH_VARIABLE} must be a free port of this host. Received: {text!r} ({problem}). Write another "
        "one, each task of a host its own, or leave it out where nothing probes the task."
    )


def report_ready() -> None:
    """Note that this process has met its cluster."""
    health = process_health()
    if health is not None:
        health.is_ready = True
