"""What processes know of each other: records, ports that answer, and what follows. Several in one process."""

import concurrent.futures
import socket
import threading

import jax
import numpy as np
import pytest

from unisono import ClusterError
from unisono.cluster._attendance import Attendance
from unisono.cluster._meeting import frame
from unisono.cluster._presence import AbsentError, EndedError, Peers, Presence, own_ip
from unisono.cluster._record import Record, described
from unisono.cluster._relay import Relay

GLOO = "UNKNOWN: Gloo AllGather failed: Connection closed by peer [127.0.0.1]:4711"


def gloo_error():
    return jax.errors.JaxRuntimeError(GLOO)


# --- the record


def test_a_batch_is_new_when_its_shapes_or_its_step_are():
    record = Record()
    batches = [
        ("train", ((8, 3),)),
        ("train", ((8, 3),)),
        ("train", ((7, 3),)),
        ("test", ((7, 3),)),
        ("test", None),
    ]
    assert [record.begin(b) for b in batches] == [True, False, True, True, True]
    assert record.answer({"kind": "step", "number": 3})["step"] == "train on (7, 3)"
    assert record.answer({"kind": "step", "number": 5})["step"] == "test: the end of the data"
    assert record.answer({"kind": "step", "number": 6}) == {"kind": "step", "reached": False, "step": None}


@pytest.mark.parametrize("number", [None, "1", -1, 0])
def test_batches_that_nobody_has(number):
    record = Record()
    record.begin(("train", ((8,),)))
    assert record.answer({"kind": "step", "number": number})["step"] is None


def test_old_batches_are_forgotten():
    record = Record()
    for _ in range(300):
        record.begin(("train", ((8,),)))
    assert record.answer({"kind": "step", "number": 1}) == {"kind": "step", "reached": True, "step": None}
    assert record.answer({"kind": "step", "number": 300})["step"] == described(("train", ((8,),)))


def test_the_first_word_counts():
    record = Record()
    for text in ("first", "second"):
        record.answer({"kind": "word", "text": text})
    assert record.word == "first"


@pytest.mark.parametrize(
    ("path", "meetings", "done"), [("a", 2, True), ("b", 2, False), ("a", 1, True), ("a", 3, False)]
)
def test_a_file_is_saved_after_a_meeting(path, meetings, done):
    record = Record(meetings=2)
    record.saved("a")
    assert record.answer({"kind": "saved", "path": path, "meetings": meetings})["done"] is done
    record.is_leaving = True
    assert record.answer({"kind": "saved", "path": path, "meetings": meetings})["done"]


@pytest.mark.parametrize(
    ("series", "index", "meetings", "done", "number"),
    [
        ("a", 0, 2, True, 7),
        ("a", 1, 2, True, 9),
        ("a", 2, 2, False, None),
        ("a", 2, 1, True, None),
        ("b", 0, 2, False, None),
        ("a", None, 2, False, None),
    ],
)
def test_a_checkpoint_is_numbered_or_will_not_be(series, index, meetings, done, number):
    record = Record(meetings=2)
    for given in (7, 9):
        record.numbered("a", given)
    question = {"kind": "number", "series": series, "index": index, "meetings": meetings}
    assert record.answer(question) == {"kind": "number", "done": done, "number": number}


# --- ports


class Cluster:
    """Several attendances in one process."""

    def __init__(self, count, limit=60.0, patience=60.0):
        self.records = [Record() for _ in range(count)]
        self.ports = [Presence("127.0.0.1", record) for record in self.records]
        addresses = tuple(f"127.0.0.1:{port.port}" for port in self.ports)
        names = tuple(f"worker {i}" for i in range(count))
        for port in self.ports:
            port.secret = "secret"
        self.peers = [Peers(i, addresses, names, "secret", patience) for i in range(count)]
        self.members = [Attendance(r, p, limit) for r, p in zip(self.records, self.peers, strict=True)]

    def take(self, *shapes, kind="train"):
        """What each worker is told when all take their batches at once."""

        def one(member, shape):
            try:
                member.begin(kind, [] if shape is None else [np.zeros(shape)])
            except ClusterError as error:
                return str(error)
            return None

        with concurrent.futures.ThreadPoolExecutor(len(shapes)) as pool:
            return list(pool.map(one, self.members, shapes))


@pytest.fixture
def cluster():
    made = []

    def make(count, **options):
        made.append(Cluster(count, **options))
        return made[-1]

    yield make
    for one in made:
        for port in one.ports:
            port.close()


def test_all_are_asked_at_once(cluster):
    two = cluster(3)
    two.records[2].begin(("train", None))
    found = two.peers[0].ask_all({"kind": "state"}, [1, 2])
    assert [found[1]["steps"], found[2]["steps"]] == [0, 1]
    two.ports[1].close()
    assert isinstance(two.peers[0].ask_all({"kind": "state"}, [1, 2])[1], EndedError)


def test_the_first_process_numbers_checkpoints(cluster):
    two = cluster(2)
    first, second = two.members
    assert [first.number("a", 7, is_first=True), first.number("a", 9, is_first=True)] == [7, 9]
    assert [second.number("a", 1, is_first=False), second.number("a", 2, is_first=False)] == [7, 9]
    # It goes on without a third, and so does this one.
    two.records[0].begin(("train", None))
    assert second.number("a", 3, is_first=False) == 3


def test_a_first_process_that_has_ended_numbers_nothing(cluster, caplog):
    two = cluster(2)
    two.ports[0].close()
    assert two.members[1].number("a", 3, is_first=False) == 3
    assert "The first worker may not have numbered checkpoint 0 of a" in caplog.text


def test_strangers_are_not_answered(cluster):
    two = cluster(2)
    stranger = Peers(0, two.peers[0].addresses, ("a", "b"), "guess", 60.0)
    with pytest.raises(AbsentError):
        stranger.ask(1, {"kind": "state"})
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", frame({"kind": "state", "secret": "é"})):
        with socket.create_connection(("127.0.0.1", two.ports[1].port)) as sock:
            sock.sendall(nonsense)
            assert sock.recv(10) == b""
    assert two.peers[0].ask(1, {"kind": "state"})["steps"] == 0


def test_one_that_listens_and_says_nothing_is_stopped():
    """The kernel accepts connections for a process that was stopped."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(AbsentError, match=r"no sign of life within 0.2 s") as info:
            Peers(0, ("", address), ("a", "b"), "s", 0.2).ask(1, {"kind": "state"})
    assert not isinstance(info.value, EndedError)


def test_the_own_address_is_that_of_the_way_to_the_other():
    assert own_ip("127.0.0.1:4711") == "127.0.0.1"


# --- what follows


def test_equal_batches_are_taken(cluster):
    three = cluster(3)
    for shape in ((8, 2), (8, 2), (5, 2), None):
        assert three.take(shape, shape, shape) == [None] * 3


def test_only_a_new_shape_is_asked_about(cluster):
    two = cluster(2)
    two.take((8, 2), (8, 2))
    for port in two.ports:
        port.close()
    assert two.take((8, 2), (8, 2)) == [None, None]


@pytest.mark.parametrize(
    "shapes", [((8,), (8,), (6,)), ((6,), (8,), (8,)), ((8,), (8,), None), ((1,), (2,), (3,))]
)
def test_unequal_batches_end_all(cluster, shapes):
    three = cluster(3)
    three.take((8,), (8,), (8,))
    found = three.take(*shapes)
    assert any(found)
    # Who did not look hears of it at the next batch, or from the error of its collective.
    for member, text in zip(three.members, found, strict=True):
        told = text or str(member.explained(gloo_error()))
        assert told.startswith("All workers must take the same steps, on batches of the same shapes.")
        assert "Received: step 2 is 'train" in told
        # One that was slow may not have come to this batch when it was asked.
        assert ", but 'train" in told


def test_a_batch_waits_for_the_other_worker(cluster):
    two = cluster(2)
    first = threading.Thread(target=two.members[0].begin, args=("train", [np.zeros(3)]))
    first.start()
    assert first.is_alive()
    two.members[1].begin("train", [np.zeros(3)])
    first.join(60)
    assert not first.is_alive()


def test_a_worker_that_does_not_come_is_named_with_what_it_did_last(cluster):
    two = cluster(2, limit=0.2)
    two.records[1].begin(("test", ((4,),)))
    two.records[1].begin(("test", ((4,),)))
    two.members[0].record.steps = 2
    with pytest.raises(
        ClusterError,
        match=r"worker 0 of 2 has waited in vain.*worker 1: it has begun 2 steps, the last: test on \(4,\)",
    ):
        two.members[0].begin("train", [np.zeros(3)])


def test_a_worker_that_has_ended_is_named(cluster):
    three = cluster(3)
    three.ports[2].close()
    told = [str(three.members[i].explained(gloo_error())) for i in range(2)]
    # The first to notice tells the other.
    assert all("Received: worker 0 of 3 lost worker 2: its process has ended." in text for text in told)
    assert all(text.endswith(f"Here: {GLOO}") for text in told)
    with pytest.raises(ClusterError, match="lost worker 2"):
        three.members[1].begin("train", [np.zeros(3)])


def test_the_next_worker_has_ended(cluster):
    two = cluster(2)
    two.ports[1].close()
    with pytest.raises(ClusterError, match=r"worker 0 of 2 lost worker 1: its process has ended\. The log"):
        two.members[0].begin("train", [np.zeros(3)])


def chained(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        ValueError("my own"),
        ValueError("collective"),
        RuntimeError("Connection reset by peer"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"),
        ClusterError("Gloo"),
        chained(RuntimeError("mine"), chained(ClusterError("explained"), gloo_error())),
    ],
)
def test_other_errors_are_left_alone(cluster, error):
    two = cluster(2)
    assert two.members[0].explained(error) is None
    assert not two.members[0].is_broken


@pytest.mark.parametrize("error", [ValueError(GLOO), chained(RuntimeError("deleted"), gloo_error())])
def test_errors_of_others_are_found(cluster, error):
    two = cluster(2)
    assert "worker 1: it has begun 0 steps" in str(two.members[0].explained(error))
    assert two.members[1].is_broken


def test_leaving_waits_for_all(cluster):
    two = cluster(2)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda m: m.leave(60.0), two.members)) == [None, None]


@pytest.mark.parametrize(
    ("ended", "text"), [(True, "its process has ended"), (False, "it has begun 0 steps")]
)
def test_leaving_without_somebody(cluster, ended, text):
    two = cluster(2)
    if ended:
        two.ports[1].close()
    assert two.members[0].leave(60.0 if ended else 0.1) == f"worker 1: {text}"


def test_a_file_is_waited_for_until_it_is_there(cluster):
    two = cluster(2)
    waiting = threading.Thread(target=two.members[1].wait_for_file, args=("m.keras",))
    waiting.start()
    assert waiting.is_alive()
    two.records[0].saved("m.keras")
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_file_that_the_first_worker_does_not_write_is_not_waited_for(cluster, caplog):
    """As in TensorFlow's tutorial, where the others write to places of their own."""
    two = cluster(2)
    two.records[0].saved("chief/m.keras")
    two.records[0].meetings += 1
    two.members[1].wait_for_file("worker-1/m.keras")
    assert not caplog.records
    two.ports[0].close()
    two.records[1].meetings += 1
    two.members[1].wait_for_file("m.keras")
    assert "may not have written m.keras: its process has ended" in caplog.text


# --- the way to JAX' service


def test_a_relay_passes_on_and_stays_open():
    with socket.create_server(("127.0.0.1", 0)) as service:
        relay = Relay(f"127.0.0.1:{service.getsockname()[1]}")
        host, _, port = relay.address.rpartition(":")
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
        relay.close()


def test_a_relay_hangs_up_when_this_process_does():
    with socket.create_server(("127.0.0.1", 0)) as service:
        relay = Relay(f"127.0.0.1:{service.getsockname()[1]}")
        host, _, port = relay.address.rpartition(":")
        socket.create_connection((host, int(port))).close()
        far, _ = service.accept()
        assert far.recv(1) == b""
        far.close()
        relay.close()
