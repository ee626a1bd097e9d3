"""TCP between the hosts of a world: what code gets instead of `socket` and `selectors`, and how it fails.

`SocketDoors` puts it in place in modules of the project while its block runs. Hosts have kernels: they
accept connections and keep bytes for a process that is stopped, refuse them where no process listens, close
and reset the connections of one that was killed, and say nothing where a machine is gone. Segments are late,
connections are reset, parts of the network are cut in one direction or both, descriptors run out, names are
not known, reads and writes are short.

Bytes that were sent arrive in order, and once. Not simulated: IPv6, urgent data, and options but keep-alive.

Tests: tests/unit/test_simulated_cluster.py.
"""

import collections
import contextlib
import errno
import heapq
import importlib
import itertools
import math
import os
import selectors
import socket

import greenlet
import pytest

from tests.simulation._primitives import _StandInModule
from tests.simulation._world import DELAY, ORDER

#: Seconds between the attempts of a kernel to connect, and after which it gives up.
_ATTEMPTS = (0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0)
_GIVES_UP = 127.0
#: Seconds of silence after which keep-alive ends a connection: as `enable_keepalive` sets it.
_KEEPALIVE = 5.0 + 3 * 2.0
#: The first port that kernels give to programs which ask for none.
_FIRST_PORT = 32768
LOOPBACK, ALL = "127.0.0.1", "0.0.0.0"

#: The modules that open sockets in what is simulated.
MODULES = (
    "unisono.cluster.rendezvous._client",
    "unisono.cluster.rendezvous._server",
    "unisono.cluster.rendezvous._addresses",
    "unisono.cluster.liveness._port_server",
    "unisono.cluster.liveness._status_server",
    "unisono.cluster.liveness._health",
    "unisono.rpc._ports",
)


class Host:
    """A machine of the network."""

    def __init__(self, network, name, ip):
        self.network, self.name, self.ip = network, name, ip
        self.is_down = False
        self.listeners, self.ports = {}, itertools.count(_FIRST_PORT)

    def process(self, name, body):
        """Start a process on this machine."""
        process = self.network.world.process(name, body)
        process.own["host"] = self
        process.own["free descriptors"] = list(range(3, 1024))
        process.at_end(lambda: self.network._release(process))
        return process

    def listener(self, ip, port):
        """Return the socket that listens at an address, or at this port of all."""
        return self.listeners.get((ip, port)) or self.listeners.get((ALL, port))


class Network:
    """The machines, the way between them, and what goes wrong there.

    Args:
        delay: seconds of a segment at most, when nothing happens to it.
        late, latest: the probability that one is late, and by how many seconds at most.
        reset: the probability, for each segment, that its connection is reset instead.
        descriptors: the probability that no descriptor is free for a further socket.
        buffer: bytes that a connection keeps in a direction.
        is_short: whether reads return less than what is there.
    """

    def __init__(
        self,
        world,
        delay=0.01,
        late=0.0,
        latest=2.0,
        reset=0.0,
        descriptors=0.0,
        buffer=1 << 16,
        is_short=False,
    ):
        self.world, self.delay, self.late, self.latest = world, delay, late, latest
        self.reset, self.descriptors, self.buffer, self.is_short = reset, descriptors, buffer, is_short
        self.hosts, self.names = {}, {}
        #: Until when what a host sends to another one does not arrive.
        self._parted = {}
        #: Names that cannot be resolved, and until when.
        self.unknown = {}
        #: All sockets that are open, by the processes that have opened them.
        self._opened = {}

    def host(self, name):
        """Add a machine."""
        host = Host(self, name, f"10.0.0.{len(self.hosts) + 1}")
        self.hosts[host.ip] = self.names[name] = host
        return host

    @property
    def own(self):
        """The machine of the process that runs now."""
        return self.world.current.process.own["host"]

    def sockets_of(self, process):
        """Return the sockets that a process has open."""
        return list(self._opened.get(process, ()))

    def part(self, one, other, seconds, both=True):
        """Cut the network between two machines, from the first to the second one or in both directions."""
        until = self.world.now + seconds
        for pair in [(one, other), (other, one)][: 1 + both]:
            self._parted[pair] = max(self._parted.get(pair, 0.0), until)
        self.world.note("part", one.name, other.name, f"parted for {seconds:.1f} s")
        self._watch_silence({one, other})

    def lose(self, host):
        """Lose a machine: its processes end, and no connection is closed."""
        host.is_down = True
        self.world.note("power", host.name, host.name, "lost its power")
        for process in [p for p in self._opened if p.own["host"] is host]:
            process.kill()
        self._watch_silence({host})

    def reaches(self, one, other):
        """Return whether what one machine sends now arrives at another one."""
        if one.is_down or other.is_down:
            return False
        return one is other or self._parted.get((one, other), 0.0) <= self.world.now

    def _watch_silence(self, hosts):
        """Let keep-alive end the connections of machines that do not reach each other for long enough."""
        for end in [s for sockets in self._opened.values() for s in sockets]:
            peer = end._peer
            if not end._keepalive or peer is None or not {end.host, peer.host} & hosts:
                continue

            def look(end=end, peer=peer, since=self.world.now):
                until = max(
                    self._parted.get(pair, 0.0) for pair in ((end.host, peer.host), (peer.host, end.host))
                )
                if end.host.is_down or not (peer.host.is_down or until >= since + _KEEPALIVE):
                    return
                end._fail(errno.ETIMEDOUT)

            self.world.call_later(_KEEPALIVE, look)

    def _release(self, process):
        """Close what a process has open that has ended, as its kernel does."""
        for sock in self.sockets_of(process):
            sock._close(silently=sock.host.is_down)
        self._opened.pop(process, None)

    def _carry(self, source, target, deliver, sender=None):
        """Carry a segment from one machine to another: `deliver()` is called when it arrives, if it does.

        Args:
            sender: the socket whose segments keep their order.
        """
        world = self.world
        world.counts["messages"] += 1
        delay = world.uniform(0.0, self.delay, DELAY)
        if source is not target:
            until = self._parted.get((source, target), 0.0)
            if until == math.inf:
                return
            if until > world.now:
                # The kernel sends it again, in longer and longer intervals.
                delay += (until - world.now) * world.uniform(1.0, 1.5, DELAY)
            elif world.fault(self.late, "late"):
                delay += world.uniform(0.0, self.latest, DELAY)
        if sender is not None:
            if world.fault(self.reset, "reset"):
                self._reset(sender)
                return
            delay = max(delay, sender._last - world.now + 1e-6)
            sender._last = world.now + delay

        def arrive():
            if not source.is_down and not target.is_down:
                deliver()

        world.call_later(delay, arrive)

    def _reset(self, sock):
        """Reset a connection, as a firewall does that has forgotten it."""
        peer = sock._peer
        for end in (sock, peer):
            self.world.call_later(
                self.world.uniform(0.0, self.delay, DELAY), lambda end=end: end._fail(errno.ECONNRESET)
            )
        self.world.note("lost", sock.host.name, peer.host.name, "the connection is reset")

    # --- what modules get -----------------------------------------------------------------------

    def getaddrinfo(self, host, port, family=0, type=0, proto=0, flags=0):  # noqa: A002
        """Return the addresses of a name, as `socket.getaddrinfo`."""
        if host == "localhost":
            ip = LOOPBACK
        elif host.replace(".", "").isdecimal():
            ip = host
        elif host in self.names and self.unknown.get(host, 0.0) <= self.world.now:
            ip = self.names[host].ip
        else:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, type, 6, "", (ip, port))]

    def make_socket(self, family=socket.AF_INET, type=socket.SOCK_STREAM, proto=0, fileno=None):  # noqa: A002
        """Return a socket of the present process."""
        return Socket(self, self.own)

    def create_server(
        self, address, *, family=socket.AF_INET, backlog=None, reuse_port=False, dualstack_ipv6=False
    ):
        """Return a socket that listens, as `socket.create_server`."""
        if family != socket.AF_INET:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        sock = Socket(self, self.own)
        try:
            sock._listen(address[0] or ALL, address[1], backlog or 128)
        except OSError:
            sock.close()
            raise
        return sock

    def create_connection(self, address, timeout=None):
        """Return a connected socket, as `socket.create_connection`."""
        ip = self.getaddrinfo(*address)[0][4][0]
        sock = Socket(self, self.own)
        try:
            sock.settimeout(timeout)
            sock.connect((ip, address[1]))
        except OSError:
            sock.close()
            raise
        return sock


class Socket:
    """A TCP socket of a process, with what the kernel keeps for it."""

    family, type = socket.AF_INET, socket.SOCK_STREAM

    def __init__(self, network, host, process=None):
        self.network, self.world, self.host = network, network.world, host
        self._process = process
        self._descriptor = -1
        self._timeout = None
        self._local = self._remote = None
        self._peer = None
        #: Received and not read; sent and not yet received; what a listener has not accepted.
        self._inbox, self._under_way, self._queue, self._backlog = bytearray(), 0, None, 0
        self._has_ended = self._has_shut = self._is_closed = self._keepalive = False
        self._is_connecting = False
        self._error = 0
        self._last = 0.0
        #: Lists of those that wait for something to happen here.
        self._watchers = []
        if process is None:
            self._take_descriptor(self.world.current.process)

    def _take_descriptor(self, process):
        if self.world.fault(self.network.descriptors, "no descriptor"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self._process = process
        # The lowest one, which an earlier socket may have had.
        self._descriptor = heapq.heappop(process.own["free descriptors"])
        self.network._opened.setdefault(process, {})[self] = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __repr__(self):
        return f"<socket {self._descriptor} of {self._process.name}: {self._local} -> {self._remote}>"

    def fileno(self):
        return self._descriptor

    def settimeout(self, seconds):
        self._timeout = seconds

    def gettimeout(self):
        return self._timeout

    def setblocking(self, is_blocking):
        self._timeout = None if is_blocking else 0.0

    def setsockopt(self, level, option, value):
        self._require_open()
        if (level, option) == (socket.SOL_SOCKET, socket.SO_KEEPALIVE):
            self._keepalive = bool(value)

    def getsockopt(self, level, option):
        self._require_open()
        code, self._error = self._error, 0
        return code

    def getsockname(self):
        self._require_open()
        return self._local or (ALL, 0)

    def getpeername(self):
        self._require_open()
        if self._peer is None or self._is_connecting:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return self._remote

    # --- listening ------------------------------------------------------------------------------

    def _listen(self, ip, port, backlog):
        if ip not in (ALL, LOOPBACK, self.host.ip):
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        port = port or next(self.host.ports)
        taken = [at for at in self.host.listeners if at[1] == port and (ip == ALL or at[0] in (ip, ALL))]
        if taken:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        self._local, self._queue, self._backlog = (ip, port), collections.deque(), backlog
        self.host.listeners[ip, port] = self

    def accept(self):
        self._step()
        self._wait(self._is_readable, "a connection")
        if self._has_shut:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        sock = self._queue[0]
        # Without a descriptor it stays in the queue.
        sock._take_descriptor(self._process)
        self._queue.popleft()
        return sock, sock._remote

    # --- connecting -----------------------------------------------------------------------------

    def connect(self, address):
        code = self.connect_ex(address)
        if code == errno.EINPROGRESS and self._timeout != 0.0:
            self._wait(lambda: not self._is_connecting, f"a connection to {address}")
            code, self._error = self._error, 0
        if code:
            raise OSError(code, os.strerror(code))

    def connect_ex(self, address):
        self._step()
        ip, port = address
        target = self.host if ip.startswith("127.") else self.network.hosts.get(ip)
        self._local = (
            LOOPBACK if target is self.host and ip != self.host.ip else self.host.ip,
            next(self.host.ports),
        )
        self._remote = ip, port
        if target is None:
            return errno.ENETUNREACH
        self._is_connecting = True
        is_alone = target is self.host and target.listener(ip, port) is None
        if is_alone and self.world.fault(0.1, "connection to itself"):
            # TCP's simultaneous open: the kernel has given it the very port.
            self._local, self._peer, self._is_connecting = self._remote, self, False
            return 0
        self._try(target, 0, self.world.now)
        return errno.EINPROGRESS

    def _try(self, target, attempt, began):
        """Send the first segment of a connection, and send it again until there is an answer."""
        world = self.world
        if not self._is_connecting or self._is_closed:
            return

        def fail(code):
            if self._is_connecting and not self._is_closed:
                self._fail(code)

        def refuse():
            if self.network.reaches(target, self.host):
                self.network._carry(target, self.host, lambda: fail(errno.ECONNREFUSED))

        def arrive():
            if self._peer is not None or not self._is_connecting:
                return
            listener = target.listener(*self._remote)
            if listener is None:
                refuse()
            elif len(listener._queue) <= listener._backlog and self.network.reaches(target, self.host):
                self._meet(listener)

        if self.network.reaches(self.host, target):
            self.network._carry(self.host, target, arrive)
        elif target.is_down and attempt == 0 and world.choose(2, DELAY):
            # A router, or the own kernel, finds nobody at that address.
            world.call_later(3.0, lambda: fail(errno.EHOSTUNREACH))
        if attempt + 1 < len(_ATTEMPTS):
            at = began + _ATTEMPTS[attempt + 1] - world.now
            world.call_later(at, lambda: self._try(target, attempt + 1, began))
        else:
            world.call_later(began + _GIVES_UP - world.now, lambda: fail(errno.ETIMEDOUT))

    def _meet(self, listener):
        """Have arrived at a listener: its kernel accepts the connection."""
        other = Socket(self.network, listener.host, listener._process)
        other._local, other._remote = self._remote, self._local
        other._peer, self._peer = self, other
        listener._queue.append(other)
        listener._tell()

        def establish():
            if not self._is_closed:
                self._is_connecting = False
                self._tell()

        self.network._carry(listener.host, self.host, establish, sender=other)

    # --- data -----------------------------------------------------------------------------------

    def send(self, data):
        self._step()
        self._wait(self._is_writable, "room for data")
        if self._error:
            self._raise()
        if self._peer is None or self._is_connecting or self._has_shut:
            raise OSError(errno.EPIPE, os.strerror(errno.EPIPE))
        peer = self._peer
        piece = bytes(data[: self._room()])
        self._under_way += len(piece)

        def arrive():
            self._under_way -= len(piece)
            if peer._is_closed:
                # Its kernel knows no such connection any more.
                self.network._carry(peer.host, self.host, lambda: self._fail(errno.ECONNRESET))
                return
            peer._inbox += piece
            if self.world.is_recorded:
                self.world.note(
                    "message", self._process.name, peer._process.name, f"{len(piece)} bytes {_shown(piece)}"
                )
            peer._tell()

        self.network._carry(self.host, peer.host, arrive, sender=self)
        return len(piece)

    def sendall(self, data):
        end = None if not self._timeout else self.world.now + self._timeout
        view = memoryview(data)
        while view:
            if end is not None and self.world.now >= end:
                raise TimeoutError("timed out")
            view = view[self.send(view) :]

    def recv(self, size, flags=0):
        self._step()
        self._wait(self._is_readable, "data")
        if not self._inbox:
            if self._error:
                self._raise()
            return b""
        was_full = self._peer is not None and self._peer._room() <= 0
        size = min(size, len(self._inbox))
        if self.network.is_short and self.world.chance(0.3, DELAY):
            size = 1 + self.world.choose(size, DELAY)
        piece = bytes(self._inbox[:size])
        del self._inbox[:size]
        if was_full:
            self._peer._tell()
        return piece

    def shutdown(self, how):
        self._step()
        if self._queue is not None:
            # It wakes who waits in `accept`.
            self._has_shut = True
            self._tell()
            return
        if self._peer is None:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        if how != socket.SHUT_RD:
            self._send_end()
        if how != socket.SHUT_WR:
            self._has_ended = True
            self._tell()

    def _send_end(self):
        if self._has_shut or self._error:
            return
        self._has_shut = True
        peer = self._peer

        def arrive():
            peer._has_ended = True
            peer._tell()

        self.network._carry(self.host, peer.host, arrive, sender=self)

    def close(self):
        if self.world.is_over or self._is_closed:
            return
        if self._process.is_dead:
            raise greenlet.GreenletExit
        self._close()

    def _close(self, silently=False):
        process, number = self._process, self._descriptor
        self._is_closed, self._descriptor = True, -1
        opened = self.network._opened.get(process, {})
        if opened.pop(self, self) is None and number >= 0:
            heapq.heappush(process.own["free descriptors"], number)
        if self._queue is not None:
            if self.host.listeners.get(self._local) is self:
                del self.host.listeners[self._local]
            for waiting in self._queue:
                waiting._close_connection(silently, is_reset=True)
                waiting._is_closed = True
        elif self._peer is not None:
            # What was not read is lost, and the other end told so.
            self._close_connection(silently, is_reset=bool(self._inbox))
        self._tell()

    def _close_connection(self, silently, is_reset):
        if silently or self._peer is None or self._peer is self:
            return
        if not is_reset:
            self._send_end()
            return
        peer = self._peer

        def arrive():
            # Some kernels throw away what was received before, too.
            if self.world.choose(2, DELAY):
                peer._inbox.clear()
            peer._fail(errno.ECONNRESET)

        self.network._carry(self.host, peer.host, arrive, sender=self)

    # --- waiting --------------------------------------------------------------------------------

    def _room(self):
        return self.network.buffer - self._under_way - len(self._peer._inbox)

    def _is_readable(self):
        if self._queue is not None:
            return bool(self._queue) or self._has_shut
        return bool(self._inbox or self._has_ended or self._error)

    def _is_writable(self):
        if self._queue is not None or self._is_connecting:
            return False
        return bool(self._error) or self._peer is None or self._has_shut or self._room() > 0

    def _fail(self, code):
        """Let the connection be over, with an error."""
        if self._is_closed or self._error:
            return
        self._error, self._is_connecting = code, False
        self._has_ended = True
        self._tell()

    def _raise(self):
        code, self._error = self._error, 0
        self._has_shut = True
        raise OSError(code, os.strerror(code))

    def _tell(self):
        for waiters in self._watchers:
            self.world.wake(waiters)

    def _step(self):
        """Be a call of the system: others may run before."""
        world = self.world
        if world.is_over or self._process.is_dead:
            raise greenlet.GreenletExit
        if world._preempt:
            world.give_way(0.5)
        self._require_open()

    def _require_open(self):
        if self._is_closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def _wait(self, is_ready, why):
        if is_ready():
            return
        if self._timeout == 0.0:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        end = None if self._timeout is None else self.world.now + self._timeout
        if not _wait_for([self], is_ready, self.world, end, why):
            raise TimeoutError("timed out")
        self._require_open()


def _wait_for(sockets, is_ready, world, end, why):
    waiters = []
    for sock in sockets:
        sock._watchers.append(waiters)
    try:
        while not is_ready():
            left = None if end is None else end - world.now
            if left is not None and left <= 0:
                return False
            world.block(waiters, left, why)
    finally:
        for sock in sockets:
            # Not `remove`: the list of another one that waits is equal when both were woken.
            sock._watchers = [other for other in sock._watchers if other is not waiters]
    return True


class Selector(selectors._BaseSelectorImpl):
    """Waits for several sockets."""

    def __init__(self, network):
        super().__init__()
        self._network = network

    def select(self, timeout=None):
        world = self._network.world
        if world.is_over:
            raise greenlet.GreenletExit
        if world._preempt:
            world.give_way()
        keys = list(self.get_map().values())
        found = self._ready(keys)
        if not found and (timeout is None or timeout > 0):
            end = None if timeout is None else world.now + timeout
            _wait_for(
                [key.fileobj for key in keys], lambda: self._ready(keys), world, end, "any of its sockets"
            )
            found = self._ready(keys)
        if len(found) > 1 and world.choose(2, ORDER):
            found.reverse()
        return found

    @staticmethod
    def _ready(keys):
        found = []
        for key in keys:
            sock = key.fileobj
            # The kernel forgets sockets that are closed.
            if sock._is_closed:
                continue
            mask = selectors.EVENT_READ if key.events & selectors.EVENT_READ and sock._is_readable() else 0
            if key.events & selectors.EVENT_WRITE and sock._is_writable():
                mask |= selectors.EVENT_WRITE
            if mask:
                found.append((key, mask))
        return found


class SocketDoors(contextlib.ExitStack):
    """Replaces `socket` and `selectors` in modules of the project, while its block runs.

    Args:
        modules: names of the modules that open sockets.
    """

    def __init__(self, network, modules=MODULES):
        super().__init__()
        self._network, self._modules = network, modules

    def __enter__(self):
        super().__enter__()
        network, patches = self._network, self.enter_context(pytest.MonkeyPatch.context())

        def selector():
            return Selector(network)

        names = ("getaddrinfo", "create_server", "create_connection")
        fakes = {
            "socket": _StandInModule(
                socket,
                {name: getattr(network, name) for name in names}
                | {
                    "socket": network.make_socket,
                    "gethostname": lambda: network.own.name,
                    "has_dualstack_ipv6": lambda: False,
                },
            ),
            "selectors": _StandInModule(selectors, {"DefaultSelector": selector, "PollSelector": selector}),
            "_Selector": selector,
        }
        for module in map(importlib.import_module, self._modules):
            for name, fake in fakes.items():
                if name in vars(module):
                    patches.setattr(module, name, fake)
        return self


def _shown(piece):
    at = piece.find(b'"kind": "')
    return piece[at + 9 :].partition(b'"')[0].decode() if at >= 0 else ""
