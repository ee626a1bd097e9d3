"""Messages that are damaged, of another version, or no messages at all, between those of a job.

Real: `Frame`, its packing and parsing, the loopback's clients and servers, `PendingCalls`. A stub: the
transport, which hands over the parts of messages, and another program that sends to the same server.
Promised, and checked:

- a message is handled as it was sent, or not at all: its header and `meta` have a checksum;
- what is no message, or one of another version, is rejected, and the server goes on;
- what has no place in a message is an error of its sender, and nothing is sent.

The contents of arrays have no checksum: TCP has one.

Tests: tests/unit/test_simulation.py.
"""

import dataclasses
import functools

import ml_dtypes
import numpy as np

from tests.simulation import _primitives as sim
from tests.simulation._network import SimulatedNetwork
from tests.simulation._world import SETTING
from unisono._errors import ClusterError
from unisono.cluster_resolver._spec import Task
from unisono.rpc import _frames
from unisono.rpc._calls import PeerLostError, RequestNumbers
from unisono.rpc._frames import Frame, FrameError
from unisono.rpc._ops import Op

_DTYPES = ("float32", "bool", "int8", "complex64", ml_dtypes.bfloat16)
_SHAPES = ((3,), (), (0, 2), (2, 1))
_METAS = ({}, {"text": "é\ud7ff", "n": [1, {"a": None}]}, {"list": list(range(40))}, {"deep": [[[[True]]]]})
#: Requests of each client.
_REQUESTS = 4


def _facts(frame):
    """Return all of a message as something that can be compared."""
    arrays = [(str(a.dtype), a.shape, a.tobytes()) for a in frame.arrays]
    return int(frame.op), frame.request, frame.generation, repr(dict(frame.meta)), arrays


def _repacked(parts, **fields):
    """Return a message with other fields in its header, and the checksum of that."""
    names = ("magic", "version", "op", "flags", "generation", "request", "count", "length", "checksum")
    header, meta = parts[0], parts[1]
    old = dict(zip(names, _frames._FIXED.unpack_from(header), strict=True))
    shapes = fields.pop("shapes", header[_frames._FIXED.size :])
    meta = fields.pop("meta", meta)
    old |= {"length": len(meta), **fields}
    fixed = _frames._FIXED.pack(*old.values())[: _frames._BEFORE_CHECKSUM]
    return [fixed + _frames._checksum(fixed, shapes, meta) + shapes, meta, *parts[2:]]


class _Damaging(SimulatedNetwork):
    """Changes the parts of messages on their way.

    Args:
        damage: the probability for each message.
    """

    def __init__(self, world, damage, **faults):
        super().__init__(world, **faults)
        self.damage = damage
        #: The parts of the message before.
        self._before = [b"", b""]

    def _packed(self, frame):
        parts = super()._packed(frame)
        before, self._before = self._before, list(parts)
        if not self.world.fault(self.damage, "damage"):
            return parts
        parts = list(parts)
        match self.world.choose(5 + bool(parts[1] and before[1])):
            case 0 | 1:
                # A bit of the header, or of `meta`.
                place = self.world.choose(2) if parts[1] else 0
                changed = bytearray(parts[place])
                changed[self.world.choose(len(changed))] ^= 1 << self.world.choose(8)
                parts[place] = bytes(changed)
            case 2:
                place = self.world.choose(len(parts))
                parts[place] = parts[place][: self.world.choose(len(parts[place]) + 1)]
            case 3:
                del parts[self.world.choose(len(parts))]
            case 4:
                parts.insert(self.world.choose(len(parts) + 1), b"more")
            case _:
                # Another message's `meta` behind its own header.
                parts[1] = before[1]
        return parts


@functools.cache
def _foreign():
    """Return what another program, or another version of this one, may send."""
    # No client has this number.
    frame = Frame(Op.STATUS, 1 << 63, 0, {"a": 1}, [np.ones(2, "float32")])
    parts = [bytes(part) for part in frame.parts()]
    size = _frames._FIXED.size
    shape = parts[0][size:]
    rank = shape[:1] + bytes([_frames.MAX_RANK + 1]) + shape[2:]
    span = _frames._pack_shape(np.dtype("float32"), (1 << 62, 0))
    return (
        [b"GET / HTTP/1.1", b""],
        [b"", b""],
        [b"UNPS"],
        [],
        _repacked(parts, version=_frames.VERSION + 1),
        _repacked(parts, flags=1),
        _repacked(parts, op=250),
        _repacked(parts, magic=b"HTTP"),
        _repacked(parts, count=2),
        _repacked(parts, count=0)[:2],
        _repacked(parts, length=3),
        _repacked(parts, shapes=bytes([250]) + shape[1:]),
        _repacked(parts, shapes=rank),
        _repacked(parts, shapes=shape[:-1]),
        _repacked(parts, shapes=shape[:1]),
        _repacked(parts, shapes=b""),
        _repacked(parts, shapes=shape + b"\0"),
        _repacked(parts, shapes=shape[:-8] + bytes([4]) + bytes(7)),
        [*_repacked(parts, shapes=span)[:2], b""],
        [*_repacked(parts, shapes=_frames._pack_shape(np.dtype("bool"), (8,)))[:2], b"\2" * 8],
        [*_repacked(parts)[:2], b"\0" * 9],
        _repacked(parts, meta=b"[1]"),
        _repacked(parts, meta=b'{"a": NaN}'),
        _repacked(parts, meta=b'{"a": "\\ud800"}'),
        _repacked(parts, meta=b"\xff"),
        _repacked(parts, meta=b'{"a":' + b"[" * 40 + b"]" * 40 + b"}"),
        _repacked(parts, meta=b'{"a":[' + b"1," * (1 << 17) + b"1]}"),
    )


@functools.cache
def _unsendable():
    """Return messages that have no place on the wire."""
    deep = []
    for _ in range(40):
        deep = [deep]
    frame = Frame(Op.STATUS, 1 << 62)
    metas = ({"a": float("nan")}, {"a": deep}, {"a": {1}}, {1: "a"}, {"a": "," * (1 << 17)})
    rank = (1,) * (_frames.MAX_RANK + 1)
    arrays = (np.array(["text"]), np.ones(2, ">f4"), np.ones(rank))
    return (
        *(dataclasses.replace(frame, meta=meta) for meta in metas),
        *(dataclasses.replace(frame, arrays=[array]) for array in arrays),
        dataclasses.replace(frame, request=-1),
        dataclasses.replace(frame, generation=1 << 32),
    )


class _Messages:
    """Clients, a server, and what each has sent."""

    def __init__(self, world):
        self.world = world
        self.network = _Damaging(
            world, world.pick((0.3, 0.0), SETTING), repeat=world.pick((0.0, 0.1), SETTING)
        )
        #: All that was sent, and all that was answered, by request.
        self.sent, self.answered = {}, {}
        self.is_over = False
        self.ends = sim.Event()

    def serve(self):
        """Be a server, which sends back what it gets."""
        rpc_server = self.network.rpc_server("server", self.handle)
        rpc_server.start()
        self.ends.wait()

    def handle(self, client, frame):
        """Check a message, and answer it."""
        found, sent = _facts(frame), self.sent.get(frame.request)
        if found != sent:
            # Not raised: a server answers errors of its handler.
            self.world.fail(AssertionError(f"A message is handled as it was sent: {found}, not {sent}."))
        answer = frame.answer(Op.OK, {"of": frame.request, **frame.meta}, frame.arrays)
        self.answered[frame.request] = _facts(answer)
        return answer

    def ask(self, index, is_last=False):
        """Be a client."""
        world = self.world
        client = self.network.rpc_client(Task("ps", 0), "server", Task("worker", index))
        numbers = RequestNumbers()
        for _ in range(_REQUESTS):
            number = numbers.next()
            if world.choose(4) == 3:
                self.refuse(client, world.pick(_unsendable()))
                continue
            arrays = [np.ones(world.pick(_SHAPES), world.pick(_DTYPES)) for _ in range(world.choose(3))]
            if arrays and world.choose(3) == 2:
                # Not in C order: it is copied.
                arrays[0] = np.asfortranarray(np.arange(6, dtype="int32").reshape(2, 3))
            frame = Frame(Op.STATUS, number, world.choose(3), world.pick(_METAS), arrays)
            self.sent[number] = _facts(frame)
            try:
                answer = client.call(frame, 2.0)
            except PeerLostError:
                lost = (world.faults["damage"] and not is_last) or world._stall
                world.check(lost, "A message that nothing has damaged is answered.")
                continue
            world.check(
                _facts(answer) == self.answered[number],
                lambda answer=answer, number=number: (
                    f"An answer is as it was sent: {_facts(answer)}, not {self.answered[number]}."
                ),
            )
        world.check(not client._pending.bytes_in_flight, "What was answered or refused holds no bytes.")

    def refuse(self, client, frame):
        """Send what cannot be sent."""
        try:
            client.send(frame, 2.0)
        except FrameError:
            return
        except ClusterError as error:
            self.world.check(False, f"What cannot be sent is an error of its own: {error!r}")
        self.world.check(False, f"A message that no one could read is not sent: {frame}.")

    def send_foreign(self):
        """Be another program: what it sends reaches the server's queue."""
        world = self.world
        client = self.network.rpc_client(Task("ps", 0), "server", Task("worker", 9))
        for _ in range(3):
            world.sleep(world.uniform(0.0, 0.5))
            server = self.network._rpc_servers["server"]
            world.note("message", "foreign", "server", "no message")
            server._inbox.put((client.client, world.pick(_foreign())))


def messages(world):
    """Clients and another program send to one server."""
    world.settle()
    world.faults_left = world.choose(4, SETTING)
    job = _Messages(world)
    world.process("server", job.serve)
    while not job.network._rpc_servers:
        world.sleep(0.1)
    clients = [world.process(f"client{i}", lambda i=i: job.ask(i)) for i in range(2)]
    clients.append(world.process("foreign", job.send_foreign))
    for process in clients:
        world.check(process.wait(120.0), lambda: f"Clients end.\n{world.stacks()}")
        if process.error is not None:
            raise process.error
    # The server goes on, and answers when nothing is damaged any more.
    world.faults_left = 0
    last = world.process("last", lambda: job.ask(7, is_last=True))
    world.check(last.wait(120.0), lambda: f"The server goes on.\n{world.stacks()}")
    if last.error is not None:
        raise last.error
    job.ends.set()


PROTOCOLS = {"messages": messages}
