"""The command `unisono serve`.

Tests: tests/cluster/test_standalone.py.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from unisono._errors import InvalidArgumentError
from unisono.cluster_resolver._base import process_environ
from unisono.cluster_resolver._spec import with_port
from unisono.launcher._launch import stop_signals
from unisono.rpc._transport._keys import FILE_VARIABLE, VARIABLE
from unisono.standalone._server import StandardServer

#: Seconds between two looks at signals.
_POLL = 0.05


def main(address: str, port: int | None, key_file: Path | None, directory: Path | None, spares: int) -> int:
    """Serve until a signal asks to stop; return the exit code."""
    environ = process_environ()
    if key_file is not None:
        environ.pop(VARIABLE, None)
        environ[FILE_VARIABLE] = str(key_file)
    if port is not None:
        if not 0 <= port < 1 << 16:
            raise InvalidArgumentError(f"`--port` must be below 65536. Received: {port}.")
        has_key = bool(environ.get(VARIABLE) or environ.get(FILE_VARIABLE))
        address = with_port("0.0.0.0" if has_key else "127.0.0.1", port)
    elif not _is_address(address):
        raise InvalidArgumentError(
            f"`--address` must be HOST:PORT, the port below 65536. Received: {address!r}. "
            "Write `--address localhost:2222`."
        )
    server = StandardServer(address, directory, spares)
    with stop_signals() as requests:
        server.start()
        print(f"unisono: serving at {server.address}; {_access(environ)}", file=sys.stderr, flush=True)
        try:
            while not requests:
                time.sleep(_POLL)
        finally:
            server.stop()
    return 0 if requests[0] == signal.SIGTERM else 128 + requests[0]


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 1 << 16


def _access(environ: Mapping[str, str]) -> str:
    if environ.get(VARIABLE) or environ.get(FILE_VARIABLE):
        return "clients need the cluster's key"
    return "clients of this user on this machine alone (no key)"
