"""The end of a task that others can reach and that has no key: those who ask it learn why.

It cannot read what a task with a key sends. But such a task cannot take a handshake without keys,
and ends at once with an error, where it would try to connect until its time is over.
"""

from __future__ import annotations

import logging
import time

from unisono._errors import ClusterError
from unisono.cluster_resolver._spec import split_address, with_port
from unisono.rpc._transport import _local as local
from unisono.rpc._transport import _sockets as sockets
from unisono.rpc._transport._keys import ClusterKeys
from unisono.rpc._transport._server import require_key
from unisono.rpc._transport._zmq import zmq

_LOG = logging.getLogger("unisono")

#: Seconds for which a task refuses the others before it ends: they may be started a little later.
_REFUSES = 60.0
#: The same after the first one was refused: the others ask at about the same time, and each one three times.
_REFUSES_ON = 2.0
#: The monitor's events for a client with a key.
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)
#: Bytes of a message, which is never read.
_LIMIT = 1 << 10


def require_key_or_refuse(address: str, keys: ClusterKeys | None) -> None:
    """Check that a task which other machines can reach has keys; without them, refuse clients for a while."""
    try:
        require_key(address, keys)
    except ClusterError as error:
        _LOG.error("%s The tasks that connect are told so for %g s.", error, _REFUSES)
        _refuse(address)
        raise


def _refuse(address: str) -> None:
    """Break off handshakes at an address."""
    context: zmq.Context[sockets.ZmqSocket] = zmq.Context()
    made = sockets.new_socket(context, zmq.ROUTER, _LIMIT)
    # One message of each connection is taken, and none is read.
    made.rcvhwm = 1
    monitor = sockets.Monitor(made)
    try:
        _bind(made, address)
        end = time.monotonic() + _REFUSES
        while (left := end - time.monotonic()) > 0:
            ready = monitor.socket.poll(max(1, int(1000 * left)))
            if ready and any(event in _FAILED for event, _ in monitor.events()):
                end = min(end, time.monotonic() + _REFUSES_ON)
    except zmq.ZMQError as error:
        # Another program's port: who asks there learns something else.
        _LOG.warning("Tasks that ask %s cannot be told: %s", address, error.strerror)
    finally:
        monitor.close()
        made.close()
        context.term()


def _bind(made: sockets.ZmqSocket, address: str) -> None:
    host, port = split_address(address)
    try:
        made.bind(f"tcp://{with_port(local.resolve(host), port)}")
    except (OSError, zmq.ZMQError):
        # The name or address of a service, which is not one of this machine's interfaces.
        made.bind(f"tcp://*:{port}")
