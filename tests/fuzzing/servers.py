"""What parameter servers keep, and the messages that processes send each other."""

import contextlib
import json
import shutil
import struct
import zlib

import numpy as np
from hypothesis import strategies as st

from tests.fuzzing.changes import BYTE_CHANGES, SAME, TEXT_CHANGES, changed_bytes, changed_text
from unisono.cluster.rendezvous import _protocol
from unisono.parameter_server.server._durable import DurableStore
from unisono.parameter_server.state import _container, _records
from unisono.parameter_server.state._create import NewVariable
from unisono.parameter_server.state._push import Push
from unisono.parameter_server.state._variables import StoredSpec
from unisono.rpc import _frames
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op


def with_description(content, change):
    """An image or a snapshot with another description, whose checksums fit."""
    fields = list(_container._HEADER.unpack(content[: _container._HEADER.size]))
    at, length = fields[3], fields[4]
    body = changed_text(content[at : at + length], change)
    fields[4:] = [len(body), zlib.crc32(body), 0]
    header = _container._HEADER.pack(*fields)[:-4]
    return header + struct.pack("<I", zlib.crc32(header)) + content[len(header) + 4 : at] + body


def with_record(content, change):
    """A log whose first record has another description, and checksums that fit."""
    at, size = _records.FIRST, _records._HEADER.size
    fields = list(_records._HEADER.unpack(content[at : at + size]))
    begin, length = at + fields[3], fields[4]
    body = changed_text(content[begin : begin + length], change)
    fields[2] = max(fields[2], _records.aligned(fields[3] + len(body)))
    fields[4] = len(body)
    fields[6:] = [zlib.crc32(body), 0]
    header = _records._HEADER.pack(*fields)[:-4]
    header += struct.pack("<I", zlib.crc32(header))
    return content[:at] + header + content[at + size : begin] + body + content[begin + len(body) :]


class ServerFiles:
    """The image, the log, the note, and the snapshot of a server that was killed."""

    cases = st.tuples(
        st.sampled_from(["image", "log", "acknowledged", "snapshot"]),
        st.booleans(),
        TEXT_CHANGES,
        BYTE_CHANGES,
    )

    unchanged = ("snapshot", True, SAME, [])

    def __init__(self, folder):
        self.folder, first = folder, folder / "first"
        durable = DurableStore(first, 1, None)
        table = NewVariable(StoredSpec("t", (4, 2), "float32", "table"), fill=1.0)
        durable.store.create([NewVariable(StoredSpec("w", (2,), "float32"), np.ones(2, "float32")), table], 3)
        durable.snapshot()
        durable.store.push(Push(7, adds=((0, np.ones(2, "float32")),)))
        durable.store.write(1, np.ones((2, 2), "float32"), indices=np.array([0, 2]), request=5)
        self.files = {path.name: path.read_bytes() for path in first.iterdir()}
        durable.close()
        image = max(
            (name for name in self.files if name.startswith("image")),
            key=lambda name: _container._HEADER.unpack(self.files[name][: _container._HEADER.size])[2],
        )
        snapshot = next(name for name in self.files if name.startswith("snapshot"))
        self.names = {"image": image, "log": "log", "acknowledged": "acknowledged", "snapshot": snapshot}

    def run(self, case):
        kind, has_checksums, in_text, in_bytes = case
        server = self.folder / "again"
        shutil.rmtree(server, ignore_errors=True)
        server.mkdir()
        files = dict(self.files)
        name = self.names[kind]
        if has_checksums and kind == "log":
            files[name] = with_record(files[name], in_text)
        elif has_checksums and kind != "acknowledged":
            files[name] = with_description(files[name], in_text)
        else:
            files[name] = changed_bytes(files[name], in_bytes)
        if kind == "snapshot":
            files = {name: files[name]}
        for other, content in files.items():
            (server / other).write_bytes(content)
        durable = DurableStore(server, 0 if kind == "snapshot" else 1, None)
        try:
            assert durable.recovery.source in ("nothing", "log", "snapshot", "damage")
        finally:
            durable.close()


def framed(parts):
    """A message with the checksum of its header."""
    header, meta = bytearray(parts[0]), parts[1]
    if len(header) >= _frames._FIXED.size:
        before, at = _frames._BEFORE_CHECKSUM, _frames._FIXED.size
        header[at - 8 : at - 4] = struct.pack("<I", len(meta))
        header[before:at] = _frames._checksum(memoryview(header)[:before], memoryview(header)[at:], meta)
    return [bytes(header), *parts[1:]]


class Messages:
    """Messages of parameter servers, and of the rendezvous."""

    cases = st.tuples(st.booleans(), TEXT_CHANGES, BYTE_CHANGES)
    unchanged = (True, SAME, [])

    def __init__(self, folder):
        meta, arrays = Push(7, adds=((0, np.ones(2, "float32")),)).encode()
        self.parts = [bytes(part) for part in Frame(Op.PUSH, 3, meta=meta, arrays=arrays).parts()]
        self.greeting = {"kind": "hello", "process_id": 0, "host": "h", "pid": 1, "token": "t", "config": {}}

    def run(self, case):
        is_meta, in_text, in_bytes = case
        header, meta, *arrays = self.parts
        if is_meta:
            meta = changed_text(meta, in_text)
        else:
            header = changed_bytes(header, in_bytes)
        inbox = bytearray(_protocol.frame(self.greeting))
        if is_meta:
            body = changed_text(json.dumps(self.greeting), in_text)
            inbox = bytearray(struct.pack(">4sHI", b"UNIM", _protocol.VERSION, len(body)) + body)
        else:
            inbox = bytearray(changed_bytes(bytes(inbox), in_bytes))
        try:
            frame = Frame.parse(framed([header, meta, *arrays]))
            Push.decode(frame.meta, frame.arrays)
        finally:
            with contextlib.suppress(_protocol.UnknownPeerError):
                _protocol.take_frame(inbox, 1 << 20)
