"""Checkpoints on a disk, on NFS and in an object store: complete or absent, and the newest one is found.

Processes follow each other. Each sweeps, restores the newest checkpoint, and writes further ones, of which a
few are kept; it may be killed at any call, its machine may lose its power, and its disk may fail. `rivals`
and `rivals_in_store` have two of them at a time, and in `damage` bytes change that nothing has written.
"""

import json

from tests.simulation._disk import Disk, Folder
from tests.simulation._file_doors import ROOT, FileDoors, Machine
from tests.simulation._object_store import LATEST, ObjectStore, StoreDoors
from tests.simulation._stub_training import batches_in, snapshot_after
from tests.simulation._world import SETTING
from unisono._errors import CheckpointError
from unisono._system._object_store import StorePath, place_of
from unisono.checkpoint._reader import latest_checkpoint
from unisono.checkpoint._series import CommitSeries, read_snapshot, write_snapshot
from unisono.checkpoint.commits import _commits, _uploads
from unisono.checkpoint.commits._manifests import FORMAT, MANIFEST, _hash_json, parse_manifest

_KEEP = 2
#: The state of a process that has not been restored.
_NOTHING = 0
#: What a process of these protocols catches.
_FAILURES = (CheckpointError, OSError)


class _Job:
    """A place with checkpoints, and what the checker knows: what was acknowledged, and what may be found."""

    def __init__(self, world, place, lag=0.0):
        self.world, self.place, self.lag = world, place, lag
        #: After how many batches the newest checkpoint was made whose writing returned; by whom, and when.
        self.acknowledged, self.by, self.at = _NOTHING, None, None
        #: The same of the checkpoint that is replaced, and the most batches whose writing was begun.
        self.best = self.begun = _NOTHING

    def series(self):
        return CommitSeries(self.place, "ckpt", _KEEP, in_one_file=True)

    def must_find(self, machine):
        """The fewest batches that this machine must find now."""
        is_seen = machine is self.by or self.at is None or self.world.now - self.at > self.lag
        return self.acknowledged if is_seen else _NOTHING

    def may_fail(self):
        """Whether something has happened for which a call of a checkpoint may fail."""
        # A request whose answer was lost is repeated.
        return self.lag or set(self.world.faults) - {"lost request", "lost answer"}

    def restored(self, machine):
        """Restore the newest checkpoint, and check that it is the right one."""
        world = self.world
        least, failed = self.must_find(machine), world.faults["disk"]
        series = self.series()
        found = series.newest()
        batches = _NOTHING if found is None else batches_in(world, found[1])
        if world.faults["disk"] > failed:
            # What cannot be read counts as damaged, and the one before is taken.
            least = _NOTHING
        world.check(
            least <= batches <= self.begun,
            lambda: (
                f"The newest checkpoint must be that after {least} batches or a later one, of {self.begun} "
                f"at most. Found: {batches} at {found and found[0]}"
            ),
        )
        if not self.lag and not world.faults["disk"]:
            for path in series.paths():
                batches_in(world, read_snapshot(path))
        return batches

    def begin(self, machine):
        """Make the place ready, and restore; None where the disk fails again and again."""
        for _ in range(3):
            try:
                _commits.check_place(self.place, writes=True)
                _commits.sweep(self.place)
                return self.restored(machine)
            except _FAILURES as error:
                if not self.world.faults["disk"]:
                    raise error
        return None

    def train(self, machine, writes=3):
        """Be one process: restore, and write checkpoints."""
        world = self.world
        batches = self.begin(machine)
        series = self.series()
        for _ in range(0 if batches is None else 1 + world.choose(writes)):
            batches += 1 + world.choose(4)
            self.begun = max(self.begun, batches)
            if not self.wrote(series, batches):
                continue
            self.acknowledged, self.by, self.at = batches, machine, world.now
            world.note("data", machine.name, machine.name, f"acknowledged {batches} batches")
            try:
                series.trim()
            except _FAILURES:
                world.check(self.may_fail(), "Deleting fails without a fault.")

    def wrote(self, series, batches):
        """Write a checkpoint; return whether that was acknowledged."""
        try:
            series.write(_commits.newest_number(self.place, "ckpt") + 1, snapshot_after(batches))
        except _FAILURES as error:
            self.world.check(
                self.may_fail(), lambda error=error: f"A checkpoint must be written. Found: {error!r}"
            )
            return False
        return True

    def replace(self, machine):
        """Be one process that writes one checkpoint over the other, as `Checkpoint.write` does."""
        world = self.world
        if self.begin(machine) is None:
            return
        for _ in range(1 + world.choose(3)):
            self.check_best()
            self.begun += 1 + world.choose(4)
            try:
                snapshot = snapshot_after(self.begun)
                write_snapshot(self.place, "best", snapshot, in_one_file=True, replaces=True)
            except _FAILURES as error:
                world.check(
                    self.may_fail(), lambda error=error: f"A checkpoint must be replaced. Found: {error!r}"
                )
                continue
            self.best, self.by, self.at = self.begun, machine, world.now
        self.check_best()

    def check_best(self):
        """The checkpoint that was replaced, or a newer one, is there."""
        if not self.best or self.lag or self.world.faults["disk"]:
            return
        try:
            found = batches_in(self.world, read_snapshot(self.place / "best"))
        except _FAILURES:
            if self.world.faults["disk"]:
                return
            raise
        self.world.check(
            found >= self.best, lambda: f"A replaced checkpoint is after {found} batches, not {self.best}."
        )

    def read(self):
        """Be a reader beside the training, such as an evaluator."""
        world = self.world
        for _ in range(4 + world.choose(8)):
            world.sleep(world.uniform(0.0, 0.3))
            try:
                path = latest_checkpoint(str(self.place))
                if path is None:
                    continue
                name = path.rpartition("/")[2]
                world.check(not name.startswith("."), lambda path=path: f"A reader sees {path}.")
                snapshot = read_snapshot(place_of(path))
            except _FAILURES:
                # Deleted meanwhile, as it may be; a machine that fails reads nothing.
                continue
            batches_in(world, snapshot)

    def finish(self, machine):
        """Be the last process, when nothing fails any more: restore, write one more, delete all."""
        world = self.world
        world.check(self.begin(machine) is not None, "A directory must be usable when nothing fails.")
        self.check_best()
        series = self.series()
        self.begun += 1
        for name, number in (("ckpt", _commits.newest_number(self.place, "ckpt") + 1), ("best", None)):
            self.check_remains(name, False)
            if number is not None:
                series.write(number, snapshot_after(self.begun))
            elif self.best:
                write_snapshot(
                    self.place, "best", snapshot_after(self.begun), in_one_file=True, replaces=True
                )
            self.check_remains(name, number is not None or self.best)
        series.trim()
        paths = series.paths()
        world.check(1 <= len(paths) <= _KEEP, lambda: f"{_KEEP} checkpoints must be kept. Found: {paths}")
        series.delete(paths)
        if (self.place / "best").exists():
            _commits.delete_commit(self.place / "best")
        _commits.leave(self.place)

    def check_remains(self, series, is_swept):
        """Where a store was swept, each object of a series belongs to a manifest."""
        if not is_swept or not isinstance(self.place, StorePath):
            return
        objects = self.place.find(series)
        for name in {key.partition("/")[0] for key in objects}:
            inside = {key.partition("/")[2] for key in objects if key.startswith(f"{name}/")}
            named = set()
            if MANIFEST in inside:
                path = self.place / name
                named = {MANIFEST, *parse_manifest(path, (path / MANIFEST).read_bytes())["files"]}
            self.world.check(
                inside <= named, lambda name=name, more=inside - named: f"{name} has remains: {more}"
            )


class _Setting:
    """The machines and disks of a schedule."""

    def __init__(self, world, kind, is_local):
        self.world, self.kind = world, kind
        world.settle()
        # Processes of other worlds have the same numbers.
        _uploads._CLAIMS.clear()
        self.store = ObjectStore(world) if kind == "object store" else None
        self.lag = world.uniform(0.0, 60.0, SETTING) if kind == "nfs" else 0.0
        self.disk = Disk(world, self.lag)
        self.machines = []
        for name in ("host-a",) if is_local else ("host-a", "host-b"):
            disks = {"disk": self.disk, "tmp": Disk(world)} | ({"store": self.store} if self.store else {})
            own = ("disk", "tmp") if kind == "disk" else ("tmp",)
            self.machines.append(Machine(world, name, disks, own))
        self.place = StorePath("s3", "bucket/run") if self.store else place_of(f"{ROOT}/disk/run")
        self.doors = FileDoors(world, Machine(world, "checker", self.machines[0].disks))

    def __enter__(self):
        self.doors.__enter__()
        self._store_doors = StoreDoors(self.doors)
        self._store_doors.__enter__()
        return self

    def __exit__(self, *_):
        self._store_doors.__exit__()
        self.doors.__exit__()

    def draw_faults(self, machine):
        """Draw which faults a machine has from now on."""
        world = self.world
        machine.risk = world.pick((0.0, 0.005, 0.02), SETTING)
        machine.power = world.pick((0.0, 0.01), SETTING)
        machine.errors = world.pick((0.0, 0.0, 0.01), SETTING)
        machine.latency = world.pick((0.0, 0.0, 0.02), SETTING)
        if self.store:
            self.store.failing = world.pick((0.0, 0.02), SETTING)

    def run(self, machine, body, name, limit=1000.0):
        """Run a process to its end; raise what it has raised."""
        process = machine.process(name, body)
        self.world.check(process.wait(limit), f"{name} must end within {limit:g} s.")
        if process.error is not None:
            raise process.error

    def check_gone(self, machine):
        """Nothing is left of the job, but for what dead processes of another machine have not completed."""
        if self.store is not None:
            left = [name for name in self.store.objects if name.endswith((MANIFEST, ".writer"))]
        else:
            left = [path for path in self.disk.listing() if f".{machine.name}@" in path or "/." not in path]
        self.world.check(not left, lambda: f"Files must be gone at the end. Found: {left}")


def _schedule(world, kind):
    """Run one schedule of a kind of disk."""
    with _Setting(world, kind, is_local=kind == "disk") as setting:
        job = _Job(world, setting.place, setting.lag)
        machines = setting.machines
        world.faults_left = world.choose(4, SETTING)
        body = job.replace if world.choose(3, SETTING) == 2 else job.train
        reader = machines[-1].process("reader", job.read) if world.choose(2, SETTING) else None
        for i in range(1 + world.choose(3, SETTING)):
            machine = world.pick(machines)
            setting.draw_faults(machine)
            setting.run(machine, lambda machine=machine: body(machine), f"trainer-{i}")
            # A program that starts again imports for longer than a request is under way.
            world.sleep(LATEST + world.uniform(0.0, 5.0))
        if reader is not None:
            world.check(reader.wait(1000.0), "A reader must end.")
            if reader.error is not None:
                raise reader.error
        world.faults_left = 0
        # Names that others have changed are seen then.
        world.sleep(setting.lag)
        setting.run(machines[0], lambda: job.finish(machines[0]), "last")
        setting.check_gone(machines[0])


def disk(world):
    """Checkpoints on a local disk, which loses with the power what was not flushed."""
    _schedule(world, "disk")


def nfs(world):
    """Checkpoints on NFS, where a host sees late what another one has changed."""
    _schedule(world, "nfs")


def object_store(world):
    """Checkpoints in an object store, whose requests, or their answers, are lost."""
    _schedule(world, "object store")


def damage(world):
    """Bytes of checkpoints change, or files are cut or lost: the newest of the others is found."""
    with _Setting(world, "disk", is_local=True) as setting:
        machine = setting.machines[0]
        job = _Job(world, setting.place)
        setting.run(machine, lambda: job.train(machine, writes=1), "first")
        setting.run(machine, lambda: job.train(machine, writes=2), "second")
        folder = setting.disk.find("run", None)
        names = sorted(folder.names, key=lambda name: int(name.partition("-")[2]), reverse=True)
        count = 1 + world.choose(len(names))
        for name in names[:count]:
            _damage(world, folder.names[name], name)
        good = [int(name.partition("-")[2]) for name in names[count:]]

        def restore():
            try:
                found = job.series().newest()
            except CheckpointError:
                world.check(not good, "An undamaged checkpoint must be found.")
                return
            number = None if found is None else int(found[0].name.partition("-")[2])
            world.check(
                good and number == good[0], lambda: f"The newest that is undamaged is {good}. Found: {number}"
            )
            batches_in(world, found[1])
            # A run goes on behind it.
            series = job.series()
            series.write(_commits.newest_number(job.place, "ckpt") + 1, snapshot_after(99))
            _, snapshot = series.newest()
            world.check(batches_in(world, snapshot) == 99, "A new checkpoint must be the newest.")

        setting.run(machine, restore, "restoring")


def _damage(world, folder, checkpoint):
    """Flip a bit of a file of a checkpoint, cut it, lose it, or let its manifest say what is not so."""
    name = world.pick(sorted(folder.names))
    file = folder.names[name]
    match world.choose(6):
        case 0 if file.data:
            file.data[world.choose(len(file.data))] ^= 1 << world.choose(8)
        case 1 if file.data:
            del file.data[world.choose(len(file.data)) :]
        case 3:
            folder.names[name] = Folder(file.number)
        case 4 | 5:
            manifest = folder.names[MANIFEST]
            manifest.data[:] = _forged(world, manifest.data, checkpoint)
        case _:
            del folder.names[name]


def _forged(world, text, checkpoint):
    """Return a manifest whose hash is right, of a newer version, or by one who wants other files read."""
    manifest = json.loads(bytes(text))
    del manifest["sha256"]
    files = manifest["files"]
    name = sorted(files)[0]
    change = world.pick(
        (
            lambda: manifest.update(format=FORMAT + 1),
            lambda: manifest.update(format=str(FORMAT)),
            lambda: manifest.update(files=sorted(files)),
            lambda: files.update({name: {**files[name], "bytes": str(files[name]["bytes"])}}),
            lambda: files.update({name: {**files[name], "sha256": 5}}),
            # What they lead to is there, and has this hash.
            lambda: files.update({f"../{checkpoint}/{name}": files[name]}),
            lambda: manifest.update(folder=f"../{checkpoint}"),
        )
    )
    change()
    return json.dumps({**manifest, "sha256": _hash_json(manifest)}).encode()


def rivals(world):
    """While a process writes, another one of this machine sweeps the directory, as each does that begins."""
    with _Setting(world, "disk", is_local=True) as setting:
        machine = setting.machines[0]
        machine.latency = world.pick((0.002, 0.02), SETTING)
        job = _Job(world, setting.place)
        writer = machine.process("writer", lambda: job.train(machine))
        for _ in range(1 + world.choose(4)):
            world.sleep(world.uniform(0.0, 1.0))
            setting.run(machine, lambda: _commits.sweep(job.place), "sweeper")
        world.check(writer.wait(1000.0), "A writer must end.")
        if writer.error is not None:
            raise writer.error


def rivals_in_store(world):
    """A process is stopped while it writes, and another one replaces it; then the first one goes on."""
    with _Setting(world, "object store", is_local=False) as setting:
        first, second = setting.machines
        first.latency = second.latency = world.pick((0.002, 0.02), SETTING)
        job = _Job(world, setting.place)
        has_begun = []
        replaced = first.process("replaced", lambda: _replaced(world, job, first, has_begun))
        # One that has claimed nothing before it was replaced claims the directory when it goes on: this is
        # what the fence between generations is for.
        while not has_begun:
            world.sleep(0.1)
        world.sleep(world.uniform(0.0, 1.0))
        replaced.pause(world.uniform(0.0, 3.0))
        # A request that is under way arrives before the successor begins.
        world.sleep(LATEST + world.uniform(0.0, 1.0))
        setting.run(second, lambda: job.train(second), "successor")
        world.check(replaced.wait(1000.0), "A process that was replaced must end.")
        if replaced.error is not None:
            raise replaced.error
        least = job.acknowledged

        def look():
            found = job.series().newest()
            batches = _NOTHING if found is None else batches_in(world, found[1])
            world.check(
                batches >= least, lambda: f"What a successor has written is lost: {batches} of {least}"
            )
            for path in job.series().paths():
                batches_in(world, read_snapshot(path))

        setting.run(second, look, "look")


def _replaced(world, job, machine, has_begun):
    """Write checkpoints until another process has claimed the directory."""
    series, batches = job.series(), job.begin(machine)
    has_begun.append(True)
    for _ in range(9):
        batches += 1
        job.begun = max(job.begun, batches)
        try:
            series.write(_commits.newest_number(job.place, "ckpt") + 1, snapshot_after(batches))
            series.trim()
        except CheckpointError:
            world.note("data", machine.name, machine.name, "was replaced")
            return


PROTOCOLS = {
    "disk": disk,
    "nfs": nfs,
    "object_store": object_store,
    "damage": damage,
    "rivals": rivals,
    "rivals_in_store": rivals_in_store,
}
