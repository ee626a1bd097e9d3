"""The port for probes, asked as a kubelet asks it: by HTTP, without a key."""

import http.client
import socket

import pytest

from unisono._errors import InvalidArgumentError
from unisono.cluster.liveness import _health, _port_server
from unisono.cluster.liveness._health import HealthServer, process_health, report_ready


@pytest.fixture
def health():
    server = HealthServer(0)
    yield server
    server.close()


def get(port, path, method="GET", host="127.0.0.1"):
    connection = http.client.HTTPConnection(host, port, timeout=60)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


def test_it_lives_before_it_is_ready(health):
    assert [get(health.port, path)[0] for path in ("/livez", "/healthz")] == [200, 503]
    health.is_ready = True
    assert [get(health.port, path)[0] for path in ("/livez", "/healthz")] == [200, 200]


def test_nothing_of_the_process_is_in_an_answer(health):
    assert get(health.port, "/healthz") == (
        503,
        b"Service Unavailable\n",
        {"Content-Type": "text/plain", "Content-Length": "20", "Connection": "close"},
    )
    assert [get(health.port, path)[0] for path in ("/", "/healthz/x", "/livez?verbose")] == [404, 404, 404]
    assert get(health.port, "/livez", "POST")[0] == 405


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_pods_may_have_addresses_of_either_version(health):
    assert get(health.port, "/livez", host="::1")[0] == 200


@pytest.mark.parametrize("data", [b"\r\n\r\n", b"GET /livez\r\n\r\n", b"\xff\x00 \r\n\r\n", b"x" * (1 << 14)])
def test_other_bytes_end_nothing(health, data):
    with socket.create_connection(("127.0.0.1", health.port), 60) as sock:
        sock.sendall(data)
        answer = b""
        try:
            while part := sock.recv(1 << 16):
                answer += part
        except ConnectionResetError:
            pass
    assert answer.startswith(b"HTTP/1.1 400 ") or (len(data) > 1 << 13 and not answer)
    assert get(health.port, "/livez")[0] == 200


def test_slow_clients_do_not_keep_others_waiting(health, tuned):
    tuned(_port_server, _CONNECTIONS=4)
    slow = [socket.create_connection(("127.0.0.1", health.port), 60) for _ in range(8)]
    try:
        for sock in slow:
            sock.sendall(b"GET /livez HT")
        assert get(health.port, "/livez")[0] == 200
    finally:
        for sock in slow:
            sock.close()


def test_the_port_is_the_variables(monkeypatch):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        for text, problem in (("http", "from 1 to 65535"), ("0", "from 1 to"), (str(port), "in use")):
            monkeypatch.setenv(_health.HEALTH_VARIABLE, text)
            with pytest.raises(InvalidArgumentError, match=f"Received: '{text}' .*{problem}"):
                process_health.__wrapped__()


def test_without_the_variable_nothing_listens(monkeypatch):
    monkeypatch.delenv(_health.HEALTH_VARIABLE, raising=False)
    assert process_health.__wrapped__() is None
    monkeypatch.setattr(_health, "process_health", lambda: None)
    report_ready()
