"""Process 0's end of the rendezvous: it accepts, admits, rejects, and sends the outcome to all.

Tests: tests/cluster/test_rendezvous.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import selectors
import socket
import time
from types import TracebackType

from unisono._errors import ClusterError
from unisono.cluster.rendezvous import _addresses, _protocol
from unisono.cluster.rendezvous._addresses import UnknownNames
from unisono.cluster.rendezvous._protocol import (
    Abort,
    Member,
    Message,
    OtherVersionError,
    Proceed,
    RendezvousState,
    UnknownPeerError,
)

_LOG = logging.getLogger("unisono")

#: Seconds for the hello of a new connection. A client sends it at once; a port scanner sends nothing.
_HELLO_SECONDS = 5.0
#: Seconds in which final messages are delivered; a stopped process would hold up the others for ever.
_DRAIN_SECONDS = 5.0
#: Seconds between two rosters: a thousand processes that connect at once would otherwise send a million.
_ROSTER_SECONDS = 1.0
#: Seconds that the loop sleeps at most.
_TICK = 0.25
#: Unknown peers that may be connected, beyond one for each process.
_UNKNOWN_PEERS = 64
#: Rejections that are logged: a port scan must not fill the disk.
_LOGGED_REJECTIONS = 64


class _RendezvousPeer:
    """A connection to process 0; its process is unknown until its hello."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.sock = sock
        self.address = address
        self.deadline = time.monotonic() + _HELLO_SECONDS
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.process_id: int | None = None
        self.closing = False


class RendezvousServer:
    """Process 0's end of a rendezvous: one thread, the caller's, and non-blocking sockets."""

    def __init__(
        self, listener: socket.socket, state: RendezvousState, names: UnknownNames | None = None
    ) -> None:
        self._listener = listener
        self._names = names or UnknownNames(())
        #: The IP address at which the other processes reach this one; known when all have connected.
        self.reached = str(listener.getsockname()[0])
        self._state = state
        self._peers: dict[int, _RendezvousPeer] = {}
        self._next_roster = state.began_at
        self._roster_changed = False
        self._eviction = ""
        self._reminded = False
        self._next_expiry = 0.0
        self._rejections = 0
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> RendezvousServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for peer in list(self._peers.values()):
            self._drop(peer)
        self._close_listener()
        self._selector.close()

    def hosts(self) -> tuple[str, ...]:
        """Return the names of the machines, by process; none where the addresses of all are known."""
        if len(set(self._state.address_of)) == self._state.num_processes:
            return ()
        return tuple(member.host for _, member in sorted(self._state.connected.items()))

    def run(self, agreed: Message) -> None:
        """Wait for all processes, send them the outcome, and return when they have received it."""
        while 0 in self._state.connected:
            outcome = _protocol.outcome(self._state, time.monotonic())
            if isinstance(outcome, Proceed):
                arrivals = [str(peer.sock.getsockname()[0]) for _, peer in self._members()]
                self.reached = _addresses.reached_address(self.reached, arrivals)
                self._drain({"kind": "start", **agreed, "reached": self.reached, "hosts": self.hosts()})
                return
            if isinstance(outcome, Abort):
                self._drain({"kind": "abort", "reason": outcome.reason})
                raise ClusterError(outcome.reason)
            self._poll()
        # A newer generation has connected: it waits for its own process 0, which needs this port.
        self._drain(None)
        raise ClusterError(self._eviction)

    def _drain(self, message: Message | None) -> None:
        """Send a final message to the connected processes, and wait until they have closed."""
        # Close the listener first: a peer that starts at once must not reconnect to a finished rendezvous.
        self._close_listener()
        data = _protocol.frame(message) if message is not None else b""
        for peer in list(self._peers.values()):
            if data and peer.process_id is not None:
                self._send_final(peer, data)
            elif not peer.closing:
                self._drop(peer)
        deadline = time.monotonic() + _DRAIN_SECONDS
        while self._peers and time.monotonic() < deadline:
            self._poll()

    def _close_listener(self) -> None:
        if self._listener.fileno() >= 0:
            self._selector.unregister(self._listener)
            self._listener.close()

    def _poll(self) -> None:
        deadline = self._state.began_at + self._state.start_up
        wait = min(_TICK, max(0.0, deadline - time.monotonic()) or _TICK)
        events = self._selector.select(wait)
        # Disconnections first: they free the number for a replacement that connects in the same moment.
        for key, mask in sorted(events, key=lambda event: _priority(event[0].data)):
            if key.data is None:
                self._accept()
            elif key.data.sock.fileno() >= 0:
                self._serve(key.data, mask)
        self._expire()
        if self._names.names is not self._state.unknown_names:
            self._note_names()
        self._remind()
        self._send_rosters()

    def _members(self) -> list[tuple[int, _RendezvousPeer]]:
        peers = self._peers.values()
        return [(p.process_id, p) for p in peers if p.process_id is not None and not p.closing]

    def _accept(self) -> None:
        for _ in range(_UNKNOWN_PEERS):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Usually EMFILE. The connection stays in the kernel's queue, and the listener readable.
                _LOG.warning("Process 0 cannot accept a connection: %s", describe(error))
                time.sleep(_TICK)
                return
            sock.setblocking(False)
            enable_keepalive(sock)
            peer = _RendezvousPeer(sock, str(address[0]).removeprefix("::ffff:"))
            self._peers[sock.fileno()] = peer
            self._selector.register(sock, selectors.EVENT_READ, peer)
        most = _UNKNOWN_PEERS + self._state.num_processes
        if len(self._peers) > most:
            unknown = [p for p in self._peers.values() if p.process_id is None and not p.closing]
            for peer in unknown[:-most]:
                self._reject(peer, "too many connections at once")

    def _serve(self, peer: _RendezvousPeer, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._flush(peer)
        if not mask & selectors.EVENT_READ or peer.sock.fileno() < 0:
            return
        try:
            data = peer.sock.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            _LOG.debug("A connection from %s broke: %s", peer.address, error)
            data = b""
        if not data:
            self._disconnect(peer)
        elif peer.process_id is None and not peer.closing:
            peer.inbox += data
            self._handshake(peer)

    def _handshake(self, peer: _RendezvousPeer) -> None:
        try:
            message = _protocol.take_frame(peer.inbox)
            if message is not None:
                self._admit(peer, _protocol.read_hello(message, peer.address))
        except OtherVersionError as problem:
            reason = _protocol.other_version_text(peer.address, str(problem))
            note = f"rejected: a process from {peer.address}: {problem}"
            self._state = _protocol.note_rejection(self._state, note)
            self._reject(peer, str(problem), {"kind": "abort", "reason": reason})
        except UnknownPeerError as problem:
            self._reject(peer, str(problem))

    def _admit(self, peer: _RendezvousPeer, member: Member) -> None:
        is_known = member.process_id in self._state.connected
        admission = _protocol.admit(self._state, member)
        self._state = admission.state
        if admission.rejected is not None:
            self._reject(peer, admission.rejected, {"kind": "abort", "reason": admission.rejected})
            return
        for process, other in self._members() if is_known or admission.evicted else ():
            reason = admission.evicted.get(process)
            if reason is not None:
                self._reject(other, reason, {"kind": "abort", "reason": reason})
            elif process == member.process_id:
                # The same process reconnected: its earlier connection is broken.
                self._drop(other)
        self._eviction = admission.evicted.get(0, self._eviction)
        peer.process_id = member.process_id
        peer.inbox.clear()
        self._roster_changed = True
        # At once: by the first roster the client knows that this is process 0, and not another program.
        self._send(peer, self._roster())

    def _roster(self) -> bytes:
        return _protocol.frame({"kind": "roster", "roster": _protocol.roster(self._state)})

    def _disconnect(self, peer: _RendezvousPeer) -> None:
        self._drop(peer)
        if peer.closing:
            return
        if peer.process_id is None:
            if peer.inbox:
                self._log_rejection(peer, "it closed the connection in its first message")
            return
        member = self._state.connected[peer.process_id]
        _LOG.warning(
            "Process %d (%s) disconnected before all processes had connected.", peer.process_id, member
        )
        self._state = _protocol.disconnect(self._state, peer.process_id)
        self._roster_changed = True

    def _expire(self) -> None:
        now = time.monotonic()
        if now < self._next_expiry:
            return
        self._next_expiry = now + _TICK
        for peer in [p for p in self._peers.values() if now >= p.deadline]:
            if peer.closing:
                self._drop(peer)
            elif peer.process_id is None:
                self._reject(peer, f"it sent no hello within {_HELLO_SECONDS:g} s")

    def _note_names(self) -> None:
        """Say at once which hosts of other processes have names that this machine does not know."""
        unknown = self._names.names
        for name in unknown[len(self._state.unknown_names) :]:
            _LOG.warning(_protocol.unknown_name_text(name))
        if unknown != self._state.unknown_names:
            self._state = dataclasses.replace(self._state, unknown_names=unknown)
            self._roster_changed = True

    def _remind(self) -> None:
        if self._reminded or time.monotonic() < self._state.began_at + _protocol.REMIND_SECONDS:
            return
        self._reminded = True
        roster = _protocol.roster(self._state)
        if any(line.startswith("missing") for line in roster):
            _LOG.warning(_protocol.absent_text(0, roster))

    def _send_rosters(self) -> None:
        now = time.monotonic()
        if not self._roster_changed or now < self._next_roster:
            return
        self._next_roster, self._roster_changed = now + _ROSTER_SECONDS, False
        data = self._roster()
        for _, peer in self._members():
            # A peer that does not read gets the final message only: its outbox must not grow.
            if not peer.outbox:
                self._send(peer, data)

    def _reject(self, peer: _RendezvousPeer, reason: str, message: Message | None = None) -> None:
        self._log_rejection(peer, reason)
        peer.process_id = None
        if message is None:
            self._drop(peer)
        else:
            self._send_final(peer, _protocol.frame(message))

    def _log_rejection(self, peer: _RendezvousPeer, reason: str) -> None:
        self._rejections += 1
        if self._rejections <= _LOGGED_REJECTIONS:
            _LOG.warning("Process 0 rejected a connection from %s: %s", peer.address, reason)
        if self._rejections == _LOGGED_REJECTIONS:
            _LOG.warning(
                "Process 0 rejected %d connections; further ones are not logged.", _LOGGED_REJECTIONS
            )

    def _send_final(self, peer: _RendezvousPeer, data: bytes) -> None:
        """Send a message and half-close, and read until the peer closes.

        Closing with unread bytes would send a reset, on which the peer's kernel discards the message.
        """
        peer.closing = True
        peer.deadline = time.monotonic() + _DRAIN_SECONDS
        self._send(peer, data)

    def _send(self, peer: _RendezvousPeer, data: bytes) -> None:
        peer.outbox += data
        self._flush(peer)

    def _flush(self, peer: _RendezvousPeer) -> None:
        try:
            while peer.outbox:
                del peer.outbox[: peer.sock.send(peer.outbox)]
            if peer.closing:
                peer.sock.shutdown(socket.SHUT_WR)
        except (BlockingIOError, InterruptedError):
            # The rest is sent when the socket is writable.
            self._selector.modify(peer.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
            return
        except OSError as error:
            _LOG.debug("A connection from %s broke: %s", peer.address, error)
            self._disconnect(peer)
            return
        self._selector.modify(peer.sock, selectors.EVENT_READ, peer)

    def _drop(self, peer: _RendezvousPeer) -> None:
        if self._peers.pop(peer.sock.fileno(), None) is not None:
            self._selector.unregister(peer.sock)
        peer.sock.close()


def _priority(peer: _RendezvousPeer | None) -> int:
    """Processes, then unknown peers, then the listener."""
    if peer is None:
        return 2
    return 1 if peer.process_id is None else 0


def enable_keepalive(sock: socket.socket) -> None:
    """Let the kernel detect a machine that disappeared: after 5 s of silence, 3 probes 2 s apart."""
    # Some systems refuse options of a connection that the other end has closed.
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
            # macOS lacks TCP_KEEPIDLE.
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def describe(error: OSError) -> str:
    """Return what happened to a connection, in a few words."""
    if isinstance(error, socket.gaierror):
        return "name not known"
    if isinstance(error, TimeoutError):
        return "timed out"
    return (os.strerror(error.errno) if error.errno else str(error)).lower()
