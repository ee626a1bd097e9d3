"""A rendezvous over real sockets: of threads of this process, or small processes without JAX.

What must not take long is waited for, and the time for all to come is far longer than that wait.
"""

import concurrent.futures
import contextlib
import errno
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest

from tests.cluster._workers import free_ports
from unisono._errors import ClusterError, InvalidArgumentError
from unisono.cluster.rendezvous import _addresses, _client, _protocol
from unisono.cluster.rendezvous._client import RendezvousResult, rendezvous
from unisono.cluster.rendezvous._server import RendezvousServer
from unisono.cluster_resolver._spec import Timeouts

CONFIG = {"jax": "0.10.2", "program": "abc", "devices": 2, "generation": 3, "float64": False}
#: Seconds for whatever a test waits for.
LIMIT = 60.0
#: The time for all to come, where nothing may take as long.
LONG = 2 * LIMIT


def addresses(count, host="127.0.0.1"):
    """Free ports, which no two of them share."""
    return [f"{host}:{port}" for port in free_ports(count, host.strip("[]"))]


def port_of(address):
    return int(address.rpartition(":")[2])


class Cluster:
    """Calls of `rendezvous` in threads."""

    def __init__(self, count, start_up=LONG, host="127.0.0.1"):
        self.addresses = addresses(count, host)
        self.count = count
        self.timeouts = Timeouts(start_up=start_up)
        self.pool = concurrent.futures.ThreadPoolExecutor(16)
        self.began = time.monotonic()

    def start(self, process, **config):
        """A process that begins the rendezvous; its configuration is the usual one but for these values."""
        config = {k: v for k, v in {**CONFIG, **config}.items() if v is not ...}
        args = (process, self.count, self.addresses, config, self.timeouts)
        return self.pool.submit(rendezvous, *args)

    def connect(self):
        """A connection to process 0, as soon as it listens."""
        until = time.monotonic() + LIMIT
        while True:
            try:
                sock = socket.create_connection(("127.0.0.1", port_of(self.addresses[0])), LIMIT)
            except ConnectionRefusedError:
                assert time.monotonic() < until
                time.sleep(0.01)
                continue
            if sock.getsockname() != sock.getpeername():
                return sock
            sock.close()

    def hello(self, process, token, **config):
        config = {**CONFIG, "num_processes": self.count, **config}
        return _protocol.frame(_protocol.hello(_protocol.Member(process, "hostX", 77, token, config)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.pool.shutdown()


def messages(*futures):
    """The errors that processes raised."""
    return [str(future.exception(timeout=LIMIT)) for future in futures]


def agreements(*futures):
    return [future.result(timeout=LIMIT) for future in futures]


def answer(sock):
    """All that process 0 says until it closes."""
    sock.settimeout(LIMIT)
    inbox, found = bytearray(), []
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(1 << 16):
            inbox += data
            while inbox and (message := _protocol.take_frame(inbox)):
                found.append(message)
    return found


def sockets():
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(link for link in links if link.startswith(("socket:", "anon_inode:[eventpoll]")))


@pytest.fixture
def wait_for_hellos(monkeypatch):
    """Waits until some number of processes have sent a hello to process 0, or to several of that number."""
    admit, admitted = _protocol.admit, threading.Semaphore(0)

    def noting(state, member):
        admission = admit(state, member)
        admitted.release()
        return admission

    def wait(count):
        for _ in range(count):
            assert admitted.acquire(timeout=LIMIT)

    monkeypatch.setattr(_protocol, "admit", noting)
    return wait


@pytest.fixture(autouse=True)
def no_socket_or_thread_is_left():
    before = (sockets(), set(threading.enumerate())) if sys.platform == "linux" else ([], set())
    yield
    if sys.platform == "linux":
        if sockets() != before[0]:
            # An error's traceback may hold, in a circle, a socket of the test's own.
            gc.collect()
        assert sockets() == before[0]
        assert set(threading.enumerate()) <= before[1]


# --- all is well


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_all_arrive(count, host):
    with Cluster(count, host=host) as cluster:
        found = agreements(*[cluster.start(i) for i in range(count)])
    coordinator = found[0].coordinator
    assert coordinator == cluster.addresses[0]
    for agreement in found[1:]:
        assert agreement == RendezvousResult(coordinator, "", (), found[0].secret, reached=found[0].reached)
    ip, _, port = found[0].bind.rpartition(":")
    assert ip in ("127.0.0.1", "[::1]")
    assert ip.strip("[]") == found[0].reached
    with socket.create_server((found[0].reached, int(port)), family=socket.AF_INET6 if ":" in ip else 2):
        pass


def test_only_the_address_of_process_0_is_known():
    with Cluster(2, start_up=1.0) as cluster:
        cluster.addresses = cluster.addresses[:1] * 2
        (text,) = messages(cluster.start(0))
    assert text.count(cluster.addresses[0]) == 1
    assert "missing: process 1\n" in text


def test_process_0_is_late():
    with Cluster(3) as cluster:
        others = [cluster.start(1), cluster.start(2)]
        time.sleep(1.0)
        found = agreements(cluster.start(0), *others)
    assert len({a.coordinator for a in found}) == 1


def test_a_second_rendezvous_at_the_same_port():
    with Cluster(2) as cluster:
        for _ in range(3):
            agreements(cluster.start(0), cluster.start(1))


def test_the_listener_is_closed_before_any_process_starts():
    """A process that starts JAX at once must not reach the rendezvous at process 0's port."""
    with Cluster(2) as cluster:
        first = cluster.start(0)
        with cluster.connect() as sock:
            sock.sendall(cluster.hello(1, "t"))
            assert answer(sock)[-1]["kind"] == "start"
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port_of(cluster.addresses[0])), 5).close()
        agreements(first)


def test_a_name_that_is_another_machines(monkeypatch):
    """Behind a service's name process 0 listens everywhere, and JAX takes over the port that is forwarded."""
    resolve = _addresses.resolve
    monkeypatch.setattr(
        _addresses, "resolve", lambda host: ["192.0.2.7"] if host == "service" else resolve(host)
    )
    connect = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda a, *args: connect(("127.0.0.1", a[1]), *args))
    with Cluster(2) as cluster:
        cluster.addresses[0] = f"service:{port_of(cluster.addresses[0])}"
        found = agreements(cluster.start(0), cluster.start(1))
    assert {a.coordinator for a in found} == {cluster.addresses[0]}
    # Where the other has arrived, and not on all interfaces.
    assert found[0].bind == f"127.0.0.1:{port_of(cluster.addresses[0])}"


# --- somebody is missing


def test_one_is_missing(monkeypatch, caplog, wait_for_hellos):
    with Cluster(3, start_up=2.5) as cluster:
        futures = [cluster.start(0), cluster.start(1)]
        wait_for_hellos(1)
        monkeypatch.setattr(_protocol, "REMIND_SECONDS", 0.0)
        texts = messages(*futures)
    assert time.monotonic() - cluster.began > 2.4
    assert texts[0] == texts[1]
    where, here = cluster.addresses, f"(host {socket.gethostname()}, pid {os.getpid()})"
    for words in (
        "within 2.5 s. Received:",
        f"connected: process 0 at {where[0]} {here}",
        f"connected: process 1 at {where[1]} {here}",
        f"missing: process 2 at {where[2]}\n",
        "Timeouts(start_up=6)",
    ):
        assert words in texts[0]
    reminder = f"waits for all processes to connect; missing: process 2 at {where[2]}"
    said = sorted(r.message for r in caplog.records if reminder in r.message)
    assert said == [f"Process {n} {reminder}" for n in (0, 1)]


def test_a_process_says_once_that_it_does_not_reach_process_0(monkeypatch, caplog):
    monkeypatch.setattr(_protocol, "REMIND_SECONDS", 0.0)
    with Cluster(2, start_up=2.0) as cluster:
        messages(cluster.start(1))
    said = [r.message for r in caplog.records if "Waiting for process 0" in r.message]
    assert len(said) == 1
    assert f"{cluster.addresses[0]} cannot be reached (connection refused)" in said[0]


def test_an_unknown_name_of_process_0_is_said_at_once(caplog):
    with Cluster(2, start_up=1.0) as cluster:
        cluster.addresses[0] = f"no-such-host.invalid:{port_of(cluster.addresses[0])}"
        messages(cluster.start(1))
    assert [r for r in caplog.records if "(name not known)" in r.message]


def test_process_0_says_at_once_which_names_it_does_not_know_and_the_others_read_it(caplog, monkeypatch):
    monkeypatch.setattr(_addresses, "resolve", unknown_if_invalid)
    with Cluster(3, start_up=2.0) as cluster:
        cluster.addresses[2] = f"host7.invalid:{port_of(cluster.addresses[2])}"
        texts = messages(cluster.start(0), cluster.start(1))
    said = [r.message for r in caplog.records if "The name 'host7.invalid' of a host" in r.message]
    assert len(said) == 1
    missing = (
        f"missing: process 2 at {cluster.addresses[2]}, a name that the machine of process 0 does not know"
    )
    assert all(missing in text for text in texts)


def unknown_if_invalid(host):
    """Resolve a name; those that end in `.invalid` are unknown at once, whatever DNS there is."""
    if host.endswith(".invalid"):
        raise socket.gaierror(socket.EAI_NONAME, "not known")
    return [host]


def test_process_0_waits_longer_than_the_others(monkeypatch):
    """A process whose time is over names the missing ones itself."""
    monkeypatch.setattr(_protocol, "GRACE_SECONDS", 0.5)
    with Cluster(3) as cluster:
        first = cluster.start(0)
        patient, cluster.timeouts = cluster.timeouts, Timeouts(start_up=2.0)
        (text,) = messages(cluster.start(1))
        assert f"missing: process 2 at {cluster.addresses[2]}" in text
        assert not first.done()
        cluster.timeouts = patient
        agreements(first, cluster.start(1), cluster.start(2))


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("127.0.0.1", "connection refused"),
        ("[::1]", "connection refused"),
        ("no.such.invalid", "name not known"),
    ],
)
def test_process_0_is_missing(host, words):
    (address,) = addresses(1, "127.0.0.1" if "invalid" in host else host)
    address = f"{host}:{port_of(address)}"
    began = time.monotonic()
    with pytest.raises(ClusterError, match=r"must answer at its address within 1 s") as error:
        rendezvous(1, 2, [address, "b:2"], CONFIG, Timeouts(start_up=1.0))
    assert f"cannot reach {address}: {words} (" in str(error.value)
    assert time.monotonic() - began > 0.9


@pytest.mark.parametrize(
    ("sends", "words"),
    [
        (b"", "does not answer as process 0"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "another program answers there: it sent b'HTTP/1.1 400"),
        (_protocol.frame({"kind": "roster", "roster": 5}), "its message has no roster"),
        (_protocol.frame({"kind": "start"}), "its message has no hosts"),
    ],
    ids=["silent", "web", "roster", "start"],
)
def test_something_else_listens_at_process_0s_port(monkeypatch, sends, words):
    if sends:
        # The last attempt has time to hear it, however busy the machine is.
        monkeypatch.setattr(_client, "_LEAST_SECONDS", LIMIT)
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    sock = stack.enter_context(server.accept()[0])
                    sock.sendall(sends)

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        try:
            with pytest.raises(ClusterError) as error:
                rendezvous(1, 2, [address, "b:2"], CONFIG, Timeouts(start_up=1.0))
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
    assert words in str(error.value)


def test_process_0_of_another_version():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            guest = pool.submit(rendezvous, 1, 2, [address, "b:2"], CONFIG, Timeouts())
            with server.accept()[0] as sock:
                sock.sendall(struct.pack(">4sHI", b"UNIM", 9, 5) + b"later")
                (text,) = messages(guest)
    assert (
        f"version 9 of the protocol, this process version {_protocol.VERSION}. Install one version of unisono"
        in text
    )


@pytest.mark.parametrize(
    ("absent", "words"),
    [([], "Process 0 must send what it decides within 0.5 s"), (["missing: process 2"], "must connect")],
)
def test_process_0_is_silent_after_its_roster(absent, words, monkeypatch):
    monkeypatch.setattr(_protocol, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(_client, "_LEAST_SECONDS", LIMIT)
    roster = ["connected: process 0", "connected: process 1", *absent]
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            guest = pool.submit(rendezvous, 1, 2, [address, "b:2"], CONFIG, Timeouts(start_up=0.3))
            with server.accept()[0] as sock:
                sock.sendall(_protocol.frame({"kind": "roster", "roster": roster}))
                (text,) = messages(guest)
    assert text.startswith(("All processes of a cluster", "Process 0"))
    assert words in text
    assert "connected: process 1" in text


def test_an_older_process_0_says_why_it_ends_where_several_newer_ones_arrive_at_once():
    own = _protocol.Member(0, "hostX", 77, "zero", {"generation": 1})
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        state = _protocol.open_rendezvous(own, 3, ["127.0.0.1:1"], LIMIT, time.monotonic())
        server = stack.enter_context(RendezvousServer(listener, state))
        for process in (1, 2):
            newer = _protocol.Member(process, "hostX", 78, f"token{process}", {"generation": 2})
            sock = stack.enter_context(socket.create_connection(listener.getsockname()))
            sock.sendall(_protocol.frame(_protocol.hello(newer)))
        with pytest.raises(ClusterError, match="of generation 1, the cluster is at 2"):
            server.run({})


# --- somebody differs


@pytest.mark.parametrize("fact", [*CONFIG.keys() - {"generation"}, "new"])
def test_a_fact_differs(fact):
    with Cluster(3) as cluster:
        values = ["other" if i == 1 else CONFIG.get(fact, "usual") for i in range(3)]
        futures = [cluster.start(i, **{fact: values[i]}) for i in range(3)]
        texts = messages(*futures)
    assert len(set(texts)) == 1
    assert f"{fact} is {values[0]!r} on processes 0 and 2, but 'other' on process 1" in texts[0]


def test_the_number_of_processes_differs():
    with Cluster(3) as cluster:
        first, second = cluster.start(0), cluster.start(1)
        cluster.count = 4
        cluster.addresses.append("127.0.0.1:9")
        texts = messages(first, second, cluster.start(2))
    assert all("num_processes is 3 on processes 0 and 1, but 4 on process 2" in text for text in texts)


# --- somebody is wrong


def test_a_number_twice():
    with Cluster(3) as cluster:
        first, twins = cluster.start(0), [cluster.start(1), cluster.start(1)]
        (rejected,), (stays,) = concurrent.futures.wait(twins, LIMIT, concurrent.futures.FIRST_COMPLETED)
        assert "Received: process 1 twice" in messages(rejected)[0]
        found = agreements(first, stays, cluster.start(2))
    assert len({a.coordinator for a in found}) == 1


def test_a_number_twice_is_told_when_another_is_missing():
    with Cluster(3, start_up=3.0) as cluster:
        texts = messages(cluster.start(0), cluster.start(1), cluster.start(1))
    ours = [text for text in texts if "within 3 s" in text]
    assert len(ours) == 2
    assert all("missing: process 2" in text and "Received: process 1 twice" in text for text in ours)


@pytest.mark.parametrize("process", [-1, 2, 10**6])
def test_a_number_out_of_range(process):
    with Cluster(2) as cluster:
        first = cluster.start(0)
        with cluster.connect() as sock:
            sock.sendall(cluster.hello(process, "t"))
            (said,) = answer(sock)
        assert "from 0 to 1 in a cluster of 2" in said["reason"]
        agreements(first, cluster.start(1))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        bytes(range(255, 0, -1)) * 1000,
        struct.pack(">4sHI", b"UNIM", _protocol.VERSION, 0xFFFFFFFF) + b"x" * 100_000,
        struct.pack(">4sHI", b"UNIM", _protocol.VERSION, 4) + b"\x80\x04N.",
        _protocol.frame({"kind": "start", "coordinator": "evil:1", "hosts": []}),
    ],
)
def test_unknown_peers(data, caplog):
    with Cluster(2) as cluster:
        first = cluster.start(0)
        with cluster.connect() as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(data)
            assert answer(sock) == []
        agreements(first, cluster.start(1))
    assert len([r for r in caplog.records if "rejected a connection" in r.message]) == 1


def test_unknown_peers_of_another_version_are_told():
    with Cluster(2) as cluster:
        first = cluster.start(0)
        with cluster.connect() as sock:
            sock.sendall(struct.pack(">4sHI", b"UNIM", 9, 100_000) + b"x" * 100_000)
            (said,) = answer(sock)
        assert (
            f"it uses version 9 of the protocol, this process version {_protocol.VERSION}" in said["reason"]
        )
        agreements(first, cluster.start(1))


def test_unknown_peers_that_are_slow(monkeypatch, caplog):
    monkeypatch.setattr("unisono.cluster.rendezvous._server._HELLO_SECONDS", 0.5)
    with Cluster(2) as cluster:
        first = cluster.start(0)
        with cluster.connect() as silent, cluster.connect() as slow:
            with contextlib.suppress(ConnectionError):
                for byte in cluster.hello(1, "t")[:60]:
                    slow.sendall(bytes([byte]))
                    time.sleep(0.05)
            assert answer(slow) == answer(silent) == []
        monkeypatch.setattr("unisono.cluster.rendezvous._server._HELLO_SECONDS", LIMIT)
        agreements(first, cluster.start(1))
    assert len([r for r in caplog.records if "sent no hello within" in r.message]) == 2


def test_unknown_peers_do_not_use_up_the_places(monkeypatch):
    monkeypatch.setattr("unisono.cluster.rendezvous._server._UNKNOWN_PEERS", 8)
    with Cluster(2) as cluster, contextlib.ExitStack() as stack:
        first = cluster.start(0)
        crowd = [stack.enter_context(cluster.connect()) for _ in range(40)]
        agreements(first, cluster.start(1))
        assert all(answer(sock) == [] for sock in crowd)


def test_a_process_that_does_not_read_holds_nobody_up(monkeypatch):
    monkeypatch.setattr("unisono.cluster.rendezvous._server._DRAIN_SECONDS", 0.5)
    with Cluster(3) as cluster:
        first = cluster.start(0)
        with cluster.connect() as sock:
            sock.sendall(cluster.hello(1, "t"))
            agreements(first, cluster.start(2))


# --- somebody goes


def test_who_goes_before_the_verdict_is_named(caplog):
    with Cluster(3, start_up=3.0) as cluster:
        first = cluster.start(0)
        with cluster.connect() as sock:
            sock.sendall(cluster.hello(1, "t"))
            assert sock.recv(1 << 16)
        texts = messages(first, cluster.start(2))
    went = f"missing: process 1 at {cluster.addresses[1]}, which connected (host hostX, pid 77), and ended"
    assert all(went in text for text in texts)
    assert any("Process 1 (host hostX, pid 77) disconnected before" in r.message for r in caplog.records)


def test_who_goes_may_be_replaced():
    with Cluster(3) as cluster:
        first = cluster.start(0)
        for reset in (0, 1):
            with cluster.connect() as sock:
                sock.sendall(cluster.hello(1, f"t{reset}", jax="other"))
                assert sock.recv(1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", reset, 0))
        # The configurations of those that disconnected are forgotten.
        agreements(first, cluster.start(1), cluster.start(2))


PROGRAM = """
import json, sys
from unisono.cluster.rendezvous._client import rendezvous
from unisono.cluster_resolver._spec import Timeouts
process, count, addresses, config, start_up = json.loads(sys.argv[1])
try:
    found = rendezvous(process, count, addresses, config, Timeouts(start_up=start_up))
    print(found.coordinator)
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"jax" in sys.modules and sys.exit("JAX was imported")
"""


def process(*args):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )


def test_real_processes_one_killed_and_replaced():
    where = addresses(3)
    started = [process(i, 3, where, CONFIG, LONG) for i in (0, 1)]
    try:
        time.sleep(1.0)
        started[1].send_signal(signal.SIGKILL)
        started[1].communicate()
        del started[1]
        started += [process(i, 3, where, CONFIG, LONG) for i in (1, 2)]
        results = [(*p.communicate(timeout=LIMIT), p.returncode) for p in started]
    finally:
        for p in started:
            p.kill()
            p.communicate()
    assert [code for *_, code in results] == [0, 0, 0], results
    assert len({out for out, *_ in results}) == 1


# --- generations


def test_an_older_process_is_fenced():
    with Cluster(3) as cluster:
        first = cluster.start(0, generation=4)
        time.sleep(0.3)
        (text,) = messages(cluster.start(1, generation=3))
        assert "this process is of generation 3, the cluster is at 4. End this process" in text
        assert not first.done()
        agreements(first, *[cluster.start(i, generation=4) for i in (1, 2)])


def test_older_processes_are_fenced_when_a_newer_comes(wait_for_hellos):
    """Also process 0: the newer one waits for the right one, which listens at the same port."""
    with Cluster(3) as cluster:
        older = [cluster.start(i, generation=3) for i in (0, 1)]
        wait_for_hellos(1)
        newer = cluster.start(2, generation=4)
        for text in messages(*older):
            assert "this process is of generation 3, the cluster is at 4" in text
        assert not newer.done()
        found = agreements(newer, *[cluster.start(i, generation=4) for i in (0, 1)])
    assert len({a.coordinator for a in found}) == 1


# --- process 0 cannot listen


def test_the_address_is_in_use():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ClusterError, match="must be able to listen on port") as error:
            rendezvous(0, 2, [f"127.0.0.1:{port}", "b:2"], CONFIG, Timeouts(start_up=0.5))
    text = str(error.value)
    assert f"Received: 127.0.0.1:{port}: {os.strerror(errno.EADDRINUSE).lower()}" in text
    assert "another free port" in text
    assert "TF_CONFIG" in text


def test_an_address_in_use_may_become_free(monkeypatch):
    monkeypatch.setattr(_client, "_BIND_SECONDS", LONG)
    with Cluster(2) as cluster:
        with socket.create_server(("127.0.0.1", port_of(cluster.addresses[0]))):
            first = cluster.start(0)
            time.sleep(0.3)
        agreements(first, cluster.start(1))


def test_the_address_is_another_machines():
    with pytest.raises(ClusterError, match=r"has no interface 192\.0\.2\.7") as error:
        rendezvous(0, 2, ["192.0.2.7:4711", "b:2"], CONFIG, Timeouts(start_up=1.0))
    assert "Process 0 must run on the machine of its address" in str(error.value)


# --- arguments


@pytest.mark.parametrize(
    ("process_id", "count", "where", "words"),
    [
        (2, 2, ["a:1", "b:2"], "process_id=2 of 2"),
        (-1, 2, ["a:1", "b:2"], "process_id=-1 of 2"),
        (0, 0, [], "num_processes=0"),
        (0, 2, [], "address_of=[]"),
        (0, 2, "a:1", "address_of='a:1'"),
        (0, 1, ["a:1", "b:2"], "for 1 processes"),
        (0, 2, ["a:1", "b"], "'b': it has no port"),
    ],
)
def test_arguments_are_checked(process_id, count, where, words):
    with pytest.raises(InvalidArgumentError) as error:
        rendezvous(process_id, count, where, CONFIG, Timeouts())
    assert words in str(error.value)


def test_a_configuration_is_checked_before_anything_is_opened():
    with pytest.raises(InvalidArgumentError, match="must fit into"):
        rendezvous(1, 2, ["a:1", "b:2"], {"a": "x" * (1 << 20)}, Timeouts())
