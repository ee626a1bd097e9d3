"""A client that trains on standalone servers: its connections, its launcher, the servers' agents and jobs.

Real: `Supervisor`, `RemoteMachines`, `ServerLink`, `RemoteProcess`, `Agent`, `ServerJob`, `LeaseBook`, and
the loopback's messages. A stub: the processes of tasks, and a server's machine. Promised, and checked:

- a launch that ends with 0 has trained all batches, and the client's logs have each line once, in order;
- without a fault no server is lost; what a fault does a restart repairs, or the launch ends within its bound;
- a server runs processes of one generation and of one client at a time;
- a client that has ended leaves no processes behind, and a server ends those of a silent client: also what
  tasks have started and left behind;
- a server that is back is taken again, and what it has ended meanwhile is not waited for;
- a connection that is lost and found again ends no task;
- when a launch has ended, its servers are free at once.

Tests: tests/unit/test_simulated_files.py.
"""

import dataclasses
import json
import shutil
import signal
import types

import pytest

from tests.simulation._disk import Disk
from tests.simulation._file_doors import ROOT, Machine
from tests.simulation._network import SimulatedNetwork
from tests.simulation._world import SETTING
from tests.simulation.protocol_generations import Screen, doors
from unisono._errors import ClusterError
from unisono._system._object_store import place_of
from unisono._system._signals import RESTART_WANTED
from unisono.cluster.liveness._heartbeat_file import HeartbeatFile
from unisono.launcher._plan import RunPaths
from unisono.rpc._ops import Op
from unisono.standalone import _client, _link, _server_job
from unisono.standalone._agent import Agent
from unisono.standalone._link import ServerLink
from unisono.standalone._protocol import CLIENT, LEASE_GRACE, LEASE_SECONDS, SERVER
from unisono.standalone._remote_machines import RemoteProgram, ServerAccess
from unisono.standalone._slots import Slots

_STEP, _EVERY, _TICK = 0.4, 3, 0.25
_GRACE, _STALL = 6.0, 30.0
#: Seconds for a launch in all, and for each fault: a lost server is waited for, and a lease ends.
_BOUND = 120.0
#: Lines after which a client must know a task that prints them.
_KNOWN_AFTER = 15
#: Seconds in which a server that can be reached is found again.
_FOUND_WITHIN = 15.0
_KILLED, _STOPPED = 128 + signal.SIGKILL, 128 + signal.SIGTERM
#: Requests at which connections are lost, and what leads to them in the middle of a launch.
_AIMS = (None, None, Op.HELLO, Op.PUT, Op.START, Op.SIGNAL, Op.GET, Op.SWEEP, Op.END)
_LEADS = {
    Op.PUT: "kill server", Op.START: "kill server", Op.SIGNAL: "stop", Op.GET: "one way",
    Op.SWEEP: "raise",
}  # fmt: skip
#: When something goes wrong: at a random moment, as a task starts, or as the first task succeeds.
_MOMENTS = ("now", "start", "success")
_KINDS = (
    "kill server", "kill task", "pause server", "pause client", "raise", "part", "one way", "wall",
    "stop", "kill client", "cut off", "cut off",
)  # fmt: skip


class _ServerProcess:
    """A process on a server, as its job has it."""

    warm, loss, kept = False, "", None

    def __init__(self, server, log):
        self.server, self.log, self.world = server, log, server.world
        self.ended_at, self.key = None, ""
        self.wants_end = False
        #: How many lines it has printed.
        self.lines = 0
        self._job, self._waiters = None, []
        self.process = server.cluster.machine.process(f"task.{next(server.cluster.numbers)}", self._run)
        self.pid = self.process.pid
        self.process.at_end(self._end)
        server.processes.append(self)

    def _run(self):
        self.world.sleep(self.world.uniform(0.2, 1.0))
        while self._job is None:
            self.world.block(self._waiters, None, "a job")
        return self.server.cluster.train(self, self._job)

    def _end(self):
        self.ended_at = self.world.wall
        if self.process.is_killed and self.lines >= _KNOWN_AFTER:
            self.server.cluster.killed.append(self.process.name)

    def assign(self, job):
        self._job = job
        self.generation = int(job["environ"]["UNISONO_GENERATION"])
        self.task = json.loads(job["environ"]["TF_CONFIG"])["task"]
        self.server.cluster.moment("start")
        self.world.wake(self._waiters)
        return not self.process.is_dead

    def poll(self):
        if not self.process.is_dead:
            return None
        if self.process.is_killed:
            return self.process.own.get("code", _KILLED)
        return 1 if self.process.error is not None else self.process.result

    def send(self, number):
        if number == signal.SIGTERM:
            self.wants_end = True

    def kill(self):
        self.process.kill()


class _Server:
    """A server: its process, those of its jobs, and the machine under them."""

    cores, gpus = 1, ()

    def __init__(self, cluster, name):
        self.cluster, self.world, self.name = cluster, cluster.world, name
        self.root = place_of(f"{ROOT}/disk/{name.partition(':')[0]}")
        self.process, self.processes, self.pauses = None, [], []
        #: The fields that its answers lack, as those of another version do.
        self.lacks = ()
        #: What tasks have left behind: the generation of the task, and the process.
        self.children = []

    def start(self, is_elsewhere=False):
        if self.process is not None and not self.process.is_dead:
            return
        #: Since when it runs, and whether on another machine than before, which has no files of it.
        self.since, self.is_elsewhere = self.world.now, is_elsewhere
        self.process = self.cluster.machine.process(self.name, self._serve)
        # They are this server's children, and the kernel ends them with it.
        self.process.at_end(self._kill_all)

    def _kill_all(self):
        for each in self.processes:
            each.kill()
        for _, child in self.children:
            child.kill()

    def leave_child(self, generation):
        """Start a process that a task does not wait for, such as one that reads its data."""
        name = f"child.{next(self.cluster.numbers)}"
        child = self.cluster.machine.process(name, lambda: self.world.block([], None, "what never ends"))
        self.children.append((generation, child))

    def old_children(self, generation):
        """Return what tasks of earlier generations have left behind, and runs."""
        return [child for own, child in self.children if own < generation and not child.is_dead]

    def reachable_since(self):
        """Return since when the client can reach it without an end."""
        ends = [end for _, end in self.pauses + self.cluster.pauses]
        names = self.process.name, "client"
        parted = [self.cluster.network._parted.get(pair, 0.0) for pair in (names, names[::-1])]
        return max([self.since, *ends, *parted])

    def _serve(self):
        if self.is_elsewhere:
            shutil.rmtree(self.root, ignore_errors=True)
        rpc_server = None
        agent = self.agent = Agent(self.name, _Machine(self), lambda *args: rpc_server.reply(*args))
        lacks = self.lacks

        def handle(client, frame):
            answer = agent.handle(client, frame)
            if answer is None:
                return None
            return dataclasses.replace(
                answer, meta={name: value for name, value in answer.meta.items() if name not in lacks}
            )

        rpc_server = self.cluster.network.rpc_server(self.name, handle if lacks else agent.handle)
        rpc_server.start()
        while True:
            self.world.sleep(_TICK)
            agent.tick()

    # --- its machine -----------------------------------------------------------------------------------

    def job_directory(self, job):
        path = self.root / f"job-{job}"
        if not path.is_dir():
            for other in self.root.glob("job-*"):
                shutil.rmtree(other, ignore_errors=True)
            path.mkdir(mode=0o700, parents=True)
        return path

    def ports(self, count, avoid):
        free = (port for port in range(6000, 7000) if port not in avoid)
        return [next(free) for _ in range(count)]

    def claim_spare(self, shape):
        return None

    def start_process(self, log):
        return _ServerProcess(self, log)

    def sweep(self):
        left = {each.pid for each in self.processes if each.poll() is None}
        left |= {child.pid for _, child in self.children if not child.is_dead}
        self._kill_all()
        return left


class _Machine:
    """What an agent has of a server: `start` is a process there."""

    def __init__(self, server):
        self._server = server

    def __getattr__(self, name):
        return getattr(self._server, name)

    def start(self, shape, log):
        return self._server.start_process(log)


class _Screen(Screen):
    """Keeps what a launch says."""

    def __init__(self):
        self.said = []

    def say(self, text):
        self.said.append(text)


class _Cluster:
    """Servers, a client, and what the checker knows of them."""

    def __init__(self, world, machine, total):
        self.world, self.machine, self.total = world, machine, total
        self.numbers = iter(range(1, 1000))
        self.network = SimulatedNetwork(
            world,
            late=world.pick((0.0, 0.02), SETTING),
            cut=world.pick((0.0, 0.02, 0.1), SETTING),
            latest=4.0,
            is_lossy=lambda address: False,
        )
        self.network.aim, self.network.aimed_at = world.pick(_AIMS, SETTING), world.pick((0.5, 0.1), SETTING)
        self.servers, self.signals, self.raises = {}, [], set()
        #: What goes wrong at the next of some moments.
        self.at = {}
        self.paths = RunPaths(place_of(f"{ROOT}/disk/client"))
        #: Batches that are trained, and those of the newest backup, in a folder of all servers.
        self.trained = self.saved = 0
        self.hit = False
        #: What each process has printed, by its server's log.
        self.printed = {}
        #: The tasks that were killed after their client knew them.
        self.killed = []
        #: When the client was stopped, as the servers have it, too; and since when its launch has ended.
        self.pauses, self.ended_at = [], 0.0
        self.screen = _Screen()

    def living(self):
        """Return the processes of tasks that run."""
        every = [p for server in self.servers.values() for p in server.processes]
        return [p for p in every if not p.process.is_dead and p._job is not None]

    def moment(self, name):
        """Let go wrong what waits for a moment."""
        for fault in self.at.pop(name, ()):
            self.world.call_later(self.world.uniform(0.0, self.world.pick((0.5, 0.05))), fault)

    # --- tasks -----------------------------------------------------------------------------------------

    def train(self, process, job):
        """Be a task: worker 0 trains, the others are there."""
        world, environ, index = self.world, job["environ"], process.task["index"]
        older = [
            each for each in self.living()
            if each.server is process.server and each.generation < process.generation
        ]  # fmt: skip
        if older or process.server.old_children(process.generation):
            world.fail(AssertionError(f"{process.server.name} runs two generations."))
        brought = process.server.root / f"job-{job['job']}" / "train.py"
        text = brought.read_text() if brought.is_file() else "no file"
        if text != "print()":
            world.fail(AssertionError(f"The program was not brought: {text!r}"))
        if world.choose(2):
            process.server.leave_child(process.generation)
        heart = HeartbeatFile(
            place_of(environ["UNISONO_PROGRESS"]), place_of(environ["UNISONO_FENCE"]), str(process.generation)
        )
        peers = {p.task["index"]: p for p in self.living() if p.generation == process.generation}
        batches = self.saved if index == 0 else 0
        while True:
            world.sleep(_STEP)
            heart.beat()
            self._print(process, job, f"{index} {batches}")
            for each in self.living():
                if each.generation == process.generation:
                    peers[each.task["index"]] = each
            if process in self.raises:
                return self._fail(process, job, "ValueError: data")
            if any(p.process.is_dead and p.poll() not in (0, RESTART_WANTED) for p in peers.values()):
                return self._fail(process, job, "RuntimeError: Gloo: Connection closed by peer")
            if process.wants_end:
                return _STOPPED
            if index == 0:
                batches = min(batches + 1, self.total)
                self.trained = max(self.trained, batches)
                if batches % _EVERY == 0 or batches == self.total:
                    self.saved = batches
                if batches == self.total:
                    return self._succeed(process, job)
            elif self.saved == self.total:
                return self._succeed(process, job)

    def _print(self, process, job, text):
        process.lines += 1
        self.printed.setdefault(job["log"], []).append(text)
        with open(job["log"], "a", encoding="utf-8") as file:
            file.write(text + "\n")

    def _succeed(self, process, job):
        self.moment("success")
        with open(job["result"], "w", encoding="utf-8") as file:
            file.write(f"result of {process.task['index']}")
        return 0

    def _fail(self, process, job, text):
        record = {"at": self.world.wall, "code": 1, "summary": f"failed: {text}", "traceback": text}
        with open(job["error"], "w", encoding="utf-8") as file:
            file.write(json.dumps(record))
        return 1

    # --- the client ------------------------------------------------------------------------------------

    def launch(self, options, slots):
        """Be a client; return how its launch has ended, or the error that it raises."""
        self.paths.root.mkdir(parents=True, exist_ok=True)
        run = _client.ClusterRun(wait=0.0, server_timeout=40.0, lease=LEASE_SECONDS)

        def describe(paths, task):
            result = f"{paths.root}/result-{task.type}-{task.index}"
            return {"job": paths.root.name.removeprefix("job-"), "result": result}

        program = RemoteProgram({"train.py": b"print()"}, describe)
        access = ServerAccess(lambda address: self.network.rpc_client(SERVER, address, CLIENT))
        try:
            return _client._run(
                slots, slots.options(**options), program, self.paths, self.screen,
                lambda: tuple(self.signals), run, "train.py", access,
            )  # fmt: skip
        except ClusterError as error:
            return error
        finally:
            self.ended_at = self.world.now

    def check_logs(self, workers):
        """Check that the client has each line of the processes that have ended well, once and in order."""
        for index in range(workers):
            path = self.paths.log(types.SimpleNamespace(type="worker", index=index))
            lines = path.read_text().splitlines()
            # What is before is of earlier generations.
            begins = [number for number, line in enumerate(lines, 1) if line.startswith("---")]
            lines = lines[max(begins, default=0) :]
            last = [text for log, text in self.printed.items() if f"-worker-{index}-" in log][-1]
            self.world.check(
                lines == last,
                lambda index=index, lines=lines, last=last: (
                    f"worker {index} has printed {last}, not {lines}."
                ),
            )
            result = (self.paths.root / f"result-worker-{index}").read_text()
            self.world.check(
                result == f"result of {index}", lambda result=result: f"The result is {result!r}."
            )


def _disturb(world, cluster, client):
    """Let one thing go wrong, now or at a moment that is soon."""
    moment = world.pick(_MOMENTS, "fault moment")
    if moment == "now":
        _break_something(world, cluster, client)
    else:
        cluster.at.setdefault(moment, []).append(lambda: _break_something(world, cluster, client))


def _break_something(world, cluster, client):
    lead = _LEADS.get(cluster.network.aim)
    kind = lead if lead and world.choose(2) else world.pick(_KINDS, "fault kind")
    server = world.pick(list(cluster.servers.values()))
    running = cluster.living()
    if not world.fault(0.7, kind):
        return
    world.note("fault", "test", server.name, kind)
    if kind == "kill server":
        server.process.kill()
        is_elsewhere = world.choose(2) == 1
        # At once, as what watches over a server does, or later.
        seconds = world.pick((20.0, 1.0))
        world.call_later(world.uniform(0.0, seconds), lambda: server.start(is_elsewhere))
    elif kind == "kill task" and running:
        world.pick(running).kill()
    elif kind == "raise" and running:
        cluster.raises.add(world.pick(running))
    elif kind == "pause server":
        seconds = world.uniform(0.0, 20.0)
        server.pauses.append((world.now, world.now + seconds))
        server.process.pause(seconds)
    elif kind == "pause client":
        seconds = world.uniform(0.0, 2 * LEASE_SECONDS)
        cluster.pauses.append((world.now, world.now + seconds))
        client.pause(seconds)
        if world.choose(2):
            # As a machine that sleeps: its connections are gone when it goes on.
            for name in cluster.servers:
                cluster.network.cut_off(name)
    elif kind in ("part", "one way"):
        cluster.network.part("client", server.name, world.uniform(0.0, 20.0), both=kind == "part")
    elif kind == "cut off":
        # Its connection is lost, and there is none for less than a lease.
        cluster.network.part("client", server.name, world.uniform(3.0, LEASE_SECONDS))
        cluster.network.cut_off(server.name)
    elif kind == "wall":
        world.wall_offset += world.pick((3600.0, -3600.0))
    elif kind == "stop":
        cluster.signals.append(signal.SIGTERM)
    elif kind == "kill client":
        client.kill()


def links(world):
    """A client trains on servers that are killed, stopped and cut off, as it is itself."""
    run_links(world)


def run_links(world, begin=lambda cluster, client: None):
    """Run the protocol.

    Args:
        begin: starts others that speak with the servers.
    """
    world.settle()
    world.limit = 2000.0
    machine = Machine(world, "host-a", {"disk": Disk(world), "tmp": Disk(world)}, own=("disk", "tmp"))
    workers = 1 + world.choose(2, SETTING)
    elastic = workers > 1 and world.choose(2, SETTING) == 1
    cluster = _Cluster(world, machine, 8 + world.choose(40, SETTING))
    options = {
        "max_restarts": world.pick((None, 10, 0), SETTING),
        "grace": _GRACE,
        "stall_timeout": _STALL,
        "cool_down": 1.0,
        "elastic": (1, workers) if elastic else None,
    }
    slots = Slots.of({"worker": [f"s{i}:1" for i in range(workers)]})
    with doors(world, machine), pytest.MonkeyPatch.context() as patches:
        # Files and output take one message, or several.
        patches.setattr(_server_job, "LOG_BYTES", world.pick((1 << 20, 6), SETTING))
        size = world.pick((1 << 20, 5), SETTING)
        patches.setattr(_server_job, "CHUNK", size)
        patches.setattr(_link, "CHUNK", size)
        # A default value, which the class has from its definition.
        patches.setattr(
            ServerLink.__init__,
            "__defaults__",
            (lambda address: address not in cluster.network._rpc_servers,),
        )
        for name in slots.addresses:
            server = cluster.servers[name] = _Server(cluster, name)
            server.start()
        world.faults_left = world.choose(6, SETTING) + (cluster.network.aim is not None)
        client = machine.process("client", lambda: cluster.launch(options, slots))
        begin(cluster, client)
        began = world.now
        while not client.wait(world.uniform(0.0, 6.0)):
            if world.faults_left:
                _disturb(world, cluster, client)
            world.check(
                world.now - began < _BOUND * (1 + sum(world.faults.values())),
                lambda: f"A launch must end or go on within its bound.\n{world.stacks()}",
            )
        if client.error is not None:
            raise client.error
        if not world._stall:
            _check_servers(world, cluster, elastic)
        _check_end(world, cluster, client, workers)


def _check_servers(world, cluster, elastic):
    """Compare what has become of servers and tasks with what has happened to them."""
    is_found_again = set(world.faults) <= {"cut", "wall"} and not elastic
    world.check(
        not is_found_again or not cluster.killed,
        lambda: f"A connection that is found again ends no task. Killed: {cluster.killed}",
    )
    if not world.faults:
        clients = [server.agent.status()["client"] for server in cluster.servers.values()]
        world.check(not any(clients), lambda: f"Servers are free at the end of a launch, not for {clients}.")


def _check_end(world, cluster, client, workers):
    left = max([0.0, *(end - world.now for s in cluster.servers.values() for _, end in s.pauses)])
    world.sleep(left + LEASE_SECONDS + LEASE_GRACE + 8.0 + 20.0 * bool(world.faults))
    running = [each.process.name for each in cluster.living()]
    running += [child.name for server in cluster.servers.values() for child in server.old_children(1 << 30)]
    world.check(not running, lambda: f"{running} run on after their client has ended.")
    outcome = client.result
    if client.is_killed:
        return
    if not world._stall:
        stalls = [text for text in cluster.screen.said if "made no progress" in text]
        # A server that is stopped for so long keeps its tasks' progress from the client.
        is_late = any(end - begin > _STALL / 2 for s in cluster.servers.values() for begin, end in s.pauses)
        world.check(is_late or not stalls, lambda: f"All tasks make progress: {stalls}")
    if isinstance(outcome, ClusterError):
        world.check(bool(world.faults), lambda: f"Nothing was lost: {outcome}")
        if "after they were lost" in str(outcome) and not world._stall:
            named = [server for name, server in cluster.servers.items() if name in str(outcome)]
            away = [cluster.ended_at - server.reachable_since() for server in named]
            world.check(
                not away or min(away) < _FOUND_WITHIN,
                lambda: f"Servers that can be reached for {away} s are taken again: {outcome}",
            )
        return
    if outcome.code == 0:
        world.check(
            cluster.saved == cluster.total, lambda: f"{cluster.saved} of {cluster.total} are trained."
        )
        cluster.check_logs(len(outcome.plan.tasks))
    else:
        world.check(bool(world.faults), lambda: f"Nothing has failed, and the launch ends with {outcome}.")


PROTOCOLS = {"links": links}
