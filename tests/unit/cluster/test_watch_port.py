"""What a worker's port tells watchers, and that it takes no orders; over real sockets in this process."""

import functools
import json
import os
import time
from types import SimpleNamespace

import pytest
from tests.cluster._workers import free_ports

from unisono._errors import ClusterError
from unisono._system._task_reports import TaskEvents
from unisono.cluster import _watch_port
from unisono.cluster._watch_port import WATCHED, WATCHER, WatchPort, read_watch_keys
from unisono.rpc._calls import ClientId, PeerRejectedError
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op
from unisono.rpc._transport import _local
from unisono.rpc._transport._client import RpcClient
from unisono.rpc._transport._keys import VARIABLE, WATCH_VARIABLES

KEY, OTHER = "5e" * 32, "a7" * 32
LONG = 30.0


@pytest.fixture
def port(tmp_path, monkeypatch):
    """A port that listens on TCP alone, as for another machine; its address and the file of events."""
    monkeypatch.setattr(_watch_port, "process_events", TaskEvents)
    monkeypatch.setattr(_local, "socket_directory", no_directory)
    monkeypatch.setenv("UNISONO_EVENTS", str(tmp_path / "worker-0.jsonl"))
    monkeypatch.setenv("UNISONO_GENERATION", "2")
    monkeypatch.setenv(WATCH_VARIABLES[0], KEY)
    address = f"127.0.0.1:{free_ports(1)[0]}"
    made = WatchPort("worker:0", {"worker:0": address, "worker:1": "h1:2222"})
    made.listen("127.0.0.1")
    yield address, tmp_path / "worker-0.jsonl", made
    made.end(0)


def no_directory(parent=""):
    raise ClusterError("no directory")


@pytest.fixture
def ask(port):
    """Sends a request with a key, and returns the answer or its future."""
    clients = []

    def send(frame, key=KEY):
        keys = read_watch_keys({WATCH_VARIABLES[0]: key}, WATCHER)
        clients.append(RpcClient(WATCHED, port[0], keys, _watch_port.LIMIT))
        return clients[-1].send(frame, LONG)

    yield send
    for client in clients:
        client.close()


def test_the_events_are_read_from_where_the_watcher_is(port, ask):
    _, file, _ = port
    answer = ask(Frame(Op.STATUS, 1, meta={"file": "", "offset": 0})).result(LONG)
    facts = answer.meta
    assert (facts["watch"], facts["tasks"]["worker:1"], facts["pid"]) == ("worker:0", "h1:2222", os.getpid())
    assert (facts["generation"], facts["size"]) == (2, 0)
    assert facts["began"] <= time.time()
    file.write_text('{"a": 1}\n')
    name = ask(Frame(Op.STATUS, 1, meta={"file": "", "offset": 0})).result(LONG).meta["file"]
    for offset, data in ((0, b'{"a": 1}\n'), (3, b'": 1}\n'), (9, b"")):
        answer = ask(Frame(Op.STATUS, 2, meta={"file": name, "offset": offset})).result(LONG)
        assert (answer.meta["offset"], answer.meta["size"]) == (offset, 9)
        assert answer.arrays[0].tobytes() == data
    # Another file than the watcher knows, or a shorter one, is told from its beginning.
    for known in ({"file": "older.jsonl", "offset": 5}, {"file": name, "offset": 50}):
        answer = ask(Frame(Op.STATUS, 3, meta=known)).result(LONG)
        assert (answer.meta["offset"], len(answer.arrays[0])) == (0, 9)
    # So is the next one of the same path, also where it is as long.
    file.with_suffix(".new").write_text('{"b": 2}\n')
    file.with_suffix(".new").replace(file)
    answer = ask(Frame(Op.STATUS, 4, meta={"file": name, "offset": 3})).result(LONG)
    assert (answer.meta["offset"], answer.arrays[0].tobytes()) == (0, b'{"b": 2}\n')
    file.unlink()
    assert "offset" not in ask(Frame(Op.STATUS, 5, meta={"file": name, "offset": 3})).result(LONG).meta


@pytest.mark.parametrize("op", [op for op in Op if op is not Op.STATUS])
def test_a_watcher_gives_no_orders(port, ask, op):
    _, file, _ = port
    file.write_text("events\n")
    answer = ask(Frame(op, 1, meta={"name": "program/x.py", "key": "x", "job": "x"})).result(LONG)
    assert answer.op is Op.ERROR
    assert "`unisono watch` alone" in answer.meta["text"]
    assert file.read_text() == "events\n"


@pytest.mark.parametrize("meta", [{"offset": -1}, {"offset": "x", "until": "end"}, {"offset": 1 << 60}])
def test_a_question_that_cannot_be_answered_is_refused(port, ask, meta):
    assert ask(Frame(Op.STATUS, 1, meta=meta)).result(LONG).op is Op.ERROR


def test_another_key_is_rejected(ask):
    with pytest.raises(PeerRejectedError):
        ask(Frame(Op.STATUS, 1), OTHER).result(LONG)


def test_the_end_is_told_with_the_last_events(port, ask):
    _, file, made = port
    until = ask(Frame(Op.STATUS, 1, meta={"until": "end", "file": "", "offset": 0}))
    ask(Frame(Op.STATUS, 2)).result(LONG)
    assert not until.done()
    file.write_text("last\n")
    deadline = time.monotonic() + LONG
    while not made._waiting and time.monotonic() < deadline:
        time.sleep(0.01)
    made.end(1, "ValueError: no data")
    answer = until.result(LONG)
    assert (answer.meta["exit_code"], answer.meta["text"]) == (1, "ValueError: no data")
    assert answer.arrays[0].tobytes() == b"last\n"
    made.end(0)


def test_who_asks_while_the_port_closes_is_told_the_end(port, monkeypatch):
    _, file, made = port
    file.write_text("last\n")
    late, server = Frame(Op.STATUS, 1, meta={"until": "end", "file": "", "offset": 0}), made._server
    close, answers = server.close, []

    def closes():
        # After those who wait were told.
        answers.append(made._handle(ClientId(b"late"), late))
        close()

    monkeypatch.setattr(server, "close", closes)
    made.end(3, "asked to end")
    assert (answers[0].meta["exit_code"], answers[0].meta["text"]) == (3, "asked to end")
    assert answers[0].arrays[0].tobytes() == b"last\n"


def test_a_program_ends_whose_folder_of_events_was_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(_watch_port, "process_events", functools.cache(TaskEvents))
    environ = {WATCH_VARIABLES[0]: KEY}
    monkeypatch.setattr(_watch_port, "process_environ", lambda: environ)
    made = WatchPort("worker:0", {"worker:0": "h0:2222"})
    made._server = SimpleNamespace(reply=None, close=lambda: None)
    made._file.parent.rmdir()
    made.end(0)
    assert made._server is None


def test_without_a_launcher_the_events_have_a_file_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    first = _watch_port._events_file("h0:2222", 0)
    first.write_text("of generation 0")
    folder = first.parent
    assert folder.parent.stat().st_mode & 0o777 == folder.stat().st_mode & 0o777 == 0o700
    # A supervisor that counts generations restarts the same job.
    assert _watch_port._events_file("h0:2222", 1) == first
    second = _watch_port._events_file("h0:2222", 0)
    assert second != first
    assert not first.exists()
    folder.chmod(0o755)
    with pytest.raises(ClusterError, match="its mode is 0755"):
        _watch_port._events_file("h0:2222", 0)


def test_a_key_for_watching_is_checked_as_others_are(tmp_path, monkeypatch):
    assert read_watch_keys({VARIABLE: KEY}, WATCHED) is None
    with pytest.raises(ClusterError, match=f"Set {WATCH_VARIABLES[0]} to the same 64"):
        read_watch_keys({WATCH_VARIABLES[0]: "short"}, WATCHED)
    file = tmp_path / "watch.key"
    file.write_text(KEY)
    file.chmod(0o644)
    with pytest.raises(ClusterError, match=rf"{WATCH_VARIABLES[1]}=.*mode is 0644"):
        read_watch_keys({WATCH_VARIABLES[1]: str(file)}, WATCHED)
    file.chmod(0o600)
    keys = read_watch_keys({WATCH_VARIABLES[1]: str(file)}, WATCHED)
    assert KEY not in repr(keys)


def test_a_port_that_is_taken_ends_no_training(tmp_path, monkeypatch, caplog, tuned):
    from unisono.rpc._transport import _server

    tuned(_server, _BIND_SECONDS=0.1)
    monkeypatch.setenv("UNISONO_EVENTS", str(tmp_path / "worker-0.jsonl"))
    monkeypatch.setenv(WATCH_VARIABLES[0], KEY)
    with _local.listen("127.0.0.1") as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        made = WatchPort("worker:0", {"worker:0": address})
        made.listen("127.0.0.1")
    assert "cannot be watched" in caplog.text
    made.end(0)
    assert json.dumps(made.facts())
