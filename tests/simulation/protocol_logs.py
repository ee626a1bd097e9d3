"""The files of a parameter server on a simulated disk: log, images, tables, note of what was acknowledged.

Real: `DurableStore`, `FileJournal`, `RecordFile`, `ImageFile`, snapshots, `VariableStore`. Log, images and
tables are mapped into memory: a killed process loses nothing of them, a loss of power leaves any of their
pages. Servers follow each other, each with two threads that push closures; a closure that was under way when
its server ended is pushed again by the next one. Promised, and checked:

- after a kill all that was acknowledged is there, each closure once and whole, and nothing else;
- after a loss of power, or of bits of a file, the state is whole, or the error says how many updates are
  lost, and every request fails until a new job begins;
- without a log, at least what the newest snapshot holds is there, of some moment, after a loss of power too;
- on a full disk a change fails with the documented error, and is not applied;
- at the end of the job its files are gone.

Tests: tests/unit/test_simulated_files.py.
"""

import dataclasses
import re

import numpy as np

from tests.simulation import _primitives as sim
from tests.simulation._disk import Disk
from tests.simulation._file_doors import ROOT, FileDoors, Machine
from tests.simulation._world import ACTIVE, SETTING
from tests.simulation.protocol_servers import lock_file, shorten  # its `fcntl.flock` is needed
from unisono._errors import ClusterError
from unisono._system._object_store import place_of
from unisono.parameter_server.server._durable import _KEPT, DurableStore
from unisono.parameter_server.state import _acknowledged, _container, _records
from unisono.parameter_server.state._create import NewVariable
from unisono.parameter_server.state._push import COUNTER_BITS, Push, RowWrite
from unisono.parameter_server.state._variables import TABLE, StoredSpec

__all__ = ["PROTOCOLS", "lock_file"]

#: Numbers of the variables.
COUNTS, BULK, ROWS, REGISTER = range(4)
#: How many closures a job may have; each adds one to a cell of its own.
_CELLS = 64
_THREADS = 2
#: Fills a log of the least size with three pushes.
_BULK = 60_000
#: What a server of these protocols may end with.
_FAILURES = (ClusterError, OSError)
#: What becomes of a file that is damaged: one bit of a header's numbers, of the first records and arrays, of
#: any byte, or of a description; it is cut or lost.
_FATES = ("header", "header", "first", "any", "text", "text", "text", "cut", "lost")
#: What an error says of updates.
_LOST = re.compile(r"Received: (?:(at least )?(\d+) of (?:at least )?(\d+) are lost|it is not known)")

_real_boot_id = _records.boot_id


def _boot_id():
    """The machine's of the process that runs now."""
    world = ACTIVE.world
    machine = world and world.current and world.current.process.own.get("machine")
    return machine.boot if machine else _real_boot_id()


def _is_noted(content, place):
    """Return whether a place for a note of what was acknowledged has one."""
    return content[place : place + 8] == _acknowledged._MAGIC


class _Mapped(np.ndarray):
    """Bytes of a mapped file: a process may be killed in the middle of a copy to them."""

    def __getitem__(self, key):
        return self.view(np.ndarray)[key]

    def __setitem__(self, key, value):
        world = ACTIVE.world
        process = world and world.current and world.current.process
        whole = self.view(np.ndarray)
        risk = 5 * process.risk if process and np.ndim(value) else 0.0
        if world and world.fault(risk, f"kill {process.name}"):
            part = world.choose(len(value))
            begin = key.start or 0
            whole[begin : begin + part] = value[:part]
            process.kill()
        whole[key] = value


_real_map_file = _records.map_file


def _map_file(path, size):
    if ACTIVE.world is not None:
        ACTIVE.world.point()
    return _real_map_file(path, size).view(_Mapped)


sim.extend(_records, boot_id=_boot_id, map_file=_map_file)
sim.POINTS += [
    (_records.RecordFile, "begin"),
    (_container.ImageFile, "write"),
    (_acknowledged.AcknowledgedFile, "read"),
]


@dataclasses.dataclass
class _Closure:
    """What the checker knows of a closure; times are counts of what has happened."""

    cell: int
    thread: int
    bulk: bool
    begun: int
    ended: int | None = None
    #: Whether it was lost with a state that could be lost, and maybe is there again.
    is_lost: bool = False


class _Job:
    """The job of one chief: the closures, and the values that it has written."""

    def __init__(self, generation):
        self.generation, self.closures, self.moment = generation, [], 0
        #: Values written to the register, each as [value, number of its request, is acknowledged].
        self.writes = [[0.0, 0, True]]
        #: Those that a server without a log had lost.
        self.lost_values = []
        #: Whether an older snapshot was taken, and no newer one written: the unreadable one may return.
        self.may_return = False

    @property
    def first(self):
        """The number of the first closure."""
        return self.generation << COUNTER_BITS

    def now(self):
        self.moment += 1
        return self.moment

    def number(self, closure):
        return self.first + closure.cell

    @property
    def watermark(self):
        """The number below which each closure was acknowledged."""
        waiting = [c for c in self.closures if c.ended is None and not c.is_lost]
        return self.first + min((c.cell for c in waiting), default=len(self.closures))


class Logs:
    """A server's directory, and what is known of it."""

    def __init__(self, world, has_log):
        self.world, self.has_log = world, has_log
        self.disk = Disk(world)
        self.machine = Machine(world, "host", {"disk": self.disk, "tmp": Disk(world)}, own=("disk", "tmp"))
        self.place = place_of(f"{ROOT}/disk/ps-0")
        self.log_bytes = 1 << 16 if has_log else 0
        self.has_bulk = bool(world.choose(2, SETTING))
        #: How many changes a log takes; 0 for as many as it has room for.
        self.most_changes = world.pick((0, 1, 3, 6), SETTING) if has_log else 0
        #: How probable a kill between an image and its log is.
        self.between = world.pick((0.0, 0.3), SETTING)
        self.job = None
        self.generation = 0
        #: By number, the moments that snapshots hold at least, the newest last.
        self.snapshots = {}
        self.lost_power, self.damaged = False, 0
        #: Whether one of two notes was damaged, and nothing else.
        self.other_note = False
        #: Faults of the disk before the first server whose state was not looked at yet.
        self.faults = 0
        self.is_looked_at = True
        self.requests = 0

    # --- a server ------------------------------------------------------------------------------------

    def serve(self, closures, is_last=False):
        """Be a server: recover, check what is there, and apply closures."""
        # A server may have found a snapshot that it could not read, have written the older state as the
        # newest, and have been killed then: the next one finds that.
        if self.is_looked_at:
            self.faults, self.is_looked_at = self.world.faults["disk"], False
        try:
            durable = DurableStore(self.place, self.log_bytes, None)
        except _FAILURES as error:
            self.check_full(error)
            return
        if self.most_changes:
            shorten(durable._journal._records, self.most_changes, self.between)
        try:
            self.recovered(durable)
            self.run_job(durable, closures)
            # A chief that was started again begins a new job: a log has the changes of both.
            if self.has_log and self.world.choose(3) > 1 - bool(self.most_changes):
                self.begin_job(durable, False)
                self.run_job(durable, closures)
        except _FAILURES as error:
            self.check_full(error)
        if is_last:
            durable.close(remove=True)
            left = [path for path in self.disk.listing() if not path.endswith("/lock")]
            self.world.check(not left, lambda: f"At the end of a job its files are gone. Found: {left}")
        else:
            durable.close()

    def run_job(self, durable, closures):
        """Apply closures in two threads, and look at what is there then."""
        threads = [
            sim.Thread(target=self.push_all, args=(durable, thread, closures), name=f"pushes{thread}")
            for thread in range(_THREADS)
        ]
        for thread in threads:
            thread.start()
        self.snapshots_of(durable)
        for thread in threads:
            thread.join()
        self.look(durable.store)

    def check_full(self, error):
        """A server fails because its disk is full, or another one's call for files fails, and says so."""
        faulty = self.world.faults["disk"] or self.disk.room < 1 << 24
        self.world.check(faulty, lambda: f"A server must go on. It fails with: {error}")
        said = "needs room in" in str(error)
        # A snapshot is written at the request of one who is told what the disk has said.
        said |= isinstance(error, OSError) and (self.world.faults["disk"] > 0 or not self.has_log)
        self.world.check(said, lambda: f"A full disk has an error of its own. Found: {error!r}")
        left = [path for path in self.disk.listing() if path.endswith(".partial")]
        self.world.check(self.world.faults["disk"] or not left, lambda: f"A full disk keeps {left}.")

    def recovered(self, durable):
        """Check what a server has found, and begin a new job where nothing is left."""
        store, source = durable.store, durable.recovery.source
        world, may_lose = self.world, self.lost_power or self.damaged or not self.has_log
        world.note("data", "ps0", "ps0", f"recovered from {source}: {durable.recovery.damaged}")
        if source == "damage":
            world.check(may_lose, lambda: f"A kill damages nothing. Found: {store.damage}")
            world.check(not self.other_note, lambda: f"The other note is whole. Found: {store.damage}")
            if self.job is not None:
                self.check_damage(store)
            self.begin_job(durable, True)
        elif source == "nothing" or self.job is None or COUNTS not in store.variables:
            has_begun = self.job is not None and self.job.closures
            may_lose = self.job is None or (self.has_log and self.lost_power) or self.least_moment() == 0
            world.check(may_lose or not has_begun, "A server has lost all that it had acknowledged.")
            self.begin_job(durable, False)
        else:
            self.look(store, after_start=True)
            is_rewritten = durable.snapshot_number not in (None, durable.recovery.changes)
            self.job.may_return |= bool(durable.recovery.damaged) and not is_rewritten
        self.lost_power, self.damaged, self.is_looked_at, self.other_note = False, 0, True, False

    def least_moment(self):
        """The moment up to which a server without a log must know all."""
        if self.has_log:
            return self.job.moment
        # What cannot be read counts as damaged, and the one before is taken.
        unread = bool(self.damaged) + self.world.faults["disk"] - self.faults
        known = list(self.snapshots.values())[-_KEPT:]
        return max(known[: len(known) - unread] if unread < len(known) else [], default=0)

    def check_damage(self, store):
        """The error says how many updates are lost, and every request fails."""
        found = _LOST.search(store.damage)
        self.world.check(found, lambda: f"An error says what is lost. Found: {store.damage}")
        # Of two notes that take turns the newer one may be damaged, and something else besides.
        least = sum(c.ended is not None for c in self.job.closures) - (self.damaged > 1)
        most = len(self.job.closures)
        at_least, lost, total = found.groups()
        if total is not None and not at_least:
            self.world.check(
                least <= int(total) <= most and int(lost) <= int(total),
                lambda: f"{least} to {most} updates were acknowledged. The error says: {store.damage}",
            )
        for request in (lambda: store.pull([COUNTS]), lambda: store.push(Push(self.job.watermark))):
            try:
                request()
            except ClusterError:
                continue
            self.world.check(False, "A damaged state must serve nothing.")

    def begin_job(self, durable, is_damaged):
        """Be the chief that begins again: from a backup, which is no matter here."""
        store = durable.store
        self.generation = max(self.generation, store.generation) + 1
        self.job, self.snapshots = None, {}
        store.raise_generation(self.generation)
        if is_damaged:
            self.world.check(store.damage is None, "A new job begins without the damage.")
        store.reset(request=self.request())
        specs = (
            StoredSpec("counts", (_CELLS,), "float32"),
            StoredSpec("bulk", (_BULK if self.has_bulk else 2,), "float32"),
            StoredSpec("rows", (_THREADS, 3), "float32", kind=TABLE),
            StoredSpec("register", (), "float32"),
        )
        numbers = store.create([NewVariable(spec) for spec in specs], request=self.request())
        self.world.check(numbers == [0, 1, 2, 3], lambda: f"A new job has no variables yet. Found: {numbers}")
        if not durable.has_log:
            self.snapshots = {durable.snapshot(): 0}
        self.job = _Job(self.generation)

    def request(self):
        self.requests += 1
        return self.requests

    # --- changes -------------------------------------------------------------------------------------

    def push_all(self, durable, thread, count):
        """Push the closures of a thread that are not acknowledged yet, and some more."""
        try:
            job, store = self.job, durable.store
            if self.world.choose(2):
                self.repeat(job, store)
            waiting = [c for c in job.closures if c.thread == thread and c.ended is None and not c.is_lost]
            for closure in waiting:
                self.push(job, store, closure)
            for _ in range(count):
                self.world.sleep(self.world.uniform(0.0, 0.2))
                if len(job.closures) == _CELLS:
                    return
                closure = _Closure(len(job.closures), thread, self.world.choose(2) == 1, job.now())
                job.closures.append(closure)
                self.push(job, store, closure)
                if thread == 0 and self.world.choose(4) == 3:
                    self.write(job, store)
        except _FAILURES as error:
            self.check_full(error)

    def message(self, job, closure, watermark):
        """Return what the client of a closure pushes."""
        one_hot = np.zeros(_CELLS, "float32")
        one_hot[closure.cell] = 1
        row = np.full((1, 3), closure.cell + 1, "float32")
        update = RowWrite((ROWS,), np.array([closure.thread]), (row,))
        bulk = np.full(_BULK if self.has_bulk else 2, closure.cell + 1, "float32")
        assigns = ((BULK, bulk),) if closure.bulk else ()
        return Push(job.number(closure), watermark, (update,), ((COUNTS, one_hot),), assigns)

    def repeat(self, job, store):
        """Send once more what was acknowledged: a message may outlive the server that had answered it."""
        written = [entry for entry in job.writes if entry[1] and entry[2]]
        if written and self.world.choose(2):
            value, request, _ = self.world.pick(written)
            self.world.check(
                not store.write(REGISTER, np.float32(value), request=request),
                lambda: f"A write that is late is not carried out again: {value:g}.",
            )
            return
        done = [c for c in job.closures if c.ended is not None and not c.is_lost]
        if done:
            closure = self.world.pick(done)
            push = self.message(job, closure, job.first)
            self.world.check(
                not store.push(push), lambda: f"A push that is late does not count again: {closure}."
            )

    def push(self, job, store, closure):
        """Push a closure, and once more where its answer is lost."""
        push = self.message(job, closure, job.watermark)
        self.world.note("data", "ps0", "ps0", f"pushes {closure.cell}")
        store.push(push)
        if self.world.choose(4) == 3:
            self.world.check(not store.push(push), "A closure that is pushed again does not count again.")
        closure.ended = job.now()
        self.world.note("data", "ps0", "ps0", f"acknowledged {closure.cell}")

    def write(self, job, store):
        """Write the register, under a number that a repetition has, too."""
        entry = [float(len(job.writes)), self.request(), False]
        if not job.writes[-1][2]:
            # Repeated by a client that got no answer.
            entry = job.writes[-1]
        else:
            job.writes.append(entry)
        store.write(REGISTER, np.float32(entry[0]), request=entry[1])
        entry[2] = True

    def snapshots_of(self, durable):
        """Write snapshots, as a thread of a server without a log does: the first one at once, or later."""
        job = self.job
        for count in range(0 if durable.has_log else 1 + self.world.choose(3)):
            if count or self.world.choose(2):
                self.world.sleep(self.world.uniform(0.0, 0.3))
            moment = job.moment
            try:
                number = durable.snapshot()
            except OSError:
                failed = self.world.faults["disk"]
                self.world.check(failed or self.disk.room < 1 << 24, "A snapshot fails with its disk alone.")
                left = [path for path in self.disk.listing() if path.endswith(".partial")]
                self.world.check(failed or not left, lambda left=left: f"A full disk keeps {left}.")
                continue
            if number in self.snapshots:
                del self.snapshots[number]
            self.snapshots[number] = moment

    # --- what is there -------------------------------------------------------------------------------

    def look(self, store, after_start=False):
        """Check the values of a server against what was pushed."""
        world, job = self.world, self.job
        world.check(
            store.generation == job.generation, f"A server must know its generation: {store.generation}."
        )
        counts = store.read(COUNTS).tolist()
        rows, bulk = store.rows(ROWS, np.arange(_THREADS)), store.read(BULK)
        least = self.least_moment() if after_start else job.moment
        for closure in job.closures:
            is_there = counts[closure.cell]
            must = closure.ended is not None and closure.ended <= least and not closure.is_lost
            may = not closure.is_lost or job.may_return
            world.check(
                float(must) <= is_there <= float(may),
                lambda closure=closure: f"Each closure counts once. {closure} counts {counts[closure.cell]}.",
            )
        world.check(not any(counts[len(job.closures) :]), "Nothing is there that was not pushed.")
        there = [c for c in job.closures if counts[c.cell]]
        gone = [c for c in job.closures if not counts[c.cell] and c.ended is not None]
        world.check(
            not any(lost.ended < kept.begun for lost in gone if not lost.is_lost for kept in there),
            "What is kept is the state of one moment.",
        )
        for thread in range(_THREADS):
            newest = max((c.cell + 1.0 for c in there if c.thread == thread), default=0.0)
            world.check(
                rows[thread].tolist() == [newest] * 3,
                lambda thread=thread, newest=newest: (
                    f"A push is applied whole: row {thread} is {rows[thread]}, not {newest}."
                ),
            )
        allowed = {0.0} | {c.cell + 1.0 for c in there if c.bulk}
        found = set(np.unique(bulk).tolist())
        world.check(len(found) == 1 and found <= allowed, lambda: f"A value is whole: {found} of {allowed}.")
        self.check_register(store, after_start)
        world.check(
            store.applied_count == len(there), lambda: f"{store.applied_count} updates, {len(there)} there."
        )
        if after_start and not self.has_log:
            # What a server without a log has lost stays lost: a chief goes on from its backup.
            for closure in gone:
                closure.is_lost = True

    def check_register(self, store, after_start):
        job, found = self.job, float(store.read(REGISTER))
        values = [value for value, _, _ in job.writes]
        if not self.has_log:
            values += job.lost_values * job.may_return
            self.world.check(found in values, lambda: f"The register is one of {values}, not {found}.")
            if after_start:
                job.lost_values += [value for value, _, _ in job.writes if value > found]
                job.writes = [entry for entry in job.writes if entry[0] <= found]
                if found not in [value for value, _, _ in job.writes]:
                    job.writes.append([found, 0, True])
            return
        may = values[-1:] if job.writes[-1][2] else values[-2:]
        self.world.check(found in may, lambda: f"The register is one of {may}, not {found}.")

    # --- the machine ---------------------------------------------------------------------------------

    def write_back(self):
        """Be the system, which writes pages to the disk."""
        while True:
            self.world.sleep(self.world.uniform(0.05, 1.0))
            self.disk.write_back()

    def damage_files(self):
        """Damage files while no server runs."""
        folder = self.disk.root.names.get("ps-0")
        if folder is None:
            return
        self.damage_file(folder)
        if not any(name == "log" or name.startswith(("image", "acknowledged")) for name in folder.names):
            # No server can know that there was a job.
            self.job = None

    def damage_file(self, folder):
        """Flip a bit of a file, cut it, or lose it, or lose several."""
        names = sorted(name for name in folder.names if name != "lock")
        if not names:
            return
        self.damaged += 1
        self.other_note = False
        if self.world.choose(6) >= self.partly:
            # As where a folder was restored in part.
            for name in names:
                if name == "acknowledged" or name.startswith("image"):
                    del folder.names[name]
            self.damaged += 1
            self.world.note("fault", "host", "host", "lost all but the log")
            self.world.faults["damage"] += 1
            return
        # The note is small, and nothing is as important.
        name = self.world.pick([*names, *("acknowledged",) * (2 if "acknowledged" in names else 0)])
        file = folder.names[name]
        fate = self.world.pick(_FATES)
        if fate not in ("cut", "lost") and len(file.data):
            size = len(file.data)
            texts = [match.start() for match in re.finditer(rb'\["|\{"', bytes(file.data))] or [0]
            begin, length = {
                "header": (36 % size, 40),
                "first": (_records.FIRST % size, 1024),
                "any": (0, size),
                "text": (self.world.pick(texts), 256),
            }[fate]
            at = begin + self.world.choose(min(length, size - begin))
            if name == "acknowledged" and all(_is_noted(bytes(file.data), place) for place in (0, 128)):
                self.other_note = self.damaged == 1 and not self.lost_power
            # Another digit or letter, so that a description is still one, or any bit.
            file.data[at] ^= 1 << self.world.choose(3 if fate == "text" else 8)
        elif fate == "cut":
            del file.data[self.world.choose(len(file.data) + 1) :]
        else:
            del folder.names[name]
        self.world.note("fault", "host", "host", f"damaged {name}")
        self.world.faults["damage"] += 1

    def run(self, may_damage, servers=1, power=1, partly=5):
        """Run servers one after another.

        Args:
            servers: how many there are at least, before the last one.
            power: in how many of three cases the machine loses its power behind one of them.
            partly: in how many of six cases a part of the files is damaged, and not all but the log lost.
        """
        self.partly = partly
        world, machine = self.world, self.machine
        # Files that no other fault has touched are damaged, too.
        is_quiet = may_damage and world.choose(2, SETTING) == 1
        with FileDoors(world, Machine(world, "checker", machine.disks)):
            world.process("system", self.write_back)
            for _ in range(servers + world.choose(4, SETTING)):
                world.faults_left = 1 + world.choose(2, SETTING)
                self.draw_faults(is_quiet)
                risk = 0.0 if is_quiet else world.pick((0.0, 0.005, 0.03), SETTING)
                losses = machine.power_losses
                process = machine.process("ps0", lambda: self.serve(world.choose(5)))
                process.risk = risk
                world.check(process.wait(1000.0), lambda: f"A server must end.\n{world.stacks()}")
                if process.error is not None:
                    raise process.error
                if 1 <= world.choose(3) <= power - (is_quiet and power == 1):
                    machine.lose_power()
                self.lost_power |= machine.power_losses > losses
                if may_damage and world.choose(2):
                    self.damage_files()
                self.disk.room = float("inf")
            world.faults_left, machine.risk, machine.power, machine.errors = 0, 0.0, 0.0, 0.0
            process = machine.process("ps0", lambda: self.serve(1, is_last=True))
            world.check(process.wait(1000.0), lambda: f"The last server must end.\n{world.stacks()}")
            if process.error is not None:
                raise process.error

    def draw_faults(self, is_quiet):
        """Draw what may happen to the next server; nothing, where it is quiet."""
        world, machine = self.world, self.machine
        if is_quiet:
            return
        machine.risk = world.pick((0.0, 0.01), SETTING)
        machine.power = world.pick((0.0, 0.0, 0.02), SETTING)
        machine.errors = world.pick((0.0, 0.0, 0.02), SETTING)
        if world.choose(6, SETTING) == 5:
            self.disk.room = world.choose(3 << 20 if self.has_log else 1 << 18)


def _run(world, has_log, **faults):
    world.settle()
    Logs(world, has_log).run(**faults)


def logs(world):
    """A server with a log is killed, loses its power, or has a full disk."""
    _run(world, True, may_damage=False)


def snapshots(world):
    """The same without a log: the newest snapshot is found."""
    _run(world, False, may_damage=False)


def damaged_logs(world):
    """Bits of a server's files change, and files are cut or lost."""
    _run(world, True, may_damage=True)


def reboots(world):
    """The same on a machine that is started again and again: files of several boots lie in one folder."""
    _run(world, True, may_damage=True, servers=3, power=2, partly=3)


PROTOCOLS = {"logs": logs, "snapshots": snapshots, "damaged_logs": damaged_logs, "reboots": reboots}
