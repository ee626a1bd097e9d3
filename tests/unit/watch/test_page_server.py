"""The server of a page: what it answers to whom, and that no client can hold it."""

import contextlib
import http.client
import json
import socket
import threading
import time

import pytest

from unisono._errors import InvalidArgumentError
from unisono.watch.web import _job_feed, _page_server
from unisono.watch.web._job_feed import JobFeed
from unisono.watch.web._page import policy
from unisono.watch.web._page_server import PageServer

LIMIT = 60.0


@pytest.fixture
def server(tuned):
    tuned(_job_feed, PERIOD=0.01)
    feed = JobFeed(lambda: {"now": time.time()})
    with PageServer(feed, {"worker:0": b"a log\n"}.get) as server:
        yield server
        feed.end(lambda: {"job": {"state": "ended"}, "logs": {}})


def get(server, path, host="localhost"):
    """The answer's status, headers and body; without a header `Host` where that is None."""
    name = "" if host is None else f"Host: {host}\r\n"
    with socket.create_connection(("127.0.0.1", server.port), LIMIT) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\n{name}\r\n".encode("latin-1"))
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        return answer.status, answer.headers, answer.read()


def test_the_page_its_log_and_nothing_else_is_answered(server):
    status, headers, body = get(server, f"/{server.token}/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert body.startswith(b"<!DOCTYPE html>")
    assert headers["Content-Security-Policy"] == f"{policy()}; frame-ancestors 'none'"
    assert (headers["Cache-Control"], headers["Referrer-Policy"]) == ("no-store", "no-referrer")
    status, headers, body = get(server, f"/{server.token}/log?task=worker:0")
    assert (status, headers["Content-Type"], body) == (200, "text/plain; charset=utf-8", b"a log\n")
    others = (
        "log",
        "log?task=worker:1",
        "log?task=../x",
        "log/worker:0",
        "../log",
        "events/",
        "page.js",
        "etc",
    )
    assert {get(server, f"/{server.token}/{path}")[0] for path in others} == {404}


def test_without_the_token_nothing_is_answered(server):
    wrong = server.token[:-1] + ("a" if server.token[-1] != "a" else "b")
    paths = [
        "/",
        "*",
        "/token",
        "//",
        "/%00/",
        f"/{wrong}/",
        f"/{server.token}x/",
        f"/{wrong}\xd6/events",
        "/x/log",
    ]
    for path in paths:
        status, _, body = get(server, path)
        assert status == 403, path
        assert b"token" in body
        assert server.token.encode() not in body


def test_the_token_is_compared_in_constant_time_and_differs_between_servers(server, monkeypatch):
    compared = []
    monkeypatch.setattr(_page_server.hmac, "compare_digest", lambda a, b: compared.append((a, b)))
    assert get(server, "/wrong/")[0] == 403
    assert compared == [(b"wrong", server.token.encode())]
    feed = JobFeed(dict)
    with PageServer(feed, lambda task: None) as other:
        assert len({server.token, other.token}) == 2
        assert len(other.token) == 24
        feed.end()


OWN_NAMES = ["localhost:8080", "localhost", "LOCALHOST:1", "127.0.0.1:1", "[::1]:1"]
OTHER_NAMES = [
    "evil.example",
    "evil.example:80",
    "127.0.0.1.evil.example",
    "evil.example#localhost",
    "192.168.0.1",
]
OTHER_NAMES += ["localhost@evil.example", "evil.example/localhost", "localhost:x", "[::1", "\xff", "", None]


def test_requests_under_another_name_are_refused(server):
    """Also of the port that ssh forwards; a page of another site has another name (DNS rebinding)."""
    answers = {name: get(server, f"/{server.token}/", name)[0] for name in (*OWN_NAMES, *OTHER_NAMES)}
    assert answers == dict.fromkeys(OWN_NAMES, 200) | dict.fromkeys(OTHER_NAMES, 403)


def test_a_server_for_other_machines_answers_to_addresses_and_its_name():
    feed = JobFeed(dict)
    with PageServer(feed, lambda task: None, "0.0.0.0:0") as server:
        assert not server.is_local
        assert server.address == f"http://{socket.gethostname()}:{server.port}/{server.token}/"
        names = ("192.168.0.1:80", "[fe80::1]", socket.gethostname(), "127.0.0.1", "evil.example")
        assert [server.allows(name) for name in names] == [True, True, True, True, False]
        feed.end()


def test_events_go_on_until_the_job_ends(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT)
    with contextlib.closing(connection):
        connection.request("GET", f"/{server.token}/events")
        answer = connection.getresponse()
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        seen = ""
        while seen.count("event: change") < 3:
            seen += answer.readline().decode()
        assert "event: full" in seen
        server.feed.end(lambda: {"job": {"state": "ended"}, "logs": {}})
        rest = answer.read().decode()
    last = rest.strip().split("\n")
    assert last[-3] == "event: end"
    assert json.loads(last[-1].removeprefix("data: "))["job"] == {"state": "ended"}


def test_other_methods_and_broken_requests_are_refused_and_the_server_stays(server):
    requests = [b"POST / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\r\n\r\n", b"GET\r\n\r\n", b"\r\n"]
    requests += [b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n"]
    requests.append(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n")
    for request in requests:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", server.port), LIMIT) as sock,
        ):
            sock.sendall(request)
            sock.shutdown(socket.SHUT_WR)
            assert b" 200 " not in sock.recv(1 << 16)
    assert get(server, f"/{server.token}/")[0] == 200


def test_connections_are_bounded_in_number_and_in_time(tuned):
    tuned(_page_server, _CONNECTIONS=3, _SECONDS=0.5)
    feed = JobFeed(dict)
    with PageServer(feed, lambda task: None) as server, contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), LIMIT)) for _ in range(3)
        ]
        silent[0].sendall(b"GET / HTTP/1.1\r\n")
        deadline = time.monotonic() + LIMIT
        while get_or_none(server) != 503:
            assert time.monotonic() < deadline
        # Those that send no request, or half of one, are closed, and others have room again.
        for sock in silent:
            while sock.recv(1 << 16):
                pass
        while get_or_none(server) != 200:
            assert time.monotonic() < deadline
        feed.end()


def get_or_none(server):
    with contextlib.suppress(OSError, http.client.HTTPException):
        return get(server, f"/{server.token}/")[0]
    return None


def test_closing_ends_a_page_that_takes_nothing(tuned):
    tuned(_job_feed, PERIOD=0.001)
    tuned(_page_server, _LAST=0.2)
    feed = JobFeed(lambda: {"now": time.time(), "text": "x" * 300_000})
    server = PageServer(feed, lambda task: None)
    with socket.create_connection(("127.0.0.1", server.port), LIMIT) as sock:
        sock.sendall(f"GET /{server.token}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert sock.recv(100)
        time.sleep(0.2)
        began = time.monotonic()
        feed.end(lambda: {"text": "x" * 5_000_000})
        server.close()
        assert time.monotonic() - began < LIMIT
    assert not [t for t in threading.enumerate() if "unisono-page" in t.name or "process_request" in t.name]


ADDRESSES = ["localhost", "localhost:", ":80", "localhost:http", "192.0.2.1:0", "localhost:99999"]


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_that_cannot_be_listened_at_is_an_error(address):
    feed = JobFeed(dict)
    with pytest.raises(InvalidArgumentError, match=r"Received: '.*Write `--web-address localhost:0`"):
        PageServer(feed, lambda task: None, address)
    feed.end()
