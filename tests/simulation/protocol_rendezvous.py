"""The rendezvous: tasks find each other, whoever is late, ends, is replaced, or is no task at all.

`rendezvous`, with its server, its client and their decisions, is the project's; JAX's start, which follows
it, is a barrier of those that were told the same secret. Tasks are killed, stopped, late, started twice, and
go on after they were replaced; a supervisor restarts those that fail: each alone, or all of them as a new
generation.
"""

import dataclasses
import itertools

from tests.simulation._sockets import Network, SocketDoors
from tests.simulation._world import SETTING
from unisono._errors import ClusterError
from unisono.cluster.rendezvous import _protocol
from unisono.cluster.rendezvous._client import rendezvous as meet
from unisono.cluster_resolver._spec import Timeouts

#: Seconds by which a rendezvous may end later than `start_up`: the grace of its clients, or the final
#: messages of process 0, and their last attempt.
_OVER = 5.0 + 2.0
#: Seconds from the moment when all have started to the moment when they know it, where nothing happens.
_AT_ONCE = 4.0
#: What goes wrong without an effect on those that connect.
_HARMLESS = {"stranger", "wall", "connection to itself"}
#: What disturbs connections, so that a task that runs may be missing.
_OF_NETWORK = {"reset", "late", "cut", "one way", "no descriptor", "names", "pause", "stranger", "program"}

_KINDS = (
    "kill", "pause", "duplicate", "stranger", "cut", "one way", "wall", "names", "outlive", "program",
    "kill all", "duplicate",
)  # fmt: skip


@dataclasses.dataclass
class _Run:
    """A process of a task, and how its rendezvous has ended."""

    task: int
    generation: int
    process: object = None
    began: float = 0.0
    result: object = None
    error: str = ""
    paused: float = 0.0
    is_late: bool = False
    ended_at: float = 0.0

    @property
    def is_alive(self):
        return not self.process.is_dead


class _Cluster:
    """The tasks of a job, and who restarts them."""

    def __init__(self, world, network, count, start_up, is_on_one_host, has_generations):
        self.world, self.network, self.count, self.start_up = world, network, count, start_up
        self.has_generations = has_generations
        hosts = [
            network.host("node0" if is_on_one_host else f"node{i}")
            for i in range(1 if is_on_one_host else count)
        ]
        self.hosts = [hosts[i % len(hosts)] for i in range(count)]
        self.addresses = [f"{host.name}:{2222 + i}" for i, host in enumerate(self.hosts)]
        self.generation = 0
        #: The process of each task that its supervisor knows, and all that ever ran.
        self.present, self.runs = {}, []
        #: By secret: who was told it; JAX's start waits until all are there.
        self.told, self.waiters = {}, []
        self.formed = None
        self.number = itertools.count()
        self.last_start = 0.0

    def start(self, task, generation=None):
        """Start a process of a task."""
        own = self.generation if generation is None else generation
        run = _Run(task, own, began=self.world.now)
        name = (
            f"task{task}.{own}"
            if not any(r.task == task for r in self.runs)
            else f"task{task}.{own}-{next(self.number)}"
        )
        self.runs.append(run)
        run.process = self.hosts[task].process(name, lambda: self._run(run))
        run.process.at_end(lambda: setattr(run, "ended_at", self.world.now))
        self.last_start = self.world.now
        return run

    def _run(self, run):
        world = self.world
        began = world.now
        config = {"program": "train.py"} | ({"generation": run.generation} if self.has_generations else {})
        try:
            run.result = meet(run.task, self.count, self.addresses, config, Timeouts(start_up=self.start_up))
        except ClusterError as error:
            run.error = str(error) or "an error without a text"
        world.note(
            "end",
            run.process.name,
            run.process.name,
            f"{run.error or run.result.secret}"[:150].replace("\n", " "),
        )
        seconds = world.now - began - run.paused
        if not world._stall:
            world.check(
                seconds <= self.start_up + _OVER,
                lambda: f"A rendezvous must end within {self.start_up + _OVER:g} s, not {seconds:.1f}: {run}",
            )
        left = self.network.sockets_of(run.process)
        world.check(not left, lambda: f"A rendezvous must close its sockets. Left open: {left}")
        if run.error:
            self._check_error(run)
            return 1
        self._check_result(run)
        return self._start_jax(run)

    def _start_jax(self, run):
        """Wait for all others that were told the same; return the exit code."""
        group = self.told[run.result.secret]
        end = self.world.now + self.start_up
        while self.formed is None and self.world.now < end:
            if len([r for r in group.values() if r.is_alive]) == self.count:
                self.formed = group
                while self.world.wake(self.waiters):
                    pass
                break
            self.world.block(self.waiters, end - self.world.now, "JAX's start")
        return 0 if self.formed is group else 1

    # --- what must hold --------------------------------------------------------------------------

    def _check_result(self, run):
        world, result = self.world, run.result
        group = self.told.setdefault(result.secret, {})
        world.check(result.secret, "All must agree on a secret.")
        world.check(
            all(other.generation == run.generation for other in group.values()),
            lambda: f"Two generations must not meet: {run} and {group}",
        )
        world.check(
            run.task not in group, lambda: f"Two processes of one number must not meet: {run} and {group}"
        )
        group[run.task] = run
        while world.wake(self.waiters):
            pass
        host, _, port = self.addresses[0].partition(":")
        world.check(
            result.coordinator in (self.addresses[0], f"{self.hosts[0].ip}:{port}")
            and result.reached == self.hosts[0].ip,
            lambda: f"All must get the address of process 0, {host} at {self.hosts[0].ip}: {result}",
        )
        # Whoever has seen all has seen one of each that is there, or was there.
        begun = {
            r.task for r in self.runs
            if r.generation == run.generation and (r.is_alive or r.result or r.ended_at > world.now - 1.0)
        }  # fmt: skip
        world.check(
            len(begun) == self.count or run.task or world._stall or set(world.faults) & _OF_NETWORK,
            lambda: f"Only {begun} are there, and {run} has met all.",
        )
        # Who was there first has the number.
        others = [r for r in self.runs if r.began < run.began - _AT_ONCE and self._waits(r, run)]
        world.check(
            not any(r.task == run.task for r in others) or not any(r.task == 0 for r in others)
            or world._stall or set(world.faults) & _OF_NETWORK,
            lambda: f"{run} has taken the place of one that was there before.",
        )  # fmt: skip

    def _check_error(self, run):
        """An error says what holds."""
        world, text = self.world, run.error
        faults = set(world.faults)
        if "must connect within" in text:
            missing = [i for i in range(self.count) if f"missing: process {i} at" in text]
            world.check(missing, lambda: f"The error must name who is missing: {text}")
            if not faults & _OF_NETWORK and not world._stall:
                # Process 0 decides; the others show its last list.
                well = [i for i in missing if self._was_there(i, run)]
                world.check(not well, lambda: f"Processes {well} were there, and are called missing: {text}")
                absent = [i for i in range(self.count) if not any(r.task == i for r in self.runs)]
                world.check(
                    set(absent) <= set(missing),
                    lambda: f"The error must name {absent}, who never came: {text}",
                )
        elif "must send what it decides" in text:
            world.check(
                faults & _OF_NETWORK or world._stall, lambda: f"Process 0 was silent for no reason: {text}"
            )
        elif "must answer at its address" in text:
            if not faults & _OF_NETWORK and not world._stall:
                world.check(not self._was_there(0, run), lambda: f"Process 0 was there: {text}")
            seconds = world.now - run.began
            world.check(
                seconds >= self.start_up - 0.1,
                lambda: f"{run} has {self.start_up:g} s, and has given up after {seconds:.1f}.",
            )
        elif "number of its own" in text:
            twins = [r for r in self.runs if r.task == run.task and r is not run]
            world.check(twins, lambda: f"{run} has no twin.")
        elif "newest generation" in text:
            newest = max(r.generation for r in self.runs)
            world.check(run.generation < newest, lambda: f"{run} is of the newest generation, {newest}.")
        elif "must be able to listen" in text:
            world.check(
                "program" in faults
                or any(r.task == 0 and r is not run for r in self.runs)
                or "no descriptor" in faults,
                lambda: f"The port must be free: {text}",
            )
        else:
            world.fail(AssertionError(f"An error that tells nothing of the cause, with {faults}: {text}"))

    def _waits(self, other, run):
        """Whether another process waits, undisturbed, in the rendezvous of this one."""
        is_waiting = other.is_alive and not other.paused and other.result is None and not other.error
        return is_waiting and other.generation == run.generation

    def _was_there(self, task, run):
        """Whether a task has waited in the last seconds of a rendezvous, undisturbed."""
        since = self.world.now - 2 * _AT_ONCE
        return any(r.task == task and r.began < since and self._waits(r, run) for r in self.runs)

    def check_twins(self):
        """Of two processes of a number that wait undisturbed, one is told so."""
        if self.world._stall or set(self.world.faults) & _OF_NETWORK:
            return
        since = self.world.now - 2 * _AT_ONCE
        waiting = [r for r in self.runs if r.began < since and self._waits(r, r)]
        known = set()
        for run in waiting:
            key = run.task, run.generation
            self.world.check(
                key not in known or not any(r.task == 0 and self._waits(r, run) for r in waiting),
                lambda run=run: f"Two processes wait, and neither is told that its number is twice: {run}",
            )
            known.add(key)

    # --- the supervisor --------------------------------------------------------------------------

    def supervise(self):
        """Restart what has failed."""
        world = self.world
        failed = [
            i for i, run in self.present.items()
            if not run.is_alive and not (run.result and run.process.result == 0) and not run.is_late
        ]  # fmt: skip
        if not failed or self.formed is not None:
            return
        if self.has_generations:
            self.next_generation()
            return
        for task in failed:
            world.sleep(world.uniform(0.05, 1.0))
            self.present[task] = self.start(task)

    def next_generation(self, outlives=None):
        """End all, and start them as a new generation.

        Args:
            outlives: a task whose process its supervisor cannot reach: it runs on.
        """
        world = self.world
        for task, run in self.present.items():
            if task != outlives:
                run.process.kill()
        world.sleep(world.uniform(0.0, 1.0))
        self.generation += 1
        for task in range(self.count):
            self.present[task] = self.start(task)
            if world.choose(2):
                world.sleep(world.uniform(0.0, 1.0))


def _strange_bytes(world, count):
    """Return what a program sends that is no task of this cluster."""
    member = _protocol.Member(count + 1, "other", 1, "token", {"num_processes": count})
    return world.pick(
        (
            b"GET / HTTP/1.1\r\n\r\n",
            b"",
            b"UNIM",
            b"UNIM\x00\x04\xff\xff\xff\xff",
            b"UNIM\x00\x09\x00\x00\x00\x02{}",
            _protocol.frame({"kind": "start"}),
            _protocol.frame(_protocol.hello(member)),
        )
    )


def _be_stranger(world, network, address, data):
    """Connect, send something, and look at the answer for a while."""
    try:
        with network.create_connection(address, 5.0) as sock:
            sock.sendall(data)
            sock.settimeout(world.uniform(0.1, 20.0))
            while sock.recv(100):
                pass
    except OSError:
        return


def _be_program(world, network, port, seconds):
    """Listen where process 0 should, and answer something else."""
    try:
        with network.create_server(("", port)) as listener:
            end = world.now + seconds
            while world.now < end:
                listener.settimeout(max(0.01, end - world.now))
                with listener.accept()[0] as sock:
                    sock.settimeout(1.0)
                    sock.sendall(
                        world.pick(
                            (b"HTTP/1.1 400 Bad Request\r\n\r\n", b"UN", b"UNIM\x00\x04\x00\x00\x00\x02[]")
                        )
                    )
                    sock.recv(1000)
    except OSError:
        return


def _disturb(world, cluster):
    """Let one thing go wrong."""
    network = cluster.network
    kind = world.pick(_KINDS, "fault kind")
    task = world.choose(cluster.count)
    run = cluster.present.get(task)
    if run is None or not world.fault(0.6, kind):
        return
    world.note("fault", "test", run.process.name, kind)
    other = cluster.hosts[(task + 1) % cluster.count]
    if kind == "kill":
        run.process.kill()
    elif kind == "kill all":
        for each in cluster.present.values():
            each.process.kill()
    elif kind == "pause" and run.is_alive:
        run.paused += (seconds := world.uniform(0.1, cluster.start_up * 1.5))
        run.process.pause(seconds)
    elif kind == "duplicate":
        cluster.start(task)
    elif kind == "outlive" and cluster.has_generations:
        if world.choose(2):
            run.paused += (seconds := world.uniform(0.1, cluster.start_up))
            run.process.pause(seconds)
        cluster.next_generation(outlives=task)
    elif kind == "stranger":
        data = _strange_bytes(world, cluster.count)
        address = cluster.hosts[0].ip, 2222
        cluster.hosts[task].process(
            f"stranger{next(cluster.number)}", lambda: _be_stranger(world, network, address, data)
        )
    elif kind == "program":
        cluster.hosts[0].process(
            "program", lambda: _be_program(world, network, 2222, world.uniform(0.5, 10.0))
        )
        cluster.present[0].process.kill()
    elif kind in ("cut", "one way") and other is not cluster.hosts[task]:
        network.part(cluster.hosts[task], other, world.uniform(0.1, 20.0), both=kind == "cut")
    elif kind == "names":
        name = cluster.hosts[0].name
        network.unknown[name] = world.now + world.uniform(0.1, 5.0)
    elif kind == "wall":
        world.wall_offset += world.pick((3600.0, -3600.0, 1e6))


def rendezvous(world):
    """Tasks begin, fail and are started again, until all that are there have met."""
    world.settle()
    count = 2 + world.choose(3, SETTING)
    start_up = world.pick((20.0, 10.0, 40.0), SETTING)
    network = Network(
        world,
        delay=world.pick((0.01, 0.2), SETTING),
        late=world.pick((0.0, 0.02), SETTING),
        reset=world.pick((0.0, 0.02), SETTING),
        descriptors=world.pick((0.0, 0.0, 0.05), SETTING),
        is_short=bool(world.choose(2, SETTING)),
    )
    cluster = _Cluster(
        world,
        network,
        count,
        start_up,
        world.choose(3, SETTING) == 2,
        has_generations=bool(world.choose(2, SETTING)),
    )
    world.faults_left = world.choose(5, SETTING)
    with SocketDoors(network):
        for task in range(count):
            if world.fault(0.1, "late start"):
                run = cluster.present[task] = _Run(task, 0, is_late=True)
                seconds = world.uniform(0.0, 1.7 * start_up)
                run.process = cluster.hosts[task].process(
                    f"launcher{task}", lambda seconds=seconds: world.sleep(seconds)
                )
            else:
                cluster.present[task] = cluster.start(task)
                world.sleep(world.uniform(0.0, 0.5))
        last_fault = world.now
        while cluster.formed is None:
            left = world.faults_left
            world.sleep(world.uniform(0.1, 2.0))
            if left:
                _disturb(world, cluster)
            if world.faults_left < left:
                last_fault = world.now
            for task, run in list(cluster.present.items()):
                if run.is_late and not run.is_alive:
                    cluster.present[task] = cluster.start(task)
                    last_fault = world.now
            for run in cluster.runs:
                if run.process.error is not None:
                    raise run.process.error
            cluster.check_twins()
            cluster.supervise()
            paused = max((run.paused for run in cluster.runs), default=0.0)
            bound = 5 * (start_up + _OVER) + paused + 20.0
            if world._stall:
                bound *= 2
            elif set(world.faults) <= _HARMLESS:
                bound = _AT_ONCE
                last_fault = max(last_fault, cluster.last_start) if not world.faults else last_fault
            world.check(
                world.now - last_fault <= bound,
                lambda bound=bound: (
                    f"All must meet within {bound:g} s.\n{world.stacks()}\n"
                    + "\n".join(f"{r.process.name}: {r.error or r.result or 'waits'}" for r in cluster.runs)
                ),
            )
        world.check(
            len({run.generation for run in cluster.formed.values()}) == 1,
            lambda: f"Two generations must not meet: {cluster.formed}",
        )
        if not world.faults:
            world.check(
                not any(run.error for run in cluster.runs),
                lambda: f"All must meet: {[r.error for r in cluster.runs]}",
            )


PROTOCOLS = {"rendezvous": rendezvous}
