"""Hostile messages to a parameter server's server while a client trains: nothing may change.

    python benchmarks/ps_hostile.py                          # a million frames: some minutes on two cores
    python benchmarks/ps_hostile.py --frames 20000 --seed 7

The server runs in a process of its own and holds an array. An honest client pulls and pushes, and knows
what the array must be in the end, bit for bit. Meanwhile others send random, malformed, truncated,
oversize and replayed frames over a connection that is admitted, the same and damaged messages with and
without files over direct sockets, and bytes and frames over connections that are not admitted. The process
must live, its memory must stay, and its handler must see only what is valid.
"""

import argparse
import array
import contextlib
import json
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import zmq
from zmq.utils import z85

from unisono.cluster_resolver._spec import ClusterSpec, Task
from unisono.rpc._calls import PeerLostError
from unisono.rpc._frames import Frame, FrameError
from unisono.rpc._ops import Op
from unisono.rpc._transport import _local, _local_channel
from unisono.rpc._transport._server import RpcServer
from unisono.rpc._transport._keys import keys_of
from unisono.rpc._transport._client import RpcClient

PS, CHIEF = Task("ps", 0), Task("chief", 0)
SECRET = "5eed" * 16
#: Bytes of a frame that the server accepts.
LIMIT = 1 << 18
SIZE = 5000
#: Seconds until something is taken to hang, on however busy a machine.
SECONDS = 600.0


def keys(own, secret=SECRET):
    return keys_of(secret, own, ClusterSpec({"ps": ["localhost:1"], "chief": ["localhost:2"]}))


# --- the process that is attacked


def resident():
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Held:
    """An array to which pushes are added once each."""

    def __init__(self):
        self.value = np.zeros(SIZE)
        self.applied, self.replayed, self.others = set(), 0, 0

    def handle(self, client, request):
        """Answer a request, as a parameter server does."""
        if request.op is Op.PULL:
            return request.answer(Op.OK, arrays=[self.value.copy()])
        if request.op is Op.PUSH and request.meta.get("name") == "w":
            if request.request in self.applied:
                self.replayed += 1
            else:
                self.applied.add(request.request)
                self.value += request.arrays[0]
            return request.answer(Op.OK)
        if request.op is Op.STATUS:
            counts = {"pushes": len(self.applied), "replayed": self.replayed, "others": self.others}
            return request.answer(Op.OK, {**counts, "rejected": ENDPOINT[0].rejected, "bytes": resident()})
        self.others += 1
        return request.answer(Op.ERROR, {"kind": "InvalidArgumentError", "text": "not here"})


ENDPOINT = []


def serve():
    """Be the process that is attacked, until standard input ends."""
    ENDPOINT.append(RpcServer("127.0.0.1:0", Held().handle, keys(PS), LIMIT))
    ENDPOINT[0].start()
    print(ENDPOINT[0].address, flush=True)
    sys.stdin.read()
    ENDPOINT[0].close()


# --- hostile frames


def raw(shapes=b"", meta=b"", arrays=(), **fields):
    """The parts of a frame with any fields and a right checksum."""
    numbers = {"magic": b"UNPS", "version": 1, "op": 12, "flags": 0, "generation": 0, "request": 1}
    numbers |= {"count": len(arrays), "length": len(meta)} | fields
    head = struct.pack("<4sBBHIQHI", *numbers.values())
    return [head + struct.pack("<I", zlib.crc32(head + shapes + meta)) + shapes, meta, *arrays]


def shape(code, dims, length):
    return struct.pack(f"<BB{len(dims)}QQ", code, len(dims), *dims, length)


class Attack:
    """Makes hostile frames.

    Args:
        seed: of all of them.
    """

    def __init__(self, seed):
        self.random = random.Random(seed)
        push = Frame(Op.PUSH, 7, 0, {"name": "other"}, [np.arange(40.0), np.ones((3, 4), np.int8)])
        self.valid = [bytes(part) for part in push.parts()]
        self.kinds = [self.noise, self.flipped, self.cut, self.lying, self.wide, self.nested, self.many_parts]

    def frame(self):
        """The parts of a frame that is none."""
        while True:
            parts = self.random.choice(self.kinds)()
            try:
                Frame.parse(parts, LIMIT)
            except FrameError:
                return parts

    def noise(self):
        """Random bytes."""
        return [self.random.randbytes(self.random.randrange(200)) for _ in range(self.random.randrange(1, 5))]

    def flipped(self):
        """A valid frame with another byte in what its checksum guards."""
        parts = [bytearray(part) for part in self.valid]
        part = self.random.choice(parts[:2])
        part[self.random.randrange(len(part))] ^= self.random.randrange(1, 256)
        return parts

    def cut(self):
        """A valid frame that ends early."""
        parts = list(self.valid)
        at = self.random.randrange(len(parts))
        parts[at] = parts[at][: self.random.randrange(len(parts[at]))]
        return parts[: self.random.randrange(1, len(parts) + 1)]

    def lying(self):
        """Headers with a right checksum that claim what is not there."""
        big = self.random.choice([0, 1, 4, 1 << 31, 1 << 40, (1 << 64) - 1])
        dims = [self.random.choice([0, 1, 3, 1 << 32, 1 << 62]) for _ in range(self.random.randrange(6))]
        shapes = shape(self.random.randrange(40), dims, big)
        data = [self.random.randbytes(self.random.choice([0, 1, 4, 100]))]
        return raw(shapes, b"", data, op=self.random.randrange(256), version=self.random.choice([1, 1, 1, 2]))

    def wide(self):
        """More bytes than the limit, each part below it."""
        if self.random.random() < 0.99:
            return self.noise()
        part = bytes(LIMIT // 2 + 1)
        return raw(shape(5, [len(part)], len(part)) * 2, b"", [part, part])

    def nested(self):
        """Objects that are no JSON, or too deep or too large."""
        if self.random.random() < 0.95:
            return raw(meta=self.random.choice([b"[]", b"{", b'{"x":NaN}', b"\xff", b'{"a":"\\ud800"}']))
        return raw(meta=self.random.choice([b'{"x":' * 5000, b"[" * 100_000, b'{"x":[' + b"[]," * 70_000]))

    def many_parts(self):
        """Another number of parts than the header says."""
        count = 2 if self.random.random() < 0.98 else 3000
        return raw(arrays=[b""] * count, count=self.random.choice([0, 1, 65535]))

    def bytes_for_tcp(self):
        """What other programs send to a port, or a beginning of ZeroMQ's own protocol."""
        greeting = b"\xff" + bytes(8) + b"\x7f" + b"\3\0"
        mechanism = self.random.choice([b"NULL", b"CURVE", b"PLAIN", b"?"]).ljust(20, b"\0")
        noise = self.random.randbytes(self.random.randrange(1, 300))
        beginnings = [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", greeting]
        beginnings.append(greeting + mechanism + bytes(32))
        return self.random.choice(beginnings) + noise


class Admitted:
    """Sends frames over a connection that is admitted: a process of the same user, or one with a key.

    Args:
        address: of the server.
    """

    def __init__(self, address):
        self.context = zmq.Context()
        self.path = _local.socket_path(address, _local.socket_directory())
        self.socket = self._connect()

    def _connect(self):
        made = self.context.socket(zmq.DEALER)
        made.linger, made.sndtimeo = 0, int(1000 * SECONDS)
        made.connect(f"ipc://{self.path}")
        return made

    def send(self, parts):
        """Send a frame. Answers are not taken: they must not fill the server's memory."""
        self.socket.send_multipart(parts)

    def send_huge(self):
        """Send a part beyond the limit, which closes the connection."""
        self.socket.send(bytes(LIMIT + 1))
        self.renew()

    def renew(self):
        """Connect again."""
        self.socket.close(100)
        self.socket = self._connect()

    def close(self):
        """End the connection."""
        self.socket.close(1000)
        self.context.term()


class Direct:
    """Sends messages on direct sockets, as a process of the same user may.

    Args:
        address: of the server.
        attack: makes them.
    """

    def __init__(self, address, attack):
        self.attack, self.random = attack, attack.random
        self.path = str(_local_channel.channel_path(_local.socket_path(address, _local.socket_directory())))
        self.socket = None
        self.lost = 0

    def run(self, count):
        """Send some messages."""
        for _ in range(count):
            if self.socket is None:
                self.socket = socket.socket(socket.AF_UNIX)
                self.socket.settimeout(SECONDS)
                self.socket.connect(self.path)
            try:
                self._send()
            except OSError:  # the server has ended it
                self._end()
        self._end()

    def _end(self):
        if self.socket is not None:
            self.socket.close()
            self.socket = None
            self.lost += 1

    def _send(self):
        parts = [bytes(part) for part in self.attack.frame()]
        slot = self.random.choice([255, 255, 255, self.random.randrange(256)])
        places = [(len(part), 0) for part in parts]
        is_new = self.random.random() < 0.02
        if self.random.random() < 0.01:
            length = self.random.choice([1, 4096, 1 << 20, 1 << 40, (1 << 64) - 1])
            places.append((length, self.random.choice([1, 4096, 1 << 16, 1 << 63])))
        head = struct.pack("<4sBBHIQ", b"UNPL", slot, is_new, 0, len(places), sum(map(len, parts)))
        data = bytearray(head + b"".join(struct.pack("<QQ", *place) for place in places) + b"".join(parts))
        if self.random.random() < 0.02:
            data[self.random.randrange(len(head) + 16 * len(places))] = self.random.randrange(256)
        if self.random.random() < 0.01:
            del data[self.random.randrange(len(data)) :]
        files = [self._file() for _ in range(self.random.choice([1, 1, 2]))] if is_new else []
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
            sent = self.socket.sendmsg([data or b"x"], rights)
            self.socket.sendall(data[sent:])
        finally:
            for file in files:
                os.close(file)
        # Some end by themselves.
        if self.random.random() < 0.005:
            self._end()

    def _file(self):
        if self.random.random() < 0.2:
            return os.open("/dev/null", os.O_RDWR)
        made = os.memfd_create("attack", os.MFD_ALLOW_SEALING)
        with contextlib.suppress(OSError):
            os.ftruncate(made, 1 << self.random.randrange(41))
        return made


def attack_unauthenticated(address, attack, count):
    """Send bytes and frames over connections that are not admitted."""
    host, port = _local.split_address(address)
    context = zmq.Context()
    for number in range(count):
        if number % 10:
            try:
                with socket.create_connection((host, port), SECONDS) as plain:
                    plain.sendall(attack.bytes_for_tcp())
            except ConnectionError:  # it was closed while it was written to
                continue
        else:
            made = context.socket(zmq.DEALER)
            made.linger = 0
            if number % 20:
                secret = z85.encode(attack.random.randbytes(32))
                made.curve_secretkey, made.curve_publickey = secret, zmq.curve_public(secret)
                made.curve_serverkey = zmq.curve_public(z85.encode(keys(PS).server_secret(PS)))
            made.connect(f"tcp://{address}")
            # Where the server has rejected the connection already, nothing takes a message any more.
            with contextlib.suppress(zmq.Again):
                made.send_multipart(attack.valid, zmq.NOBLOCK)
            time.sleep(0.002)
            made.close()
    context.term()


# --- an honest client


class Training(threading.Thread):
    """Pulls and pushes until it is stopped, and checks each answer.

    Args:
        address: of the server.
    """

    def __init__(self, address):
        super().__init__()
        self.rpc_client = RpcClient(PS, address, keys(CHIEF))
        self.steps, self.slowest, self.lost = 0, 0.0, 0
        self.wrong = []
        self.last_push = None
        self._asked_to_stop = threading.Event()

    def run(self):
        """Train."""
        expected = np.zeros(SIZE)
        while not self._asked_to_stop.is_set() and not self.wrong:
            began = time.monotonic()
            value = self._ask(Frame(Op.PULL, 2 * self.steps + 1)).arrays[0]
            if not np.array_equal(value, expected):
                self.wrong.append(f"step {self.steps}: another value")
            gradient = np.cos(value + self.steps)
            push = Frame(Op.PUSH, (1 << 40) + self.steps, meta={"name": "w"}, arrays=[gradient])
            self.last_push = [bytes(part) for part in push.parts()]
            if self._ask(push).op is not Op.OK:
                self.wrong.append(f"step {self.steps}: no answer OK")
            expected = expected + gradient
            self.steps += 1
            self.slowest = max(self.slowest, time.monotonic() - began)
            # A step computes, too: it leaves the processors to the others.
            time.sleep(0.002)

    def _ask(self, request):
        """Ask, again where the connection was lost: a machine that stood still has lost its heartbeats."""
        while True:
            try:
                return self.rpc_client.call(request, SECONDS)
            except PeerLostError:
                self.lost += 1

    def stop(self):
        """End after this step."""
        self._asked_to_stop.set()
        self.join(2 * SECONDS)


def run(frames, seed, unauthenticated=None, direct=None):
    """Attack a server; return what was seen as a dict."""
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        address = process.stdout.readline().strip()
        training = Training(address)
        training.start()
        try:
            result = _attack(address, training, frames, seed, unauthenticated, direct)
            training.stop()
            result |= training.rpc_client.call(Frame(Op.STATUS, 1), SECONDS).meta
        finally:
            training.stop()
            training.rpc_client.close()
            process.stdin.close()
            process.wait(SECONDS)
    return result | {
        "exit code": process.returncode,
        "steps": training.steps,
        "lost": training.lost,
        "wrong": training.wrong,
    }


def _attack(address, training, frames, seed, unauthenticated, by_direct):
    attack, admitted = Attack(seed), Admitted(address)
    status = RpcClient(PS, address, keys(CHIEF))
    began = time.monotonic()
    outside = max(20, frames // 500) if unauthenticated is None else unauthenticated
    other = threading.Thread(target=attack_unauthenticated, args=(address, Attack(seed + 1), outside))
    other.start()
    by_direct = frames if by_direct is None else by_direct
    direct = Direct(address, Attack(seed + 2))
    beside = threading.Thread(target=direct.run, args=(by_direct,))
    beside.start()
    sizes, replays = [], 0
    for number in range(frames):
        if number % 50 == 49 and training.last_push is not None:
            admitted.send(training.last_push)
            replays += 1
        elif number % 2000 == 1999:
            admitted.send_huge()
        else:
            admitted.send(attack.frame())
        if number % max(1, frames // 20) == 0:
            sizes.append(status.call(Frame(Op.STATUS, number), SECONDS).meta["bytes"])
            print(f"{number} frames, {sizes[-1] >> 20} MiB", file=sys.stderr)
    other.join()
    beside.join()
    admitted.close()
    status.close()
    seconds = time.monotonic() - began
    warm = sizes[len(sizes) // 4 :]
    return {
        "frames": frames + by_direct + outside,
        "direct sockets": direct.lost,
        "seconds": round(seconds, 1),
        "sent replays": replays,
        "growth": max(warm) - warm[0],
        "slowest step": round(training.slowest, 3),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", action="store_true")
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    result = run(options.frames, options.seed)
    print(json.dumps({"seed": options.seed, **result}, indent=1))
    sound = not result["wrong"] and not result["others"] and not result["exit code"]
    sys.exit(not (sound and result["growth"] < 32 << 20 and result["pushes"] == result["steps"]))


if __name__ == "__main__":
    main()
