"""Process 0's end of the meeting before the start: who comes, who goes, who is turned away."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from unisono._errors import ClusterError
from unisono.cluster.rendezvous import _protocol
from unisono.cluster.rendezvous._protocol import (
    Abort,
    Member,
    OtherVersionError,
    Proceed,
    RendezvousState,
    UnknownPeerError,
)

_LOG = logging.getLogger("unisono")

#: Seconds for a new connection to tell who it is.
_HELLO_SECONDS = 5.0
#: Seconds in which the last answers are delivered.
_FAREWELL_SECONDS = 5.0
#: Seconds between two messages about who is here.
_NEWS_SECONDS = 1.0
#: Seconds after which the log says for whom the others wait.
_REMIND_SECONDS = 10.0
#: Seconds that the loop sleeps at most.
_TICK = 0.25
#: Connections that have not told who they are, beyond one for each process.
_STRANGERS = 64
#: Rejected connections that the log names.
_NAMED = 64


class _Peer:
    """A connection to process 0: a stranger until its process is known."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.sock = sock
        self.address = address
        self.until = time.monotonic() + _HELLO_SECONDS
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.process_id: int | None = None
        self.closing = False


class RendezvousServer:
    """Process 0's end of a meeting: one thread, the caller's, and sockets that do not block.

    Args:
        listener: a socket that listens; it is closed at the end.
        meeting: with process 0 alone.
    """

    def __init__(self, listener: socket.socket, meeting: RendezvousState) -> None:
        self._listener = listener
        self._meeting = meeting
        self._peers: dict[int, _Peer] = {}
        self._news = meeting.begun
        self._stale = False
        self._dismissal = ""
        self._reminded = False
        self._rejected = 0
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
        self._hush()
        self._selector.close()

    def hosts(self) -> tuple[str, ...]:
        """Return the names of the machines, by process."""
        return tuple(member.host for _, member in sorted(self._meeting.here.items()))

    def run(self, agreed: Mapping[str, Any]) -> Proceed:
        """Wait for all, tell everybody how it ends, and return when they have heard it.

        Args:
            agreed: what is told with a good end.

        Raises:
            ClusterError: when the cluster cannot start.
        """
        while 0 in self._meeting.here:
            end = _protocol.verdict(self._meeting, time.monotonic())
            if isinstance(end, Proceed):
                self._part({"kind": "go", **agreed, "hosts": self.hosts(), "warnings": end.warnings})
                return end
            if isinstance(end, Abort):
                self._part({"kind": "stop", "text": end.text})
                raise ClusterError(end.text)
            self._turn()
        # A newer generation came: it meets its own process 0, as soon as this one is gone.
        self._part(None)
        raise ClusterError(self._dismissal)

    def _part(self, message: Mapping[str, Any] | None) -> None:
        """Say the last word to the processes that are here, and wait until they have gone."""
        # Nobody who begins to use what was agreed on shall find this meeting at its port.
        self._hush()
        for peer in list(self._peers.values()):
            if message is not None and peer.process_id is not None:
                self._say_last(peer, message)
            elif not peer.closing:
                self._drop(peer)
        until = time.monotonic() + _FAREWELL_SECONDS
        while self._peers and time.monotonic() < until:
            self._turn()

    def _hush(self) -> None:
        if self._listener.fileno() >= 0:
            self._selector.unregister(self._listener)
            self._listener.close()

    def _turn(self) -> None:
        deadline = self._meeting.begun + self._meeting.start_up
        wait = min(_TICK, max(0.0, deadline - time.monotonic()) or _TICK)
        events = self._selector.select(wait)
        # Who has gone makes room for who comes in the same moment.
        for key, mask in sorted(events, key=lambda event: _order(event[0].data)):
            if key.data is None:
                self._accept()
            elif key.data.sock.fileno() >= 0:
                self._serve(key.data, mask)
        self._expire()
        self._remind()
        self._tell_news()

    def _members(self) -> list[tuple[int, _Peer]]:
        peers = self._peers.values()
        return [(p.process_id, p) for p in peers if p.process_id is not None and not p.closing]

    def _accept(self) -> None:
        for _ in range(_STRANGERS):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Mostly no file descriptor is left. The connection waits in the kernel.
                _LOG.warning("Process 0 cannot accept a connection: %s", described(error))
                time.sleep(_TICK)
                return
            sock.setblocking(False)
            keep_alive(sock)
            peer = _Peer(sock, str(address[0]).removeprefix("::ffff:"))
            self._peers[sock.fileno()] = peer
            self._selector.register(sock, selectors.EVENT_READ, peer)
        strangers = [p for p in self._peers.values() if p.process_id is None and not p.closing]
        for peer in strangers[: -_STRANGERS - self._meeting.num_processes]:
            self._turn_away(peer, "too many connections at once")

    def _serve(self, peer: _Peer, mask: int) -> None:
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
            self._lost(peer)
        elif peer.process_id is None and not peer.closing:
            peer.inbox += data
            self._listen_to(peer)

    def _listen_to(self, peer: _Peer) -> None:
        try:
            message = _protocol.take_frame(peer.inbox)
            if message is not None:
                self._welcome(peer, _protocol.read_hello(message, peer.address))
        except OtherVersionError as problem:
            text = _protocol.other_version_text(peer.address, str(problem))
            note = f"turned away: a process from {peer.address}: {problem}"
            self._meeting = _protocol.turn_away(self._meeting, note)
            self._turn_away(peer, str(problem), {"kind": "stop", "text": text})
        except UnknownPeerError as problem:
            self._turn_away(peer, str(problem))

    def _welcome(self, peer: _Peer, member: Member) -> None:
        reception = _protocol.arrive(self._meeting, member)
        self._meeting = reception.meeting
        if reception.refused is not None:
            self._turn_away(peer, reception.refused, {"kind": "stop", "text": reception.refused})
            return
        for process, other in self._members():
            text = reception.dismissed.get(process)
            if text is not None:
                self._turn_away(other, text, {"kind": "stop", "text": text})
            elif process == member.process_id:
                # The same process again: the connection that it lost is of no use.
                self._drop(other)
        self._dismissal = reception.dismissed.get(0, "")
        peer.process_id = member.process_id
        peer.inbox.clear()
        self._stale = True
        # It shall know at once that this is process 0.
        self._say(peer, {"kind": "news", "roster": _protocol.roster(self._meeting)})

    def _lost(self, peer: _Peer) -> None:
        self._drop(peer)
        if peer.closing:
            return
        if peer.process_id is None:
            if peer.inbox:
                self._log_rejected(peer, "it ended in its first message")
            return
        gone = self._meeting.here[peer.process_id]
        _LOG.warning("Process %d (%s) has gone before all were here.", peer.process_id, gone)
        self._meeting = _protocol.leave(self._meeting, peer.process_id)
        self._stale = True

    def _expire(self) -> None:
        now = time.monotonic()
        for peer in [p for p in self._peers.values() if now >= p.until]:
            if peer.closing:
                self._drop(peer)
            elif peer.process_id is None:
                self._turn_away(peer, f"it did not tell who it is within {_HELLO_SECONDS:g} s")

    def _remind(self) -> None:
        if self._reminded or time.monotonic() < self._meeting.begun + _REMIND_SECONDS:
            return
        self._reminded = True
        missing = [line for line in _protocol.roster(self._meeting) if line.startswith("missing")]
        if missing:
            _LOG.warning("Process 0 waits for all to come; %s", "; ".join(missing))

    def _tell_news(self) -> None:
        now = time.monotonic()
        if not self._stale or now < self._news:
            return
        self._news, self._stale = now + _NEWS_SECONDS, False
        news = {"kind": "news", "roster": _protocol.roster(self._meeting)}
        for _, peer in self._members():
            # One that does not read hears the end only.
            if not peer.outbox:
                self._say(peer, news)

    def _turn_away(self, peer: _Peer, reason: str, message: Mapping[str, Any] | None = None) -> None:
        self._log_rejected(peer, reason)
        peer.process_id = None
        if message is None:
            self._drop(peer)
        else:
            self._say_last(peer, message)

    def _log_rejected(self, peer: _Peer, reason: str) -> None:
        self._rejected += 1
        if self._rejected <= _NAMED:
            _LOG.warning("Process 0 turned away a connection from %s: %s", peer.address, reason)
        if self._rejected == _NAMED:
            _LOG.warning("Process 0 turned away %d connections; further ones are not logged.", _NAMED)

    def _say_last(self, peer: _Peer, message: Mapping[str, Any]) -> None:
        """Say something and close: what still comes is read, or the kernel would take the answer back."""
        peer.closing = True
        peer.until = time.monotonic() + _FAREWELL_SECONDS
        self._say(peer, message)

    def _say(self, peer: _Peer, message: Mapping[str, Any]) -> None:
        peer.outbox += _protocol.frame(message)
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        try:
            while peer.outbox:
                del peer.outbox[: peer.sock.send(peer.outbox)]
            if peer.closing:
                peer.sock.shutdown(socket.SHUT_WR)
        except (BlockingIOError, InterruptedError):
            # The rest follows when the connection takes it.
            self._selector.modify(peer.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
            return
        except OSError as error:
            _LOG.debug("A connection from %s broke: %s", peer.address, error)
            self._lost(peer)
            return
        self._selector.modify(peer.sock, selectors.EVENT_READ, peer)

    def _drop(self, peer: _Peer) -> None:
        if self._peers.pop(peer.sock.fileno(), None) is not None:
            self._selector.unregister(peer.sock)
        peer.sock.close()


def _order(peer: _Peer | None) -> int:
    if peer is None:
        return 2
    return 1 if peer.process_id is None else 0


def keep_alive(sock: socket.socket) -> None:
    """Let the kernel notice a machine that is gone without a word, in some ten seconds."""
    # Some systems refuse options of a connection that the other end has closed.
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
            # Not all systems have them.
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def described(error: OSError) -> str:
    """Return what happened to a connection, in a few words."""
    if isinstance(error, socket.gaierror):
        return "name not known"
    if isinstance(error, TimeoutError):
        return "timed out"
    return (os.strerror(error.errno) if error.errno else str(error)).lower()
