"""The gate of JAX's coordination service, in process 0: for the processes that know the cluster's secret.

JAX asks no client who it is. One that takes the place of a worker makes JAX abort all processes, in C++. So
the service listens on a socket in a file, in a folder that this user alone may enter. The other processes
reach it through the gate, which listens in its place: a process that connects answers a random number by the
secret of the rendezvous. Both are there while JAX starts, which waits for all processes: then the gate
closes and the file is removed, and the connections stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import resource
import secrets
import socket
import tempfile
import threading
import time
from pathlib import Path

from unisono._errors import ClusterError
from unisono.cluster_resolver._spec import split_address

_LOG = logging.getLogger("unisono")

#: Bytes of the gate's random number, and of the proof that answers it.
NONCE_BYTES, PROOF_BYTES = 16, 32
#: Not `tempfile.gettempdir()`: its path may be longer than the 107 bytes of a socket's name.
_PARENT = "/tmp"
#: Seconds for a proof, and for JAX to start its service.
_PROOF_SECONDS, _SERVICE_SECONDS = 5.0, 30.0
#: Connections without a proof that are open at once: for one more the oldest is closed.
_UNKNOWN_PEERS = 64
_BACKLOG = 1024
_PIECE = 1 << 16
#: Files in process 0: for each process its connection here and both ends of that to the service; and others.
_FILES_EACH, _OTHER_FILES = 3, 512


def proof_of(secret: str, nonce: bytes) -> bytes:
    """Return what proves that a process has the secret, without telling it."""
    return hmac.digest(secret.encode("utf-8", "surrogatepass"), nonce, "sha256")


class CoordinatorGate:
    """Listens for the coordination service, from its creation to `close`.

    Args:
        address: the `"ip:port"` to listen at.
        secret: of the rendezvous.
        processes: of the cluster.

    Raises:
        ClusterError: another process listens at the address.
    """

    def __init__(self, address: str, secret: str, processes: int = 2) -> None:
        self._secret = secret
        _allow_files(_FILES_EACH * processes + _OTHER_FILES)
        self.listens_at = host, port = split_address(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ClusterError(
                "Process 0 must be able to listen at its address when all processes have connected. "
                f"Received: {address} ({error.strerror}). End the program that has taken it meanwhile, or "
                "choose another port."
            ) from error
        self._folder = tempfile.TemporaryDirectory(prefix="unisono-jax-", dir=_PARENT)
        self._path = Path(self._folder.name) / "service"
        self._unknown: list[asyncio.StreamWriter] = []
        self._loop = asyncio.new_event_loop()
        serving = asyncio.start_server(self._serve, sock=listener, backlog=_BACKLOG)
        self._server = self._loop.run_until_complete(serving)
        threading.Thread(target=self._loop.run_forever, name="unisono-coordinator-gate", daemon=True).start()

    @property
    def address(self) -> str:
        """The address of the service, and for the client of this process, as gRPC writes it."""
        return f"unix:{self._path}"

    def close(self) -> None:
        """Stop listening, and remove the service's file; open connections are kept."""
        self._loop.call_soon_threadsafe(self._server.close)
        self._folder.cleanup()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            try:
                if not await self._is_known(reader, writer):
                    _LOG.warning(
                        "Process 0 rejected a connection to JAX's service from %s: it does not know the "
                        "secret of this cluster.", writer.get_extra_info("peername"),
                    )  # fmt: skip
                    return
                service_reader, service_writer = await self._connected()
                with contextlib.closing(service_writer):
                    ways = _forward(reader, service_writer), _forward(service_reader, writer)
                    # Where one end closes, so does the other one.
                    await asyncio.wait(map(asyncio.ensure_future, ways), return_when="FIRST_COMPLETED")
            except OSError as error:
                _LOG.debug("A connection to JAX's service broke: %s", error)

    async def _is_known(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Return whether a process proves that it has the secret."""
        self._unknown.append(writer)
        if len(self._unknown) > _UNKNOWN_PEERS:
            self._unknown[0].close()
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            async with asyncio.timeout(_PROOF_SECONDS):
                writer.write(nonce)
                proof = await reader.readexactly(PROOF_BYTES)
        except (TimeoutError, asyncio.IncompleteReadError):
            return False
        finally:
            self._unknown.remove(writer)
        return hmac.compare_digest(proof, proof_of(self._secret, nonce))

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        until = time.monotonic() + _SERVICE_SECONDS
        while True:
            try:
                return await asyncio.open_unix_connection(self._path)
            except (ConnectionRefusedError, FileNotFoundError):
                if time.monotonic() >= until:
                    raise
                await asyncio.sleep(0.02)


def _allow_files(count: int) -> None:
    """Let this process open so many files, as far as the system allows it: often 1,024 are the default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_PIECE):
            writer.write(data)
            await writer.drain()
