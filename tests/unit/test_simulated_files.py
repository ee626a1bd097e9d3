"""Disks and object stores that crash, and the protocols on them: launches, leases and checkpoints."""

import dataclasses
import errno
import io
import os
import tempfile

import numpy as np
import pytest
from tests.simulation._disk import Disk
from tests.simulation._file_doors import ROOT, FileDoors, Machine
from tests.simulation._object_store import ObjectStore
from tests.simulation._primitives import simulated
from tests.simulation._runner import run_many, run_one
from tests.simulation._world import World
from tests.simulation.mistakes_files import MISTAKES as OF_FILES
from tests.simulation.mistakes_launches import MISTAKES as OF_LAUNCHES
from tests.simulation.mistakes_links import MISTAKES as OF_LINKS
from tests.simulation.mistakes_single import MISTAKES as OF_SINGLE_TASKS
from tests.simulation.protocol_logs import Logs
from tests.simulation.protocols import protocols

from unisono._system._files import flush, make_folder, replace_file
from unisono._system._object_store import place_of
from unisono.parameter_server.server._durable import DurableStore
from unisono.parameter_server.state import _records

PROTOCOLS = (
    "disk", "nfs", "object_store", "damage", "rivals", "rivals_in_store", "generations", "preemptions",
    "single_restarts", "leases", "links", "logs", "snapshots", "damaged_logs",
    "reboots",
)  # fmt: skip
#: Mistakes that few schedules show, and the defects that the simulation has found in the project itself.
PLANTED = {
    "fsync is left out": 40,
    "the rename is before the manifest": 40,
    "the folder of checkpoints is not flushed in the one above": 60,
    "the newest one is deleted, too": 20,
    "names that are being written are seen": 20,
    "a commit is not taken back": 60,
    "remains of living processes are swept": 20,
    "a lease does not end": 60,
    "a second client takes the server": 20,
    "a task that ended is waited for": 20,
    "a worker ends while another saves": 20,
    "a task starts beside its hanging process": 40,
    "servers are asked to end with their chief": 60,
    "output that was sent is sent again": 20,
}


def on_disk(body, lag=0.0):
    """Run `body(disk, machine)` as a process of a machine with a local disk; return the disk."""
    # Each choice is the worst: what was not flushed is lost.
    world = World(0)
    disk = Disk(world, lag)
    machine = Machine(world, "host", {"disk": disk}, own=("disk",))

    def main():
        with FileDoors(world, Machine(world, "checker", {"disk": disk})):
            process = machine.process("writer", lambda: body(disk, machine))
            process.wait()
            if process.error is not None:
                raise process.error
        return disk

    return world.run(main)


def lose_all(disk):
    """Lose what was not flushed, of files and of folders."""
    disk.world.choose = lambda n, kind="data": n - 1
    disk.lose_power()


def test_a_power_loss_keeps_what_was_flushed():
    place = place_of(f"{ROOT}/disk")

    def body(disk, machine):
        replace_file(place / "kept", "as it was written", durable=True)
        (place / "lost").write_text("never flushed")
        assert sorted(os.listdir(place)) == ["kept", "lost"]
        lose_all(disk)
        assert os.listdir(place) == ["kept"]
        assert (place / "kept").read_text() == "as it was written"

    on_disk(body)


def test_a_folder_outlives_a_power_loss_with_those_above_it():
    place = place_of(f"{ROOT}/disk/a/b/c")

    def body(disk, machine):
        make_folder(place)
        lose_all(disk)
        assert place.is_dir()

    on_disk(body)


def test_a_file_that_was_not_flushed_is_torn():
    seen = set()

    def body(disk, machine):
        path = place_of(f"{ROOT}/disk/file")
        path.write_text("")
        node = disk.find("file", "host")
        node.flush()
        disk.root.flush()
        for _ in range(60):
            node.write(0, b"abc")
            disk.lose_power()
            seen.add(bytes(node.data))
            node.data, node.saved = bytearray(), b""

    on_disk(body)
    assert {b"", b"abc", b"ab"} < seen
    assert any(0 in data for data in seen)


def test_another_host_sees_names_late_on_nfs():
    def body(disk, machine):
        assert disk.names(disk.root, "other") == {}
        disk.create("file", "host")
        assert disk.find("file", "host").links
        with pytest.raises(FileNotFoundError):
            disk.find("file", "other")
        machine.world.sleep(60.0)
        assert disk.find("file", "other").links

    on_disk(body, lag=60.0)


def test_files_of_the_machine_stay_as_they_are(tmp_path):
    real = os.open, io.open, os.stat, tempfile.gettempdir()

    def body(disk, machine):
        (tmp_path / "real").write_text("real")
        assert (tmp_path / "real").read_text() == "real"
        assert not disk.listing()

    on_disk(body)
    assert (os.open, io.open, os.stat, tempfile.gettempdir()) == real


def test_an_object_is_created_once():
    store = ObjectStore(World(0))
    store.put("a", b"1", is_new=True)
    with pytest.raises(FileExistsError):
        store.put("a", b"2", is_new=True)
    assert store.get("a")[0] == b"1"


def test_mapped_pages_outlive_a_process_and_not_the_power():
    states = set()

    def body(disk, machine):
        path = place_of(f"{ROOT}/disk/log")
        first, second = _records.map_file(path, 8192), _records.map_file(path, 8192)
        first[:] = 1
        # Mappings share their memory with each other and with what reads the file.
        assert second.all()
        assert path.read_bytes() == b"\1" * 8192
        assert np.memmap(path, np.uint8, mode="r").all()
        node = disk.find("log", "host")
        for _ in range(60):
            node.data, node.saved = bytearray(8192), bytes(8192)
            _records.map_file(path, 8192)[:] = 1
            disk.write_back()
            node.lose_power(lambda n: disk.world.choose(n))
            states.add(tuple(np.frombuffer(node.saved, np.uint8).reshape(2, 4096).mean(1)))

    on_disk(body)
    assert {(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)} < states


def test_a_full_disk_refuses_pages():
    def body(disk, machine):
        disk.room = 8192
        place = place_of(f"{ROOT}/disk")
        _records.map_file(place / "a", 8192)
        with pytest.raises(OSError, match="No space left"):
            _records.map_file(place / "b", 1)

    on_disk(body)


def test_a_snapshot_that_was_found_is_kept_at_a_power_loss():
    """Its name may not be on the disk yet: who wrote it may have been killed behind the rename."""
    place = place_of(f"{ROOT}/disk/ps-0")

    def body(disk, machine):
        durable = DurableStore(place, 0, None)
        durable.store.raise_generation(1)
        number = durable.snapshot()
        (written,) = place.glob("snapshot-*")
        written.rename(place / "other")
        flush(place)
        (place / "other").rename(written)
        durable.close()
        again = DurableStore(place, 0, None)
        assert again.snapshot() == number
        lose_all(disk)
        assert written.exists()
        again.close()

    with simulated():
        on_disk(body)


class StoppedLogs(Logs):
    """Its second server cannot read the newest snapshot, and is killed before it serves anything."""

    starts = 0

    def serve(self, closures, is_last=False):
        self.starts += 1
        super().serve(closures, is_last)

    def fail(self, name, path):
        """Be the disk."""
        if self.starts == 2 and name == "mmap" and not self.world.faults["disk"]:
            self.world.faults["disk"] += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    def recovered(self, durable):
        if self.starts == 2:
            assert durable.recovery.source == "snapshot"
            self.world.current.process.kill()
        super().recovered(durable)


def test_what_a_killed_server_could_not_read_its_successor_need_not_have(monkeypatch):
    world = World(2)
    logs = StoppedLogs(world, has_log=False)
    with simulated():
        found = run_stopped(world, logs, monkeypatch)
    assert found == ["ends", "is killed", "ends"]


def run_stopped(world, logs, monkeypatch):
    """Run three servers; return how each has ended."""
    found = []

    def main():
        with FileDoors(world, Machine(world, "checker", logs.machine.disks)) as doors:
            monkeypatch.setattr(doors, "gate", logs.fail)
            for is_last in (False, False, True):
                process = logs.machine.process("ps0", lambda is_last=is_last: logs.serve(3, is_last))
                process.wait()
                if process.error is not None:
                    raise process.error
                found.append("is killed" if process.is_killed else "ends")

    world.run(main)
    return found


def holds(name, seeds):
    """Run schedules of a protocol; fail with the seed of one that does not hold."""
    # Imported before: a protocol may add stand-ins, which the next `simulated` puts in place.
    protocol = protocols()[name]
    with simulated() as look:
        tally, failures = run_many(protocol, seeds, look)
    for failure in failures:
        pytest.fail(f"{name}, seed {failure.seed}: {failure.text()}")
    assert tally.schedules == len(seeds)
    return tally


@pytest.mark.parametrize("name", PROTOCOLS)
def test_protocols_hold(name):
    holds(name, range(25))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PROTOCOLS)
def test_protocols_hold_with_many_faults(name):
    # Behind those of `make simulate` in .ci/run.
    tally = holds(name, range(150, 200))
    if name not in ("damage", "rivals", "rivals_in_store"):
        assert sum(tally.faults.values()) > 33


@pytest.mark.parametrize("name", PLANTED)
def test_planted_mistakes_are_found(name):
    (mistake,) = [m for m in (*OF_FILES, *OF_LAUNCHES, *OF_LINKS, *OF_SINGLE_TASKS) if m.name == name]
    with simulated() as look, mistake.planted():
        _, failures = run_many(protocols()[mistake.protocol], range(PLANTED[name]), look)
    assert failures
    # Without the mistake the same seed holds.
    with simulated():
        assert run_one(protocols()[mistake.protocol], failures[0].seed).error is None


def test_a_mistake_must_change_the_code():
    with pytest.raises(ValueError, match="occurs 0 times"):
        with dataclasses.replace(OF_FILES[0], old="no such text").planted():
            pass
