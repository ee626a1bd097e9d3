"""ZeroMQ between the processes of a world: what code gets instead of `zmq`.

Of libzmq 4.3.5, with the options of `rpc/_transport/_sockets`: a DEALER connects once, and takes messages
only when its handshake has succeeded; a ROUTER gives each connection a name of its own, and says so where it
is gone. Messages wait at their sender, on the way, and at their receiver, and each place is soon full. What
had arrived when a connection ended can be read, what waits to be sent is lost with it. Large parts are read
where they are, later than `send`, and dropped in a thread of their own. The threads of ZeroMQ stop with their
process: others find that out by the heartbeats that a DEALER sends.

Connections are reset and silent, messages late, handshakes broken off, and descriptors run out. Not
simulated: messages that are lost without their connection, which TCP and ZeroMQ do not have.

Tests: tests/unit/test_simulated_transport.py.
"""

import collections
import errno
import hashlib
import struct
from pathlib import Path

import zmq

from tests.simulation import _primitives as sim
from tests.simulation._descriptors import Poller
from tests.simulation._primitives import _StandInModule
from tests.simulation._world import DELAY, Violation

#: Parts from this size on are not copied.
COPY_THRESHOLD = 96


def _public(secret):
    return hashlib.sha256(secret).hexdigest()[:40].encode()


class ZeroMQ:
    """The library, and the network below it.

    Args:
        machine: the kernel with the descriptors of processes.
        delay: seconds of a message at most, when nothing happens to it.
        late, latest: the probability that one is late, and by how many seconds at most.
        cut: the probability, for each message, that its connection is lost instead.
        silent: the probability, for each message, that nothing passes for up to twice the heartbeats' time.
        wire: messages of a connection that are on the way at most, in a direction.
    """

    def __init__(self, world, machine, delay=0.02, late=0.0, latest=6.0, cut=0.0, silent=0.0, wire=3):
        self.world, self.machine = world, machine
        self.delay, self.late, self.latest = delay, late, latest
        self.cut, self.silent, self.wire = cut, silent, wire
        #: By address: the sockets that listen.
        self.bound = {}
        #: Large parts of processes that were killed.
        self.graveyard = []
        self.module = _StandInModule(
            zmq,
            {
                "Context": lambda: _Context(self),
                "Poller": lambda: Poller(machine),
                "curve_public": _public,
                "COPY_THRESHOLD": COPY_THRESHOLD,
            },
        )

    def listener(self, place):
        """Return the socket that listens at an address."""
        return self.bound.get(place) or self.bound.get(f"tcp://*:{place.rpartition(':')[2]}")

    def later(self, fn, seconds=None):
        """Call a function after a while."""
        return self.world.call_later(self.world.uniform(0.0, seconds or self.delay, DELAY), fn)


def _error(code):
    return zmq.ZMQError(code)


class _Context:
    def __init__(self, library):
        self.library, self.sockets, self.is_ending = library, [], False
        self.inproc = {}
        library.machine.own()

    def get(self, option):
        return 1000

    def set(self, option, value):
        pass

    def socket(self, kind):
        if self.library.machine.lacks():
            raise _error(errno.EMFILE)
        made = _Socket(self, kind)
        self.sockets.append(made)
        return made

    def term(self):
        self.is_ending = True
        machine = self.library.machine
        machine.notify(self.library.world.current.process)
        machine.wait(lambda: not self.sockets, None, "the end of a context's sockets")


class _Frame:
    """A part of a message that was received."""

    def __init__(self, data, user):
        self.bytes, self._user = data, user

    @property
    def buffer(self):
        return memoryview(self.bytes)

    def get(self, name):
        if self._user is None:
            raise _error(errno.EINVAL)
        return self._user


class _Way:
    """One direction of a connection."""

    def __init__(self, connection, sender, receiver):
        self.connection, self.sender, self.receiver = connection, sender, receiver
        self.unsent, self.held, self.inbox = collections.deque(), collections.deque(), collections.deque()
        self.under_way, self._last = 0, 0.0

    def send(self, parts):
        """Queue a message; return whether there was room."""
        if len(self.unsent) >= self.sender.sndhwm:
            return False
        self.unsent.append([part if _is_large(part) else bytes(part) for part in parts])
        # In a thread of ZeroMQ: large parts are read then.
        self.sender.library.later(self.pump, 0.002)
        return True

    def pump(self):
        """Let messages leave, as long as there is room on the way."""
        library, connection = self.sender.library, self.connection
        world = library.world
        while self.unsent and self.under_way < library.wire and connection.is_open:
            parts = self.unsent.popleft()
            message = [bytes(part) for part in parts]
            self.sender.drop([part for part in parts if _is_large(part)])
            delay = world.uniform(0.0, library.delay, DELAY)
            if world.fault(library.cut, "cut"):
                connection.reset()
                return
            if world.fault(library.late, "late"):
                delay += world.uniform(0.0, library.latest, DELAY)
            elif world.fault(library.silent, "silence"):
                connection.silent_until = world.now + world.uniform(0.0, 30.0, DELAY)
            self.under_way += 1
            self._last = max(world.now + delay, self._last + 1e-6, connection.silent_until)
            world.call_later(self._last - world.now, lambda message=message: self._arrive(message))

    def after_all(self, fn):
        """Call a function after what is on the way has arrived."""
        world = self.sender.library.world
        self._last = max(world.now, self._last + 1e-6, self.connection.silent_until)
        world.call_later(self._last - world.now, fn)

    def _arrive(self, message):
        receiver = self.receiver
        if self.connection.is_reset or receiver.is_closed or receiver.process.is_dead:
            return
        if any(len(part) > receiver.maxmsgsize for part in message):
            self.connection.reset()
            return
        self.held.append(message)
        self.fill()

    def fill(self):
        """Let the receiver have what is there, as long as it has room."""
        while self.held and len(self.inbox) < self.receiver.rcvhwm:
            self.inbox.append(self.held.popleft())
            self.under_way -= 1
            receiver = self.receiver
            receiver.library.machine.notify(receiver.process)
        self.pump()


def _is_large(part):
    return isinstance(part, memoryview) and len(part) >= COPY_THRESHOLD


class _Connection:
    """A connection whose handshake has succeeded, seen from both ends."""

    def __init__(self, client, server, user):
        self.client, self.server, self.user = client, server, user
        world = client.library.world
        self.name = b"\0" + world.identities.randbytes(4)
        self.to_server, self.to_client = _Way(self, client, server), _Way(self, server, client)
        self.is_open, self.is_reset, self.silent_until = True, False, 0.0
        self._heard = {client: world.now, server: world.now}
        world.call_later(2.0, self._beat)

    def _beat(self):
        """Look for an end that is silent, as both ends do by themselves."""
        world = self.client.library.world
        if not self.is_open:
            return
        for end, other in ((self.client, self.server), (self.server, self.client)):
            # A machine that was lost, or a process that was stopped, sends nothing.
            if world.now >= self.silent_until and not other.process.is_paused:
                self._heard[end] = world.now
            elif world.now - self._heard[end] >= 15.0 and not end.process.is_paused:
                self.reset()
                return
        world.call_later(2.0, self._beat)

    def reset(self):
        """Lose the connection, and all that is on the way."""
        if self.is_open:
            self.is_open, self.is_reset = False, True
            library = self.client.library
            library.world.note("lost", self.client.process.name, self.server.process.name, "connection lost")
            library.later(self._end_of_client)
            library.later(self._end_of_server)

    def end(self, closer):
        """End the connection, as one end was closed: what is on the way arrives before."""
        if self.is_open:
            self.is_open = False
            if closer is self.client:
                self.to_server.after_all(self._end_of_server)
                self._end_of_client()
            else:
                self.to_client.after_all(self._end_of_client)
                self._end_of_server()

    def _end_of_client(self):
        client = self.client
        if client.connection is self:
            client.connection = None
            self._drop(self.to_server)
            client.report(zmq.EVENT_DISCONNECTED, 0)

    def _end_of_server(self):
        if self.server.connections.pop(self.name, None) is not None:
            self._drop(self.to_client)

    def _drop(self, way):
        for parts in way.unsent:
            way.sender.drop([part for part in parts if _is_large(part)])
        way.unsent.clear()


class _Socket:
    """A socket of ZeroMQ; its options are plain attributes."""

    linger, maxmsgsize, sndhwm, rcvhwm, handshake_ivl, connect_timeout = -1, 1 << 60, 1000, 1000, 30000, 0
    curve_server, curve_secretkey, curve_publickey, curve_serverkey = False, None, None, None
    immediate = router_mandatory = False
    has_room, has_hung_up = False, False

    def __init__(self, context, kind):
        self.context, self.library, self._kind = context, context.library, kind
        self.world = self.library.world
        self.process = self.world.current.process
        self.is_closed = False
        #: A DEALER's connection, a ROUTER's by their names, and whose messages can be read.
        self.connection, self.connections, self.ways = None, {}, []
        self._places, self._dialing = [], None
        self._watcher, self._wanted = None, 0
        #: Of PAIR and REP: messages.
        self.inbox, self._asker = collections.deque(), None
        # A killed process closes nothing, and its kernel does.
        self.process.at_end(self._killed)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _step(self):
        self.world.give_way()
        if self.is_closed:
            raise _error(zmq.ENOTSOCK)

    @property
    def is_readable(self):
        return bool(self.inbox) or any(way.inbox for way in self.ways)

    def drop(self, parts):
        """Drop large parts, in the thread of pyzmq that does so."""
        if parts and self.process.is_dead:
            # Memory of a process that was killed: nothing is called for it.
            self.library.graveyard.append(parts)
        elif parts:
            own = self.process.own
            if "zmq garbage" not in own:
                own["zmq garbage"] = sim.SimpleQueue()
                self.world.spawn(lambda: _collect(own["zmq garbage"]), "pyzmq", self.process)
            queue = own["zmq garbage"]
            queue.queue.append(parts)
            if queue._getters:
                self.world.wake(queue._getters)

    # --- listening -------------------------------------------------------------------------------

    def bind(self, place):
        self._step()
        if place.startswith("inproc://"):
            self.context.inproc[place] = self
            return
        if place.startswith("tcp://"):
            ip, _, port = place.removeprefix("tcp://").rpartition(":")
            if ip not in ("*", self.process.own.get("ip", "10.0.0.1"), "127.0.0.1"):
                raise _error(zmq.EADDRNOTAVAIL)
            if any(known.endswith(f":{port}") and known.startswith("tcp") for known in self.library.bound):
                raise _error(zmq.EADDRINUSE)
        else:
            if place in self.library.bound:
                self.world.fail(Violation(f"Two processes listen at {place}."))
            path = Path(place.removeprefix("ipc://"))
            path.unlink(missing_ok=True)
            path.touch()
        self.library.bound[place] = self
        self._places.append(place)

    # --- connecting ------------------------------------------------------------------------------

    def connect(self, place):
        self._step()
        if place.startswith("inproc://"):
            self.context.inproc[place]._watcher = self
            return
        self._dialing = dial = _Dial(self, place)
        self.library.later(dial.begin, 0.002 if place.startswith("ipc") else None)

    def close(self, linger=None):
        if self.is_closed:
            return
        self.world.give_way()
        for place in self._places:
            if place.startswith("ipc://"):
                Path(place.removeprefix("ipc://")).unlink(missing_ok=True)
        self._released()

    def _killed(self):
        if not self.is_closed:
            self._released()

    def _released(self):
        self.is_closed = True
        for place in self._places:
            self.library.bound.pop(place, None)
        for connection in [self.connection, *self.connections.values()]:
            if connection is not None:
                connection.end(self)
        self.ways.clear()
        self.context.sockets.remove(self)
        if not self.process.is_dead:
            self.library.machine.notify(self.process)

    # --- what happens to connections -------------------------------------------------------------

    def monitor(self, address, events):
        self._step()
        self._wanted = events
        self.context.inproc[address] = self

    def disable_monitor(self):
        self._watcher, self._wanted = None, 0

    def report(self, event, value=0):
        """Tell the socket that watches this one."""
        watcher = self._watcher
        if event & self._wanted and watcher is not None and not watcher.is_closed:
            watcher.inbox.append([struct.pack("=hi", event, value), b""])
            self.library.machine.notify(self.process)

    # --- messages --------------------------------------------------------------------------------

    def send_multipart(self, parts, flags=0, copy=True):
        self._step()
        if self._kind == zmq.REP:
            answer, self._asker = self._asker, None
            answer(list(parts))
        elif self._kind == zmq.DEALER:
            if self.connection is None or not self.connection.to_server.send(parts):
                raise zmq.Again
        else:
            connection = self.connections.get(bytes(parts[0]))
            if connection is None:
                raise _error(zmq.EHOSTUNREACH)
            if not connection.to_client.send(parts[1:]):
                raise zmq.Again

    def recv_multipart(self, flags=0, copy=True):
        self._step()
        if self._kind == zmq.REP:
            self.library.machine.wait(lambda: self.inbox or self.context.is_ending, None, "a question")
            if self.context.is_ending:
                raise zmq.ContextTerminated
            message, self._asker = self.inbox.popleft()
            return message
        if self.inbox:
            return self.inbox.popleft()
        # Each connection in turns.
        for way in self.ways:
            if way.inbox:
                self.ways.remove(way)
                self.ways.append(way)
                user = way.connection.user
                message = [_Frame(part, user) for part in way.inbox.popleft()]
                way.fill()
                if not way.connection.is_open and not way.inbox and not way.under_way:
                    self.ways.remove(way)
                return [_Frame(way.connection.name, None), *message] if self._kind == zmq.ROUTER else message
        raise zmq.Again

    def poll(self, timeout=None):
        self.world.give_way()
        seconds = None if timeout is None else timeout / 1000
        return zmq.POLLIN if self.library.machine.wait(lambda: self.is_readable, seconds, "a socket") else 0


def _collect(garbage):
    while True:
        parts = garbage.get()
        parts.clear()


class _Dial:
    """An attempt of a DEALER to connect."""

    def __init__(self, client, place):
        self.client, self.place = client, place
        self.library, self.world = client.library, client.world
        self.server, self._has_ended = None, False

    def begin(self):
        """Find the other end."""
        client = self.client
        if client.is_closed:
            return
        self.server = self.library.listener(self.place)
        if self.server is None:
            client.report(zmq.EVENT_CLOSED, errno.ECONNREFUSED)
            return
        client.report(zmq.EVENT_CONNECTED)
        self.world.call_later(client.handshake_ivl / 1000, lambda: self._fail_late())
        self.library.later(self._meet)

    def _fail_late(self):
        self._fail(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, errno.ETIMEDOUT)

    def _fail(self, event, value=0, of_server=0):
        if self._has_ended or self.client.is_closed:
            return
        self._has_ended = True
        self.client.report(event, value)
        self.client.report(zmq.EVENT_DISCONNECTED, 0)
        if of_server and not self.server.is_closed:
            self.server.report(of_server)

    def _meet(self):
        client, server = self.client, self.server
        if self._has_ended or client.is_closed:
            return
        if server.is_closed or self.world.fault(self.library.cut, "cut"):
            self._fail(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, errno.ECONNRESET)
            return
        if server.process.is_paused:
            self.world.call_later(0.5, self._meet)
            return
        if (client.curve_serverkey is None) == server.curve_server:
            wrong = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            self._fail(wrong, 0, wrong)
        elif not server.curve_server:
            self._admit(None)
        elif client.curve_serverkey != _public(server.curve_secretkey):
            self._fail(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, errno.EPIPE, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        else:
            self._ask()

    def _ask(self):
        """Ask the authenticator of the other end."""
        server = self.server
        asked = server.context.inproc["inproc://zeromq.zap.01"]
        key = zmq.utils.z85.decode(self.client.curve_publickey)
        question = [b"1.0", b"1", b"unisono", b"", b"", b"CURVE", key]

        def answer(parts):
            _, _, code, _, user, _ = parts
            if code == b"200":
                self._admit(user.decode())
            else:
                self.library.later(lambda: self._fail(zmq.EVENT_HANDSHAKE_FAILED_AUTH, int(code)))

        asked.inbox.append((question, answer))
        self.library.machine.notify(server.process)

    def _admit(self, user):
        """Let the other end have the connection, and then this one."""
        client, server = self.client, self.server
        if self._has_ended or server.is_closed or client.is_closed:
            self._fail(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, errno.ECONNRESET)
            return
        connection = _Connection(client, server, user)
        server.connections[connection.name] = connection
        server.ways.append(connection.to_server)

        def arrive():
            if self._has_ended or client.is_closed or not connection.is_open:
                self._fail(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, errno.ECONNRESET)
                connection.reset()
                return
            self._has_ended = True
            client.connection = connection
            client.ways.append(connection.to_client)
            client.report(zmq.EVENT_HANDSHAKE_SUCCEEDED)

        self.library.later(arrive)
