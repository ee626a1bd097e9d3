"""A server for the page of a job: on loopback by default, with a random token in its address.

Clients that know the address may read the job and the end of each log, and nothing else. The name of the host
that a browser asks for is checked: else a page of another site could have its own name lead here (DNS
rebinding).
"""

from __future__ import annotations

import contextlib
import hmac
import http
import http.server
import ipaddress
import secrets
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator

from unisono._checks import digits
from unisono._errors import InvalidArgumentError
from unisono.cluster_resolver._spec import split_address
from unisono.watch.web._job_feed import JobFeed
from unisono.watch.web._page import make_page, policy

#: Connections that are open at once; another one is answered with status 503. A page has one, and for a
#: moment another one for each log that is open.
_CONNECTIONS = 32
#: Seconds for a request to arrive, and for a part of an answer to be taken.
_SECONDS = 10.0
#: Seconds that pages have, when the job has ended, to take the last event.
_LAST = 10.0
_ANY = frozenset({"0.0.0.0", "::", ""})


class PageServer:
    """Serves the page of a job until it is closed; a context manager.

    Args:
        feed: the events for the page; the server does not end it.
        log_of: returns the end of a task's log, by the task's name; None for a name that is no task's.
        address: `"host:port"` to listen at; port 0 is a free one.

    Raises:
        InvalidArgumentError: when the address cannot be listened at.
    """

    def __init__(
        self, feed: JobFeed, log_of: Callable[[str], bytes | None], address: str = "127.0.0.1:0"
    ) -> None:
        host, port = _split(address)
        self.token = secrets.token_urlsafe(18)
        self.feed, self.log_of = feed, log_of
        self._host = host
        try:
            self._server = _PageHTTPServer((host, port), self)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise InvalidArgumentError(
                "The page's address must be one of this machine, and its port free. "
                f"Received: {address!r} ({why}). Write `--web-address localhost:0`."
            ) from None
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="unisono-page")
        self._thread.daemon = True
        self._thread.start()

    @property
    def address(self) -> str:
        """The address for a browser, with its token."""
        host = socket.gethostname() if self._host in _ANY else self._host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/{self.token}/"

    @property
    def target(self) -> str:
        """The host and port that ssh forwards to."""
        host = str(self._server.server_address[0])
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """True if other machines cannot connect."""
        return self._host == "localhost" or _is_loopback(self._host)

    def allows(self, header: str | None) -> bool:
        """Return whether a request's header `Host` names this machine."""
        try:
            name = urllib.parse.urlsplit(f"//{header or ''}")
            host = (name.hostname or "").lower()
            _ = name.port
        except ValueError:
            return False
        if name.username is not None or name.path or name.query:
            return False
        if host in ("localhost", self._host.lower()) or _is_loopback(host):
            return bool(host)
        # At all interfaces: by any address, which no other site can have as its name, or by the own name.
        return self._host in _ANY and (_is_address(host) or host == socket.gethostname().lower())

    def close(self) -> None:
        """Stop serving; connections that are open are closed once the last event is sent, or soon."""
        self._server.shutdown()
        self._thread.join()
        self._server.end(time.monotonic() + _LAST)

    def __enter__(self) -> PageServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or digits(port) is None:
        raise InvalidArgumentError(
            f"The page's address must have a host and a port. Received: {address!r}. Write "
            "`--web-address localhost:0`, or `0.0.0.0:8080` for other machines."
        )
    return split_address(address)


def _is_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


class _PageHTTPServer(http.server.ThreadingHTTPServer):
    daemon_threads = True
    # `end` waits for the threads, within bounds.
    block_on_close = False
    allow_reuse_address = False
    request_queue_size = _CONNECTIONS

    def __init__(self, address: tuple[str, int], page: PageServer) -> None:
        self.page = page
        #: Until when the request of a connection must have arrived; None once it has.
        self._deadlines: dict[socket.socket, float | None] = {}
        self._changed = threading.Condition()
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _PageRequest)

    def server_bind(self) -> None:
        """Bind the socket, without a look for the name of its address, which may take seconds."""
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        """Answer a request in a thread of its own, unless there are too many."""
        with self._changed:
            has_room = len(self._deadlines) < _CONNECTIONS
            if has_room:
                self._deadlines[request] = time.monotonic() + _SECONDS
        if has_room:
            super().process_request(request, client_address)
            return
        with contextlib.suppress(OSError):
            request.settimeout(0.1)
            request.sendall(b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 2\r\n\r\n")
        self.shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections whose request has not arrived in time."""
        now = time.monotonic()
        with self._changed:
            late = [each for each, limit in self._deadlines.items() if limit is not None and now > limit]
        for each in late:
            _end_connection(each)

    def has_arrived(self, request: socket.socket) -> None:
        """Note that a connection's request is complete."""
        with self._changed:
            self._deadlines[request] = None

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        """Close a connection."""
        super().shutdown_request(request)
        with self._changed:
            self._deadlines.pop(request, None)
            self._changed.notify_all()

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing of a connection that was lost: the terminal belongs to the job."""

    def end(self, deadline: float) -> None:
        """Wait for the connections until a deadline, then close them."""
        self.server_close()
        with self._changed:
            self._changed.wait_for(lambda: not self._deadlines, deadline - time.monotonic())
            left = list(self._deadlines)
        for each in left:
            _end_connection(each)
        with self._changed:
            self._changed.wait_for(lambda: not self._deadlines, _SECONDS)


def _end_connection(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _PageRequest(http.server.BaseHTTPRequestHandler):
    server: _PageHTTPServer
    timeout = _SECONDS
    server_version, sys_version = "unisono", ""

    def do_GET(self) -> None:
        """Answer with the page, its events, or the end of a log."""
        self.server.has_arrived(self.connection)
        page = self.server.page
        if not page.allows(self.headers.get("Host")):
            self._refuse(http.HTTPStatus.FORBIDDEN, "This server answers requests to its own machine alone.")
            return
        url = urllib.parse.urlsplit(self.path)
        _, token, *rest = [*url.path.split("/"), ""]
        if not hmac.compare_digest(token.encode("utf-8", "surrogateescape"), page.token.encode()):
            self._refuse(
                http.HTTPStatus.FORBIDDEN, "The address must have the token that the command has printed."
            )
            return
        match rest[:-1]:
            case [""]:
                self._answer("text/html", make_page("Unisono", {"job": None}).encode())
            case ["events"]:
                self._send_events(page.feed.events(self.headers.get("Last-Event-ID", "")))
            case ["log"]:
                task = urllib.parse.parse_qs(url.query).get("task", [""])[0]
                log = page.log_of(task)
                if log is None:
                    self._refuse(http.HTTPStatus.NOT_FOUND, "There is no such task.")
                else:
                    self._answer("text/plain", log)
            case _:
                self._refuse(http.HTTPStatus.NOT_FOUND, "There is no such page.")

    def _send_events(self, events: Iterator[bytes]) -> None:
        self._begin(http.HTTPStatus.OK, "text/event-stream")
        # A browser that is gone, or takes nothing, ends the loop.
        with contextlib.suppress(OSError), contextlib.closing(events):  # type: ignore[type-var]
            for event in events:
                self.wfile.write(event)

    def _answer(self, kind: str, body: bytes, status: http.HTTPStatus = http.HTTPStatus.OK) -> None:
        with contextlib.suppress(OSError):
            self._begin(status, kind, len(body))
            self.wfile.write(body)

    def _refuse(self, status: http.HTTPStatus, why: str) -> None:
        self._answer("text/plain", why.encode(), status)

    def _begin(self, status: http.HTTPStatus, kind: str, length: int | None = None) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Security-Policy": f"{policy()}; frame-ancestors 'none'",
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Connection": "close",
        }
        if length is not None:
            headers["Content-Length"] = str(length)
        for name, text in headers.items():
            self.send_header(name, text)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Print nothing: the terminal belongs to the job."""
