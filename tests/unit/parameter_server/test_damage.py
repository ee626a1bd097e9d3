"""A server whose files are damaged says how many updates are lost, and serves nothing until a new job begins.

One bit is flipped in each kind of record and block, files are cut, removed, or those of an earlier time.
"""

import re
import shutil

import numpy as np
import pytest
from tests.unit.parameter_server.test_durable import (
    ROWS,
    add_programs,
    assert_same,
    content,
    fill,
    opened,
    push_of,
)

from unisono import ClusterError
from unisono.cluster_resolver._spec import Task
from unisono.parameter_server.server._client import ServerClient
from unisono.parameter_server.server._server import VariableServer
from unisono.parameter_server.state import _acknowledged, _container, _journal, _records
from unisono.parameter_server.state._acknowledged import LogPosition, describe_loss
from unisono.parameter_server.state._create import NewVariable
from unisono.parameter_server.state._push import Push
from unisono.parameter_server.state._variables import StoredSpec
from unisono.rpc._loopback import LoopbackNetwork

UPDATES = 6
#: The rows of the tables that the log repeats, and one that it does not.
TOUCHED = {int(i) for closure in range(UPDATES) for i in push_of(closure).updates[1].indices}
ROW = min(set(range(ROWS)) - TOUCHED)


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """The directory that a killed server left, and what it held."""
    directory = tmp_path_factory.mktemp("left") / "server"
    durable = opened(directory)
    durable.store.raise_generation(3)
    fill(durable.store)
    durable._journal.begin_log()
    for closure in range(UPDATES):
        durable.store.push(push_of(closure))
    copied = directory.with_name("copy")
    shutil.copytree(directory, copied)
    yield copied, content(durable.store)
    durable.close()


@pytest.fixture
def server(left, tmp_path):
    """A copy of that directory; `restart` opens it."""
    directory = tmp_path / "server"
    shutil.copytree(left[0], directory)
    return directory


def flip(path, at, bit=3):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << bit
    path.write_bytes(raw)


def records(path):
    """The begins of the records of a log, and the positions of their parts."""
    raw, at, found = path.read_bytes(), _records.FIRST, []
    for _ in range(UPDATES):
        _, _, size, meta_at, length, *_ = _records._HEADER.unpack_from(raw, at)
        found.append(
            {"header": at + 20, "arrays": at + 64, "meta": at + meta_at + length // 2, "end": at + size}
        )
        at += size
    return found


def image(directory):
    return max(directory.glob("image-*"), key=lambda path: _container.read_container(path).number)


def table(directory, name):
    """The file of a table: number 4 is `table`, 5 its velocity, which begins with zeros."""
    (path,) = directory.glob(f"table-*-{ {'table': 4, 'velocity': 5}[name] }")
    return path


def flip_record(part, index):
    return lambda d: flip(d / "log", records(d / "log")[index][part])


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


#: What is done to the directory, how many of the updates are lost, and what is said about it.
DAMAGES = {
    "the header of a record": (flip_record("header", 2), 4, "record 5 has no complete header"),
    "the description of a record": (flip_record("meta", 0), 6, "record 3 has a description without its"),
    "the arrays of a record": (flip_record("arrays", 3), 3, "record 6 has arrays without their checksum"),
    "the last record": (flip_record("arrays", 5), 1, "record 8 has arrays without"),
    "the header of the last record": (flip_record("header", 5), 1, "record 8 has no complete header"),
    "the header of the log": (lambda d: flip(d / "log", 50), 6, "header of .*log does not have its checksum"),
    "half of the records cut": (
        lambda d: cut(d / "log", records(d / "log")[2]["end"]), 3, "record 6 is behind the end of the file"
    ),
    "a record cut in two": (
        lambda d: cut(d / "log", records(d / "log")[4]["arrays"]), 2, "record 7 ends behind the end"
    ),
    "the log empty": (lambda d: cut(d / "log", 0), 6, "log is missing or too short"),
    "the log removed": (lambda d: (d / "log").unlink(), 6, "log is missing or too short"),
    "the header of the image": (lambda d: flip(image(d), 60), 6, "begins with change 3, behind the image of"),
    "a value in the image": (lambda d: flip(image(d), 4096 + 5), 6, "begins with change 3"),
    "the description of the image": (lambda d: flip(image(d), -20), 6, "begins with change 3"),
    "both images": (
        lambda d: [flip(path, 4096) for path in d.glob("image-*")], 6, "no image in .* is complete"
    ),
    "a row of a table": (lambda d: flip(table(d, "table"), 12 * ROW + 5), 6, "of the table 'table' in"),
    "the checksum of a row": (lambda d: flip(table(d, "table"), 256 + 4 * ROW), 6, "nor do 0 others"),
    "zeros of a table": (lambda d: flip(table(d, "velocity"), 12 * ROW), 6, "of the table 'velocity'"),
    "half of a table cut": (lambda d: cut(table(d, "table"), 120), 6, "no .*table-.* of 336 bytes"),
    "a table removed": (lambda d: table(d, "table").unlink(), 6, "no .*table-"),
    "all but the note removed": (
        lambda d: [p.unlink() for p in d.iterdir() if p.name != "acknowledged"], 6, "no image in"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_an_error_that_counts_what_is_lost(server, what, caplog):
    damage, lost, why = DAMAGES[what]
    damage(server)
    for _ in range(2):
        # The first start leaves the files as they are.
        durable = opened(server)
        assert durable.recovery.source == "damage"
        error = (
            rf"must have all updates that it has acknowledged\. Received: {lost} of {UPDATES} are lost "
            rf"\(.*{why}.*\)\. Start the program again.*BackupAndRestore"
        )
        with pytest.raises(ClusterError, match=error):
            durable.store.pull([0])
        assert re.search(error, caplog.text)
        assert (durable.store.generation, durable.store.variables) == (3, {})
        durable.close()


def test_a_row_of_a_table_that_the_log_repeats_is_mended(server, left):
    # As where the server was killed while it wrote the row.
    flip(table(server, "table"), 12 * min(TOUCHED))
    durable = opened(server)
    assert durable.recovery.source == "log"
    assert_same(content(durable.store), left[1])
    durable.close()


def noted(directory, position):
    file = _acknowledged.AcknowledgedFile(directory / "acknowledged")
    file.path.unlink()
    file.note(position)


@pytest.mark.parametrize("cut_at", ["header", "meta", "arrays"])
def test_a_last_record_that_was_never_acknowledged_may_be_cut(server, cut_at):
    noted(server, LogPosition(7, UPDATES - 1, 3))
    flip_record(cut_at, UPDATES - 1)(server)
    durable = opened(server)
    assert (durable.recovery.source, durable.store.applied_count) == ("log", UPDATES - 1)
    assert durable.store.push(push_of(UPDATES - 1))
    durable.close()


def test_any_bit_is_either_of_no_use_or_found(server, left, tmp_path):
    draw = np.random.default_rng(5)
    end = records(server / "log")[-1]["end"]
    files = [server / "acknowledged", *server.glob("image-*"), *server.glob("table-*")]
    sizes = [*((path, path.stat().st_size) for path in files), (server / "log", end)]
    places = [(path, int(at)) for path, size in sizes for at in draw.integers(0, size, 8)]
    # Headers are small, and half of a log of a few records is its first page.
    places += [(path, at) for path, _ in sizes for at in (0, 12, 47, 60)]
    places += [(server / "log", at) for each in records(server / "log") for at in each.values() if at < end]
    found = 0
    for path, at in places:
        before = path.read_bytes()
        flip(path, at, int(draw.integers(8)))
        durable = opened(server)
        if durable.recovery.source == "damage":
            found += 1
        else:
            assert_same(content(durable.store), left[1])
        durable.close()
        # A start that finds all it needs begins the log again.
        shutil.rmtree(server)
        shutil.copytree(left[0], server)
        assert path.read_bytes() == before
    assert 20 < found < len(places)


def test_what_is_of_another_boot_is_lost(server, monkeypatch):
    for module in (_records, _container, _acknowledged, _journal):
        monkeypatch.setattr(module, "boot_id", lambda: "1" * 36)
    durable = opened(server)
    lost = r"at least 6 of at least 6 are lost \(the machine was started again"
    with pytest.raises(ClusterError, match=lost):
        durable.store.read(0)
    durable.close()


@pytest.mark.parametrize("note", ["removed", "damaged"])
def test_without_a_note_it_is_not_known_how_many_are_lost(server, note):
    path = server / "acknowledged"
    path.unlink() if note == "removed" else path.write_bytes(b"?" * 256)
    durable = opened(server)
    with pytest.raises(ClusterError, match=r"not known how many are lost .*another version of Unisono"):
        durable.store.read(0)
    durable.close()


def test_files_of_another_format_are_named(server):
    raw = image(server).read_bytes()
    image(server).write_bytes(b"UNPSARR1" + raw[8:])
    log = (server / "log").read_bytes()
    (server / "log").write_bytes(b"UNPSLOG1" + log[8:])
    durable = opened(server)
    with pytest.raises(ClusterError, match="not of this version's format: it begins with b'UNPSLOG1'"):
        durable.store.read(0)
    durable.close()


def test_a_server_that_was_killed_at_its_first_start_has_lost_nothing(tmp_path):
    first = _acknowledged.AcknowledgedFile(tmp_path / "acknowledged")
    first.note(LogPosition())
    durable = opened(tmp_path)
    assert durable.recovery.source == "nothing"
    fill(durable.store)
    durable.close()


def test_a_job_of_before_counts_for_nothing():
    text = describe_loss(LogPosition(40, 5, 2), LogPosition(30, 25, 1), "why")
    assert "5 of 5 are lost (why)" in text


@pytest.fixture
def served(server):
    """Serves a directory over a network within the process; called again, as after a restart."""
    network, opened_now = LoopbackNetwork(), []

    def serve(directory=server):
        for rpc_server, durable in opened_now:
            rpc_server.close()
            durable.close()
        opened_now.clear()
        durable = opened(directory)
        handler = VariableServer(durable.store, durable)
        rpc_server = network.rpc_server("ps", handler.handle)
        rpc_server.start()
        opened_now.append((rpc_server, durable))
        return durable

    def client(generation):
        rpc_client = network.rpc_client(Task("ps", 0), "ps", Task("chief", 0))
        return ServerClient([rpc_client], generation=generation)

    yield serve, client
    for rpc_server, durable in opened_now:
        rpc_server.close()
        durable.close()


def test_chief_and_workers_get_the_error_and_a_new_job_begins(server, served):
    serve, client = served
    flip(server / "log", records(server / "log")[1]["arrays"])
    serve()
    user = client(3)
    for request in (
        lambda: user.read((0, 0)),
        lambda: user.write((0, 0), np.zeros((5, 2), "float32")),
        lambda: user.rows([(0, 4)], [np.array([1])]).result(),
    ):
        with pytest.raises(ClusterError, match="5 of 6 are lost"):
            request()
    assert user.begin_job(0) == 4
    ones = NewVariable(StoredSpec("w", (2,), "float32"), np.ones(2, "float32"))
    assert user.create_variables(0, [ones]) == [0]
    assert user.read((0, 0)).tolist() == [1.0, 1.0]
    # The next start finds the new job.
    assert serve().recovery.source == "log"
    assert user.read((0, 0)).tolist() == [1.0, 1.0]


def test_a_directory_of_an_earlier_time_is_found_by_what_clients_know(left, served, tmp_path):
    serve, client = served
    durable = serve()
    add_programs(durable.store)
    worker = client(3)
    worker.read((0, 0))
    durable.store.push(push_of(UPDATES))
    durable.store.push(push_of(UPDATES + 1))
    worker.read((0, 0))
    earlier = tmp_path / "earlier"
    shutil.copytree(left[0], earlier)
    again = serve(earlier)
    assert again.recovery.source == "log"
    with pytest.raises(ClusterError, match=r"at least 2 of at least 8 are lost .*earlier time"):
        worker.read((0, 0))
    # Also for clients that do not know it, and pushes.
    with pytest.raises(ClusterError, match="at least 2 of at least 8 are lost"):
        client(3).read((0, 0))
    with pytest.raises(ClusterError, match="at least 2"):
        again.store.push(Push(99))
