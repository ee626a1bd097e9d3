"""Workers that watch each other: introduction, status servers, peer monitor, watchdog, the end of programs.

`introduce`, `StatusServer`, `Peers`, `PeerMonitor`, `WorkerStatus`, `PeerWatchdog` and `HealthServer` are the
project's. A worker computes nothing: its collectives wait for all and fail as Gloo's do, or wait for ever as
NCCL's, and JAX's board of texts is a stub in process 0. Workers are killed and stopped, machines are lost,
the network is cut, in one direction or both, for a moment or for good; clocks jump, and programs differ.
"""

import dataclasses
import math
import re

import jax
import numpy as np

from tests.simulation._sockets import Network, SocketDoors
from tests.simulation._world import SETTING
from unisono._errors import ClusterError
from unisono.cluster._introduction import introduce
from unisono.cluster.liveness._health import LIVE, READY, HealthServer
from unisono.cluster.liveness._peer_monitor import PeerMonitor
from unisono.cluster.liveness._status import WorkerStatus
from unisono.cluster.liveness._status_server import Peers, StatusServer
from unisono.cluster.liveness._watchdog import PeerWatchdog
from unisono.cluster.rendezvous import _protocol

#: As `Timeouts`: for an answer, for a collective, at the end of programs, and for all to connect.
_HEARTBEAT, _COLLECTIVE, _SHUTDOWN, _START_UP = 3.0, 60.0, 40.0, 20.0
#: Seconds of a step at most.
_STEP = 1.0
#: Seconds within which a lost machine is found by processes that wait for it, as documented.
_LOST_WITHIN = 4 * _HEARTBEAT + 3.0
#: Seconds from an abort to the end of a process that is blocked, and for what has no answer.
_ABORT_WITHIN = 2 * _HEARTBEAT + 2.0
#: Seconds after which a process has ended that is hit by nothing else.
_ENDED_WITHIN = {
    "kill": _LOST_WITHIN,
    "lose": _LOST_WITHIN + _ABORT_WITHIN,
    "long cut": _LOST_WITHIN + _ABORT_WITHIN,
    "long one way": _LOST_WITHIN + _ABORT_WITHIN,
    "isolate": _LOST_WITHIN + _ABORT_WITHIN,
    "other shapes": _LOST_WITHIN,
    "ends early": _LOST_WITHIN,
}
#: An outage that is survived is shorter than this.
_SURVIVED = 3 * _HEARTBEAT
#: The port for probes.
_PROBED = 8080
#: What may happen without an effect.
_HARMLESS = (
    "wall",
    "short pause",
    "short cut",
    "short one way",
    "stranger",
    "reset",
    "late",
    "no descriptor",
)
#: What ends the job, once.
_HARMFUL = ("kill", "lose", "long pause", "long cut", "long one way", "ends early", "other shapes", "isolate")


class _Board:
    """JAX's board of texts, which lives in process 0: what is posted there cannot be lost, but with it."""

    def __init__(self, job):
        self.job, self.texts, self.waiters = job, {}, []

    def _has_way(self):
        world, first = self.job.world, self.job.workers[0]
        own = world.current.process.own["host"]
        return not first.process.is_dead and self.job.network.reaches(own, first.host)

    def post(self, key, text, seconds):
        world = self.job.world
        end = world.now + seconds
        while not self._has_way():
            if world.now >= end:
                return
            world.sleep(min(0.5, end - world.now))
        world.sleep(world.uniform(0.0, 0.02))
        self.texts[key] = text
        while world.wake(self.waiters):
            pass

    def read(self, key, seconds):
        world = self.job.world
        end = world.now + seconds
        while key not in self.texts or not self._has_way():
            left = end - world.now
            if left <= 0:
                return None
            world.block(self.waiters, min(left, 1.0), f"the text {key}")
        world.sleep(world.uniform(0.0, 0.02))
        return self.texts[key]


class _Group:
    """Collectives: each waits for all workers."""

    def __init__(self, job):
        self.job, self.world = job, job.world
        self.arrived, self.done, self.waiters = {}, -1, []

    def tell(self):
        while self.world.wake(self.waiters):
            pass

    def _is_connected(self):
        hosts = [worker.host for worker in self.job.workers]
        return all(self.job.network.reaches(a, b) for a in hosts for b in hosts)

    def arrive(self, own, number):
        """Wait until all have arrived at a collective; it fails where the end of a process is seen."""
        world, job = self.world, self.job
        self.arrived.setdefault(number, set()).add(own.number)
        end = world.now + _COLLECTIVE
        self.tell()
        while self.done < number:
            if len(self.arrived[number]) == len(job.workers) and self._is_connected():
                world.sleep(world.uniform(0.0, 0.01))
                self.done = max(self.done, number)
                self.tell()
                return
            closed = [
                w for w in job.workers
                if w.process.is_dead and not w.host.is_down and job.network.reaches(w.host, own.host)
            ]  # fmt: skip
            if closed and job.uses_gloo:
                raise jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer")
            if world.now >= end and job.uses_gloo:
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Gloo all-reduce failed: Timed out")
            left = end - world.now if job.uses_gloo else _COLLECTIVE
            # Parts of the network come back without an event of their own.
            world.block(self.waiters, min(max(left, 0.01), 0.5), f"collective {number}")


@dataclasses.dataclass
class _Worker:
    """A worker, and how it has ended."""

    job: object
    number: int
    host: object
    process: object = None
    #: "done", or the error.
    end: str | None = None
    ended_at: float = math.inf
    code: int | None = None
    steps: int = 0
    shape: int = 8
    #: After how many steps the shapes of its batches have changed.
    shaped_at: int | None = None
    ends_early: bool = False
    is_stopped: bool = False
    #: Whether it answers probes, whether it has met its cluster, and how many checkpoints it has numbered.
    is_probed: bool = False
    is_ready: bool = False
    saves: int = 0

    def start(self):
        self.process = self.host.process(f"worker{self.number}", self._run)
        self.process.at_end(self._has_ended)

    def _has_ended(self):
        self.ended_at = self.job.world.now
        # A connection that is closed is seen a moment later.
        self.job.world.call_later(0.005, self.job.group.tell)

    def exit(self, reason):
        """End at once, with code 1; what the watchdog calls, too."""
        world = self.job.world
        if self.end is None:
            self.end, self.code = reason, 1
        world.note("end", self.process.name, self.process.name, reason[:150])
        self.process.kill()

    def _run(self):
        job = self.job
        status = self.status = WorkerStatus(sees_ends=False)
        server = StatusServer(self.host.ip, status, "secret")
        health = HealthServer(_PROBED)
        self.is_probed = True
        address = f"{self.host.ip}:{server.port}"
        listening = tuple(address if i == self.number else "" for i in range(len(job.workers)))
        peers = Peers(self.number, listening, job.names, "secret", _HEARTBEAT)
        try:
            monitor = PeerMonitor(status, introduce(job.board, peers, _START_UP), _COLLECTIVE)
        except ClusterError as error:
            self.exit(str(error))
        watchdog = PeerWatchdog(monitor, status.in_flight, _HEARTBEAT, self.exit)
        status.sees_ends = job.uses_gloo
        job.met.add(self.number)
        health.is_ready = self.is_ready = True
        try:
            self._train(monitor)
        except ClusterError as error:
            self.exit(str(error))
        missing = monitor.wait_for_shutdown(_SHUTDOWN)
        if monitor.is_aborted or missing is not None:
            self.exit(status.abort_reason or f"still missing: {missing}")
        self.end, self.code = "done", 0
        watchdog.close()
        # Others may ask until they have ended as well.
        job.leave(self)
        server.close()
        health.close()
        left = job.network.sockets_of(self.process)
        job.world.check(not left, lambda: f"A worker must close its sockets. Left open: {left}")

    def _train(self, monitor):
        job, world = self.job, self.job.world
        while self.steps < job.steps and not self.ends_early:
            world.sleep(world.uniform(0.1, _STEP))
            # A step of many arrays has a long description.
            batch = [np.zeros((self.shape, i + 1)) for i in range(job.arrays)]
            try:
                monitor.begin_step("train", batch)
                with monitor.status.in_flight.collective():
                    job.group.arrive(self, self.steps)
            except RuntimeError as error:
                explained = monitor.explain(error)
                if explained is None:
                    raise
                raise explained from error
            self.steps += 1
            if self.steps % job.saves_every == 0:
                self._save(monitor)

    def _save(self, monitor):
        """Take part in a checkpoint: the first worker numbers it and writes a file for which others wait."""
        job, world = self.job, self.job.world
        index, self.saves = self.saves, self.saves + 1
        # As where each has looked into a directory of its own.
        number = monitor.agree_on_number("ckpt", 100 * self.number + index, is_first=self.number == 0)
        path = f"ckpt-{index}"
        if self.number == 0:
            world.sleep(world.uniform(0.0, 0.3))
            job.numbers[index] = number
            # A disk may fail: then the first worker goes on without the file.
            job.failed.add(path) if world.choose(4) == 3 else job.files.add(path)
            if path in job.files:
                monitor.status.note_file(path)
            return
        monitor.wait_for_file(path)
        is_there = path in job.files or path in job.failed
        is_disturbed = job.harm is not None or world._stall or monitor.is_aborted
        world.check(is_there or is_disturbed, lambda: f"Worker {self.number} does not wait for {path}.")
        world.check(
            number == job.numbers.get(index) or is_disturbed,
            lambda: f"Worker {self.number} numbers {path} {number}, the first one {job.numbers.get(index)}.",
        )


class _Job:
    """The workers of a job, and what has happened to them."""

    def __init__(self, world, network):
        self.world, self.network = world, network
        self.uses_gloo = world.choose(3, SETTING) < 2
        self.steps = 3 + world.choose(8, SETTING)
        self.arrays = world.pick((1, 3, 150), SETTING)
        #: After how many steps there is a checkpoint; the files that the first worker has written, or could
        #: not write, and its numbers.
        self.saves_every = world.pick((100, 2, 1), SETTING)
        self.files, self.failed, self.numbers = set(), set(), {}
        count = 2 + world.choose(3, SETTING)
        self.workers = [_Worker(self, i, network.host(f"node{i}")) for i in range(count)]
        self.names = tuple(f"worker {i} at node{i}:2222" for i in range(count))
        self.board, self.group = _Board(self), _Group(self)
        self.met, self.left, self.leavers = set(), set(), []
        #: The fault that ends the job: its kind, time and workers.
        self.harm = None
        self.paused = 0.0
        self.strangers = 0
        #: Whether somebody was in his last step then.
        self.is_at_end = False

    def leave(self, worker):
        """Wait until all that run have reached the end, as a process does that has other things to do."""
        self.left.add(worker.number)
        if len(self.left) == len(self.workers):
            while self.world.wake(self.leavers):
                pass
        else:
            self.world.block(self.leavers, 5.0, "the others' end")

    @property
    def is_over(self):
        return all(worker.process.is_dead for worker in self.workers)


def _be_stranger(world, network, address, data):
    try:
        with network.create_connection(address, 5.0) as sock:
            sock.sendall(data)
            sock.settimeout(world.uniform(0.1, 20.0))
            while sock.recv(100):
                pass
    except OSError:
        return


def _probe(job, worker):
    """Be the kubelet: a process that runs answers, whatever its main thread waits for."""
    world, network = job.world, job.network
    began, was_ready = world.now, worker.is_ready
    request, statuses = world.pick(
        (
            (f"GET {LIVE} HTTP/1.1", {200}),
            (f"GET {READY} HTTP/1.1", {200 if was_ready else 503}),
            ("GET /etc/passwd HTTP/1.1", {404}),
            (f"POST {LIVE} HTTP/1.1", {405}),
            ("nonsense", {400}),
            # Without an end, and too long: it is not answered.
            ("GET " + "a" * 9000, {0}),
        )
    )
    answer = b""
    try:
        with network.create_connection((worker.host.ip, _PROBED), 5.0) as sock:
            sock.sendall(f"{request}\r\nHost: a\r\n".encode() + (b"" if 0 in statuses else b"\r\n"))
            sock.settimeout(5.0)
            while data := sock.recv(1000):
                answer += data
    except OSError as error:
        # Rejected, and not kept until its time is over.
        is_closed = 0 in statuses and not isinstance(error, TimeoutError)
        answer = answer if is_closed else repr(error).encode()
        statuses = statuses if is_closed else statuses - {0}
    if READY in request and worker.is_ready:
        statuses = statuses | {200}
    status = int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0
    is_disturbed = world.faults or world._stall or worker.process.is_dead or worker.end is not None
    world.check(
        is_disturbed or status in statuses,
        lambda: f"A process answers {request[:30]} with {statuses}, at {began:.1f} s: {answer}",
    )


def _disturb(world, job):
    """Let one thing go wrong."""
    kind = world.pick(_HARMLESS[:5] + _HARMFUL, "fault kind")
    if kind in _HARMFUL and (job.harm is not None or job.paused > world.now):
        return
    if kind == "long pause" and not job.uses_gloo:
        # Without a limit of collectives nothing here ends such a job: the launcher's stall timeout does.
        return
    if kind != "wall" and job.paused > world.now:
        # Two short outages in a row are a long one.
        return
    if kind in _HARMFUL[2:] and len(job.met) < len(job.workers):
        # Before they have met, only the introduction watches: whether all are there.
        return
    if not world.fault(0.7, kind):
        return
    network = job.network
    worker = world.pick(job.workers)
    other = job.workers[(worker.number + 1) % len(job.workers)]
    world.note("fault", "test", worker.process.name, kind)
    hit = [worker.number]
    if kind == "wall":
        world.wall_offset += world.pick((3600.0, -3600.0, 1e6))
    elif kind == "stranger":
        abort = _protocol.frame({"kind": "abort", "reason": "a stranger says so", "secret": "guess"})
        noise = (
            b"GET / HTTP/1.1\r\n\r\n", b"", b"UNIM\x00\x04\x00\x00\x00\x02{}",
            b"UNIM\x00\x09\x00\x00\x00\x00", b"UNIM\x00\x04\x00\xff\x00\x00",
            _protocol.frame({"kind": "state", "secret": 5}),
            _protocol.frame({"kind": "end", "missing": "a stranger says so", "secret": ""}),
        )  # fmt: skip
        data = world.pick(noise) if world.choose(2) else abort
        port = next(
            (s._local[1] for s in network.sockets_of(worker.process) if s._queue is not None), _PROBED
        )
        job.strangers += 1
        network.host(f"stranger{job.strangers}").process(
            f"stranger{job.strangers}", lambda: _be_stranger(world, network, (worker.host.ip, port), data)
        )
    elif kind == "short pause":
        # A process that accepts connections is waited for, much longer than a machine that is silent.
        seconds = world.uniform(0.1, 30.0 if len(job.met) == len(job.workers) else 6.0)
        job.paused = world.now + seconds + _HEARTBEAT
        worker.process.pause(seconds)
    elif kind in ("short cut", "short one way"):
        seconds = world.uniform(0.1, _SURVIVED - _HEARTBEAT)
        job.paused = world.now + 1.5 * seconds + _HEARTBEAT
        network.part(worker.host, other.host, seconds, both=kind == "short cut")
    elif kind == "kill":
        worker.process.kill()
    elif kind == "lose":
        network.lose(worker.host)
    elif kind == "long pause":
        worker.is_stopped = True
        worker.process.pause(10 * _COLLECTIVE)
    elif kind in ("long cut", "long one way"):
        hit.append(other.number)
        network.part(worker.host, other.host, math.inf, both=kind == "long cut")
    elif kind == "isolate":
        for each in job.workers:
            if each is not worker:
                network.part(worker.host, each.host, math.inf)
        hit = list(range(len(job.workers))) if len(job.workers) == 2 else hit
    elif kind == "ends early":
        worker.ends_early = True
    else:
        worker.shape += 1
        worker.shaped_at = worker.steps
    if (kind in _HARMFUL and not worker.process.is_dead) or kind in ("kill", "lose"):
        job.harm = kind, world.now, hit
        job.is_at_end = any(each.steps >= job.steps - 1 for each in job.workers)


def _bound(job):
    """Return the seconds after which a job has ended that something has hit."""
    kind = job.harm[0]
    if len(job.met) < len(job.workers):
        # The introduction waits for texts, one after the other, and for who reads that they are missing.
        return 3 * (_START_UP + 30.0)
    at_end = _SHUTDOWN + _ABORT_WITHIN
    if kind in ("kill", "lose", "long cut", "long one way", "isolate"):
        return _STEP + max(_LOST_WITHIN, at_end) + _ABORT_WITHIN
    if kind == "long pause":
        # At a checkpoint its number and its file are waited for, too.
        saving = 2 * _COLLECTIVE if job.saves_every <= job.steps else 0.0
        return _STEP + saving + _COLLECTIVE + at_end + _ABORT_WITHIN
    return job.steps * _STEP + _COLLECTIVE + at_end


def _check_ends(world, job):
    """Compare how the workers have ended with what has happened to them."""
    ends = {w.number: w.end for w in job.workers}
    if job.harm is None:
        world.check(
            all(end == "done" for end in ends.values()),
            lambda: f"All must end well, where only {dict(world.faults)} happened: {ends}",
        )
        return
    kind, at, hit = job.harm
    for worker in job.workers:
        if worker.number in hit and kind in ("kill", "lose", "long pause"):
            continue
        world.check(
            worker.end is not None, lambda worker=worker: f"{worker.number} ended without a word: {ends}"
        )
        if worker.end == "done":
            continue
        seconds = worker.ended_at - at
        is_alone = sum(world.faults.values()) == 1 and len(job.met) == len(job.workers)
        world.check(
            not is_alone or job.is_at_end or seconds <= _STEP + _ENDED_WITHIN.get(kind, math.inf),
            lambda worker=worker, seconds=seconds: (
                f"{kind} of {hit}: worker {worker.number} ends {seconds:.1f} s later: {worker.end}"
            ),
        )
        names = re.findall(r"lost worker (\d)", worker.end)
        world.check(
            kind in ("ends early", "other shapes")
            or worker.number in hit
            or not names
            or int(names[0]) in hit,
            lambda worker=worker: f"{kind} of {hit}, and worker {worker.number} says: {worker.end}",
        )
        known = [
            i for i in hit if i != worker.number or len(hit) > 1 or kind in ("ends early", "other shapes")
        ]
        world.check(
            not known or any(re.search(rf"worker {i}\b|process(es)? .*\b{i}\b", worker.end) for i in known),
            lambda worker=worker: f"{kind} of {hit} must be named by worker {worker.number}: {worker.end}",
        )
    if kind == "other shapes":
        other = job.workers[hit[0]]
        world.check(
            other.end != "done" or other.steps <= other.shaped_at + 1,
            lambda: f"Worker {other.number} takes other steps than the others until the end: {ends}",
        )
        well = [end for end in ends.values() if end == "done"]
        world.check(
            not well or len(well) == len(ends), lambda: f"All take the same steps, or none ends well: {ends}"
        )


def peers(world):
    """Workers train, watch each other, and end."""
    world.settle()
    world.limit = 1200.0
    network = Network(
        world,
        delay=world.pick((0.01, 0.2), SETTING),
        late=world.pick((0.0, 0.01), SETTING),
        reset=world.pick((0.0, 0.01), SETTING),
        buffer=world.pick((1 << 16, 4096), SETTING),
        is_short=bool(world.choose(2, SETTING)),
    )
    with SocketDoors(network):
        job = _Job(world, network)
        descriptors = world.pick((0.0, 0.0, 0.02), SETTING)
        world.faults_left = world.choose(4, SETTING)
        kubelet = network.host("kubelet")
        for worker in job.workers:
            worker.start()
            world.sleep(world.uniform(0.0, 1.0))
            if worker.is_probed and world.choose(4) == 3:
                kubelet.process("probe", lambda worker=worker: _probe(job, worker))
        quiet_since = world.now
        while not job.is_over:
            left = world.faults_left
            world.sleep(world.uniform(0.2, 3.0))
            if left:
                _disturb(world, job)
            if world.faults_left < left:
                quiet_since = world.now
            # Whoever cannot open its port at all has the error at once.
            network.descriptors = descriptors if len(job.met) == len(job.workers) else 0.0
            for worker in job.workers:
                if worker.process.error is not None:
                    raise worker.process.error
            running = [w for w in job.workers if not w.process.is_dead]
            if world.choose(8) == 1 and running:
                worker = world.pick(running)
                kubelet.process("probe", lambda worker=worker: _probe(job, worker))
            bound = _bound(job) if job.harm else job.steps * (_STEP + 1.0) + _START_UP + 30.0
            bound *= 3 if world._stall else 1
            waits = [w for w in running if not w.is_stopped]
            if not waits:
                break
            world.check(
                world.now - quiet_since <= bound + job.arrays * 0.1,
                lambda bound=bound: f"{job.harm}: all must end within {bound:.1f} s.\n{world.stacks()}",
            )
        if not world._stall:
            _check_ends(world, job)


PROTOCOLS = {"peers": peers}
