"""A client with servers that the test plays, over a network that loses and repeats messages."""

import collections
import concurrent.futures
import threading
import time

import numpy as np
import pytest

from unisono._errors import ClusterError, ContextError, InvalidArgumentError, OutOfRangeError
from unisono.cluster_resolver._spec import Task
from unisono.parameter_server.server import _client
from unisono.parameter_server.server._client import ServerClient, error_of
from unisono.parameter_server.server._server import VariableServer
from unisono.parameter_server.server._store import VariableStore
from unisono.parameter_server.state._create import NewVariable
from unisono.parameter_server.state._variables import StoredSpec
from unisono.rpc._calls import PushToServer
from unisono.rpc._frames import Frame
from unisono.rpc._loopback import LoopbackNetwork
from unisono.rpc._ops import Op


class Server:
    """Versions and values by number; it notes the numbers of the requests that it answers."""

    def __init__(self):
        self.values = collections.defaultdict(lambda: (0, np.zeros(2, np.float32)))
        self.requests, self.sent, self.lineage, self.generation = [], [], "a", 0
        self.used, self.dropped, self.chief = {}, 0, ""

    def handle(self, client, frame):
        self.requests.append((frame.op, frame.request))
        if frame.op is Op.HELLO:
            self.generation, self.chief = frame.generation, frame.meta.get("chief")
        answer = {"ids": [3], "digest": "d", "generation": self.generation, "used": self.used}
        answer["chief"] = self.chief
        if frame.op is Op.PULL:
            return frame.answer(Op.OK, *self.pulled(frame.meta))
        self.pushed = dict(frame.meta)
        if "pull" not in frame.meta:
            return frame.answer(Op.OK, answer)
        meta, arrays = self.pulled(frame.meta["pull"])
        return frame.answer(Op.OK, {**answer, "pulled": meta}, arrays)

    def pulled(self, meta):
        self.asked = meta
        known = meta["versions"] if meta["lineage"] == self.lineage else [-1] * 99
        found = [self.values[i] for i in meta["ids"]]
        changed = [i for i, (version, _) in enumerate(found) if version != known[i]]
        self.sent.append(len(changed))
        meta = {"lineage": self.lineage, "versions": [v for v, _ in found], "changed": changed}
        meta["dropped"] = self.dropped
        return meta, [found[i][1] for i in changed]


def client_of(servers, copies=None, **options):
    network = LoopbackNetwork(copies)
    rpc_clients = []
    for i, server in enumerate(servers):
        rpc_server = network.rpc_server(str(i), server.handle)
        rpc_server.start()
        rpc_clients.append(network.rpc_client(Task("ps", i), str(i)))
    return ServerClient(rpc_clients, **options)


def push(client, server, arrays=(), lineage=None):
    (answer,), pulled = client.push([PushToServer(server, 5, 0, {}, arrays, lineage)])
    assert pulled is None
    return answer.result(10)


def test_pushes_bring_the_values_behind_them_and_a_step_is_one_message_to_each_server():
    servers = [Server(), Server(), Server()]
    client = client_of(servers)
    keys = [(2, 0), (0, 7), (2, 4)]
    client.pull(keys).result(10)
    for step in range(1, 4):
        servers[0].values[7] = step, np.full(2, step, np.float32)
        servers[2].values[4] = step, np.full(2, 10 * step, np.float32)
        answers, pulled = client.push([PushToServer(i, step, 0, {}, [np.ones(2)]) for i in (0, 1)], keys)
        assert [x.tolist() for x in pulled.result(10)] == [[0, 0], [step] * 2, [10 * step] * 2]
        assert pulled.result().lineages == {0: "a", 2: "a"}
        assert [answer.result(10).op for answer in answers] == [Op.OK] * 2
    assert servers[1].pushed == {"closure": 3, "watermark": 0}
    # One for the first pull; then one each. A server without a push is asked by itself, and sends the value
    # alone that has changed.
    assert [[op for op, _ in s.requests] for s in servers] == [
        [Op.PULL] + [Op.PUSH] * 3,
        [Op.PUSH] * 3,
        [Op.PULL] * 4,
    ]
    assert [s.sent for s in servers] == [[1] * 4, [], [2, 1, 1, 1]]


def test_a_pull_brings_only_what_changed():
    servers = [Server(), Server()]
    client = client_of(servers)
    keys = [(1, 0), (0, 7), (1, 4)]
    assert [x.tolist() for x in client.pull(keys).result(10)] == [[0, 0]] * 3
    servers[1].values[4] = 1, np.ones(2, np.float32)
    assert [x.tolist() for x in client.pull(keys).result(10)] == [[0, 0], [0, 0], [1, 1]]
    assert [s.sent for s in servers] == [[1, 0], [2, 1]]
    # After a restart with older state, versions count from another beginning.
    servers[1].values[4], servers[1].lineage = (1, np.full(2, 5, np.float32)), "b"
    assert client.pull(keys).result(10)[2].tolist() == [5, 5]
    assert client.pull([]).result(10) == []


def test_a_rounded_value_and_an_exact_one_are_kept_apart():
    server = Server()
    client = client_of([server])
    for keys, sent in (
        ([(0, 0), (0, 4, "float16")], 2),
        ([(0, 0), (0, 4, "float16")], 0),
        ([(0, 0), (0, 4)], 1),
        ([(0, 4, "float16")], 0),
    ):
        client.pull(keys).result(10)
        assert server.sent[-1] == sent
        assert server.asked["ids"] == [key[1] for key in keys]
        assert server.asked.get("rounded", []) == [key[1] for key in keys if len(key) == 3]


def test_what_a_server_has_dropped_is_not_kept_here():
    server, other = Server(), Server()
    client = client_of([server, other])
    client.pull([(0, 0), (0, 1), (1, 0)]).result()
    server.dropped = 1
    client.pull([(0, 1)]).result()
    assert set(client._known) == {(0, 1), (1, 0)}
    # Once: what is pulled later stays.
    client.pull([(0, 2)]).result()
    client.pull([(0, 1)]).result()
    assert set(client._known) == {(0, 1), (0, 2), (1, 0)}
    assert server.sent == [2, 0, 1, 0]


def test_a_lost_request_is_sent_again_under_its_number(monkeypatch):
    monkeypatch.setattr(_client, "RETRY_AFTER", 0.05)
    monkeypatch.setattr(_client, "RETRY_EVERY", 0.01)
    seen = collections.Counter()

    def copies(frame, is_answer):
        # The first request and the first answer are lost.
        seen[is_answer] += 1
        return 0 if seen[is_answer] == 1 else 1

    server = Server()
    push(client_of([server], copies), 0, [np.ones(2)])
    assert len(server.requests) == 2
    assert len(set(server.requests)) == 1


def test_a_server_that_stays_away_is_named(monkeypatch):
    monkeypatch.setattr(_client, "RETRY_AFTER", 0.05)
    monkeypatch.setattr(_client, "RETRY_EVERY", 0.01)
    client = client_of([Server()], lambda frame, is_answer: 0, absence_limit=0.2)
    with pytest.raises(ClusterError, match=r"nothing from ps:0 at 0 for 0\.\d s \(not connected yet\)\."):
        client.pull([(0, 0)]).result(10)


def test_an_answer_that_lacks_a_field_ends_the_wait_for_the_values():
    server = Server()
    server.pulled = lambda meta: ({"versions": []}, [])
    with pytest.raises(KeyError, match="lineage"):
        client_of([server]).pull([(0, 0)]).result(10)


def test_the_log_names_a_server_that_is_away_once_for_a_request(monkeypatch, caplog):
    monkeypatch.setattr(_client, "RETRY_AFTER", 0.02)
    monkeypatch.setattr(_client, "RETRY_EVERY", 0.001)
    monkeypatch.setattr(_client, "WARN_AFTER", 0.05)
    client = client_of([Server()], lambda frame, is_answer: 0, absence_limit=0.3)
    with pytest.raises(ClusterError, match="nothing from ps:0"):
        client.read((0, 0))
    (record,) = [r for r in caplog.records if "does not answer" in r.message]
    assert "ps:0" in record.message


def test_a_servers_error_is_raised_here():
    def handle(client, frame):
        return frame.answer(Op.ERROR, {"kind": "InvalidArgumentError", "text": "no such variable"})

    server = Server()
    server.handle = handle
    with pytest.raises(InvalidArgumentError, match="no such variable"):
        client_of([server]).write((0, 1), np.ones(2))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("OutOfRangeError", OutOfRangeError),
        ("KeyError", KeyError),
        ("UnicodeDecodeError", ClusterError),
        ("SystemExit", ClusterError),
        ("print", ClusterError),
        ("AnyOther", ClusterError),
    ],
)
def test_errors_by_name(kind, expected):
    error = error_of(Frame(Op.ERROR, meta={"kind": kind, "text": "why"}))
    assert type(error) is expected
    assert "why" in str(error)


def test_each_job_has_a_generation_of_its_own():
    servers = [Server(), Server()]
    servers[1].generation = 4
    # The launcher says which generation it is at least.
    assert [client_of(servers).begin_job(least) for least in (0, 0, 9, 3)] == [5, 6, 9, 10]
    assert [s.generation for s in servers] == [10, 10]


def test_chiefs_that_begin_at_the_same_moment_take_different_generations():
    """Both see the same generation before either takes one; one leads, and the other one is told."""
    both_have_looked = threading.Barrier(2)
    servers = [VariableServer(VariableStore()) for _ in range(2)]

    def handled(server):
        is_first = iter([True])

        def handle(client, frame):
            answer = server.handle(client, frame)
            if frame.op is Op.STATUS and next(is_first, False):
                both_have_looked.wait(30)
            return answer

        return handle

    # Each chief has a network of its own, as its requests wait for the other one's.
    chiefs = []
    for _ in range(2):
        network, clients = LoopbackNetwork(), []
        for i, server in enumerate(servers):
            rpc_server = network.rpc_server(str(i), handled(server) if i == 0 else server.handle)
            rpc_server.start()
            clients.append(network.rpc_client(Task("ps", i), str(i), Task("chief", 0)))
        chiefs.append(ServerClient(clients))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        begun = [pool.submit(chief.begin_job, 0) for chief in chiefs]
        concurrent.futures.wait(begun, 60)
    # Whose number was lower than another's when it arrived is refused at once.
    led = {b.result(): c for b, c in zip(begun, chiefs, strict=True) if b.exception() is None}
    assert led
    assert len(led) == sum(b.exception() is None for b in begun)
    news = [NewVariable(StoredSpec("w", (2,), "float32"), np.ones(2, "float32"))]
    assert led[max(led)].create_variables(0, news) == [0]
    for chief in chiefs:
        if chief is not led[max(led)]:
            with pytest.raises(ContextError, match="leads the job"):
                chief.create_variables(0, news)


def test_a_push_names_the_lineage_of_what_was_pulled():
    servers = [Server(), Server()]
    client = client_of(servers)
    pulled = client.pull([(0, 7), (1, 4)]).result(10)
    servers[0].lineage = "b"
    # Another closure's pull: that of the first one stays what it was.
    assert client.pull([(0, 7)]).result(10).lineages == {0: "b"}
    assert pulled.lineages == {0: "a", 1: "a"}
    push(client, 0, lineage=pulled.lineages[0])
    assert servers[0].pushed == {"closure": 5, "watermark": 0, "lineage": "a"}
    push(client, 0)
    assert "lineage" not in servers[0].pushed


def test_a_pull_whose_values_another_answer_has_dropped_pulls_again(monkeypatch):
    servers = [Server(), Server()]
    client = client_of(servers)
    client.pull([(0, 7)]).result(10)
    note = client._note

    def restarted(keys, answer):
        note(keys, answer)
        # By the answer of the other server: that of this one runs in the thread which a pull waits for.
        if servers[0].lineage == "a" and keys[0][0] == 1:
            # The server is started again before this pull is complete.
            servers[0].lineage = "b"
            client.pull([(0, 8)]).result(10)

    monkeypatch.setattr(client, "_note", restarted)
    pulled = client.pull([(1, 4), (0, 7)]).result(10)
    assert [x.tolist() for x in pulled] == [[0, 0], [0, 0]]
    assert pulled.lineages == {0: "b", 1: "a"}


def test_the_end_does_not_wait_for_one_server_after_the_other(monkeypatch):
    monkeypatch.setattr(_client, "_END_WITHIN", 0.3)
    servers = [Server() for _ in range(50)]
    away = {Op.END}
    client = client_of(servers, lambda frame, is_answer: frame.op not in away)
    began = time.monotonic()
    assert client.end(0) == [str(i) for i in range(50)]
    assert time.monotonic() - began < 50 * 0.3


def test_servers_that_have_ended_are_told_apart():
    assert client_of([Server(), Server()]).end(0) == []


def test_batches_count_as_used_where_one_server_has_them():
    servers = [Server(), Server()]
    servers[0].used = {"i@0": [4, 1, 2], "i@1": [2]}
    servers[1].used = {"i@0": [6, 2, 3, 5], "j@0": [1]}
    used = client_of(servers).used_batches()
    assert {name: each.encode() for name, each in used.items()} == {"i@0": [6, 2, 5], "i@1": [2], "j@0": [1]}
