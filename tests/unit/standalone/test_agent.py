"""A server without sockets, with processes that do as they are told; the client's link over a loopback."""

import errno
import io
import json
import os
import platform
import signal
import threading
import time
from unittest.mock import Mock

import pytest

import unisono
from unisono.cluster_resolver._spec import Task
from unisono.rpc._calls import ClientId
from unisono.rpc._frames import Frame, blob
from unisono.rpc._loopback import LoopbackNetwork
from unisono.rpc._ops import Op
from unisono.rpc._versions import installed
from unisono.standalone._agent import Agent
from unisono.standalone._client import check_versions
from unisono.standalone._link import Claim, RequestRefusedError, ServerInfo, ServerLink
from unisono.standalone._protocol import SERVER
from unisono.standalone._remote_process import LocalCopies, RemoteProcess

ME = ClientId(b"1")
SHAPE = {"tasks": 1, "devices": None, "ps": False}
JOB = {"generation": 0, "shape": SHAPE, "description": {}}


class Process:
    """A process that ends when a test says so."""

    warm, loss, kept = False, "", None

    def __init__(self, pid, log):
        self.pid, self.log, self.code, self.ended_at, self.signals, self.job = pid, log, None, None, [], None

    def assign(self, job):
        self.job = job
        return True

    def poll(self):
        return self.code

    def send(self, number):
        self.signals.append(number)

    def kill(self):
        if self.code is None:
            self.end(137)

    def end(self, code):
        self.code, self.ended_at = code, time.time()


class Machine:
    """A machine without processes of the system."""

    cores, gpus = 4, ("0", "1")

    def __init__(self, root):
        self.root, self.processes, self.sweeps = root, [], 0

    def job_directory(self, job):
        path = self.root / job
        path.mkdir(exist_ok=True)
        return path

    def ports(self, count, avoid):
        return list(range(1000, 1000 + count))

    def claim_spare(self, shape):
        return None

    def start(self, shape, log):
        self.processes.append(Process(100 + len(self.processes), log))
        return self.processes[-1]

    def sweep(self):
        self.sweeps += 1
        return set()

    def close(self):
        pass


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def run(self, seconds, agent):
        """Let time pass as it does in a server that looks around 50 times a second."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.5
            agent.tick()


class Server:
    """An agent, and what it answers."""

    def __init__(self, root):
        self.machine, self.clock, self.answers = Machine(root), Clock(), {}
        self.agent = Agent("a:1", self.machine, self._reply, self.clock)
        self.numbers = iter(range(1, 10_000))

    def _reply(self, client, answer):
        self.answers[answer.request] = answer

    def ask(self, op, meta, arrays=(), job="one"):
        frame = Frame(op, next(self.numbers), 0, {"job": job, **meta}, arrays)
        answer = self.agent.handle(ME, frame)
        if answer is None:
            deadline = time.monotonic() + 30
            while frame.request not in self.answers and time.monotonic() < deadline:
                if op is Op.POLL:
                    self.clock.run(0.5, self.agent)
                else:
                    time.sleep(0.005)
            answer = self.answers[frame.request]
        return answer

    def hello(self, job="one", lease=10.0):
        return self.ask(Op.HELLO, {"client": f"client of {job}", "lease": lease}, job=job)

    def start(self, key="k", task="worker:0", generation=0, job="one"):
        meta = {
            "key": key,
            "task": task,
            "generation": generation,
            "shape": SHAPE,
            "description": {"kind": "call"},
        }
        return self.ask(Op.START, meta, job=job)


@pytest.fixture
def server(tmp_path):
    return Server(tmp_path)


def test_the_first_message_takes_the_server(server):
    told = server.hello().meta
    assert (told["fresh"], told["cores"], told["gpus"]) == (True, 4, ["0", "1"])
    assert not server.hello().meta["fresh"]
    refused = server.hello("two")
    assert refused.op is Op.ERROR
    assert refused.meta["kind"] == "ServerBusyError"
    assert "client of one" in refused.meta["text"]


def test_nothing_is_done_for_others(server):
    server.hello()
    for op in (Op.PUT, Op.GET, Op.START, Op.SIGNAL, Op.PORTS, Op.SWEEP, Op.END, Op.POLL):
        assert server.agent.handle(ME, Frame(op, 1, 0, {"job": "two"})).op is Op.ERROR
        assert server.agent.handle(ME, Frame(op, 1, 0, {})).op is Op.ERROR
    assert server.agent.handle(ME, Frame(Op.PUSH, 1, 0, {"job": "one"})).op is Op.ERROR
    assert server.machine.processes == []


@pytest.mark.parametrize("job", ["../up", "a/b", "", "a" * 101, 5])
def test_the_name_of_a_job_is_no_path(server, job):
    assert server.hello(job).op is Op.ERROR


def test_files_arrive_in_parts_and_are_read_in_parts(server):
    server.hello()
    for offset, part in ((0, b"abc"), (3, b"def"), (3, b"def")):
        assert server.ask(Op.PUT, {"name": "d/f", "offset": offset, "size": 6}, [blob(part)]).op is Op.OK
    answer = server.ask(Op.GET, {"name": "d/f", "offset": 4})
    assert (answer.meta["size"], answer.arrays[0].tobytes()) == (6, b"ef")
    assert server.ask(Op.GET, {"name": "absent", "offset": 0}).op is Op.ERROR
    assert server.ask(Op.PUT, {"name": "../f", "offset": 0, "size": 1}, [blob(b"x")]).op is Op.ERROR
    assert (server.machine.root / "one" / "d" / "f").stat().st_mode & 0o777 == 0o600


def test_a_repeated_start_starts_one_process(server):
    server.hello()
    assert server.start().meta == server.start().meta == {"pid": 100}
    (process,) = server.machine.processes
    assert process.job["kind"] == "call"
    assert process.job["log"] == str(process.log)
    assert (server.machine.root / "one" / "fence").read_text() == "0\n"


def test_what_is_new_and_the_end_after_all_output(server):
    server.hello()
    server.start()
    (process,) = server.machine.processes
    process.log.write_bytes(b"x" * ((1 << 20) + 5))
    process.end(3)
    first = server.ask(Op.POLL, {"seen": {"k": [0, ""]}})
    entry = first.meta["news"]["k"]
    assert (entry["offset"], "code" in entry) == (1 << 20, False)
    rest = server.ask(Op.POLL, {"seen": {"k": [1 << 20, ""]}})
    entry = rest.meta["news"]["k"]
    assert (rest.arrays[entry["log"]].tobytes(), entry["code"]) == (b"xxxxx", 3)


def test_without_news_a_poll_is_answered_after_a_second(server):
    server.hello()
    assert server.ask(Op.POLL, {"seen": {}}).meta["news"] == {}
    assert server.clock.now >= 1.0


def test_a_silent_client_loses_its_processes(server):
    server.hello(lease=10.0)
    server.start()
    (process,) = server.machine.processes
    server.clock.run(9.0, server.agent)
    assert process.signals == []
    server.clock.run(2.0, server.agent)
    assert process.signals == [signal.SIGTERM]
    assert server.hello("two").meta["kind"] == "ServerBusyError"
    server.clock.run(4.0, server.agent)
    assert (process.code, server.machine.sweeps) == (137, 1)
    assert server.hello("two").meta["fresh"]


def test_a_server_that_stood_still_does_not_blame_its_client(server):
    server.hello(lease=10.0)
    server.agent.tick()
    server.clock.now += 3600.0
    server.agent.tick()
    assert server.ask(Op.PORTS, {"count": 2, "avoid": []}).meta["ports"] == [1000, 1001]


def test_the_end_of_a_job(server):
    server.hello()
    server.start()
    assert server.ask(Op.END, {}).op is Op.OK
    assert server.machine.processes[0].code == 137
    assert not (server.machine.root / "one").exists()
    assert server.hello().op is Op.ERROR
    assert server.hello("two").meta["fresh"]


def test_status_is_told_to_all(server):
    server.hello()
    server.start()
    told = server.agent.handle(ME, Frame(Op.STATUS, 1)).meta
    assert (told["client"], told["processes"], told["counts"]["HELLO"]) == ("client of one", 1, 1)


# --- the client's link


class Linked:
    """A link and its server over a loopback, which loses what a test wants."""

    def __init__(self, root):
        (root / "server").mkdir()
        (root / "client").mkdir()
        self.root, self.machine = root / "client", Machine(root / "server")
        self.network, self.prepared = LoopbackNetwork(), []
        self.serve()
        rpc_client = self.network.rpc_client(SERVER, "a:1")
        # How often the system says that nothing listens.
        self.refusals, claim = 0, Claim("one", "me", 10.0)
        self.link = ServerLink(
            "a:1", rpc_client, claim, self.prepared.append, lambda: None, lambda address: self._refuses()
        )

    def _refuses(self):
        self.refusals -= 1
        return self.refusals >= 0

    def serve(self):
        self.rpc_server = self.network.rpc_server("a:1", lambda c, f: self.agent.handle(c, f))
        self.agent = Agent("a:1", self.machine, self.rpc_server.reply)
        self.rpc_server.start()

    def connect_again(self):
        self.rpc_server = self.network.rpc_server("a:1", self.agent.handle)
        self.agent._reply = self.rpc_server.reply
        self.rpc_server.start()

    def new_process(self):
        copies = LocalCopies(*(self.root / name for name in ("log", "error", "progress", "result")))
        return RemoteProcess("k", Task("worker", 0), self.link, copies, lambda: None)

    def process(self):
        process = self.new_process()
        assert process.assign(JOB)
        return process

    def until(self, condition):
        deadline = time.monotonic() + 30
        while not condition() and time.monotonic() < deadline:
            self.agent.tick()
            time.sleep(0.01)
        assert condition()

    def close(self):
        self.link.close()
        self.rpc_server.close()


@pytest.fixture
def linked(tmp_path):
    made = Linked(tmp_path)
    made.link.claim(10.0)
    yield made
    made.close()


def test_output_result_and_end_are_copied(linked):
    process = linked.process()
    (there,) = linked.machine.processes
    there.log.write_bytes(b"hello")
    (linked.machine.root / "one" / "result").write_bytes(b"r" * (5 << 20))
    there.end(0)
    linked.until(lambda: process.poll() is not None)
    assert (process.poll(), process.copies.log.read_bytes()) == (0, b"hello")
    assert process.copies.result.stat().st_size == 5 << 20


class FullDisk:
    """The client's disk: what is written there is refused while it is full."""

    def __init__(self, patches):
        self.is_full, self._open = True, io.open
        patches.setattr(io, "open", self._opened)

    def _opened(self, path, mode="r", *args, **options):
        if self.is_full and "/client/" in str(path) and set(mode) & set("wa+"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return self._open(path, mode, *args, **options)


def raised(summary):
    return json.dumps({"at": 1.0, "code": 1, "summary": summary, "traceback": f"Traceback: {summary}"})


@pytest.mark.parametrize("has_room_later", [False, True])
def test_a_client_with_a_full_disk_loses_output_and_no_process(linked, monkeypatch, caplog, has_room_later):
    disk, process = FullDisk(monkeypatch), linked.process()
    (there,) = linked.machine.processes
    there.log.write_bytes(b"first\n")
    (linked.machine.root / "one" / "progress" / "g0-worker-0").write_text("step 3\n")
    linked.until(lambda: process.offset == 6)
    disk.is_full = not has_room_later
    with there.log.open("ab") as file:
        file.write(b"second\n")
    error = linked.machine.root / "one" / "errors" / "g0-worker-0.json"
    error.write_text(raised("ValueError: data"))
    there.end(1)
    linked.until(lambda: process.poll() is not None)
    assert (process.poll(), process.loss, linked.link.losses) == (1, "", set())
    assert caplog.text.count("No space left on device") == 1
    unwritten = "first" if has_room_later else "first\nsecond"
    assert process.kept.last_lines() == unwritten
    if has_room_later:
        assert process.copies.log.read_bytes() == b"second\n"
        assert process.copies.error.exists()
    else:
        assert process.kept.error["summary"] == "ValueError: data"


def test_a_result_that_the_clients_disk_does_not_take_is_an_error_that_names_the_disk(linked, monkeypatch):
    process = linked.process()
    FullDisk(monkeypatch)
    (there,) = linked.machine.processes
    (linked.machine.root / "one" / "result").write_bytes(b"r")
    there.end(0)
    linked.until(lambda: process.poll() is not None)
    assert process.poll() == 1
    assert process.loss.startswith("has returned, and its result cannot be kept on this machine: [Errno 28]")
    assert str(linked.root) in process.loss
    # It is no reason to start the task again on its server.
    assert linked.link.losses == set()


def test_an_answer_that_cannot_be_read_costs_the_server(linked, monkeypatch):
    process = linked.process()
    monkeypatch.setattr(linked.link, "_apply", lambda *_: {}["code"])
    linked.machine.processes[0].end(0)
    linked.until(lambda: process.poll() is not None)
    assert process.loss == "lost its server a:1: its answer could not be read ('code')"


def test_a_server_that_was_started_again_has_lost_its_processes(linked):
    process = linked.process()
    linked.rpc_server.close()
    linked.serve()
    linked.until(lambda: process.poll() is not None)
    assert process.loss == "lost its server a:1: it was started again"
    linked.until(lambda: linked.link.is_live)
    assert len(linked.prepared) == 2


def test_a_lost_connection_to_the_same_server_loses_nothing(linked):
    process = linked.process()
    linked.refusals = 2
    linked.rpc_server.close()
    linked.connect_again()
    linked.machine.processes[0].end(5)
    linked.until(lambda: process.poll() is not None)
    assert (process.poll(), process.loss) == (5, "")


def test_a_connection_that_is_lost_again_meanwhile_loses_nothing(linked, monkeypatch):
    monkeypatch.setattr("unisono.standalone._link._FIND_SECONDS", 600.0)
    process = linked.process()
    handle, asked = linked.agent.handle, []

    def handle_or_lose(client, frame):
        asked.append(frame.op)
        if frame.op is Op.HELLO and asked.count(Op.HELLO) < 3:
            threading.Thread(target=lose).start()
            return None
        return handle(client, frame)

    def lose():
        linked.rpc_server.close()
        linked.connect_again()

    linked.agent.handle = handle_or_lose
    lose()
    linked.machine.processes[0].end(5)
    linked.until(lambda: process.poll() is not None)
    assert (process.poll(), process.loss, asked.count(Op.HELLO)) == (5, "", 3)


def test_a_server_whose_process_has_ended_is_not_looked_for(linked, monkeypatch):
    for name, seconds in (("_FIND_SECONDS", 600.0), ("_REFUSED_SECONDS", 0.1), ("_RETRY_SECONDS", 0.1)):
        monkeypatch.setattr(f"unisono.standalone._link.{name}", seconds)
    process = linked.process()
    linked.refusals = 10_000
    linked.rpc_server.close()
    linked.until(lambda: process.poll() is not None)
    assert process.loss == "lost its server a:1: no process listens there (connection refused)"
    linked.serve()
    linked.until(lambda: linked.link.is_live)


def test_a_server_that_has_ended_the_job_of_a_stopped_client_has_lost_its_processes(linked):
    """The server is the same one, and takes the client again: the training must not seem to run."""
    process = linked.process()
    linked.rpc_server.close()
    linked.agent._forget_job(for_good=False)
    linked.connect_again()
    linked.until(lambda: process.poll() is not None)
    assert process.loss == "lost its server a:1: it has received nothing from this client for too long"
    linked.until(lambda: linked.link.is_live)
    assert len(linked.prepared) == 2


def test_a_lost_server_that_another_client_has_says_so(linked, monkeypatch):
    monkeypatch.setattr("unisono.standalone._link._RETRY_SECONDS", 0.1)
    linked.rpc_server.close()
    linked.agent._forget_job(for_good=False)
    linked.agent._book.claim("two", "somebody", 60.0)
    linked.connect_again()
    linked.until(lambda: "trains for somebody" in linked.link.refusal)
    linked.agent._book.end(for_good=True)
    linked.until(lambda: linked.link.is_live)
    assert linked.link.refusal == ""


def test_nothing_starts_on_a_server_before_the_program_is_brought(linked):
    first = linked.process()
    starts = []

    def prepare(link):
        linked.prepared.append(link)
        starts.append((link.is_live, linked.new_process().assign(JOB)))

    linked.link._prepare = prepare
    linked.rpc_server.close()
    linked.serve()
    linked.until(lambda: first.poll() is not None and linked.link.is_live)
    assert starts == [(False, False)]
    assert linked.new_process().assign(JOB)


def test_a_sweep_whose_connection_is_lost_is_repeated(linked, monkeypatch):
    monkeypatch.setattr("unisono.standalone._link._FIND_SECONDS", 600.0)
    linked.process()
    handle = linked.agent.handle
    asked = []

    def handle_or_lose(client, frame):
        asked.append(frame.op)
        if asked.count(Op.SWEEP) == 1 and frame.op is Op.SWEEP:
            threading.Thread(target=lose).start()
            return None
        return handle(client, frame)

    def lose():
        linked.rpc_server.close()
        linked.connect_again()

    linked.agent.handle = handle_or_lose
    swept = []
    thread = threading.Thread(target=lambda: swept.append(linked.link.sweep()))
    thread.start()
    linked.until(lambda: swept)
    thread.join()
    assert asked.count(Op.SWEEP) == 2
    assert linked.machine.sweeps == 1


@pytest.mark.parametrize("arrives", [False, True])
def test_a_start_or_a_signal_whose_connection_is_lost_is_repeated(linked, monkeypatch, arrives):
    monkeypatch.setattr("unisono.standalone._link._FIND_SECONDS", 600.0)
    handle, asked = linked.agent.handle, []

    def handle_or_lose(client, frame):
        asked.append(frame.op)
        if frame.op in (Op.START, Op.SIGNAL) and asked.count(frame.op) == 1:
            if arrives:
                handle(client, frame)
            threading.Thread(target=lose).start()
            return None
        return handle(client, frame)

    def lose():
        linked.rpc_server.close()
        linked.connect_again()

    linked.agent.handle = handle_or_lose
    process = linked.new_process()
    assert process.assign(JOB)
    (there,) = linked.machine.processes
    process.send(signal.SIGTERM)
    linked.until(lambda: asked.count(Op.SIGNAL) == 2 and there.signals)
    assert there.signals == [signal.SIGTERM] * (1 + arrives)
    assert (asked.count(Op.START), process.loss) == (2, "")


def test_a_result_that_is_lost_with_its_server_is_no_success(linked):
    """The end was told, and the server is another one when the result is asked for."""
    process = linked.process()
    (there,) = linked.machine.processes
    (linked.machine.root / "one" / "result").write_bytes(b"r")
    handle = linked.agent.handle
    again = Agent("a:1", linked.machine, lambda *answer: linked.rpc_server.reply(*answer))

    def handle_or_start_again(client, frame):
        if frame.op is Op.GET:
            linked.agent = again
        return handle(client, frame) if linked.agent is not again else again.handle(client, frame)

    linked.agent.handle = handle_or_start_again
    there.end(0)
    linked.until(lambda: process.poll() is not None)
    assert process.loss.startswith("lost its server a:1: it was started again")
    assert process.poll() != 0
    assert not process.copies.result.exists()


def test_a_server_that_was_taken_without_the_client_seeing_the_answer_gets_its_files(tmp_path):
    made = Linked(tmp_path)
    hello = Frame(Op.HELLO, 1, 0, {"job": "one", "client": "me", "lease": 10.0})
    assert made.agent.handle(ME, hello).meta["fresh"]
    made.link.claim(10.0)
    assert made.prepared == [made.link]
    made.close()


def without(agent, *fields):
    """What an agent of another version answers."""

    def handle(client, frame):
        answer = agent.handle(client, frame)
        for field in fields if frame.op is Op.HELLO else ():
            answer.meta.pop(field)
        return answer

    return handle


def test_a_server_of_another_version_is_named_with_both(tmp_path):
    made = Linked(tmp_path)
    agent, made.agent = made.agent, Mock()
    made.agent.handle = without(agent, "taken")
    version = installed("cloudpickle")["unisono"]
    text = f"one version of Unisono. Received: {version} here and {version} at a:1, .* no field 'taken'"
    with pytest.raises(unisono.ClusterError, match=text):
        made.link.claim(10.0)
    assert made.prepared == []
    made.close()


def test_a_server_that_is_started_again_as_another_version_is_waited_for(linked, monkeypatch, caplog):
    monkeypatch.setattr("unisono.standalone._link._RETRY_SECONDS", 0.05)
    process = linked.process()
    linked.rpc_server.close()
    good = Agent("a:1", linked.machine, lambda *answer: linked.rpc_server.reply(*answer))
    linked.agent = Mock()
    linked.agent.handle = without(good, "packages", "taken")
    linked.connect_again()
    linked.until(lambda: process.poll() is not None)
    assert "it cannot be used again: Client and servers must have one version" in process.loss
    linked.until(lambda: "cannot be used again" in caplog.text)
    linked.rpc_server.close()
    linked.agent = good
    linked.connect_again()
    linked.until(lambda: linked.link.is_live)
    assert caplog.text.count("cannot be used again") == 1


def test_an_error_of_the_server_has_its_kind(linked):
    with pytest.raises(RequestRefusedError, match="absent") as caught:
        linked.link.request(Op.GET, {"name": "absent", "offset": 0})
    assert caught.value.kind == "InvalidArgumentError"


# --- what a client says of servers


@pytest.mark.parametrize("python", ["3.9.1", "4.0.0"])
def test_another_python_is_refused_with_both_versions(python):
    info = ServerInfo("i", "/root", (), python, installed("cloudpickle"))
    with pytest.raises(unisono.ClusterError, match=f"{platform.python_version()} here and {python} at a:1"):
        check_versions("a:1", info, print, set())


def test_other_packages_are_named_once(capsys):
    told = installed("cloudpickle")
    packages = {**told, "jax": "0.1"}
    del packages["keras"]
    info, warned = ServerInfo("i", "/root", (), platform.python_version(), packages), set()
    for _ in range(2):
        check_versions("a:1", info, print, warned)
    (line,) = capsys.readouterr().out.splitlines()
    assert "server a:1 has other versions" in line
    assert f"jax {told['jax']} here and 0.1 there" in line
    assert f"keras {told['keras']} here and none there" in line
