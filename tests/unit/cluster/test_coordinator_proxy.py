"""The TCP proxy between JAX's client and its coordination service."""

import socket
import subprocess
import sys

import pytest

from unisono.cluster import _coordinator_gate as gate
from unisono.cluster._coordinator_proxy import CoordinatorProxy, is_own


def let_in(service):
    """Accept a connection as the gate does."""
    far, _ = service.accept()
    far.sendall(b"n" * gate.NONCE_BYTES)
    assert far.recv(100) == gate.proof_of("secret", b"n" * gate.NONCE_BYTES)
    return far


def test_a_proxy_passes_on_and_stays_open():
    with socket.create_server(("127.0.0.1", 0)) as service:
        proxy = CoordinatorProxy(f"127.0.0.1:{service.getsockname()[1]}", "secret")
        host, _, port = proxy.address.rpartition(":")
        near = socket.create_connection((host, int(port)))
        far = let_in(service)
        near.sendall(b"question")
        assert far.recv(100) == b"question"
        far.sendall(b"answer")
        assert near.recv(100) == b"answer"
        # The service dies: nothing is heard of it, and what is said to it is lost.
        far.close()
        for _ in range(3):
            near.sendall(b"again")
        near.settimeout(0.2)
        with pytest.raises(TimeoutError):
            near.recv(1)
        near.close()
        proxy.close()


def test_a_proxy_hangs_up_when_this_process_does():
    with socket.create_server(("127.0.0.1", 0)) as service:
        proxy = CoordinatorProxy(f"127.0.0.1:{service.getsockname()[1]}", "secret")
        host, _, port = proxy.address.rpartition(":")
        with socket.create_connection((host, int(port))):
            far = let_in(service)
        assert far.recv(1) == b""
        far.close()
        proxy.close()


def test_a_proxy_serves_its_own_process_alone():
    script = "import socket, sys; print(socket.create_connection(('127.0.0.1', int(sys.argv[1]))).recv(1))"
    with socket.create_server(("127.0.0.1", 0)) as service:
        service.settimeout(0.2)
        proxy = CoordinatorProxy(f"127.0.0.1:{service.getsockname()[1]}", "secret")
        port = proxy.address.rpartition(":")[2]
        done = subprocess.run(
            [sys.executable, "-c", script, port], capture_output=True, timeout=60, check=True
        )
        assert done.stdout == b"b''\n"
        with pytest.raises(TimeoutError):
            service.accept()
        proxy.close()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_connection_is_known_by_its_other_end(family):
    """gRPC's sockets are for both versions of IP."""
    with socket.create_server(("127.0.0.1", 0)) as service, socket.socket(family) as far:
        far.connect(
            ("127.0.0.1" if family == socket.AF_INET else "::ffff:127.0.0.1", service.getsockname()[1])
        )
        near, _ = service.accept()
        with near:
            assert is_own(near)
            far.close()
            assert not is_own(near)
