"""Standalone servers as they are, with processes and spares on one machine; one or two clients.

In `serving` all tasks are workers; `roles` has chiefs, parameter servers and evaluators, too.

Real: `StandardServer`, `ServerMachine`, `Agent`, `ServerJob`, `Process`, `SparePool`, `OrphanReaper`, the
start and end of a task, and on the other side `Supervisor`, `RemoteMachines` and `ServerLink`. A stub: what a
program computes. Promised, and checked:

- a server runs processes of one client and of one generation at a time, and ends none of another server's;
- a launch ends with 0, with all batches, results and logs, and its evaluator told, where nothing but
  connections was lost; otherwise within its bound, with an error that is made for its user;
- a client that finds servers busy is told so, or has them as soon as the other one has ended;
- what a server says of itself, such as that it has no free port, is in the launch's error, and so is what a
  task has raised, also where a disk is full, at either end;
- a client whose disk is full loses output, and no task; where it cannot keep a result, its error says so;
- tasks are asked to end before they are killed;
- when a client has ended, no process of it is left, and its servers are free;
- a server that is asked to end leaves no process, child or pipe.

Tests: tests/unit/test_simulated_launches.py.
"""

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.simulation._disk import Disk
from tests.simulation._file_doors import ROOT, Machine
from tests.simulation._kernel import Kernel
from tests.simulation._network import SimulatedNetwork
from tests.simulation._task_programs import TaskPrograms, doors
from tests.simulation._world import SETTING
from tests.simulation.protocol_generations import Screen
from unisono._errors import ClusterError, InvalidArgumentError
from unisono._system._object_store import place_of
from unisono.cluster.liveness._heartbeat_file import HeartbeatFile
from unisono.cluster_resolver._spec import Task
from unisono.launcher._function_call import result_path
from unisono.launcher._plan import RunPaths
from unisono.launcher._restart_policy import chief_of, serving_tasks
from unisono.rpc._ops import Op
from unisono.standalone import _client, _server, _server_machine
from unisono.standalone._lease_book import ServerBusyError
from unisono.standalone._link import ServerLink
from unisono.standalone._protocol import CLIENT, LEASE_GRACE, LEASE_SECONDS, SERVER
from unisono.standalone._remote_machines import RemoteProgram, ServerAccess
from unisono.standalone._slots import Slots

_STEP, _EVERY = 0.4, 3
_GRACE, _STALL, _LOST = 6.0, 30.0, 30.0
#: Seconds for a launch in all, and for each fault: a lost server is waited for, and a lease ends.
_BOUND = 150.0
#: Requests at which connections are lost, and what leads to them in the middle of a launch.
_AIMS = (None, Op.HELLO, Op.PUT, Op.PORTS, Op.SIGNAL, Op.SIGNAL)
_LEADS = {Op.HELLO: "cut off", Op.SIGNAL: "stop client", Op.PORTS: "ports and raise"}
_KINDS = (
    "cut off", "part", "kill server", "stop server", "pause server", "kill task", "raise", "full server",
    "full and raise", "full client", "removed", "ports", "ports and raise", "stop client", "kill client",
)  # fmt: skip
#: Of `roles`.
_OF_ROLES = (
    "kill task", "cut off", "full client", "full client", "full client", "raise", "kill server",
    "stop server", "full and raise", "stop client", "kill client", "removed",
)  # fmt: skip
#: What costs a launch time, and no more.
_HARMLESS = {"cut off", "cut", "late", "unnoticed end"}


class _Server:
    """A server, which may be started again."""

    def __init__(self, site, address):
        self.site, self.world, self.address = site, site.world, address
        self.root = place_of(f"{ROOT}/disk/serve-{address.rpartition(':')[2]}")
        self.entry, self.server = None, None
        self.is_asked = False

    def start(self):
        if self.entry is None or not self.entry.is_alive:
            self.is_asked = False
            self.entry = self.site.kernel.start(self.address, self._serve)

    def _serve(self):
        entry = self.site.kernel.current
        entry.handlers[signal.SIGTERM] = lambda: setattr(self, "is_asked", True)
        try:
            server = self.server = _server.StandardServer(
                self.address, Path(self.root), self.world.pick((1, 0, 2), SETTING)
            )
            self.site.programs.fail_unless(server.status() == {}, "A server that has not begun says nothing.")
            server.start()
            server.start()
        except (ClusterError, InvalidArgumentError):
            return self._failed(entry)
        while not self.is_asked:
            self.world.sleep(0.5)
        server.stop()
        self._check_left(entry)
        return 0

    def _failed(self, entry):
        """Check what is left where a server cannot start: the disk is full, or it has a successor."""
        self._check_left(entry)
        return 1

    def _check_left(self, entry):
        kernel, programs = self.site.kernel, self.site.programs
        programs.fail_unless(not entry.children, f"A server leaves its processes {entry.children}.")
        programs.fail_unless(not kernel.held(entry), "A server that ends closes its pipes.")
        left = self.processes()
        programs.fail_unless(not left, f"A server that ends leaves {left}.")

    def processes(self):
        """Return the processes of tasks that run in its folder."""
        return [e for e in self.site.kernel.living() if e.job is not None and self.has(e)]

    def has(self, entry):
        return entry.job["log"].startswith(f"{self.root}/")


class _Programs(TaskPrograms):
    """The tasks, and what the clients' jobs have reached."""

    def __init__(self, world, kernel, site):
        super().__init__(world, kernel)
        self.site, self.starts, self.raises = site, world.choose(2, SETTING) == 1, set()
        #: By the name of a job's folder: its processes, and the batches of its newest backup.
        self.processes, self.saved = {}, {}

    def taken(self, entry):
        entry.key = Path(entry.job["log"]).parent.name
        entry.generation = int(entry.job["environ"]["UNISONO_GENERATION"])
        cluster = json.loads(entry.job["environ"]["TF_CONFIG"])["cluster"]
        tasks = [Task(job, index) for job, every in cluster.items() for index in range(len(every))]
        entry.serves = entry.task in serving_tasks(tasks)
        leader = chief_of(tasks) or Task("chief" if "chief" in cluster else "worker", 0)
        entry.leads, entry.needs = entry.task == leader, set(serving_tasks(tasks))
        entry.has_servers = chief_of(tasks) is not None
        server = next(each for each in self.site.servers.values() if each.has(entry))
        own = entry.key, entry.generation
        # One that opens its log is judged when it gets here.
        beside = [e for e in server.processes() if e is not entry and hasattr(e, "key")]
        others = [e for e in beside if (e.key, e.generation) != own or e.task == entry.task]
        self.fail_unless(not others, f"{server.address} runs {entry} of {entry.key} beside {others}.")
        self.processes.setdefault(entry.key, []).append(entry)

    def call(self, target, result):
        """Be the function of a task."""
        entry, world = self.kernel.current, self.world
        # The system's own errors are the program's.
        total = int(target.read_text())
        entry.handlers[signal.SIGTERM] = lambda: setattr(entry, "wants_end", True)
        if self.starts:
            self.start_others(entry)
        task, environ = entry.task, entry.job["environ"]
        heart = HeartbeatFile(
            Path(environ["UNISONO_PROGRESS"]), Path(environ["UNISONO_FENCE"]), str(entry.generation)
        )
        batches = self.saved.setdefault(entry.key, 0)
        while True:
            world.sleep(_STEP)
            self._obey(entry)
            if task.type == "evaluator":
                if Path(environ["UNISONO_FINISHED"]).exists():
                    self.fail_unless(
                        self.saved[entry.key] == total,
                        f"The evaluator is told the end after {self.saved[entry.key]} of {total}.",
                    )
                    return
                continue
            heart.beat()
            self.print(entry, f"{task} step {batches}")
            if entry.leads and self._has_all(entry):
                batches = min(batches + 1, total)
                if batches % _EVERY == 0 or batches == total:
                    self.saved[entry.key] = batches
            # A parameter server serves until it is asked to end.
            if self.saved[entry.key] == total and task.type != "ps":
                break
        with open(result, "w", encoding="utf-8") as file:
            file.write(f"{task} of {entry.key}")

    def _obey(self, entry):
        if entry in self.raises:
            self.raises.discard(entry)
            raise ValueError("data")
        if entry.wants_end:
            raise SystemExit(128 + signal.SIGTERM)
        for peer in () if entry.has_servers else self.processes[entry.key]:
            if peer.generation == entry.generation and not peer.is_alive and peer.code != 0:
                raise RuntimeError("Gloo: Connection closed by peer")

    def _has_all(self, entry):
        """Return whether the parameter servers of a chief run, and a worker, if it has workers."""
        there = {p.task for p in self.processes[entry.key] if p.is_alive and p.generation == entry.generation}
        away = {task for task in entry.needs - there if task.type == "ps"}
        workers = [task for task in entry.needs if task.type == "worker"]
        return not away and (not workers or bool(there & set(workers)))


class _Client:
    """A client: its launch, and how it has ended."""

    def __init__(self, site, number, wait):
        self.site, self.world, self.wait = site, site.world, wait
        self.name = f"client{number}"
        self.paths = RunPaths(place_of(f"{ROOT}/home/{self.name}"))
        self.total = 6 + self.world.choose(20, SETTING)
        self.signals, self.screen = [], Screen()
        self.entry, self.error, self.outcome, self.job = None, None, None, ""
        self.waited = []

    def start(self, slots, options):
        self.entry = self.site.kernel.start(self.name, lambda: self._run(slots, options))

    def _run(self, slots, options):
        self.paths.root.mkdir(parents=True, exist_ok=True)

        def describe(paths, task):
            self.job = paths.root.name
            return {
                "kind": "call", "target": str(paths.root / "call"), "result": str(result_path(paths, task)),
            }  # fmt: skip

        program = RemoteProgram({"call": str(self.total).encode()}, describe)
        run = _client.ClusterRun(wait=self.wait, server_timeout=_LOST)
        network = self.site.network
        access = ServerAccess(lambda address: network.rpc_client(SERVER, address, CLIENT))
        try:
            self.outcome = _client._run(
                slots, slots.options(**options), program, self.paths, self.screen,
                lambda: tuple(self.signals), run, "train.py", access,
            )  # fmt: skip
        except (ClusterError, InvalidArgumentError) as error:
            self.error = error
        return 0

    def processes(self):
        """Return what runs of it on servers."""
        return [e for e in self.site.programs.processes.get(self.job, ()) if e.is_alive]


class _Site:
    """Servers, clients and the machine."""

    def __init__(self, world, kernel):
        self.world, self.kernel = world, kernel
        self.programs = _Programs(world, kernel, self)
        self.network = SimulatedNetwork(
            world,
            late=world.pick((0.0, 0.02), SETTING),
            cut=world.pick((0.0, 0.02, 0.1), SETTING),
            latest=4.0,
            is_lossy=lambda address: False,
        )
        self.network.aim, self.network.aimed_at = world.pick(_AIMS, SETTING), world.pick((0.3, 0.6), SETTING)
        self.servers, self.clients = {}, []
        #: The tasks that were killed, and had no SIGTERM before.
        self.unasked = []
        kernel.on_signal = self._signalled

    def rpc_server(self, address, handle, keys, limit, budget):
        rpc_server = self.network.rpc_server(address, handle)
        rpc_server.rejected = 0
        return rpc_server

    def _signalled(self, sender, target, number):
        """Check that a server ends its own processes alone."""
        own = [s for s in self.servers.values() if s.entry is sender]
        if number == signal.SIGKILL and target.job is not None and not getattr(target, "wants_end", False):
            self.unasked.append(target)
        if own and target.job is not None:
            self.programs.fail_unless(
                own[0].has(target), f"{own[0].address} sends the signal {number} to {target}."
            )


def _disturb(world, site, kinds):
    """Let one thing go wrong."""
    lead = _LEADS.get(site.network.aim)
    kind = lead if lead and world.choose(2) else world.pick(kinds, "fault kind")
    if not world.fault(0.8, kind):
        return
    server, client = world.pick(list(site.servers.values())), world.pick(site.clients)
    running = [e for s in site.servers.values() for e in s.processes()]
    kernel, entry, disks = site.kernel, server.entry, site.kernel.machine.disks
    world.note("fault", "test", server.address, kind)
    if kind in ("cut off", "part"):
        site.network.part(client.name, server.address, world.uniform(0.0, 2.0 if kind == "cut off" else 20.0))
        site.network.cut_off(server.address)
    elif kind in ("kill server", "stop server"):
        kernel._deliver(entry, signal.SIGKILL if kind == "kill server" else signal.SIGTERM)
        _start_again(world, server)
    elif kind == "pause server":
        entry.process.pause(world.uniform(0.0, 20.0))
    elif kind == "kill task" and running:
        kernel._deliver(world.pick(running), signal.SIGKILL)
    elif kind == "raise" and running:
        site.programs.raises.add(world.pick(running))
    elif kind in ("full server", "full and raise", "full client"):
        if kind == "full and raise":
            site.programs.raises.update(running)
        disk = disks["home" if kind == "full client" else "disk"]
        disk.room = world.pick((0, 20, 300))
        world.call_later(world.uniform(1.0, 60.0), lambda: setattr(disk, "room", float("inf")))
    elif kind == "removed":
        # As what cleans up temporary folders does.
        shutil.rmtree(server.root, ignore_errors=True)
    elif kind in ("ports", "ports and raise"):
        if kind == "ports and raise":
            site.programs.raises.update(running)
        # Other programs have all.
        held = [port for port in range(10_000, 10_016) if port not in kernel.ports]
        kernel.ports.update(dict.fromkeys(held))
        if world.choose(2):
            world.call_later(world.uniform(1.0, 20.0), lambda: [kernel.ports.pop(p, None) for p in held])
    elif kind == "stop client":
        client.signals.append(signal.SIGTERM)
    elif kind == "kill client" and client.entry is not None:
        kernel._deliver(client.entry, signal.SIGKILL)


def _start_again(world, server):
    def look():
        if server.entry.is_alive:
            world.call_later(1.0, look)
        else:
            server.start()

    world.call_later(world.uniform(1.0, 15.0), look)


def serving(world):
    """One or two clients train on servers whose machines have too little of everything."""
    world.settle()

    def draw():
        count = 1 + world.choose(2, SETTING)
        addresses = [f"localhost:{2222 + i}" for i in range(count)]
        cluster = {"worker": addresses}
        if world.choose(2, SETTING):
            # Beside a worker, or alone.
            cluster["evaluator"] = [world.pick((addresses[0], f"localhost:{2222 + count}"), SETTING)]
        return cluster

    _serve(world, draw, _KINDS)


def roles(world):
    """Chiefs, parameter servers and evaluators on servers elsewhere, one on each, or several on one."""
    world.settle()
    first, second, third = (f"localhost:{2222 + i}" for i in range(3))
    cluster = world.pick(
        (
            {"chief": [first], "worker": [second], "ps": [second]},
            {"worker": [first, second], "ps": [third]},
            {"chief": [first], "worker": [second]},
            {"chief": [first], "ps": [first]},
            {"chief": [first], "worker": [first, second], "ps": [second, first]},
        ),
        SETTING,
    )
    if world.choose(3, SETTING) == 2:
        cluster = cluster | {"evaluator": [second]}
    _serve(world, lambda: cluster, _OF_ROLES)


def _serve(world, draw, kinds):
    """Run the protocol with a cluster that `draw` returns."""
    world.limit = 3000.0
    disks = {"disk": Disk(world), "home": Disk(world), "tmp": Disk(world)}
    kernel = Kernel(world, Machine(world, "host-a", disks, own=tuple(disks)), {})
    site = _Site(world, kernel)
    if kinds is _OF_ROLES:
        # Its faults are rather those of tasks.
        site.network.aim = None
    cluster = draw()
    addresses = cluster.get("worker", cluster.get("chief"))
    count = len(addresses)
    options = {
        "max_restarts": world.pick((None, 10, 0), SETTING),
        "grace": _GRACE,
        "stall_timeout": _STALL,
        "cool_down": 1.0,
        "elastic": (1, count) if count > 1 and world.choose(3, SETTING) == 2 else None,
    }
    gpus = world.pick(((), ("0",), ("0", "1")), SETTING)
    with doors(world, kernel.machine, kernel, site.programs), pytest.MonkeyPatch.context() as patches:
        patches.setattr(_server, "RpcServer", site.rpc_server)
        patches.setattr(_server, "_TICK", 0.25)
        patches.setattr(_server_machine, "cores", lambda: 2)
        patches.setattr(_server_machine, "visible_gpus", lambda environ: gpus)
        refused = (lambda address: address not in site.network._rpc_servers,)
        patches.setattr(ServerLink.__init__, "__defaults__", refused)
        slots = Slots.of(cluster)
        for address in slots.addresses:
            server = site.servers[address] = _Server(site, address)
            server.start()
        world.sleep(1.0)
        world.faults_left = world.choose(4, SETTING) + (site.network.aim is not None)
        site.clients.append(_Client(site, 0, 0.0))
        site.clients[0].start(slots, options)
        if world.choose(3, SETTING) == 2:
            world.sleep(world.uniform(0.5, 15.0))
            site.clients.append(_Client(site, 1, world.pick((600.0, 0.0, 5.0))))
            own = world.pick(([addresses[-1]], addresses))
            elastic = options["elastic"] if len(own) == count else None
            site.clients[1].start(Slots.of({"worker": own}), options | {"elastic": elastic})
        _watch(world, site, kinds)
        _check_end(world, site)


def _watch(world, site, kinds):
    began = world.now
    while any(client.entry.is_alive for client in site.clients):
        world.sleep(world.uniform(1.0, 6.0))
        if world.faults_left:
            _disturb(world, site, kinds)
        world.check(
            world.now - began < _BOUND * (len(site.clients) + sum(world.faults.values())),
            lambda: f"A launch must end or go on within its bound.\n{world.stacks()}",
        )
    for client in site.clients:
        if client.entry.process.error is not None:
            raise client.entry.process.error


def _check_end(world, site):
    for client in site.clients:
        if not client.entry.process.is_killed:
            _check_outcome(world, site, client)
    pauses = 20.0 * world.faults["pause server"]
    late = (LEASE_SECONDS + LEASE_GRACE + 20.0 + pauses) if world.faults or world._stall else 0.5
    world.sleep(late)
    for client in site.clients:
        left = client.processes()
        world.check(not left, lambda client=client, left=left: f"{client.name} has ended; {left} run on.")
    for server in site.servers.values():
        _check_server(world, site, server)


def _check_server(world, site, server):
    """Check that a server is free, and what it leaves when it ends."""
    if not server.entry.is_alive:
        return
    doing = server.server.status()
    world.check(
        doing.get("client") is None and not doing.get("processes"),
        lambda: f"{server.address} must be free when its clients have ended: {doing}",
    )
    site.kernel._deliver(server.entry, signal.SIGTERM)
    world.check(server.entry.process.wait(60.0), lambda: f"A server must end.\n{world.stacks()}")
    if server.entry.process.error is not None:
        raise server.entry.process.error


def _check_outcome(world, site, client):
    error, outcome, faults = client.error, client.outcome, set(world.faults)
    if error is not None:
        _check_error(world, site, client, error)
    is_quiet = faults <= _HARMLESS and not world._stall
    is_busy = isinstance(error, ServerBusyError) and client.wait < 600.0
    if is_quiet and not is_busy:
        world.check(
            outcome is not None and outcome.code == 0,
            lambda: f"Nothing is lost, and {client.name} ends with {error or outcome}",
        )
    if outcome is None:
        return
    # Each connection is back long before its server counts as lost.
    is_found = is_quiet and world.faults["late"] == 0 and world.faults["cut off"] < 2
    world.check(
        not is_found or outcome.plan.generation == 0,
        lambda: f"A connection that is found again ends no task, and {client.name} ends with {outcome}",
    )
    if outcome.code == 0:
        _check_results(world, site, client)
    detail = "" if outcome.failure is None else outcome.failure.detail
    is_unkept = "cannot be kept on this machine" in detail
    world.check(
        outcome.code != 1 or is_unkept or "Error" in detail,
        lambda: f"A task has ended with an exception, and its client is told {detail!r}.",
    )
    has_lost_output = faults <= _HARMLESS | {"full client"} and not world._stall
    world.check(
        not has_lost_output or is_unkept or outcome.code == 0,
        lambda: f"A client's disk is full, and its launch ends with {outcome}.",
    )
    world.check(not is_unkept or "No space left" in detail, lambda: f"The error names the disk: {detail}")
    # A message that is late by seconds may be later than the grace.
    if faults <= _HARMLESS - {"late"} | {"stop client"} and not world._stall:
        asked = [each for each in site.unasked if each.key == client.job]
        world.check(not asked, lambda: f"{asked} are killed, and were not asked to end.")


def _check_error(world, site, client, error):
    is_made_for_users = type(error) in (ClusterError, ServerBusyError, InvalidArgumentError)
    world.check(is_made_for_users, lambda: f"A launch ends with {error!r}, of which its user knows nothing.")
    others = [each for each in site.clients if each is not client]
    is_busy = isinstance(error, ServerBusyError)
    is_free = not others and not world.faults
    world.check(not is_busy or not is_free, lambda: f"No other client is there: {error}")
    if set(world.faults) <= {"ports", "ports and raise"} and not is_busy:
        world.check("port" in str(error), lambda: f"No port is free, and the error is {error}")


def _check_results(world, site, client):
    """Check that all was trained, and that the client has all results and the last output."""
    programs = site.programs
    saved, plan = programs.saved[client.job], client.outcome.plan
    world.check(
        saved == client.total, lambda: f"{saved} of {client.total} batches are trained; the code is 0."
    )
    for task in plan.tasks:
        last = [e for e in programs.processes[client.job] if e.task == task][-1]
        if last.serves:
            # The launcher ends it, perhaps before it has read all.
            continue
        world.check(last.code == 0, lambda last=last: f"{last} ends with {last.code}, its launch with 0.")
        if task.type != "evaluator":
            text = result_path(client.paths, task).read_text()
            world.check(text == f"{task} of {client.job}", lambda text=text: f"The result is {text!r}.")
        log, printed = client.paths.log(task).read_bytes(), bytes(last.printed)
        world.check(
            log.endswith(printed) or "full client" in world.faults,
            lambda task=task, log=log, printed=printed: (
                f"{task} has printed {printed[-80:]!r}, not {log[-80:]!r}"
            ),
        )


PROTOCOLS = {"serving": serving, "roles": roles}
