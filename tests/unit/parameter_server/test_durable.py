"""No change that was answered is lost with the process; a torn snapshot is not taken.

What a killed process leaves is the content of its mapped files at that moment: a copy of the directory.
"""

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from tests import exported_updates as exported

from unisono import ClusterError, InvalidArgumentError
from unisono.parameter_server.server._durable import DurableStore
from unisono.parameter_server.state import _acknowledged, _container, _records
from unisono.parameter_server.state._create import NewVariable
from unisono.parameter_server.state._push import ProgramCall, Push, UsedBatches
from unisono.parameter_server.state._variables import StoredSpec

ROWS, WIDTH = 20, 3


def opened(directory, **options):
    return DurableStore(directory, **{"interval": None, "log_bytes": 1} | options)


@pytest.fixture
def after_kill(tmp_path):
    """Returns what a new process finds if the present one is killed now."""
    made = []

    def restart(directory, **options):
        copied = tmp_path / f"copy{len(made)}"
        shutil.copytree(directory, copied)
        made.append(opened(copied, **options))
        return made[-1]

    yield restart
    for durable in made:
        durable.close()


@pytest.fixture
def durable(tmp_path):
    durable = opened(tmp_path / "server")
    fill(durable.store)
    yield durable
    durable.close()


def fill(store):
    specs = [StoredSpec("w", (5, 2), "float32"), StoredSpec("rate", (), "float32", role="slot")]
    specs += [StoredSpec("count", (), "int32", role="slot"), StoredSpec("v", (5, 2), "float32", role="slot")]
    specs += [StoredSpec(n, (ROWS, WIDTH), "float32", "table") for n in ("table", "velocity")]
    fills = [1.0, 0.1, 0, 0, 1.0, 0.0]
    store.create([NewVariable(s, fill=f) for s, f in zip(specs, fills, strict=True)])
    add_programs(store)


def add_programs(store):
    store.add_program(exported.momentum_blob((5, 2)))
    store.add_program(exported.momentum_rows_blob(WIDTH))


def push_of(closure, sparse=True, watermark=0):
    draw = np.random.default_rng(closure)
    dense = draw.normal(size=(5, 2)).astype("float32")
    calls = [ProgramCall(exported.digest(exported.momentum_blob((5, 2))), (0,), (1, 2, 3), (dense,))]
    if sparse:
        indices = draw.integers(0, ROWS, size=4)
        rows = draw.normal(size=(4, WIDTH)).astype("float32")
        program = exported.digest(exported.momentum_rows_blob(WIDTH))
        calls.append(ProgramCall(program, (4,), (1, 2, 5), (rows,), indices))
    adds = ((2, np.int32(10)[...]),)
    return Push(closure, watermark, tuple(calls), adds)


def content(store):
    meta, _ = store.state()
    return json.dumps(meta), [v.host().copy() for v in store.variables.values()]


def assert_same(one, other):
    assert one[0] == other[0]
    for a, b in zip(one[1], other[1], strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_new_process_goes_on_to_the_bit(durable, after_kill, tmp_path):
    for closure in range(3):
        durable.store.push(push_of(closure))
    again = after_kill(tmp_path / "server")
    assert (again.recovery.source, again.recovery.replayed) == ("log", 4)
    assert_same(content(again.store), content(durable.store))
    assert again.number == durable.number == 4
    # What was applied is known, and both go on alike.
    assert not again.store.push(push_of(2))
    for store in (again.store, durable.store):
        assert store.push(push_of(3))
    assert_same(content(again.store), content(durable.store))


@pytest.mark.parametrize("seed", range(3))
def test_any_changes_and_full_logs(tmp_path, after_kill, monkeypatch, seed):
    draw = np.random.default_rng(seed)
    durable = opened(tmp_path / "server")
    fill(durable.store)
    # Each change begins a new file with a probability of 40%.
    monkeypatch.setattr(_records.RecordFile, "has_room", lambda self, nbytes: draw.random() < 0.6)
    for closure in range(25):
        match draw.integers(0, 10):
            case 0:
                durable.store.reset()
                fill(durable.store)
            case 1:
                durable.store.write(4, np.full((2, WIDTH), closure, "float32"), indices=np.array([3, 1]))
            case 2:
                durable.store.write(0, np.full((5, 2), closure, "float32"))
            case 3:
                durable.store.raise_generation(closure)
            case 4:
                durable.snapshot()
            case _:
                durable.store.push(push_of(closure, sparse=bool(closure % 2), watermark=closure // 2))
        if closure % 6 == 5:
            again = after_kill(tmp_path / "server")
            assert again.recovery.source == "log"
            assert_same(content(again.store), content(durable.store))
    durable.close()


def test_a_kill_at_any_moment_of_a_push(durable, after_kill, tmp_path, monkeypatch):
    durable.store.push(push_of(0))
    before = content(durable.store)
    found = []

    def put(self, at, data, whole=_records.RecordFile._put):
        if self is not durable._journal._records:
            whole(self, at, data)
            return
        # Before, in the middle, and after each part that is written.
        for part in (0, len(data) // 2, len(data)):
            whole(self, at, data[:part])
            again = after_kill(tmp_path / "server")
            found.append((again.store.applied_count, content(again.store)))

    with monkeypatch.context() as patched:
        patched.setattr(_records.RecordFile, "_put", put)
        durable.store.push(push_of(1))
    after = content(durable.store)
    counts = [count for count, _ in found]
    # The last part of the header makes it happen, and nothing before.
    assert counts == [1, 1, 1, 1, 1, 2]
    for count, state in found:
        assert_same(state, before if count == 1 else after)


def test_a_kill_while_the_log_begins_again(durable, after_kill, tmp_path, monkeypatch):
    for closure in range(2):
        durable.store.push(push_of(closure))
    before, found, busy = content(durable.store), [], []

    def kill_before(patched, owner, name):
        whole = getattr(owner, name)

        def call(*args):
            if not busy:
                busy.append(True)
                found.append(content(after_kill(tmp_path / "server").store))
                busy.pop()
            return whole(*args)

        patched.setattr(owner, name, call)

    with monkeypatch.context() as patched:
        patched.setattr(_records.RecordFile, "has_room", lambda self, nbytes: False)
        # Before the image is valid, and before each part that is written to the log.
        kill_before(patched, _container, "_header")
        kill_before(patched, _records.RecordFile, "_put")
        durable.store.push(push_of(2))
    assert len(found) == 4
    for state in found:
        assert_same(state, before)
    assert_same(content(after_kill(tmp_path / "server").store), content(durable.store))


def test_a_full_disk_rejects_a_push_and_loses_nothing(durable, after_kill, tmp_path, monkeypatch):
    durable.store.push(push_of(0))
    before = content(durable.store)
    monkeypatch.setattr(_records.RecordFile, "has_room", lambda self, nbytes: False)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises((OSError, ClusterError), match="No space left"):
            durable.store.push(push_of(1))
    assert_same(content(durable.store), before)
    assert_same(content(after_kill(tmp_path / "server").store), before)
    assert durable.store.push(push_of(1))


def test_a_log_that_cannot_be_repeated_is_an_error_until_a_new_job(durable, tmp_path, caplog):
    durable.store.raise_generation(1)
    for closure in range(2):
        durable.store.push(push_of(closure))
    durable.close()
    for program in (tmp_path / "server").glob("program-*"):
        program.write_bytes(b"damaged")
    for _ in range(2):  # the first start leaves all as it is
        again = opened(tmp_path / "server")
        assert again.recovery.source == "damage"
        assert "2 of 2 are lost (A push needs a program" in caplog.text
        for request in (lambda store: store.pull([0]), lambda store: store.push(push_of(2))):
            with pytest.raises(ClusterError, match="2 of 2 are lost"):
                request(again.store)
        if not _:
            again.close()
    # What could not be used is not taken for newer later on.
    assert again.store.generation == 1
    again.store.raise_generation(2)
    again.store.reset()
    fill(again.store)
    again.store.push(push_of(1))
    kept = content(again.store)
    again.close()
    again = opened(tmp_path / "server")
    assert again.recovery.source == "log"
    assert_same(content(again.store), kept)
    again.close()


def test_without_its_log_a_server_goes_on_from_its_snapshot(tmp_path):
    durable = opened(tmp_path)
    fill(durable.store)
    durable.store.push(push_of(0))
    durable.snapshot()
    kept = content(durable.store)
    durable.close()
    # As where they lay in a file system in memory, and the machine was started again.
    for path in tmp_path.iterdir():
        if not path.name.startswith("snapshot-"):
            path.unlink()
    again = opened(tmp_path)
    assert again.recovery.source == "snapshot"
    for value, variable in zip(kept[1], again.store.variables.values(), strict=True):
        np.testing.assert_array_equal(value, variable.host())
    again.close(remove=True)


def test_tables_that_were_dropped_leave_no_files(durable, after_kill, tmp_path, monkeypatch):
    files = lambda: {p.name for p in (tmp_path / "server").glob("table-*")}  # noqa: E731
    first = files()
    assert len(first) == 2
    durable.store.reset()
    # Until the log begins again a restart needs them; then a table may just be made.
    assert files() == first
    assert after_kill(tmp_path / "server").store.table_keys() == set()
    monkeypatch.setattr(_records.RecordFile, "has_room", lambda self, nbytes: False)
    fill(durable.store)
    assert {f"table-{key}" for key in durable.store.table_keys()} == files()
    assert not files() & first
    assert_same(content(after_kill(tmp_path / "server").store), content(durable.store))


def test_variables_that_were_dropped_stay_so(durable, after_kill, tmp_path):
    store = durable.store
    store.push(push_of(1))
    before = {number: v.spec for number, v in store.variables.items()}
    table = next(number for number, spec in before.items() if spec.kind == "table")
    store.drop([0, table], request=7)
    with pytest.raises(InvalidArgumentError, match="by number"):
        store.push(push_of(2))
    with pytest.raises(InvalidArgumentError, match="by number"):
        store.drop([1, 0], request=8)
    # Sent again, it changes nothing; the numbers are not given again.
    store.drop([0, table], request=7)
    assert store.create([NewVariable(StoredSpec(before[0].name, (9,), "float32"))]) == [len(before)]
    twin = after_kill(tmp_path / "server").store
    assert_same(content(twin), content(store))
    assert (twin.dropped_count, set(twin.variables)) == (1, {*before, len(before)} - {0, table})
    # The table's file is there until the log begins again: a log that is repeated may write to it.
    assert len(list((tmp_path / "server").glob("table-*"))) == len(store.table_keys()) + 1
    durable._journal.begin_log()
    assert {
        p.name.removeprefix("table-") for p in (tmp_path / "server").glob("table-*")
    } == store.table_keys()
    assert_same(content(after_kill(tmp_path / "server").store), content(store))


def test_a_table_may_be_dropped_while_a_snapshot_is_written(tmp_path, monkeypatch):
    durable = opened(tmp_path / "server", log_bytes=0)
    store = durable.store
    fill(store)
    table = next(number for number, v in store.variables.items() if v.spec.kind == "table")
    state = store.state

    def dropped_before():
        monkeypatch.setattr(store, "state", state)
        store.drop([table])
        return state()

    monkeypatch.setattr(store, "state", dropped_before)
    durable.snapshot()
    durable.close()
    found = opened(tmp_path / "server", log_bytes=0)
    assert found.recovery.source == "snapshot"
    assert set(found.store.variables) == set(store.variables)
    assert table not in found.store.variables
    assert_same((None, content(found.store)[1]), (None, content(store)[1]))
    found.close()


def test_one_process_uses_a_directory(durable, tmp_path):
    with pytest.raises(ClusterError, match="used by one process"):
        opened(tmp_path / "server")


@pytest.fixture
def without_log(tmp_path):
    durable = opened(tmp_path / "server", log_bytes=0)
    fill(durable.store)
    yield durable
    durable.close()


def test_without_a_log_the_newest_snapshot_is_taken(without_log, after_kill, tmp_path, monkeypatch, caplog):
    durable = without_log
    durable.store.push(push_of(0))
    durable.snapshot()
    durable.store.push(push_of(1))
    # Rows that change while a snapshot copies them: it has the state at its end.
    wrote = []

    def add(self, array, whole=_container.SnapshotWriter.add):
        whole(self, array)
        if not wrote:
            wrote.append(durable.store.push(push_of(2)))

    with monkeypatch.context() as patched:
        patched.setattr(_container.SnapshotWriter, "add", add)
        assert durable.snapshot() == 4
    kept = content(durable.store)
    durable.store.push(push_of(3))

    with caplog.at_level(logging.WARNING, "unisono"):
        again = after_kill(tmp_path / "server", log_bytes=0)
    assert again.recovery.source == "snapshot"
    assert "changes after number 4 are lost" in caplog.text
    # All the same but the lineage: versions that clients know mean nothing now.
    was, now = json.loads(kept[0]), json.loads(content(again.store)[0])
    assert was.pop("lineage") != now.pop("lineage")
    assert was == now
    for a, b in zip(kept[1], content(again.store)[1], strict=True):
        np.testing.assert_array_equal(a, b)
    assert again.store.push(push_of(3))


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_torn_snapshot_is_left_for_the_one_before(without_log, after_kill, tmp_path, caplog, damage):
    durable = without_log
    durable.store.push(push_of(0))
    assert durable.snapshot() == durable.snapshot() == 2
    durable.store.push(push_of(1))
    assert durable.snapshot() == 3
    newest = max((tmp_path / "server").glob("snapshot-*"))
    raw = bytearray(newest.read_bytes())
    raw[4096 + 5] ^= 1
    newest.write_bytes({"flip": raw, "cut": raw[:-9], "empty": b""}[damage])
    with caplog.at_level(logging.WARNING, "unisono"):
        again = after_kill(tmp_path / "server", log_bytes=0)
    assert again.recovery.changes == 2
    assert again.recovery.damaged == (newest.name,)
    assert f"{newest.name}, but" in caplog.text
    assert again.store.applied_count == 1


def test_without_a_log_the_snapshot_remains(tmp_path, after_kill):
    durable = opened(tmp_path / "server", log_bytes=0)
    fill(durable.store)
    durable.store.push(push_of(0))
    durable.snapshot()
    kept = [v.host().copy() for v in durable.store.variables.values()]
    durable.store.push(push_of(1))
    again = after_kill(tmp_path / "server", log_bytes=0)
    assert again.recovery.source == "snapshot"
    for value, variable in zip(kept, again.store.variables.values(), strict=True):
        np.testing.assert_array_equal(value, variable.host())
    assert [p.name for p in (tmp_path / "server").glob("[it]*-*")] == []
    durable.close()


@pytest.mark.parametrize("ends", ["log", "image", "snapshot"])
def test_how_far_workers_data_are_is_kept_with_the_updates(durable, after_kill, tmp_path, ends):
    durable.store.push(Push(1, adds=((0, np.ones((5, 2), "float32")),), used=(("i@0", 2), ("i@1", 1))))
    durable.store.push(Push(2, adds=((0, np.ones((5, 2), "float32")),), used=(("i@0", 3), ("i@0", 4))))
    # A repetition was applied already, with the batch of the first attempt.
    durable.store.push(Push(2, used=(("i@0", 9),)))
    if ends == "image":
        durable._journal.begin_log()
    elif ends == "snapshot":
        durable.snapshot()
        durable._journal.remove()  # as where the log was turned on later
    again = after_kill(tmp_path / "server")
    assert again.recovery.source == ("snapshot" if ends == "snapshot" else "log")
    for store in (again.store, durable.store):
        assert {name: each.encode() for name, each in store.used.items()} == {"i@0": [4, 1], "i@1": [1]}
    again.store.reset()
    assert again.store.used == {}


@pytest.mark.parametrize("ends", ["log", "image"])
def test_files_that_count_batches_are_read(durable, after_kill, tmp_path, monkeypatch, ends):
    """As development versions wrote them: a number of batches, which two closures could have."""
    encode = Push.encode

    def counted(push):
        meta, arrays = encode(push)
        return meta | {"used": dict(push.used)}, arrays

    monkeypatch.setattr(Push, "encode", counted)
    monkeypatch.setattr(UsedBatches, "encode", lambda used: used.count)
    for closure in (1, 2):
        push = Push(closure, adds=((0, np.ones((5, 2), "float32")),), used=(("i@0", 3),))
        durable.store.push(push, is_replayed=True)
    if ends == "image":
        durable._journal.begin_log()
    again = after_kill(tmp_path / "server")
    assert (again.recovery.source, again.store.applied_count) == ("log", 2)
    assert 3 in again.store.used["i@0"]


def test_the_timer_writes_snapshots_and_the_end_removes_all(tmp_path):
    import time

    durable = opened(tmp_path / "server", interval=0.01)
    fill(durable.store)
    while not list((tmp_path / "server").glob("snapshot-*")):
        time.sleep(0.01)
    durable.close(remove=True)
    assert [p.name for p in (tmp_path / "server").iterdir()] == ["lock"]


#: Pushes until it is killed, and prints the number of each closure that was answered.
PROGRAM = """
import sys
from tests.unit.parameter_server.test_durable import add_programs, fill, opened, push_of
durable = opened(sys.argv[1], log_bytes=1 << 20)
store = durable.store
# `jax.export` writes other bytes in each process.
add_programs(store)
if not store.variables:
    fill(store)
for closure in range(store.applied_count, 100_000):
    if not store.push(push_of(closure)):
        raise SystemExit(f"{closure} was applied before")
    print(closure, flush=True)
"""


def test_a_process_that_is_killed_again_and_again_loses_nothing(tmp_path):
    answered = -1
    for _ in range(2):
        task = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "server")], stdout=subprocess.PIPE, text=True
        )
        for _ in range(300):
            answered = int(task.stdout.readline())
        task.send_signal(signal.SIGKILL)
        rest = task.stdout.read().splitlines()
        task.wait()
        task.stdout.close()
        answered = int(rest[-1]) if rest and rest[-1].isdigit() else answered
        again = opened(tmp_path / "server")
        # The push that was under way may be there, too.
        assert again.store.applied_count in (answered + 1, answered + 2)
        count = again.store.applied_count
        again.close()
    expected = opened(tmp_path / "expected", log_bytes=0)
    fill(expected.store)
    for closure in range(count):
        expected.store.push(push_of(closure))
    again = opened(tmp_path / "server")
    for one, other in zip(again.store.variables.values(), expected.store.variables.values(), strict=True):
        assert one.version == other.version
        np.testing.assert_array_equal(one.host(), other.host())
    again.close()
    expected.close()


def test_snapshots_behind_damaged_ones_are_the_newest(without_log, after_kill, tmp_path):
    durable = without_log
    for closure in range(2):
        durable.store.push(push_of(closure))
        durable.snapshot()
    for path in (tmp_path / "server").glob("snapshot-*"):
        path.write_bytes(b"")
    again = after_kill(tmp_path / "server", log_bytes=0)
    assert again.recovery.source == "nothing"
    fill(again.store)
    again.snapshot()
    third = after_kill(again._directory, log_bytes=0)
    assert (third.recovery.source, len(third.store.variables)) == ("snapshot", 6)


@pytest.mark.parametrize("written", [0, 20, 60, 75])
def test_a_server_that_was_killed_before_its_first_note_has_lost_nothing(tmp_path, written):
    directory = tmp_path / "server"
    directory.mkdir()
    _acknowledged.AcknowledgedFile(tmp_path / "whole").note(_acknowledged.LogPosition())
    # In the middle of it, too.
    note = np.frombuffer((tmp_path / "whole").read_bytes()[:written], np.uint8)
    _records.map_file(directory / "acknowledged", 256)[:written] = note
    durable = opened(directory)
    assert durable.recovery.source == "nothing"
    durable.close()


def test_what_a_killed_server_had_not_completed_is_removed(tmp_path):
    directory = tmp_path / "server"
    directory.mkdir()
    for name in (".snapshot-00000000000000000007.partial", ".program-0.12-34.part"):
        (directory / name).write_bytes(b"a part")
    (directory / ".keep").write_bytes(b"another program's")
    opened(directory).close()
    assert [path.name for path in directory.glob(".*")] == [".keep"]


def test_records_of_another_use_of_a_log_are_not_read(tmp_path, monkeypatch):
    def log_of(count, boot):
        monkeypatch.setattr(_records, "boot_id", lambda: boot)
        log = _records.RecordFile(tmp_path / "log")
        log.begin(1 << 16, 1)
        for _ in range(count):
            log.commit("drop", {"numbers": [1], "request": 0})

    log_of(3, "a" * 36)
    # Another boot that has found nothing begins with the same numbers.
    log_of(1, "b" * 36)
    assert len(_records.read_records(tmp_path / "log")[0]) == 1
