"""Direct connections: shared memory, what is read from a socket, and a server that is sent anything."""

import array
import contextlib
import errno
import os
import random
import resource
import socket
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from unisono.cluster_resolver._spec import Task
from unisono.rpc._calls import PeerLostError
from unisono.rpc._frames import ALIGNMENT, Frame, aligned
from unisono.rpc._ops import Op
from unisono.rpc._transport import _local, _local_channel
from unisono.rpc._transport import _shared_memory as shared
from unisono.rpc._transport._client import RpcClient
from unisono.rpc._transport._local_channel import ChannelError, LocalChannel, NoFilesError
from unisono.rpc._transport._server import RpcServer

LIMIT = 1 << 24
LONG = 30.0

pytestmark = pytest.mark.skipif(not shared.IS_AVAILABLE, reason="the system has no sealed files in memory")


@pytest.fixture
def ends():
    first, second = socket.socketpair()
    channels = LocalChannel(first, LIMIT), LocalChannel(second, LIMIT)
    yield channels
    for channel in channels:
        channel.close()


@pytest.fixture
def raw():
    """A channel, and the plain socket at its other end."""
    first, second = socket.socketpair()
    channel = LocalChannel(first, LIMIT)
    yield channel, second
    channel.close()
    second.close()


def received(channel, count=1):
    messages = []
    deadline = time.monotonic() + LONG
    while len(messages) < count and time.monotonic() < deadline:
        messages += channel.receive()
    return messages


def prefix(magic=b"UNPL", slot=255, is_new=0, zero=0, count=0, inline=0, places=()):
    head = _local_channel._PREFIX.pack(magic, slot, is_new, zero, count, inline)
    return head + b"".join(_local_channel._PLACE.pack(*place) for place in places)


def segments(channel):
    return channel._outgoing._segments


def test_parts_arrive_as_they_were_sent_small_ones_inside_and_large_ones_in_shared_memory(ends):
    sender, receiver = ends
    parts = [b"header", b"", bytes(range(256)) * 400, b"x" * (_local_channel.SHARED_FROM - 1)]
    assert sender.send(parts)
    (message,) = received(receiver)
    assert [bytes(part) for part in message] == parts
    (segment,) = segments(sender).values()
    assert segment.size == shared.rounded(shared.FIRST + aligned(len(parts[2])))
    assert segment.descriptor is None, "its file has travelled, and is closed here"


def test_a_segment_is_written_again_only_when_all_of_its_arrays_are_gone(ends):
    sender, receiver = ends
    sent = [np.full(10_000, i, np.float64) for i in range(4)]
    sender.send(Frame(Op.PUSH, 1, arrays=sent[:2]).parts())
    (message,) = received(receiver)
    first, second = Frame.parse(message, LIMIT).arrays
    del message
    view = first[5:]
    del first
    sender.send(Frame(Op.PUSH, 2, arrays=[sent[2]]).parts())
    assert len(segments(sender)) == 2, "the first segment is read still"
    (other,) = received(receiver)
    np.testing.assert_array_equal(view, sent[0][5:])
    np.testing.assert_array_equal(second, sent[1])
    assert all(array.ctypes.data % ALIGNMENT == 0 for array in (second,))
    del view, second, other
    assert all(segment.is_free for segment in segments(sender).values())
    sender.send(Frame(Op.PUSH, 3, arrays=[sent[3]]).parts())
    assert len(segments(sender)) == 2
    np.testing.assert_array_equal(Frame.parse(received(receiver)[0], LIMIT).arrays[0], sent[3])


def test_one_who_gives_nothing_back_gets_bytes_in_the_message(ends, tuned):
    tuned(shared, _BYTES=1 << 20)
    sender, receiver = ends
    kept, made = [], []
    for i in range(8):
        part = bytes([i]) * (1 << 18)
        while not sender.send([b"h", b"", part]) and not sender.flush():
            made += receiver.receive()
        kept += received(receiver, i + 1 - len(kept) - len(made)) if len(kept) + len(made) <= i else []
    kept = made + kept
    assert [bytes(m[2][:1]) for m in kept] == [bytes([i]) for i in range(8)]
    assert sum(segment.size for segment in segments(sender).values()) <= 1 << 20
    assert 0 < len(segments(sender)) < 8


def test_segments_that_are_too_small_make_room_and_their_number_is_used_again():
    out = shared.OutgoingSegments()
    taken = [out.acquire(1000) for _ in range(shared.SLOTS)]
    assert out.acquire(1000) is None
    taken[3].memory[0] = 0
    assert out.acquire(500) is taken[3]
    taken[5].memory[0] = 0
    larger = out.acquire(1 << 20)
    assert larger is not taken[5]
    assert larger.slot == 5
    assert taken[5].descriptor is None
    out.close()
    assert all(segment.descriptor is None for segment in [*taken, larger])


def test_many_threads_send_whole_messages(ends):
    sender, receiver = ends

    def send(number):
        for i in range(40):
            sender.send([b"%d" % number, b"", bytes([number]) * (i * 3000)])

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    seen = []
    deadline = time.monotonic() + LONG
    while len(seen) < 160 and time.monotonic() < deadline:
        sender.flush()
        for first, _, data in receiver.receive():
            assert bytes(data) == bytes([int(bytes(first))]) * len(data)
            seen.append((int(bytes(first)), len(data)))
    for number in range(4):
        assert [length for which, length in seen if which == number] == [i * 3000 for i in range(40)]


def plain(messages):
    return [[bytes(part) for part in message] for message in messages]


def test_messages_are_whole_wherever_they_are_split_and_keep_their_bytes(raw):
    """What is received next must not be written over what was received before."""
    channel, there = raw
    first, second = [b"ab", b"", b"xyz"], [b"q" * 40]
    data = b"".join(channel._packed(message)[0] for message in (first, second))
    kept = []
    for cut in range(1, len(data)):
        there.sendall(data[:cut])
        messages = channel.receive()
        there.sendall(data[cut:])
        kept += messages + received(channel, 2 - len(messages))
    assert plain(kept) == [first, second] * (len(data) - 1)


def test_a_message_is_whole_where_the_end_of_the_buffer_cuts_any_byte_of_its_beginning(raw):
    channel, there = raw
    second = [bytes([i]) * 10_000 for i in range(7)]
    head = _local_channel._PREFIX.size + _local_channel._PLACE.size
    for cut in range(head + len(second) * _local_channel._PLACE.size + 2):
        first = [b"f" * (_local_channel._PIECE - head - cut)]
        # Large parts would lie in shared memory.
        channel._outgoing.acquire = lambda nbytes: None
        there.sendall(b"".join(channel._packed(message)[0] for message in (first, second)))
        assert plain(channel.receive()) == [first]
        assert plain(received(channel)) == [second]


@pytest.mark.parametrize("has_ended", [False, True])
def test_the_last_message_may_be_larger_than_the_buffer(ends, has_ended):
    here, there = ends
    message = [bytes([i]) * 10_000 for i in range(7)]
    assert there.send(message)
    if has_ended:
        there.close()
    assert plain(here.receive_rest()) == [message]
    assert here.receive_rest() == []


def test_the_end_is_told_after_the_last_message(ends):
    sender, receiver = ends
    sender.send([b"last", b""])
    sender.close()
    assert [bytes(part) for part in received(receiver)[0]] == [b"last", b""]
    with pytest.raises(ChannelError, match="connection was lost"):
        received(receiver)
    assert sender.send([b"late", b""]), "what comes late is dropped"


def test_a_message_that_the_kernel_does_not_take_ends_the_connection(ends):
    sender, receiver = ends
    plain = sender._socket

    class Full:
        def __getattr__(self, name):
            return getattr(plain, name)

        def sendmsg(self, *_):
            raise OSError(errno.ETOOMANYREFS, "Too many references")

    sender._socket = Full()
    sender.send([b"h", b"", b"x" * _local_channel.SHARED_FROM])
    sender._socket = plain
    # What was sent is lost, and neither end waits for its answer.
    for channel in (sender, receiver):
        with pytest.raises(ChannelError, match="connection was lost"):
            received(channel)


def test_a_receiver_that_can_open_no_files_says_so(raw):
    channel, other = raw
    files = [memory_file(1 << 16) for _ in range(3)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        # Numbers below it are taken: those of the files themselves are the highest.
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(files), limits[1]))
        taken = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        rights = array.array("i", files)
        other.sendmsg([prefix(is_new=1, slot=0)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        with pytest.raises(NoFilesError, match="ulimit -n"):
            received(channel)
        # One is left: for the file, and none to map it.
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(files) + 2, limits[1]))
        rights = array.array("i", files[:1])
        other.sendmsg([prefix(is_new=1, slot=0)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        with pytest.raises(NoFilesError, match="ulimit -n"):
            received(channel)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in [*files, *taken]:
            os.close(descriptor)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"x" * 40, "no messages"),
        (prefix(zero=1), "no messages"),
        (prefix(is_new=2), "no messages"),
        (prefix(count=1 << 30), "no messages"),
        (prefix(inline=1 << 60), "bytes"),
        (prefix(is_new=1, slot=0), "without its file"),
        (prefix(slot=3, count=1, places=[(10, 4096)]), "segment that was sent"),
        (prefix(slot=3, count=1, places=[(1 << 63, 4096)]), "above the limit"),
        (prefix(count=1, inline=3, places=[(4, 0)]) + b"abc", "longer than their message"),
        (prefix(count=1, inline=3, places=[(2, 0)]) + b"abc", "longer than its parts"),
        (prefix(count=1, inline=3, places=[((1 << 64) - 1, 0)]) + b"abc", "longer than their message"),
    ],
)
def test_bytes_that_are_no_message_end_the_connection(raw, data, match):
    channel, other = raw
    other.sendall(data)
    with pytest.raises(ChannelError, match=match):
        received(channel)


def memory_file(size, seals=True):
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    if seals:
        shared.fcntl.fcntl(descriptor, shared.fcntl.F_ADD_SEALS, shared.fcntl.F_SEAL_SHRINK)
    return descriptor


def send_file(other, data, *descriptors):
    rights = array.array("i", descriptors)
    other.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: memory_file(1 << 16, seals=False), "must keep its size"),
        (lambda: memory_file(100), "hold one message"),
        (lambda: memory_file(1 << 40), "hold one message"),
        (lambda: os.open("/dev/zero", os.O_RDWR), "Invalid argument"),
        (lambda: os.open(__file__, os.O_RDONLY), "Invalid argument"),
    ],
)
def test_files_that_are_no_segments_end_the_connection(raw, make, match):
    channel, other = raw
    before = len(os.listdir("/proc/self/fd"))
    send_file(other, prefix(is_new=1, slot=0), make())
    with pytest.raises(ChannelError, match=match):
        received(channel)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("place", [(10, 4095), (1 << 16, 4096), (1, 1 << 16), (1, (1 << 64) - 1)])
def test_arrays_outside_of_their_segment_end_the_connection(raw, place):
    channel, other = raw
    send_file(other, prefix(is_new=1, slot=0, count=1, places=[place]), memory_file(1 << 16))
    with pytest.raises(ChannelError, match="within its segment"):
        received(channel)


def test_files_that_no_message_uses_are_closed(raw):
    channel, other = raw
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(4):
        send_file(other, prefix(), *(memory_file(1 << 16) for _ in range(5)))
    with pytest.raises(ChannelError, match="files without messages"):
        received(channel, 10)
    channel.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_an_endpoint_goes_on_whatever_direct_connections_send():
    """Random and damaged messages, with and without files, while an honest client is answered."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    rpc_server = RpcServer("127.0.0.1:0", lambda client, f: f.answer(Op.OK, {}, list(f.arrays)), limit=LIMIT)
    rpc_server.start()
    path = _local_channel.channel_path(_local.socket_path(rpc_server.address, _local.socket_directory()))
    rpc_client = RpcClient(Task("ps", 0), rpc_server.address, limit=LIMIT)
    sent = np.arange(50_000, dtype=np.float32)
    frame = [bytes(part) for part in Frame(Op.PULL, 1, meta={"a": 1}).parts()]
    places = [(len(part), 0) for part in frame]
    valid = prefix(count=2, inline=sum(map(len, frame)), places=places) + b"".join(frame)
    try:
        before = None
        for i in range(300):
            with socket.socket(socket.AF_UNIX) as attacker, contextlib.suppress(OSError):
                attacker.connect(str(path))
                data = bytearray(valid)
                for _ in range(rng.choice([0, 1, 1, 4])):
                    data[rng.randrange(len(data))] = rng.randrange(256)
                if rng.random() < 0.3:
                    del data[rng.randrange(len(data)) :]
                if rng.random() < 0.3:
                    send_file(
                        attacker, bytes(data) or b"x", memory_file(1 << rng.randrange(30), rng.random() < 0.5)
                    )
                else:
                    attacker.sendall(bytes(data) * rng.choice([1, 3]))
            if i % 20 == 0:
                answer = rpc_client.call(Frame(Op.PUSH, 1000 + i, arrays=[sent]), LONG)
                np.testing.assert_array_equal(answer.arrays[0], sent)
                before = before or len(os.listdir("/proc/self/fd"))
        rpc_client.call(Frame(Op.PUSH, 5000, arrays=[sent]), LONG)
        deadline = time.monotonic() + LONG
        while len(rpc_server._channels._channels) > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(rpc_server._channels._channels) == 1
        # Beside the segments of the honest client: each mapping has its file. The last may still be closing.
        while len(os.listdir("/proc/self/fd")) > before + 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(os.listdir("/proc/self/fd")) <= before + 4
    finally:
        rpc_client.close()
        rpc_server.close()
    assert not Path(path).exists()


def test_requests_fail_and_are_sent_again_when_the_direct_connection_ends(caplog):
    rpc_server = RpcServer(
        "127.0.0.1:0", lambda client, f: f.answer(Op.OK, {"by": client.connection.decode()})
    )
    rpc_server.start()
    rpc_client = RpcClient(Task("ps", 0), rpc_server.address)
    try:
        assert rpc_client.call(Frame(Op.PULL, 1), LONG).meta["by"] == "channel 1"
        (channel,) = rpc_server._channels._channels.values()
        channel_before = rpc_client._link._channel
        channel._socket.shutdown(socket.SHUT_RDWR)
        # What was sent before the end was noticed fails, as on a connection of ZeroMQ.
        with contextlib.suppress(PeerLostError):
            rpc_client.call(Frame(Op.PULL, 2), LONG)
        while rpc_client._link._channel is channel_before:
            time.sleep(0.01)
        assert rpc_client.call(Frame(Op.PULL, 3), LONG).meta["by"] == "channel 2"
        assert not caplog.records
        # The client reads that the connection was lost: why, the server says.
        (channel,) = rpc_server._channels._channels.values()
        channel.receive = Mock(side_effect=NoFilesError)
        with pytest.raises(PeerLostError, match="Look into the log of ps:0"):
            rpc_client.call(Frame(Op.PULL, 4), LONG)
        assert "may not open more files, see `ulimit -n`" in caplog.text
    finally:
        rpc_client.close()
        rpc_server.close()
