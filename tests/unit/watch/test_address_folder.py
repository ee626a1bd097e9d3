"""Which job is at an address, and what is said where none is, within a bounded time."""

import socket
import threading
import time

import pytest
from tests.cluster._workers import free_ports
from tests.unit.cluster.test_watch_port import KEY, OTHER, no_directory

from unisono._errors import ClusterError, InvalidArgumentError
from unisono._system._task_reports import TaskEvents
from unisono.cluster import _watch_port
from unisono.cluster._watch_port import WatchPort
from unisono.cluster.liveness._status import WorkerStatus
from unisono.cluster.liveness._status_server import StatusServer
from unisono.rpc._transport import _local
from unisono.rpc._transport._keys import FILE_VARIABLE, VARIABLE, WATCH_VARIABLES
from unisono.watch import _address_folder
from unisono.watch._places import find_job

pytestmark = pytest.mark.usefixtures("no_key")


@pytest.fixture
def no_key(monkeypatch):
    for name in (VARIABLE, FILE_VARIABLE, *WATCH_VARIABLES):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def files(tmp_path):
    """Files with the right key and another one."""
    for name, text in (("right", KEY), ("other", OTHER)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    return tmp_path


@pytest.fixture
def worker(tmp_path, monkeypatch, files):
    """The address of a worker, which is reached by TCP alone."""
    monkeypatch.setattr(_watch_port, "process_events", TaskEvents)
    monkeypatch.setattr(_local, "socket_directory", no_directory)
    monkeypatch.setenv("UNISONO_EVENTS", str(tmp_path / "worker-0.jsonl"))
    monkeypatch.setenv(WATCH_VARIABLES[0], KEY)
    address = f"127.0.0.1:{free_ports(1)[0]}"
    made = WatchPort("worker:0", {"worker:0": address})
    made.listen("127.0.0.1")
    monkeypatch.delenv(WATCH_VARIABLES[0])
    yield address
    made.end(0)


def watch(address, key=None):
    """Find a job, look at it once, and hang up."""
    reader = find_job(address, key)
    try:
        return reader.refresh()
    finally:
        reader.folder.close()


def test_the_key_is_a_file_or_in_the_environment(worker, files, monkeypatch):
    assert [task.name for task in watch(worker, files / "right").tasks] == ["worker:0"]
    monkeypatch.setenv(WATCH_VARIABLES[1], str(files / "right"))
    assert watch(worker).state == "starts"
    # That of the cluster is tried, too, and what is written counts more than the environment.
    monkeypatch.setenv(VARIABLE, OTHER)
    assert watch(worker).state == "starts"
    with pytest.raises(ClusterError, match=r"Received: --key .*other"):
        watch(worker, files / "other")


def test_a_wrong_key_is_said_at_once(worker, files):
    began = time.monotonic()
    with pytest.raises(ClusterError, match=r"The key must belong to the job.*--key .*other.*does not take"):
        watch(worker, files / "other")
    assert time.monotonic() - began < 20


def test_a_key_that_is_no_file_is_said_before_anything_is_asked(tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"must be a file\. Received: --key .*none"):
        find_job("127.0.0.1:1", tmp_path / "none")


def test_another_machine_wants_a_key():
    with pytest.raises(ClusterError, match=r"watched with a key. Received: 10\.0\.0\.1:2222, and no key"):
        find_job("10.0.0.1:2222")


def test_a_port_where_nothing_listens(files, tuned):
    tuned(_address_folder, _FIRST_SECONDS=0.5)
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(ClusterError, match=rf"no answer of {address} within . s \(connection refused\)"):
        find_job(address, files / "right")


def serve(answer):
    """Answer connections with some bytes; return the listening socket."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(1 << 16)
                if answer:
                    connection.sendall(answer)
                else:
                    connection.settimeout(5.0)
                    while connection.recv(1 << 16):
                        pass

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return listener, thread


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00" * 9, b""])
def test_a_port_of_another_program(files, tuned, answer):
    tuned(_address_folder, _FIRST_SECONDS=1.0)
    listener, thread = serve(answer)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    began = time.monotonic()
    with pytest.raises(ClusterError, match=f"{address} within . s .another program listens there"):
        find_job(address, files / "right")
    assert time.monotonic() - began < 20
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def test_the_status_server_of_a_worker_is_no_port_for_watchers(files, tuned):
    """Its secret stays between the workers: one who has it can end the job."""
    tuned(_address_folder, _FIRST_SECONDS=1.0)
    status = WorkerStatus()
    server = StatusServer("127.0.0.1", status, KEY)
    try:
        with pytest.raises(ClusterError, match="if another program listens there"):
            find_job(f"127.0.0.1:{server.port}", files / "right")
    finally:
        server.close()
    assert not status.abort_reason


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "h0:22,127.0.0.1:0"])
def test_what_is_no_address_is_said_at_once(files, address):
    with pytest.raises(InvalidArgumentError, match="must be HOST:PORT"):
        find_job(address, None)


@pytest.mark.parametrize("where", [None, "logs", "train.py", "k8s:train"])
def test_a_key_belongs_to_an_address(files, where):
    with pytest.raises(InvalidArgumentError, match="`--key` belongs to the address"):
        find_job(where, files / "right")
