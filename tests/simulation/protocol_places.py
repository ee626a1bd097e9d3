"""Places of checkpoints that cannot be read or written for a while, on a disk and in an object store.

Real: commits, manifests, series, `latest_checkpoint`. A program has written checkpoints; then its place is
denied, full, read-only or stale, for all calls or for some, or for one checkpoint alone, or another path is
meant. Promised, and checked:

- what is raised is made for its user, names the place, and has the system's or the store's own words;
- as long as the trouble lasts nothing that was complete is lost, and nothing half written is seen;
- where one checkpoint cannot be read, the newest of the others is found;
- afterwards the newest is found, the next one is written behind it, and no file is left that none names;
- a checkpoint that is replaced again and again is read whole, or the error says so.

Tests: tests/unit/test_simulated_places.py.
"""

import contextlib
import errno
import functools
import os
from pathlib import Path

import pytest

from tests.simulation._object_store import LATEST
from tests.simulation._stub_training import batches_in, snapshot_after
from tests.simulation._world import SETTING
from tests.simulation.protocol_commits import _Job, _Setting
from unisono._errors import CheckpointError
from unisono._system._object_store import StorePath
from unisono.checkpoint._reader import latest_checkpoint
from unisono.checkpoint._series import read_snapshot, write_snapshot
from unisono.checkpoint.commits import _commits
from unisono.checkpoint.commits._manifests import MANIFEST

_WRITES = ("mkdir", "create", "write", "rename", "unlink", "rmdir", "fsync", "utime")
#: Errors of a whole place, and the calls that have them.
_TROUBLES = (
    (errno.EACCES, None), (errno.ESTALE, None), (errno.EIO, None), (errno.EROFS, _WRITES),
    (errno.EDQUOT, ("mkdir", "create", "write")), (errno.ENOSPC, ("write",)), (errno.EACCES, ("access",)),
    (errno.EACCES, ("scandir", "listdir")), (errno.EPERM, ("rename",)), (errno.EIO, ("fsync",)),
)  # fmt: skip


class _Place:
    """A place with checkpoints, and what is known of it."""

    def __init__(self, world, setting):
        self.world, self.setting, self.machine = world, setting, setting.machines[0]
        self.job = _Job(world, setting.place)
        self.path = setting.place

    def run(self, body, name):
        self.setting.run(self.machine, body, name)
        # A request that is under way arrives.
        self.world.sleep(LATEST)

    def raises(self, call, words, is_made=True):
        """Call what must fail, or need not; return whether it did, with an error made for its user."""
        try:
            call()
        except CheckpointError as error:
            self._check_text(error, words)
            return True
        except OSError as error:
            # A directory that cannot be listed is the system's own error, which names it.
            self.world.check(not is_made, lambda error=error: f"An error of the system is raised: {error!r}")
            self._check_text(error, words)
            return True
        return False

    def _check_text(self, error, words):
        is_named = any(word in str(error) for word in words)
        self.world.check(is_named, lambda: f"The error must name one of {words}. Found: {error}")

    def all_of(self, words):
        """Do all that programs do with a place; return how often it failed."""
        job, series = self.job, self.job.series()
        calls = (
            (lambda: _commits.check_place(self.path, writes=True), True),
            (lambda: _commits.check_place(self.path, writes=False), True),
            (lambda: latest_checkpoint(str(self.path)), True),
            (lambda: _commits.sweep(self.path), False),
            (lambda: job.restored(self.machine), False),
            (lambda: read_snapshot(self.path / "ckpt-1"), True),
            (lambda: self._write(series), False),
            (lambda: series.delete(series.paths()[:-1]), False),
        )
        first = self.world.choose(len(calls))
        count = 0
        for call, is_made in calls[first:] + calls[:first]:
            if call is calls[1][0] and isinstance(self.path, StorePath):
                # It gives the claim up, as a manager does that only reads.
                continue
            count += self.raises(call, words, is_made)
        self.world.check(job.begun >= job.acknowledged, "What is acknowledged was begun.")
        return count

    def _write(self, series):
        job, number = self.job, _commits.newest_number(self.path, "ckpt") + 1
        job.begun += 1
        try:
            series.write(number, snapshot_after(job.begun))
        except OSError as error:
            is_made = isinstance(error, CheckpointError)
            self.world.check(is_made, lambda error=error: f"Writing raises {error!r}.")
            raise
        job.acknowledged = job.begun

    def after(self):
        """Check that all is well once the trouble has ended."""
        _commits.check_place(self.path, writes=True)
        _commits.sweep(self.path)
        # What was written last, whether it was acknowledged or not.
        self.job.restored(self.machine)
        self.job.finish(self.machine)


def _of_all(world, place):
    """The whole place is in trouble, on a disk."""
    number, names = world.pick(_TROUBLES)
    # The first one may have been deleted before.
    words = (os.strerror(number), "cannot be made there", "full one", "where there is no directory")
    place.machine.refusal = lambda name, path: (
        number if "/disk/run" in path and (names is None or name in names) else 0
    )
    place.run(lambda: place.all_of(words), "in trouble")
    place.machine.refusal = lambda name, path: 0


def _of_one(world, place):
    """One checkpoint cannot be read."""
    number, name = world.pick((errno.EACCES, errno.ESTALE, errno.EIO)), None
    paths = sorted(p.name for p in place.job.series().paths())
    name = world.pick(paths[::-1])
    place.machine.refusal = lambda call, path: number if f"/disk/run/{name}/" in path else 0

    def look():
        series = place.job.series()
        if len(paths) == 1:
            place.raises(series.newest, (os.strerror(number),))
            return
        path, snapshot = series.newest()
        batches_in(world, snapshot)
        world.check(path.name == [p for p in paths if p != name][-1], lambda: f"{path} is found, not {name}.")

    place.run(look, "with one that is denied")
    place.machine.refusal = lambda name, path: 0


def _failing(world, place):
    """A library fails while it writes: what it raises is its own, unless the disk is full."""

    def write(text):
        def fill(folder):
            (folder / "part").write_bytes(b"x")
            raise RuntimeError(text)

        _commits.write_commit(place.path, "failed", fill)

    def look():
        world.check(
            place.raises(lambda: write("RESOURCE_EXHAUSTED: no space"), ("needs room on the disk",)),
            "A full disk is an error of checkpoints.",
        )
        try:
            write("wrong type")
        except RuntimeError as error:
            world.check(str(error) == "wrong type", lambda error=error: f"The library's error is {error!r}.")
        left = [path for path in place.setting.disk.listing() if "failed" in path]
        world.check(not left, lambda: f"A writer that fails leaves {left}.")
        world.check(not _commits.is_taken(place.path), "No other process has claimed the place.")
        aside = _commits.place_aside(place.path / "failed")
        world.check("failed" in aside.name or "unisono-" in aside.name, lambda: f"{aside} has another name.")

    if isinstance(place.path, StorePath):
        # Of this process, from now on.
        place.run(lambda: (_commits.check_place(place.path, writes=True), look()), "a library fails")
    else:
        place.run(look, "a library fails")


def _elsewhere(world, place):
    """Another path is meant: a file, one below a file, the folder of all, a model of Keras, no path."""

    def look():
        with open(place.path / "model.keras", "wb") as file:
            file.write(b"PK")
        with open(place.path / "ckpt-99", "wb") as file:
            file.write(b"x")
        below = place.path / "ckpt-99" / "run"
        check = _commits.check_place
        for call, words in (
            (
                lambda: check(place.path / "ckpt-99", writes=world.choose(2) == 1),
                ("Not a directory", "exists"),
            ),
            (lambda: check(below, writes=world.choose(2) == 1), ("Not a directory",)),
            (lambda: check(Path("/tmp/a\0b"), writes=True), ("null byte",)),
            (lambda: write_snapshot(below, "a", snapshot_after(1), in_one_file=True), ("Not a directory",)),
            (lambda: write_snapshot(place.path, "ckpt-99", snapshot_after(1), in_one_file=True), ("exists",)),
            (lambda: read_snapshot(place.path), ("latest_checkpoint",)),
            (lambda: read_snapshot(place.path / "model.keras"), ("file of Keras",)),
            (lambda: read_snapshot(place.path / "ckpt-98"), ("no directory",)),
        ):
            world.check(place.raises(call, words), lambda words=words: f"It must fail with {words}.")
        check(place.path / "absent", writes=False)
        world.check(latest_checkpoint(str(below)) is None, "Below a file there is no checkpoint.")
        number = _commits.newest_number(place.path, "ckpt")
        world.check(number == 99, lambda: f"A file has the number 99, the highest is {number}.")
        for name in ("model.keras", "ckpt-99"):
            (place.path / name).unlink()

    place.run(look, "elsewhere")


def _replaced_again(world, place):
    """A checkpoint is replaced faster than it is read."""
    folder = place.path
    ends = []

    def write():
        for batches in range(1, 16):
            write_snapshot(folder, "best", snapshot_after(batches), in_one_file=True, replaces=True)
            world.sleep(0.1)
        ends.append(True)

    def read():
        count = 0
        while not ends:
            world.sleep(0.01)
            with contextlib.suppress(FileNotFoundError):
                if not place.raises(
                    lambda: batches_in(world, read_snapshot(folder / "best")),
                    ("times meanwhile", "no directory", "is missing", "cannot be read"),
                ):
                    count += 1
        batches_in(world, read_snapshot(folder / "best"))

    slow = place.setting.machines[-1]
    process = place.machine.process("writer", write)
    slow.latency = world.pick((0.1, 0.02, 1.0), SETTING)
    with pytest.MonkeyPatch.context() as patches:
        # Fewer than in reality: most of a schedule would be these.
        patches.setattr(_commits, "_MOST_LOOKS", 3)
        place.setting.run(slow, read, "reader")
    slow.latency = 0.0
    world.check(process.wait(1000.0), "A writer must end.")
    if process.error is not None:
        raise process.error
    place.run(lambda: _commits.delete_commit(folder / "best"), "the end")


#: What a store refuses: requests, a part of the key, whether after it was carried out, and the error.
_REFUSED = (
    (("LIST", "HEAD", "GET", "PUT", "DELETE"), "", False, PermissionError(errno.EACCES, "Access Denied")),
    (("PUT",), "", False, PermissionError(errno.EACCES, "Access Denied")),
    (("PUT",), MANIFEST, True, ConnectionError("Access Denied")),
    (("PUT",), MANIFEST, False, ConnectionError("Access Denied")),
    (("GET",), "", False, PermissionError(errno.EACCES, "Access Denied")),
    (("LIST",), "", False, FileNotFoundError("Access Denied: NoSuchBucket")),
    (("DELETE",), "", False, PermissionError(errno.EACCES, "Access Denied")),
    (("HEAD", "GET"), ".writer", False, TimeoutError("Access Denied")),
)  # fmt: skip


def _refused(world, place):
    """The store refuses requests."""
    names, part, is_done, error = world.pick(_REFUSED)
    store = place.setting.store

    def refuse(name, key, done):
        return error if name in names and part in key and done == is_done else None

    store.refusal = refuse
    # Who could not claim the place does not have it.
    words = ("Access Denied", "must exist", "no directory", "is missing", "One process may write")
    place.run(lambda: place.all_of(words), "refused")
    store.refusal = lambda name, key, done: None


def _taken(world, place):
    """Others have written into the place: an object that is none of a checkpoint, and another process."""

    def look():
        path = place.path / "ckpt-99" / "notes.txt"
        path.write_bytes(b"x")
        write = functools.partial(write_snapshot, place.path, "ckpt-99", snapshot_after(1), in_one_file=True)
        world.check(place.raises(write, ("must have a new name",)), "A name that exists is refused.")
        path.unlink()

    def claim():
        _commits.check_place(place.path, writes=True)

    def replaced():
        _commits.check_place(place.path, writes=True)
        world.sleep(20.0)
        world.check(_commits.is_taken(place.path), "A process that was replaced must see it.")
        # What a successor has claimed stays claimed.
        _commits.leave(place.path)
        world.check(_commits.is_taken(place.path), "A process that was replaced takes no claim back.")
        _commits.check_place(place.path, writes=False)

    place.run(look, "another object")
    process = place.machine.process("replaced", replaced)
    world.sleep(5.0)
    place.run(claim, "successor")
    world.check(process.wait(100.0), "A process must end.")
    if process.error is not None:
        raise process.error


def _places(world, kind, troubles):
    with _Setting(world, kind, is_local=False) as setting:
        world.faults_left = 0
        place = _Place(world, setting)
        place.run(lambda: place.job.train(place.machine), "first")
        for _ in range(1 + world.choose(2, SETTING)):
            world.pick(troubles)(world, place)
        place.run(place.after, "after it")
        setting.check_gone(place.machine)


def places(world):
    """A disk's place is in trouble for a while."""
    _places(world, "disk", (_of_all, _of_one, _elsewhere, _replaced_again, _failing))


def places_in_store(world):
    """A store's place is in trouble for a while."""
    _places(world, "object store", (_refused, _taken, _failing))


PROTOCOLS = {"places": places, "places_in_store": places_in_store}
