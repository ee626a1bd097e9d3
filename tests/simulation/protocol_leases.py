"""Standalone servers: a server trains for one client at a time, and not for one that is silent.

`Agent`, `LeaseBook`, `Lease` and `ActiveClock` are the project's. A client asks, repeats what is not
answered, and polls; messages are lost, repeated and late, processes are killed and stopped, clocks jump.
"""

import types

import pytest

from tests.simulation._world import SETTING, Violation
from unisono.rpc._calls import ClientId
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op
from unisono.standalone import _agent
from unisono.standalone._protocol import CLIENT, LEASE_GRACE, LEASE_SECONDS

#: Seconds that a message takes at most, and after which a client repeats one.
_SLOW, _REPEAT = 1.0, 2.0
#: The same of one that the network repeats.
_LATEST = 25.0
#: Seconds between two looks of a server; most events of a schedule are these.
_TICK = 0.5
#: Seconds from the last sign of a client to the end of its processes, at most.
_BOUND = LEASE_SECONDS + LEASE_GRACE + 2.0


class _Job:
    """The processes of a job on a server."""

    def __init__(self, world, name, kill_seconds):
        self.world, self.name, self._kill_seconds = world, name, kill_seconds
        self.is_running = False
        self.is_removed = False
        self.count = 0
        self._news = False

    def start(self, key, task, generation, shape, description):
        self.is_running, self.count, self._news = True, 1, True
        return 1

    def terminate(self):
        # A program that saves, and takes its time.
        self.world.call_later(self.world.uniform(0.0, 2 * LEASE_GRACE), self._end)

    def kill(self):
        self.world.call_later(self._kill_seconds, self._end)

    def _end(self):
        self.is_running = False

    def has_news(self, seen):
        return self._news, False

    def news(self, seen):
        self._news = False
        return {}, []

    def remove(self):
        self.is_removed = True


class _Server:
    """A server, its process and the processes of its jobs, which end with it."""

    def __init__(self, world, network):
        self.world, self.network, self.jobs = world, network, []
        self.inbox, self.waiters, self.process = [], [], None
        # A server looks a hundred times a second whether they have ended: long ones are most of a schedule.
        self.kill_seconds = world.pick((0.005, 0.05, 0.5))
        self.pauses = []

    def start(self):
        self.process = self.world.process("server", self._run)
        self.process.at_end(self._end)

    def _end(self):
        for job in self.jobs:
            job.is_running = False

    def pause(self, seconds):
        self.pauses.append((self.world.now, self.world.now + seconds))
        self.process.pause(seconds)

    def _run(self):
        machine = types.SimpleNamespace(
            job_directory=lambda job: job,
            cores=1,
            gpus=(),
            sweep=set,
            ports=lambda count, avoid: [],
            close=lambda: None,
        )
        agent = self.agent = _agent.Agent("server", machine, self._reply)
        self.inbox = []
        inbox = self.inbox
        self.world.spawn(lambda: self._tick(agent), "ticks")
        while True:
            while not inbox:
                self.world.block(self.waiters, None, "requests")
            client, frame = inbox.pop(0)
            answer = agent.handle(client, frame)
            if answer is not None:
                self._reply(client, answer)

    def _tick(self, agent):
        while True:
            self.world.sleep(_TICK)
            agent.tick()

    def _reply(self, client, frame):
        self.network.send(client.connection, frame)

    def make_job(self, name, machine):
        running = [job.name for job in self.jobs if job.is_running]
        # Not raised: the agent answers errors, whichever they are.
        if running:
            text = f"A server takes the job {name}, and processes of {running} run on it."
            self.world.fail(Violation(text))
        if any(job.name == name and job.is_removed for job in self.jobs):
            self.world.fail(Violation(f"The job {name} has ended for good and begins again."))
        job = _Job(self.world, name, self.kill_seconds)
        self.jobs.append(job)
        return job


class _Network:
    """Messages between clients and a server."""

    def __init__(self, world):
        self.world, self.clients, self.server = world, {}, None
        self.loss = world.pick((0.0, 0.02), SETTING)

    def send(self, to, frame, client=None):
        """Send a message to a client, or from one to the server."""
        world = self.world
        world.counts["messages"] += 1
        if not world.fault(self.loss, "loss"):
            world.call_later(world.uniform(0.001, _SLOW), lambda: self._arrive(to, frame, client))
        if world.fault(self.loss, "repeat"):
            world.call_later(world.uniform(0.001, _LATEST), lambda: self._arrive(to, frame, client))

    def _arrive(self, to, frame, client):
        if client is None:
            target = self.clients[to]
            if not target.process.is_dead:
                target.answers[frame.request] = frame
                while self.world.wake(target.waiters):
                    pass
            return
        if not self.server.process.is_dead:
            self.clients[client.connection].last_sign = self.world.now
            self.server.inbox.append((client, frame))
            self.world.wake(self.server.waiters)


class _Client:
    """A client: takes the server, starts a process there, polls for a while, and ends the job."""

    def __init__(self, world, network, number, seconds):
        self.world, self.network, self.seconds = world, network, seconds
        self.name = f"job{number}"
        self.identity = ClientId(self.name.encode(), CLIENT)
        self.answers, self.waiters, self.requests = {}, [], 0
        self.outcome, self.last_sign = None, world.now
        network.clients[self.identity.connection] = self

    def start(self):
        self.process = self.world.process(self.name, self._run)

    def ask(self, op, seconds=60.0, **meta):
        """Return the answer to a request, which is repeated; None where there is none in time."""
        self.requests += 1
        number, until = self.requests, self.world.now + seconds
        frame = Frame(op, number, meta={"job": self.name, **meta})
        while self.world.now < until:
            self.network.send(b"", frame, self.identity)
            again = self.world.now + _REPEAT
            while number not in self.answers and self.world.now < again:
                self.world.block(self.waiters, again - self.world.now, "an answer")
            if number in self.answers:
                return self.answers[number]
        return None

    def _run(self):
        world = self.world
        until = world.now + 120.0
        while True:
            answer = self.ask(Op.HELLO, client=self.name, lease=LEASE_SECONDS)
            if answer is not None and answer.op is Op.OK:
                break
            if answer is None or world.now > until or "one client at a time" not in str(answer.meta):
                self.outcome = "refused"
                return
            world.sleep(1.0)
        started = self.ask(
            Op.START, key="w0", task="worker:0", generation=0, shape={"tasks": 1}, description={}
        )
        ends = world.now + self.seconds
        while started is not None and started.op is Op.OK and world.now < ends:
            answer = self.ask(Op.POLL, seen={})
            if answer is None or answer.op is not Op.OK:
                self.outcome = "lost"
                return
        # Also one that is refused: an earlier one has ended the job then.
        self.outcome = "done" if self.ask(Op.END) is not None else "lost"


def leases(world):
    """Clients share a server, which is killed and stopped as they are."""
    world.settle()
    world.limit = 600.0
    network = _Network(world)
    server = network.server = _Server(world, network)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(_agent, "ServerJob", server.make_job)
        world.faults_left = world.choose(5, SETTING)
        server.start()
        clients = [_Client(world, network, i, world.uniform(1.0, 20.0)) for i in range(1 + world.choose(3))]
        for client in clients:
            client.start()
            world.sleep(world.uniform(0.0, 3.0))
        while not all(client.process.is_dead for client in clients):
            world.sleep(world.uniform(0.2, 4.0))
            _disturb(world, server, clients)
            _check_silent(world, server, clients)
        # Without a fault each client has ended its own processes.
        late = _LATEST + _BOUND if world.faults else 0.0
        world.sleep(late + _SLOW + 2.0 + sum(end - begin for begin, end in server.pauses))
        _check_silent(world, server, clients)
        left = [job.name for job in server.jobs if job.is_running]
        world.check(not left, lambda: f"Processes of {left} run on after their clients have ended.")
        if not world.faults:
            world.check(
                all(client.outcome == "done" for client in clients),
                lambda: f"Each client must be done: {[client.outcome for client in clients]}",
            )
        for client in clients:
            world.check(client.process.error is None, lambda client=client: repr(client.process.error))
        _check_kept(world, server, clients)


def _disturb(world, server, clients):
    kind = world.pick(("kill client", "pause client", "kill server", "pause server", "wall"), "fault kind")
    if not world.fault(0.2, kind):
        return
    target = world.pick(clients)
    if kind == "kill client":
        target.process.kill()
    elif kind == "pause client":
        target.process.pause(world.uniform(0.0, 2 * LEASE_SECONDS))
    elif kind == "kill server":
        server.process.kill()
        world.call_later(world.uniform(0.0, 3.0), server.start)
    elif kind == "pause server":
        server.pause(world.uniform(0.0, 3 * LEASE_SECONDS))
    else:
        world.wall_offset += world.pick((3600.0, -3600.0))


def _check_silent(world, server, clients):
    """A job of a client that has been silent for too long runs no more."""
    for job in server.jobs:
        client = next(client for client in clients if client.name == job.name)
        paused = sum(
            end - max(begin, client.last_sign) for begin, end in server.pauses if end > client.last_sign
        )
        silent = world.now - client.last_sign - max(0.0, paused)
        world.check(
            not job.is_running or silent <= _BOUND + _SLOW + 2.0,
            lambda job=job, silent=silent: f"{job.name} runs on {silent:.1f} s after its client's last sign.",
        )


def _check_kept(world, server, clients):
    """A client keeps the server while it gives signs, also where the server was stopped."""
    harmful = {"kill client", "pause client", "kill server", "loss"}
    if harmful & set(world.faults):
        return
    for client in clients:
        world.check(
            client.outcome != "lost",
            lambda client=client: f"{client.name} has lost a server that it has polled.",
        )


PROTOCOLS = {"leases": leases}
