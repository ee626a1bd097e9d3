"""The transport over ZeroMQ: its clients' thread, links, direct connections, shared memory and servers.

Real: all of `rpc/_transport`, over the stand-ins for ZeroMQ and for the kernel's descriptors. Tasks ask by
the file of a socket, by TCP with keys, by a name, or as a container of the same machine does. Promised, and
checked:

- an answer is its own request's, and its arrays stay as they were sent for as long as somebody has them;
- a request ends by its deadline; without a fault it does not fail, nor does END, which closes the server;
- a request that was sent once is handled once at most, and those of a thread in its order on a connection;
- a server knows who asks: by the key of a task, or as a process of this user;
- when faults have ended, each client finds the server again within a minute;
- one with another key is told so, and no other one is;
- two servers never listen at one address, and the second one says so;
- who closes ends within its bound, and leaves no thread, socket or descriptor; nothing counts as unsent.

Tests: tests/unit/test_simulated_transport.py.
"""

import collections
import contextlib
import errno
import fcntl
import itertools
import os
import socket
import tempfile
import types
import weakref
from pathlib import Path

import greenlet
import numpy as np
import pytest

from tests.simulation import _primitives as sim
from tests.simulation._descriptors import Machine, failure
from tests.simulation._primitives import _StandInModule
from tests.simulation._world import ACTIVE, SETTING, Violation
from tests.simulation._zeromq import ZeroMQ
from unisono._errors import ClusterError
from unisono.cluster_resolver._spec import Task
from unisono.rpc._calls import CLOSE_SECONDS, PeerLostError, PeerRejectedError, RequestNumbers
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op
from unisono.rpc._transport import (
    _channel_events,
    _client,
    _client_thread,
    _local,
    _local_channel,
    _server,
    _server_channels,
    _shared_memory,
    _sockets,
)
from unisono.rpc._transport._keys import ClusterKeys

#: Seconds that a request may end after its deadline.
_SLACK = 0.5
#: Seconds in which a client finds a server again: 15 s of silence with 2 s between looks, an attempt of 7 s
#: at each of two addresses, and a second between attempts.
_FINDS_WITHIN = 60.0
_ADDRESSES = {
    "file": "localhost:2222", "tcp": "10.0.0.1:2222", "name": "node1:2222", "file and keys": "localhost:2222",
    "container": "localhost:2222", "refused": "10.0.0.1:2222",
}  # fmt: skip
_SERVER = Task("ps", 0)


class _Deque(collections.deque):
    """A queue without a lock, of whose calls each may be the last one before another thread runs."""

    world = None

    def append(self, item):
        super().append(item)
        self.world.give_way()

    def __len__(self):
        length = super().__len__()
        self.world.give_way()
        return length

    def popleft(self):
        item = super().popleft()
        self.world.give_way()
        return item


class _Taken:
    """The addresses that the present process has locked: memory is one for all processes of a world."""

    def __init__(self, world):
        self._world = world

    def _own(self):
        return self._world.current.process.own.setdefault("taken", set())

    def __contains__(self, path):
        return path in self._own()

    def add(self, path):
        self._own().add(path)

    def discard(self, path):
        self._own().discard(path)


class _Probe:
    """A socket that only asks whether a port is free, or whether a process listens on a file."""

    def __init__(self, library):
        self._library = library

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def setsockopt(self, *_):
        pass

    def setblocking(self, is_blocking):
        pass

    def connect(self, path):
        if f"ipc://{path}" not in self._library.bound:
            raise failure(errno.ECONNREFUSED if os.path.exists(path) else errno.ENOENT)

    def bind(self, address):
        if self._library.listener(f"tcp://{address[0]}:{address[1]}") is not None:
            raise failure(errno.EADDRINUSE)


class _Locks:
    """What stands in for `fcntl` where addresses are locked."""

    def __init__(self, world):
        self._world, self._owners, self.files = world, {}, []

    def lockf(self, file, operation):
        self._world.give_way()
        me = self._world.current.process
        node = os.fstat(file.fileno()).st_ino
        owner, held = self._owners.get(node, (None, None))
        if owner not in (None, me) and not owner.is_dead and not held.closed:
            raise BlockingIOError("Resource temporarily unavailable")
        self._owners[node] = me, file
        self.files.append(file)
        # As a kernel does for a process that was killed.
        me.at_end(file.close)


@contextlib.contextmanager
def doors(world, machine, library, folder):
    """Put what the transport touches into the world."""
    deque = type("_Deque", (_Deque,), {"world": world})

    def own_threads():
        """Return the functions of `_client_thread` with a process' own thread."""
        own = world.current.process.own
        if "threads" not in own:
            names = dict(vars(_client_thread), _THREAD=None, _GUARD=sim.Lock())
            for name in ("acquire_thread", "release_thread"):
                names[name] = types.FunctionType(getattr(_client_thread, name).__code__, names)
            own["threads"] = names
        return own["threads"]

    def directory(parent=None):
        return real_directory(str(folder / world.current.process.own.get("folder", "host")))

    def addresses(host, port, type=0):  # noqa: A002
        if host != "localhost" and world.fault(0.1, "unknown name"):
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        world.sleep(world.uniform(0.0, 0.2))
        return [(socket.AF_INET, type, 6, "", ("127.0.0.1" if host == "localhost" else "10.0.0.1", 0))]

    def finalize(part, fn, *args):
        def call():
            # A world that is over has no threads, and may end in the middle of it.
            if not world.is_over and ACTIVE.world is world:
                with contextlib.suppress(greenlet.GreenletExit):
                    fn(*args)

        return weakref.finalize(part, call)

    locks = _Locks(world)
    of_os = machine.of_os()

    def create_connection(address, timeout):
        if library.listener(f"tcp://{address[0]}:{address[1]}") is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        return types.SimpleNamespace(close=lambda: None)

    of_local = machine.of_socket(
        socket=lambda family, kind=0: _Probe(library),
        getaddrinfo=addresses,
        create_connection=create_connection,
    )
    real_directory = _local.socket_directory
    with pytest.MonkeyPatch.context() as patches:
        for module in (_client, _client_thread, _server, _server_channels, _sockets):
            patches.setattr(module, "zmq", library.module)
        for module in (_channel_events, _local_channel, _shared_memory):
            patches.setattr(module, "os", of_os)
        patches.setattr(_channel_events, "select", machine.of_select())
        for module in (_local_channel, _sockets):
            patches.setattr(module, "socket", machine.of_socket())
        patches.setattr(_server, "weakref", _StandInModule(weakref, {"finalize": finalize}))
        patches.setattr(_shared_memory, "mmap", machine.of_mmap())
        patches.setattr(_shared_memory, "fcntl", machine.of_fcntl())
        patches.setattr(_local, "socket", of_local)
        patches.setattr(_local, "fcntl", _StandInModule(fcntl, {"lockf": locks.lockf}))
        patches.setattr(_local, "_TAKEN", _Taken(world))
        patches.setattr(_local, "socket_directory", directory)
        patches.setattr(_sockets, "collections", _StandInModule(collections, {"deque": deque}))
        patches.setattr(_sockets, "_SEND_MESSAGES", world.pick((1000, 3), SETTING))
        patches.setattr(_sockets, "_RECEIVE_MESSAGES", world.pick((64, 2), SETTING))
        patches.setattr(_local_channel, "SHARED_FROM", world.pick((1 << 15, 128), SETTING))
        patches.setattr(_client, "acquire_thread", lambda: own_threads()["acquire_thread"]())
        patches.setattr(_client, "release_thread", lambda thread: own_threads()["release_thread"](thread))
        before = _client_thread.ClientThread.__bases__
        _client_thread.ClientThread.__bases__ = (sim.Thread,)
        try:
            yield
        finally:
            _client_thread.ClientThread.__bases__ = before
            for file in locks.files:
                file.close()


class _Job:
    """A server, its clients, and what was seen of them."""

    def __init__(self, world, kind):
        self.world, self.kind, self.address = world, kind, _ADDRESSES[kind]
        self.has_keys = kind != "file"
        #: How often each request was handled, and the last one of each thread, by connection.
        self.handled, self.last = collections.Counter(), {}
        self.is_over = self.has_small_budget = self.has_ends = False
        self.most = world.pick((0.0, 5.0), SETTING)
        #: Seconds for which processes were stopped.
        self.paused = 0.0
        self.server_process = None
        #: True as soon as a server listens that is not killed.
        self.is_listening = False
        #: How many ENDs were sent: the only one has its answer.
        self.ends = 0

    def keys(self, own, secret=b"s" * 32):
        """Return the keys of a task."""
        if not self.has_keys or (self.kind == "refused" and own == _SERVER):
            return None
        return ClusterKeys(secret, own, (_SERVER, Task("worker", 0), Task("worker", 1)))

    # --- the server ------------------------------------------------------------------------------

    def serve(self):
        """Be the server, until an END."""
        world = self.world
        if self.kind == "refused":
            # It has no key, and tells others so for a minute.
            with contextlib.suppress(ClusterError):
                _server.require_key_or_refuse(self.address, None)
                world.check(False, "A task without a key ends with an error.")
            world.check(world.now <= 70.0 + self._slack(), "A task without a key ends within its bound.")
            self._check_nothing_open()
            return
        later, ended = sim.SimpleQueue(), []

        def handle(client, frame):
            self._note(client, frame)
            kind = frame.meta["kind"]
            if kind == "raise":
                raise ValueError(frame.meta["text"])
            if kind == "later":
                later.put((client, frame))
                return None
            if kind == "end":
                later.put(None)
            return frame.answer(Op.OK, dict(frame.meta), frame.arrays)

        budget = 500 if self.has_small_budget else 256 << 20
        server = _server.RpcServer(self.address, handle, self.keys(_SERVER), budget=budget)
        server.start()
        self.is_listening = True
        world.current.process.own["lacks"] = True
        while (item := later.get()) is not None:
            world.sleep(world.uniform(0.0, 0.3))
            client, frame = item
            server.reply(client, frame.answer(Op.OK, dict(frame.meta), frame.arrays))
            del item, client, frame
        self._close(server)
        ended.append(True)

    def _close(self, server):
        world = self.world
        if world.choose(2):
            # All answers were taken, if nobody is slow.
            world.sleep(1.0)
        began = world.now
        server.close()
        world.check(world.now - began <= CLOSE_SECONDS + self._slack(), "A server closes within its bound.")
        if world.now - began < CLOSE_SECONDS:
            world.check(not server._thread.is_alive(), "A server that has closed has no thread.")
            world.check(
                self.has_small_budget or world.faults or not server._backlog,
                lambda: f"All answers are sent: {server._backlog}.",
            )
            self._check_nothing_open()

    def _note(self, client, frame):
        meta = frame.meta
        key = meta["text"]
        self.handled[key] += 1
        place = client.connection, meta["thread"]
        is_known = client.is_same_user or client.task == Task("worker", meta["who"])
        problem = None
        if self.handled[key] > 1:
            problem = f"The request {key} is handled {self.handled[key]} times."
        elif self.last.get(place, -1) > meta["place"]:
            problem = f"The request {key} is handled behind {self.last[place]}."
        elif not is_known or (client.task is None and not client.is_same_user):
            problem = f"The server must know who asks: {client} for {key}."
        if problem:
            self.world.fail(Violation(problem))
        self.last[place] = meta["place"]

    def _check_nothing_open(self):
        world = self.world
        own = world.current.process.own
        left = [f"{number}: {type(file).__name__}" for number, file in own["files"].items()]
        world.check(not left, lambda: f"Who has closed has nothing open: {left}.")

    def keep(self, risk):
        """Start the server, and start it again when it was killed or has ended."""
        world = self.world
        while not self.is_over:
            process = self.server_process = world.process("server", self.serve)
            process.risk = risk
            process.wait()
            if process.error is not None:
                raise process.error
            if self.kind == "refused":
                break
            world.sleep(world.uniform(0.0, 2.0))

    def rival(self):
        """Be a second server at the same address, and a launcher that asks whether a process is there."""
        world = self.world
        while not self.is_listening:
            world.sleep(0.1)
        world.sleep(world.uniform(0.0, 2.0))
        world.check(not _local.is_refused(self.address), "A server that listens is no refusal.")
        second = _server.RpcServer(self.address, lambda client, frame: None, self.keys(_SERVER))
        try:
            second.start()
        except ClusterError:
            second.close()
            self._check_nothing_open()
        else:
            world.check(False, f"Two servers listen at {self.address}.")

    # --- a client --------------------------------------------------------------------------------

    def ask(self, index, faults_end):
        """Send requests in several threads, then one when faults have ended, and close."""
        world = self.world
        self._enter()
        task = Task("worker", index)
        client = _client.RpcClient(_SERVER, self.address, self.keys(task), budget=world.pick((1 << 20, 600)))
        world.current.process.own["lacks"] = True
        numbers = RequestNumbers()
        kept = []
        threads = [
            sim.Thread(
                target=self._requests, args=(client, numbers, index, place, kept), name=f"asks {place}"
            )
            for place in range(1 + world.choose(2))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        faults_end()
        is_taken = bool(world.choose(2))
        last = sim.Thread(
            target=self._last_request, args=(client, numbers, index, is_taken), name="asks at last"
        )
        last.start()
        last.join()
        for frame, expected in kept:
            world.check(
                frame.arrays[0].tobytes() == expected,
                "An array stays as it was sent while it is kept.",
            )
        pending, thread = client._pending, client._thread
        world.check(
            not pending._waiting and pending.bytes_in_flight == 0,
            lambda: f"Nothing is held: {len(pending._waiting)} requests, {pending.bytes_in_flight} bytes.",
        )
        began = world.now
        client.close()
        world.check(world.now - began <= CLOSE_SECONDS + self._slack(), "A client closes within its bound.")
        if world.now - began < CLOSE_SECONDS:
            world.check(not thread.is_alive(), "The last client that closes ends the thread.")
            self._check_nothing_open()

    def _enter(self):
        """Be a process that may not see the files of the server."""
        if self.kind == "container":
            self.world.current.process.own["folder"] = "container"

    def be_told(self, index, faults_end):
        """Ask with a key that the server does not have, or as a task that it does not know."""
        world = self.world
        self._enter()
        is_other = world.choose(2)
        task = Task("worker", 7 if is_other else index)
        client = _client.RpcClient(
            _SERVER, self.address, self.keys(task, b"s" * 32 if is_other else b"x" * 32)
        )
        numbers, began = RequestNumbers(), world.now
        while True:
            try:
                client.call(Frame(Op.STATUS, numbers.next()), 20.0)
            except PeerRejectedError:
                break
            except PeerLostError as error:
                # One that refuses has ended meanwhile.
                is_gone = self.kind == "refused" and world.now - began > _FINDS_WITHIN
                world.check(
                    world.faults or world._stall or self.has_ends,
                    lambda error=error: f"A wrong key is told: {error}",
                )
                if is_gone or world.now - began > 3 * _FINDS_WITHIN + self.paused:
                    break
            else:
                world.check(False, "A server answers nothing without its key.")
        client.close()
        faults_end()

    def _requests(self, client, numbers, who, thread, kept):
        """Send several requests at once, and wait for them, again and again."""
        world = self.world
        place = 0
        for _ in range(2):
            world.sleep(world.uniform(0.0, self.most))
            waiting = []
            for _ in range(1 + world.choose(5)):
                size = world.pick((1, 8, 40, 200))
                array = np.full(size, 100 * who + place, "float32")
                text = f"{who}/{thread}/{place}"
                kind = world.pick(("now", "later", "now", "raise", "end" if self.has_ends else "now"))
                meta = {"kind": kind, "text": text, "who": who, "thread": f"{who}/{thread}", "place": place}
                frame = Frame(Op.STATUS, numbers.next(), 0, meta, [array])
                timeout = world.pick((20.0, 5.0, 0.5))
                place += 1
                self.ends += kind == "end"
                try:
                    waiting.append((frame, client.send(frame, timeout), timeout, world.now))
                except ClusterError as error:
                    self._may_fail(error, timeout, kind)
                if kind == "end":
                    break
            for frame, sent, timeout, began in waiting:
                self._answer(client, frame, sent, timeout, began, kept)

    def _answer(self, client, frame, sent, timeout, began, kept):
        world = self.world
        takes = world.choose(3)
        asked = world.now
        if takes:
            client.take_until(sent, began + timeout - world.now if takes == 1 else None)
            world.check(
                world.now <= max(asked, began + timeout) + self._slack(),
                lambda: f"Who takes answers waits until its own is there, or cannot be: {frame.meta}.",
            )
        # Processes may be stopped meanwhile.
        while not sent.done() and world.now < (end := began + timeout + self._slack()):
            with contextlib.suppress(TimeoutError, ClusterError):
                sent.result(end - world.now)
        world.check(sent.done(), lambda: f"A request ends by its deadline of {timeout} s: {frame.meta}.")
        try:
            answer = sent.result()
        except ClusterError as error:
            self._may_fail(error, timeout, frame.meta["kind"])
            return
        array = frame.arrays[0]
        if frame.meta["kind"] == "raise":
            expected = {"kind": "ValueError", "text": frame.meta["text"]}
            world.check(answer.meta == expected, lambda: f"An error is its own: {answer.meta}.")
            return
        found = answer.arrays[0].tobytes()
        world.check(answer.meta == frame.meta and found == array.tobytes(), "An answer is its own.")
        if world.choose(2):
            kept.append((answer, found))

    def _slack(self):
        """Return the seconds by which what ends in time may be late."""
        return _SLACK + self.paused + 10.0 * bool(self.world._stall)

    def _may_fail(self, error, timeout, kind):
        world = self.world
        world.check(
            isinstance(error, PeerLostError), lambda: f"All tasks have one key, and a request fails: {error}"
        )
        # An END ends the server for all: other requests may be lost with it.
        is_behind = self.ends > (kind == "end")
        # Who is stopped for a moment loses nothing.
        is_lossy = {fault for fault in world.faults if fault != "pause"} or self.paused > 10.0
        may_fail = is_lossy or timeout < 20 or world._stall or self.has_small_budget or is_behind
        # The server does not wait for room for long.
        may_fail = may_fail or (kind == "end" and self.paused and world.counts["is tight"])
        world.check(may_fail, lambda: f"Nothing was lost, and a request fails: {error}")

    def _last_request(self, client, numbers, who, is_taken):
        world = self.world
        began = world.now
        for attempt in itertools.count():
            meta = {
                "kind": "now",
                "text": f"last {who} {attempt}",
                "who": who,
                "thread": f"{who}",
                "place": 0,
            }
            request = Frame(Op.STATUS, numbers.next(), 0, meta, [np.zeros(4, "float32")])
            try:
                if is_taken:
                    client.call(request, 10.0)
                else:
                    client.send(request, 10.0).result(60.0)
                return
            except PeerLostError as error:
                bound = _FINDS_WITHIN + self.paused + 30.0 * bool(world._stall)
                world.check(
                    world.now - began <= bound,
                    lambda error=error: f"A client finds its server again when faults have ended: {error}",
                )


def transport(world):
    """One or two clients, and a server that is killed, stopped, and started again."""
    world.settle()
    world.faults_left = world.choose(4, SETTING)
    kind = world.pick(tuple(_ADDRESSES), SETTING)
    machine = Machine(
        world,
        buffer=world.pick((1 << 20, 300), SETTING),
        no_descriptor=world.pick((0.0, 0.0, 0.05), SETTING),
        is_short=bool(world.choose(2, SETTING)),
    )
    library = ZeroMQ(
        world,
        machine,
        late=world.pick((0.0, 0.1), SETTING),
        cut=world.pick((0.0, 0.05), SETTING),
        silent=world.pick((0.0, 0.03), SETTING),
        wire=world.pick((100, 1), SETTING),
    )
    job = _Job(world, kind)
    world.counts["is tight"] = machine.buffer < 1 << 20 or library.wire == 1
    job.has_small_budget = world.choose(4, SETTING) == 1
    job.has_ends = world.choose(3, SETTING) == 1
    risk = world.pick((0.0, 0.01), SETTING)
    pauses = world.pick((0.0, 0.1), SETTING)
    open_clients = 1 + world.choose(2, SETTING)
    has_rival = kind != "refused" and not job.has_ends and world.choose(4, SETTING) == 1
    if has_rival:
        risk = 0.0
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder,
        doors(world, machine, library, Path(folder)),
    ):
        (Path(folder) / "host").mkdir()
        (Path(folder) / "container").mkdir()
        asking = [open_clients]

        def faults_end():
            asking[0] -= 1
            while asking[0]:
                world.sleep(0.5)
            world.faults_left = 0

        sim.Thread(target=job.keep, args=(risk,), name="keeps the server").start()
        told = open_clients if kind == "refused" else 0
        if kind in ("tcp", "name", "container") and world.choose(4, SETTING) == 1:
            told = 1
        clients = [
            world.process(f"client{i}", lambda i=i: (job.be_told if i < told else job.ask)(i, faults_end))
            for i in range(open_clients)
        ]

        def stop_some():
            while not job.is_over:
                world.sleep(1.0)
                if world.fault(pauses, "pause"):
                    chosen = world.pick((job.server_process, *clients))
                    seconds = world.uniform(0.1, 20.0)
                    job.paused += seconds
                    chosen.pause(seconds)

        sim.Thread(target=stop_some, name="stops processes").start()
        if has_rival:
            clients.append(world.process("rival", job.rival))
        for client in clients:
            world.check(client.wait(600.0), lambda: f"Clients end.\n{world.stacks()}")
            if client.error is not None:
                raise client.error
        job.is_over = True


PROTOCOLS = {"transport": transport}
