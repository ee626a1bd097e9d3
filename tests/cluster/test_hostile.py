"""Bytes of strangers at every port of workers that train."""

import contextlib
import json
import os
import random
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster._workers import Workers
from tests.cluster.launch_support import LIMIT
from unisono.cluster.rendezvous import _protocol

PROGRAM = str(Path(__file__).parent / "programs" / "hostile.py")
#: Frames for each port; many more were sent by hand.
FRAMES = int(os.environ.get("UNISONO_HOSTILE_FRAMES", "100"))


def raw(body, length=None):
    return struct.pack(">4sHI", b"UNIM", _protocol.VERSION, len(body) if length is None else length) + body


def hostile(rng):
    """One of the frames that a stranger may send."""
    return rng.choice(
        [
            rng.randbytes(rng.randrange(200)),
            b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(40),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(40),
            raw(b'{"kind":"x","secret":"\\ud800"}'),
            raw(b'{"kind":"abort","secret":"","reason":"end"}'),
            raw(rng.randbytes(50)),
            raw(b"x" * 100, length=rng.randrange(1 << 32)),
            raw(b"[" * 5000),
            _protocol.frame({"kind": "abort", "reason": "end"}),
        ]
    )


#: Any program of this machine, where the test may be another user: it takes the place of a worker.
IMPOSTOR = """
import os, sys
from jaxlib import _jax
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
_jax.get_distributed_runtime_client(sys.argv[1], 1, init_timeout=1).connect()
"""


def pose_as_worker(address):
    """Connect with JAX's own client; it ends its process where it is not let in."""
    host, port = address
    subprocess.run(
        [sys.executable, "-c", IMPOSTOR, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"],
        capture_output=True,
        timeout=60,
        check=False,
    )


def send(address, data, *, abort):
    with contextlib.suppress(OSError), socket.create_connection(address, 5) as sock:
        sock.sendall(data)
        if abort:  # a reset instead of an end
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.skipif(sys.platform != "linux", reason="ports of other libraries are found in /proc")
def test_no_byte_of_a_stranger_ends_training(tmp_path):
    workers = Workers(tmp_path, [PROGRAM, str(tmp_path)])
    rng = random.Random(7)
    try:
        until = time.monotonic() + LIMIT
        begun = [tmp_path / f"begun-{i}.json" for i in range(2)]
        while not all(path.exists() for path in begun):
            assert time.monotonic() < until, workers.text()
            time.sleep(0.1)
        found = [json.loads(path.read_text()) for path in begun]
        # The status port and Gloo's of both.
        assert [len(f["ports"]) >= 2 for f in found] == [True, True], found
        every = {"::": "::1", "0.0.0.0": "127.0.0.1"}
        ports = [(every.get(host, host), port) for f in found for host, port in f["ports"]]
        for _ in range(FRAMES):
            for address in ports:
                send(address, hostile(rng), abort=rng.random() < 0.3)
        with ThreadPoolExecutor() as pool:
            list(pool.map(pose_as_worker, ports))
        assert [p.poll() for p in workers.processes] == [None, None], workers.text()
        (tmp_path / "enough").touch()
        assert workers.wait(LIMIT) == [0, 0], workers.text()
    finally:
        workers.kill()
    for i, begun_with in enumerate(found):
        before = begun_with["before"]
        ended = json.loads((tmp_path / f"ended-{i}.json").read_text())
        after = ended["after"]
        assert ended["steps"] > 0
        assert set(before["threads"]) <= set(after["threads"])
        assert after["megabytes"] < before["megabytes"] + 100, (before, after)
        # Gloo keeps each connection to its one port; a second port that did would exceed this.
        assert after["descriptors"] <= before["descriptors"] + FRAMES + 64, (before, after)
