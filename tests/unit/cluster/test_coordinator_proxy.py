"""The TCP proxy between JAX's client and its coordination service."""

import socket

import pytest

from unisono.cluster._coordinator_proxy import CoordinatorProxy


def test_a_proxy_passes_on_and_stays_open():
    with socket.create_server(("127.0.0.1", 0)) as service:
        proxy = CoordinatorProxy(f"127.0.0.1:{service.getsockname()[1]}")
        host, _, port = proxy.address.rpartition(":")
        near = socket.create_connection((host, int(port)))
        far, _ = service.accept()
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
        proxy = CoordinatorProxy(f"127.0.0.1:{service.getsockname()[1]}")
        host, _, port = proxy.address.rpartition(":")
        socket.create_connection((host, int(port))).close()
        far, _ = service.accept()
        assert far.recv(1) == b""
        far.close()
        proxy.close()
