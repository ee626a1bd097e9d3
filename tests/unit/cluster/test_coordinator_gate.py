"""The gate before JAX's coordination service: a peer that knows the secret gets in, others do not."""

import contextlib
import os
import resource
import socket
import stat
import time
from pathlib import Path

import pytest

from unisono import ClusterError
from unisono.cluster import _coordinator_gate
from unisono.cluster._coordinator_gate import NONCE_BYTES, CoordinatorGate, proof_of
from unisono.cluster._coordinator_proxy import CoordinatorProxy
from unisono.rpc._transport._local import free_port


@pytest.fixture
def gate():
    made = CoordinatorGate(f"127.0.0.1:{free_port()}", "secret")
    yield made
    made.close()


def connect(gate):
    sock = socket.create_connection(gate.listens_at, 60)
    return sock, sock.recv(NONCE_BYTES)


def service_of(gate):
    """What JAX does: listen on the socket's file."""
    path = Path(gate.address.removeprefix("unix:"))
    assert stat.S_IMODE(os.stat(path.parent).st_mode) == 0o700
    service = socket.socket(socket.AF_UNIX)
    service.bind(str(path))
    service.listen()
    service.settimeout(60)
    return service


def test_who_knows_the_secret_reaches_the_service_also_after_the_gate_has_closed(gate):
    proxy = CoordinatorProxy("{}:{}".format(*gate.listens_at), "secret")
    host, _, port = proxy.address.rpartition(":")
    with socket.create_connection((host, int(port)), 60) as near, service_of(gate) as service:
        near.sendall(b"question")
        far, _ = service.accept()
        assert far.recv(100) == b"question"
        gate.close()
        proxy.close()
        far.sendall(b"a" * 1_000_000)
        received = 0
        while received < 1_000_000:
            received += len(near.recv(1 << 16))
        near.close()
        assert far.recv(1) == b""
        far.close()
    assert not Path(gate.address.removeprefix("unix:")).parent.exists()
    until = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(gate.listens_at, 60).close()
        except ConnectionRefusedError:
            break
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("what", ["wrong", "half", "http", "nothing"])
def test_others_do_not(gate, tuned, what):
    tuned(_coordinator_gate, _PROOF_SECONDS=0.1)
    with service_of(gate) as service:
        sock, nonce = connect(gate)
        proof = proof_of("secret", nonce)
        said = {"wrong": proof_of("other", nonce), "half": proof[:20], "nothing": b""}
        with sock:
            sock.sendall(said.get(what, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" * 3))
            # A reset where bytes of its own were not read.
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
        service.settimeout(0.1)
        with pytest.raises(TimeoutError):
            service.accept()


def test_silent_connections_keep_no_other_out(gate, tuned):
    tuned(_coordinator_gate, _UNKNOWN_PEERS=3)
    crowd = [connect(gate)[0] for _ in range(5)]
    assert [sock.recv(1) for sock in crowd[:2]] == [b"", b""]
    with service_of(gate) as service:
        sock, nonce = connect(gate)
        sock.sendall(proof_of("secret", nonce) + b"hello")
        far, _ = service.accept()
        assert far.recv(100) == b"hello"
        for each in (far, sock, *crowd):
            each.close()


def test_a_port_that_is_not_free(gate):
    with pytest.raises(ClusterError, match="must be able to listen at its address"):
        CoordinatorGate("{}:{}".format(*gate.listens_at), "secret")


def test_many_processes_need_many_files(monkeypatch):
    limits, said = [(1024, 4096)], []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: said.append(both))
    for soft, hard in ((1024, 4096), (1024, 2048), (1024, resource.RLIM_INFINITY), (4096, 4096)):
        limits.append((soft, hard))
        _coordinator_gate._allow_files(3000)
    assert said == [(3000, 4096), (2048, 2048), (3000, resource.RLIM_INFINITY)]
