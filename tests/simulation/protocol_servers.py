"""Parameter servers: pushes, pulls, reads and writes, while messages are lost and processes die.

Real: `ServerClient`, `VariableServer`, `VariableStore`, `DurableStore` with its log and images,
`RequestDedup`, and the loopback transport. Workers take closures from a list, as `ClosureQueue` hands them
out: a closure whose worker was killed runs again on another one, under its number. Promised, and checked:

- each closure counts once on each server, whatever was lost, repeated or killed, and none is lost that was
  acknowledged;
- what clients read of a server is linearizable: dense values, rows of a table, and values rounded to 16 bits;
- a job of an older chief changes nothing any more;
- the job ends.

Tests: tests/unit/test_simulation.py.
"""

import contextlib
import dataclasses
import fcntl
import functools
import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

import numpy as np

from tests.simulation import _primitives as sim
from tests.simulation._history import History
from tests.simulation._network import SimulatedNetwork
from tests.simulation._world import ACTIVE, SETTING, Violation
from unisono._errors import ClusterError, ContextError, InvalidArgumentError
from unisono.cluster_resolver._spec import Task
from unisono.parameter_server.server import _client as client_module
from unisono.parameter_server.server._client import ServerClient, key_of
from unisono.parameter_server.server._durable import DurableStore
from unisono.parameter_server.server._server import VariableServer
from unisono.parameter_server.server._store import VariableStore
from unisono.parameter_server.state import _acknowledged, _container, _journal, _records, _update
from unisono.parameter_server.state._create import NewVariable
from unisono.parameter_server.state._push import COUNTER_BITS, Push, RowWrite
from unisono.parameter_server.state._variables import TABLE, StoredSpec
from unisono.parameter_server.strategy._serve import CHIEF_SECONDS
from unisono.rpc._calls import PushToServer, StaleValuesError
from unisono.rpc._ops import Op

#: Numbers of the variables on each server.
COUNTS, REGISTER, ROWS = range(3)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How large a job is, and what may happen to it."""

    servers: int = 1
    workers: int = 2
    closures: int = 5
    reads: int = 3
    chiefs: int = 1
    durable: bool = False

    @property
    def cells(self):
        """How many sums there are: two closures, whose changes are alike, add to one."""
        return -(-self.closures // 2)


def lock_file(descriptor, operation):
    """Lock a file for the present process, in whose place the system would unlock it."""
    world = ACTIVE.world
    node, process = os.fstat(descriptor).st_ino, world.current.process
    owner = world.locked_files.get(node)
    if owner is not None and owner is not process and not owner.is_dead:
        raise BlockingIOError("Resource temporarily unavailable")
    world.locked_files[node] = process

    def close():
        # Unless the process has closed it, and the number is another file's now.
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == node:
                os.close(descriptor)

    process.at_end(close)


#: Read once: a HELLO reads the packages' files each time.
_VERSIONS = functools.cache(metadata.version)
sim.extend(fcntl, flock=lock_file)
sim.extend(metadata, version=_VERSIONS)
# A thread of its own kind for workers is no matter here.
sim.extend(os, sched_setscheduler=lambda *args: None)


def shorten(log, most, between=0.0):
    """Let a log be full after some changes: images are written in the middle of a job, too.

    Args:
        between: how probable it is that the process is killed between an image and its log.
    """
    begin, has_room, first = log.begin, log.has_room, [log.last]

    def begin_again(size, number):
        world = ACTIVE.world
        process = world.current.process
        if world.fault(between, f"kill {process.name}"):
            process.kill()
        begin(size, number)
        first[0] = number - 1

    log.begin = begin_again
    log.has_room = lambda nbytes: has_room(nbytes) and log.last - first[0] < most


#: Where a server may be killed while it writes files.
sim.POINTS += [
    (_records.RecordFile, "_put"),
    (_records.RecordFile, "begin"),
    (_records.RecordFile, "stage"),
    (_container, "checksum"),
    (_acknowledged.AcknowledgedFile, "note"),
    (_journal.FileJournal, "commit"),
    (_journal.FileJournal, "begin_log"),
    (_update.PushOutcome, "apply"),
]


class Job:
    """The job of one chief: its closures, and what was seen of it."""

    def __init__(self, generation, plan, number):
        self.generation, self.number = generation, number
        self.first = generation << COUNTER_BITS
        self.waiting = [self.first + i for i in range(plan.closures)]
        self.taken = {}
        self.acknowledged = set()
        self.counts = [History() for _ in range(plan.servers)]
        self.registers = [History() for _ in range(plan.servers)]
        self.rows = [History() for _ in range(plan.servers)]
        #: By closure and server: its calls in the histories.
        self.calls = {}
        self.is_over = False
        self.total = plan.closures

    @property
    def watermark(self):
        """The number below which each closure was acknowledged."""
        return min([*self.waiting, *self.taken, self.first + self.total])

    def begun(self, who, closure, server):
        """Note that a closure is pushed; its repetitions are the same call."""
        key = closure, server
        if key not in self.calls:
            place = closure - self.first
            self.calls[key] = [
                (self.counts[server], self.counts[server].begin(who, "add", place // 2)),
                (self.registers[server], self.registers[server].begin(who, "add", 1)),
                (self.rows[server], self.rows[server].begin(who, "row", place // 2 % 2, place // 2 + 1)),
            ]
        return self.calls[key]


#: A state of `counts` is a number with a digit for each cell.
_BASE = 8


def count_step(state, call, is_answered):
    """Sums of closures: each adds one to a cell."""
    kind, *rest = call.what
    if kind == "add":
        return state + _BASE ** rest[0]
    return state if not is_answered or call.result == state else None


def register_step(state, call, is_answered):
    """A number that is written and added to."""
    kind, *rest = call.what
    if kind == "write":
        return rest[0]
    if kind == "add":
        return state + rest[0]
    return state if not is_answered or call.result == state else None


def rows_step(state, call, is_answered):
    """Two rows of a table."""
    kind, *rest = call.what
    if kind == "row":
        place, value = rest
        return (value, state[1]) if place == 0 else (state[0], value)
    return state if not is_answered or call.result == state else None


class Servers:
    """A cluster in a world."""

    def __init__(self, world, plan, folder):
        self.world, self.plan, self.folder = world, plan, folder
        self.job = None
        self.jobs = []
        self.is_over = False
        self.watches = []
        self.network = SimulatedNetwork(
            world,
            is_lossy=self.is_lossy,
            loss=world.pick((0.02, 0.1, 0.0), SETTING),
            repeat=world.pick((0.02, 0.1, 0.0), SETTING),
            late=world.pick((0.0, 0.05), SETTING),
            cut=world.pick((0.0, 0.03), SETTING),
            full=world.pick((0.0, 0.03), SETTING),
            latest=world.pick((15.0, 1.0), SETTING),
        )
        world.faults_left = 1 + world.choose(6, SETTING)
        self.replaced = []
        #: The numbers of chiefs that have begun to end the cluster.
        self.ending = []
        self.starts = 0
        #: How many changes a server's log takes; 0 for as many as it has room for.
        self.most_changes = world.pick((0, 1, 3, 6), SETTING) if plan.durable else 0
        #: Seconds that a closure takes at most, beside its messages.
        self.pace = world.pick((0.0, 1.0, 4.0), SETTING)
        #: Seconds after the last closure in which messages that are late still arrive.
        self.rest = world.pick((0.0, self.network.latest), SETTING)
        self.parts = world.pick((0.0, 0.1), SETTING)
        self.risks = {
            "ps": world.pick((0.0, 0.003, 0.02), SETTING) if plan.durable else 0.0,
            "worker": world.pick((0.0, 0.01), SETTING),
            "chief": world.pick((0.0, 0.01), SETTING) if plan.chiefs > 1 else 0.0,
        }

    def is_lossy(self, address):
        """Return whether messages to a task may be lost, repeated and reordered."""
        return True

    def handled(self, index, server, client, frame):
        """Handle a request of a server; an older chief's must not be answered with a newer one's values."""
        generation = server.store.generation
        answer = server.handle(client, frame)
        is_read = frame.op in (Op.PULL, Op.ROWS, Op.READ) and answer.op is Op.OK
        if is_read and 0 < frame.generation < generation:
            # Not raised: a server answers errors of its handler, and an older chief may get some.
            text = f"A chief of generation {frame.generation} reads values of generation {generation}."
            self.world.fail(Violation(text))
        return answer

    def wait_for_end(self, served):
        """Wait until the chief ends a task, or has given no sign for too long, as `strategy/_serve` does."""
        while not served.ended.wait(2.0):
            if served.chief_lease.silence >= CHIEF_SECONDS:
                return

    # --- processes -----------------------------------------------------------------------------------

    def keep(self, name, body, risk):
        """Start a process, and start it again when it was killed, as a launcher does."""
        world = self.world

        def watch():
            while not self.is_over:
                process = world.process(name, body)
                process.risk = risk
                process.wait()
                if process.error is not None:
                    raise process.error
                if not process.is_killed:
                    return
                world.sleep(world.uniform(0.1, 4.0))

        thread = sim.Thread(target=watch, name=f"watches {name}")
        self.watches.append(thread)
        thread.start()

    def serve(self, index):
        """Be a parameter server."""
        durable = None
        if self.plan.durable:
            durable = DurableStore(self.folder / f"ps{index}", log_bytes=1 << 16, interval=None)
            if self.most_changes:
                shorten(durable._journal._records, self.most_changes)
            self.world.check(
                durable.store.damage is None, lambda: f"No state may be damaged. {durable.store.damage}"
            )
        server = VariableServer(VariableStore() if durable is None else durable.store, durable)
        rpc_server = self.network.rpc_server(
            f"ps{index}", lambda client, frame: self.handled(index, server, client, frame)
        )
        rpc_server.start()
        self.wait_for_end(server)
        # As in `strategy/_serve`: the answer to END goes out first.
        self.world.sleep(1.0)
        rpc_server.close()

    def client(self, own, generation=0):
        """Return a client of all servers."""
        clients = [self.network.rpc_client(Task("ps", i), f"ps{i}", own) for i in range(self.plan.servers)]
        return ServerClient(clients, generation)

    # --- a worker ------------------------------------------------------------------------------------

    def work(self, index):
        """Run closures of the present job, until no job is left."""
        who = f"worker{index}"
        client = self.client(Task("worker", index))
        while not self.is_over:
            job = self.job
            if job is None or not job.waiting:
                self.world.sleep(0.3)
                continue
            closure = job.waiting.pop(0)
            job.taken[closure] = self.world.current.process
            try:
                self.closure(job, client, who, closure)
            except (ContextError, InvalidArgumentError) as error:
                # A newer chief has taken over, or is about to: the variables are gone.
                is_old = job is not self.job or job.is_over or job.number < self.starts
                self.world.check(is_old, lambda error=error: f"The newest chief's closures run: {error}")
                continue
            except StaleValuesError:
                job.taken.pop(closure, None)
                job.waiting.insert(0, closure)
                continue
            job.taken.pop(closure, None)
            job.acknowledged.add(closure)

    def closure(self, job, client, who, closure):
        """Pull, push to all servers, and wait until they have acknowledged it."""
        world = self.world
        keys = [key_of(s, COUNTS) for s in range(self.plan.servers)]
        values, end = self.reading(job, who, keys, client)
        lineages = values.lineages
        end()
        if self.pace:
            world.sleep(world.uniform(0.0, self.pace))
        place = closure - job.first
        cell = place // 2
        one_hot = np.zeros(self.plan.cells, "float32")
        one_hot[cell] = 1
        given, calls = [], []
        for server in range(self.plan.servers):
            update = RowWrite((ROWS,), np.array([cell % 2]), (np.array([[cell + 1.0]], "float32"),))
            push = Push(closure, updates=(update,), adds=((COUNTS, one_hot), (REGISTER, np.float32(1))))
            meta, arrays = push.encode()
            arrays = [np.asarray(array) for array in arrays]
            given.append(PushToServer(server, closure, job.watermark, meta, arrays, lineages[server]))
            calls.append(job.begun(who, closure, server))
        behind = keys if world.choose(2) else None
        if behind:
            finish = [self.begin_read(job, who, s) for s in range(self.plan.servers)]
        answers, pulled = client.push(given, behind)
        for answer, own in zip(answers, calls, strict=True):
            answer.result()
            for history, call in own:
                history.end(call)
        if behind:
            for server, value in enumerate(pulled.result()):
                finish[server](value)
                # A read beside the closure's own push need not show it; one that the push has carried must.
                world.check(value[cell] >= 1, lambda value=value: f"A pull is behind its push: {value}.")

    # --- reads ---------------------------------------------------------------------------------------

    def begin_read(self, job, who, server):
        history = job.counts[server]
        call = history.begin(who, "read")

        def finish(value):
            counts = np.asarray(value, "float32").tolist()
            self.world.check(
                set(counts) <= {0.0, 1.0, 2.0},
                lambda: f"Each closure counts once. {who} reads {counts} of server {server}.",
            )
            history.end(call, sum(int(n) * _BASE**i for i, n in enumerate(counts)))

        return finish

    def reading(self, job, who, keys, client):
        """Pull; return the values, and what ends the calls of the histories."""
        finish = [self.begin_read(job, who, key[0]) for key in keys]
        values = client.pull(keys).result()

        def end():
            for each, value in zip(finish, values, strict=True):
                each(value)

        return values, end

    # --- the chief -----------------------------------------------------------------------------------

    def lead(self):
        """Begin a job, read and write meanwhile, and wait for its end."""
        world = self.world
        client = self.client(Task("chief", 0))
        # A launcher tells it how often it has started the chief.
        number = self.starts = self.starts + 1
        generation = client.begin_job(number)
        world.check(
            all(generation > job.generation for job in self.jobs), "A job's generation is the highest."
        )
        job = Job(generation, self.plan, number)
        self.jobs.append(job)
        counts = StoredSpec("counts", (self.plan.cells,), "float32")
        register = StoredSpec("register", (), "float32")
        rows = StoredSpec("rows", (2, 1), "float32", kind=TABLE)
        for server in range(self.plan.servers):
            zeros = [NewVariable(spec) for spec in (counts, register, rows)]
            numbers = client.create_variables(server, zeros)
            world.check(numbers == [COUNTS, REGISTER, ROWS], f"Variables have these numbers: {numbers}")
        # Workers run the closures of the newest chief, not of one that was stopped, replaced, and goes on.
        if number == self.starts:
            self.job = job
        for place in range(self.plan.reads):
            world.sleep(world.uniform(0.0, 1.0))
            self.look(job, client, place)
        while len(job.acknowledged) < self.plan.closures:
            self.take_back(job)
            world.sleep(0.5)
            if job is not self.job:
                # It still thinks that it leads: what it asks must be refused, or dropped by the next one.
                refused = None
                for is_read in (True, False) if world.choose(2) else (False, True):
                    try:
                        if is_read:
                            client.rows([key_of(0, ROWS)], [np.array([0, 1])]).result()
                        else:
                            client.write(key_of(0, REGISTER), np.float32(999))
                    except (ClusterError, ContextError, InvalidArgumentError) as error:
                        refused = error
                if refused is not None:
                    raise refused
        job.is_over = True
        world.sleep(self.rest)
        self.judge(job, client)

    def take_back(self, job):
        """Let others run the closures of workers that were killed."""
        for closure, process in list(job.taken.items()):
            if process.is_dead:
                del job.taken[closure]
                job.waiting.insert(0, closure)

    def look(self, job, client, number):
        """Read and write."""
        server = self.world.choose(self.plan.servers)
        kind = self.world.pick((0, 1, 1, 2, 3, 4, 4))
        if kind == 4:
            self.overlap(job, client, server)
        elif kind == 0:
            finish = self.begin_read(job, "chief", server)
            dtype = self.world.pick(("float32", "bfloat16", "float16"))
            rounded = client.read(key_of(server, COUNTS, None if dtype == "float32" else dtype))
            self.world.check(rounded.dtype.name == dtype, f"Values are of the type asked: {rounded.dtype}.")
            finish(rounded)
        elif kind == 1:
            history = job.registers[server]
            call = history.begin("chief", "write", 100.0 * (number + 1))
            client.write(key_of(server, REGISTER), np.float32(100.0 * (number + 1)))
            history.end(call)
        elif kind == 2:
            history = job.registers[server]
            call = history.begin("chief", "read")
            history.end(call, float(client.read(key_of(server, REGISTER))))
        else:
            history = job.rows[server]
            call = history.begin("chief", "read")
            (found,) = client.rows([key_of(server, ROWS)], [np.array([0, 1])]).result()
            history.end(call, tuple(found[:, 0].tolist()))

    def overlap(self, job, client, server):
        """Pull the same values several times at once: answers may come in another order."""
        pulls = []
        for _ in range(6):
            finish = self.begin_read(job, "chief", server)
            pulls.append(client.pull([key_of(server, COUNTS)]))
            pulls[-1].add_done_callback(
                lambda pull, finish=finish: finish(pull.result()[0]) if pull.exception() is None else None
            )
            self.world.sleep(self.world.uniform(0.0, 0.3))
        for pull in pulls:
            pull.result()

    def disturb(self):
        """Cut the network between two processes, and let the wall clock jump."""
        world = self.world
        names = [f"ps{i}" for i in range(self.plan.servers)] + [
            f"worker{i}" for i in range(self.plan.workers)
        ]
        while not self.is_over:
            world.sleep(world.uniform(0.2, 3.0))
            if world.fault(self.parts, "part"):
                one = world.pick(("chief", *names[self.plan.servers :]))
                self.network.part(one, world.pick(names), world.uniform(0.5, 8.0), both=bool(world.choose(2)))
            if world.fault(self.parts, "wall"):
                world.wall_offset += world.pick((3600.0, -3600.0))

    def judge(self, job, client):
        """Check what a job has left."""
        for server in range(self.plan.servers):
            call = job.registers[server].begin("chief", "read")
            job.registers[server].end(call, float(client.read(key_of(server, REGISTER))))
            call = job.rows[server].begin("chief", "read")
            (rows,) = client.rows([key_of(server, ROWS)], [np.array([0, 1])]).result()
            job.rows[server].end(call, tuple(rows[:, 0].tolist()))
            found = client.read(key_of(server, COUNTS)).tolist()
            self.world.check(
                found == [2.0] * (self.plan.closures // 2) + [1.0] * (self.plan.closures % 2),
                lambda found=found, server=server: f"Each closure counts once. Server {server} has {found}.",
            )
            job.counts[server].check(count_step, 0)
            job.registers[server].check(register_step, 0.0)
            job.rows[server].check(rows_step, (0.0, 0.0))

    def replace(self, chief, starts):
        """Stop a chief for so long that another one is started, while it still thinks that it leads."""
        world = self.world
        while not chief.is_dead and len(self.jobs) < starts:
            world.sleep(0.2)
        if chief.wait(world.uniform(0.0, 3.0)):
            return False
        chief.pause(world.uniform(1.0, world.pick((60.0, 10.0, 4.0))))
        self.replaced.append(chief)
        self.job = None
        return True

    def was_ended_before(self, chief):
        """Whether one that was stopped has ended the cluster, or a part of it, that this one needs."""
        has_ended = any(number < self.starts for number in self.ending)
        return has_ended and isinstance(chief.error, ClusterError)

    def run(self):
        """Run the job to its end."""
        world, plan = self.world, self.plan
        for index in range(plan.servers):
            self.keep(f"ps{index}", lambda index=index: self.serve(index), self.risks["ps"])
        for index in range(plan.workers):
            self.keep(f"worker{index}", lambda index=index: self.work(index), self.risks["worker"])
        if self.parts:
            sim.Thread(target=self.disturb, name="disturbs").start()
        for number in range(plan.chiefs):
            is_last = number == plan.chiefs - 1
            chief = world.process(f"chief{number or ''}", self.lead)
            if not is_last and world.choose(3, SETTING) == 1 and self.replace(chief, number + 1):
                continue
            chief.risk = 0.0 if is_last else self.risks["chief"]
            chief.wait()
            if chief.error is not None and not self.was_ended_before(chief):
                raise chief.error
            if not chief.is_killed:
                break
            self.job = None
            world.sleep(world.uniform(0.0, 3.0))
        self.is_over = True
        for chief in self.replaced:
            world.check(chief.wait(700.0), lambda: f"A chief that was replaced ends.\n{world.stacks()}")
            # It may have had all that it wanted before.
            if not isinstance(chief.error, (ClusterError, ContextError, InvalidArgumentError, type(None))):
                raise chief.error


class Pulls(Servers):
    """A cluster whose chief pulls the same values many times at once, and whose messages are often late."""

    def __init__(self, world, plan, folder):
        super().__init__(world, plan, folder)
        self.network.loss = self.network.repeat = self.network.cut = self.parts = 0.0
        self.network.late, self.network.latest = 0.3, 0.5
        world.faults_left = 40

    def look(self, job, client, number):
        """Read."""
        self.overlap(job, client, 0)


def run_servers(world, plan, kind=Servers):
    """Run a cluster, with a folder for its servers' files if they have some."""
    world.settle()
    if not plan.durable:
        kind(world, plan, None).run()
        return
    folder = Path(tempfile.mkdtemp(prefix="unisono-sim-", dir=memory_folder()))
    try:
        kind(world, plan, folder).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def memory_folder():
    """Return the folder of a file system in memory; None where there is none."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def pushes(world):
    """Clients push, pull, read and write; servers keep their state in memory, and live."""
    plan = Plan(servers=1 + world.choose(2, SETTING), workers=1 + world.choose(3, SETTING), closures=4)
    run_servers(world, plan)


def few_pushes(world):
    """The same with two closures, of which many more schedules are searched in the same time."""
    run_servers(world, Plan(workers=1 + world.choose(2, SETTING), closures=2, reads=1))


def pulls(world):
    """Many pulls of one client are under way at once: their answers come in any order."""
    run_servers(world, Plan(workers=2, closures=4, reads=2), Pulls)


def restarts(world):
    """Servers with a log are killed at any switch, and started again; so are workers, and the chief."""
    chiefs = 1 + world.choose(2, SETTING)
    plan = Plan(servers=1 + world.choose(2, SETTING), workers=2, closures=4, chiefs=chiefs, durable=True)
    run_servers(world, plan)


def absence(world):
    """A server is away for a while, or for ever: clients wait for it within their limit."""
    world.settle()
    network = SimulatedNetwork(world)
    limit = 30.0
    is_gone = bool(world.choose(2, SETTING))
    away = world.uniform(0.0, limit - 3 * client_module.RETRY_AFTER)

    def serve():
        server = VariableServer(VariableStore())
        network.rpc_server("ps0", server.handle).start()
        server.ended.wait()

    server = world.process("ps0", serve)

    def ask():
        client = ServerClient([network.rpc_client(Task("ps", 0), "ps0", None)], absence_limit=limit)
        world.sleep(world.uniform(0.0, 2.0))
        began = world.now
        try:
            client.on_all(Op.STATUS)
        except ClusterError:
            took = world.now - began
            world.check(is_gone, f"A server that returns in time is waited for; given up after {took:.1f} s.")
            # A thread may be slow, twice.
            most = limit + client_module.RETRY_AFTER + client_module.RETRY_EVERY + 5.0
            world.check(limit <= took <= most, f"A server is given up after {limit} s, not {took:.1f} s.")

    client = world.process("client", ask)
    world.sleep(world.uniform(0.0, 1.5))
    world.faults_left = 1
    server.kill()
    if not is_gone:
        world.sleep(away)
        world.process("ps0", serve)
    world.check(client.wait(4 * limit), "A client gives up.")
    if client.error is not None:
        raise client.error


PROTOCOLS = {
    "few_pushes": few_pushes,
    "pushes": pushes,
    "pulls": pulls,
    "restarts": restarts,
    "absence": absence,
}
